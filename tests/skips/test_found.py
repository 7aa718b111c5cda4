"""Long skips found by running a network once: exact, complete, explained, and refused where they are not clear."""

import copy

import pytest
import torch
from gallery import GALLERY
from skip_networks import NETWORKS, VARIANTS, example, make, run
from torch import nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, ScaleLongError
from scalelong.errors import UnsupportedNetworkError
from scalelong.skips import find_sites

EVERY = pytest.mark.parametrize("name", GALLERY)


def build(name):
    torch.manual_seed(0)
    net = GALLERY[name]()
    return net, net.example(), tuple(0.3 + 0.4 * i for i in range(net.n))


def by_hand(net, x, kappas):
    net.kappas = kappas
    output = net(*x)
    net.kappas = None
    return output


@EVERY
def test_kappa_acts_as_if_it_were_written_into_the_network(name):
    net, x, kappas = build(name)
    plain, expected = net(*x), by_hand(net, x, kappas)
    assert not torch.allclose(plain, expected, atol=1e-3)
    assert scalelong.apply(net, ExplicitScaling(kappas), example=x) is net
    assert torch.equal(net(*x), expected)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net.train()(*x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters() if p.grad is not None], gradients)
    assert torch.equal(scalelong.remove(net)(*x), plain)


def test_names_alone_invent_no_skip():
    """lucidrains' and DiC's names, where the widths contradict their structure."""
    net, x, _ = build("Annotated")
    known, found = find_sites(net), scalelong.find_skips(net, *x)
    assert [(site.path, site.channels, site.source) for site in known] == [
        (site.path, site.channels, site.source) for site in found
    ]
    with pytest.raises(UnsupportedNetworkError, match="no known structure"):
        find_sites(build("Narrowing")[0])
    levels = nn.Module()
    levels.block = nn.ModuleList([nn.Conv2d(4, 4, 1)])
    net = nn.Module()
    net.conv_in, net.mid, net.down, net.up = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.ModuleList(), nn.ModuleList()
    net.down.append(levels)
    net.up.append(levels)
    with pytest.raises(UnsupportedNetworkError, match="no known structure"):
        find_sites(net)


def test_given_sites_of_a_list_that_the_block_takes_skips_off():
    net, x, kappas = build("Popped")
    expected = by_hand(net, x, kappas)
    given = [scalelong.Site(f"decoder.{k}", "skip", item=-1, channels=4) for k in (2, 1, 0)]
    scalelong.apply(net, ExplicitScaling(kappas), sites=given, example=x)
    assert torch.equal(net(*x), expected)


@EVERY
def test_batch_and_resolution_may_change(name):
    net, x, kappas = build(name)
    scalelong.apply(net, ExplicitScaling(kappas), example=x)
    one = tuple(tensor[:1] for tensor in x)
    if one[0].shape[-1] not in (3, 9):  # channels last; padded sizes
        one = (torch.cat([one[0]] * 2, dim=-1), *one[1:])
    with scalelong.unscaled(net):
        expected = by_hand(net, one, kappas)
    assert torch.equal(net(*one), expected)


@EVERY
def test_ls_needs_no_channels_and_survives_copies_and_files(name, tmp_path):
    net, x, _ = build(name)
    scalelong.apply(net, LearnableScaling(activation="elu"), example=x)
    expected = net(*x)
    expected.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in scalelong.parameters(net))
    scalelong.save_scaling(net, tmp_path)
    again, _, _ = build(name)
    assert torch.equal(scalelong.load_scaling(again, tmp_path)(*x), expected)
    if not hasattr(type(net), "__deepcopy__") and name != "Attribute":
        assert torch.equal(copy.deepcopy(net)(*x), expected)


@pytest.mark.parametrize("name", NETWORKS | VARIANTS)
@torch.no_grad()
def test_the_finder_and_the_known_structures_agree(name):
    """N, order, sources, widths, axes; and the same output when the skips that were found are scaled."""
    call, net = example(name), make(name)
    found, known = scalelong.find_skips(net, *call.args, **call.kwargs), find_sites(net)
    assert [(s.channels, s.dim, s.source, s.norm) for s in found] == [
        (s.channels, s.dim, s.source, s.norm) for s in known
    ]
    if getattr(net, "long_skips", None) is None:
        kappas = ExplicitScaling([0.3 + 0.13 * i for i in range(len(known))])
        expected = run(scalelong.apply(make(name), kappas), name)
        assert torch.equal(run(scalelong.apply(net, kappas, sites=found), name), expected)


def footprint(net: nn.Module) -> tuple[object, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    return hooks, {key: value.clone() for key, value in net.state_dict().items()}, [m.training for m in net.modules()]


def test_finding_runs_the_network_once_and_leaves_nothing_behind():
    passes = []

    class Counted(GALLERY["Residual"]):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

        def forward(self, x, t):
            passes.append(torch.is_grad_enabled())
            return self.drop(self.norm(super().forward(x, t)))

    net = Counted().train()
    before, state = footprint(net), torch.get_rng_state()
    scalelong.apply(net, ConstantScaling(0.9), example=EXAMPLE)
    assert passes == [False]
    assert torch.equal(torch.get_rng_state(), state)
    after = footprint(scalelong.remove(net))
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert all(torch.equal(after[1][key], before[1][key]) for key in before[1])


EXAMPLE = (torch.randn(2, 3, 8, 8), torch.rand(2, 1))


# ------------------------------------------------------------------------------------- what it refuses


class ResNet(nn.Module):
    """Residual blocks alone, and a global shortcut around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = (nn.Conv2d(3 if k == 0 else 4, 4, 3, padding=1) for k in range(4))

    def forward(self, x):
        h = self.stem(x)
        h = h + self.a(h).relu()
        h = h + self.b(h).relu()
        return self.head(h)


class Dense(ResNet):
    def forward(self, x):
        features = [self.stem(x)]
        for layer in (self.a, self.b):
            features.append(layer(torch.stack(features).sum(0)))
        return self.head(torch.stack(features).sum(0))


class Reminded(ResNet):
    """modded-nanoGPT: every block adds a share of the network's first features, which is no long skip."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shares, self.layer = nn.Parameter(torch.tensor([1.0, 0.1])), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, h, first):
            h = self.shares[0] * h + self.shares[1] * first
            return h + self.layer(h).relu()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x):
        h = first = self.stem(x)
        for block in self.blocks:
            h = block(h, first)
        return self.head(h)


class Straight(ResNet):
    def forward(self, x):
        return x + self.head(self.b(self.a(self.stem(x))))[:, :3]  # the input itself is not made by an encoder


class TwoDecoders(GALLERY["Root"]):
    def forward(self, x):
        one = self.stem(x).relu()
        two = self.down(one).relu()
        low, outputs = self.low(two), []
        for _ in range(2):
            h = nn.functional.interpolate(self.middle(low), scale_factor=2.0)
            h = nn.functional.interpolate(self.up2(self.join(h, two, 2)), scale_factor=2.0)
            outputs.append(self.head(self.up1(self.join(h, one, 1))))
        return outputs[0] + outputs[1]


class Twice(nn.Module):
    """Guidance in one forward: the U-Net runs twice."""

    def __init__(self):
        super().__init__()
        self.unet = GALLERY["Root"]()

    def forward(self, x):
        plain = self.unet(x)
        return plain + 2 * (self.unet(x.flip(1)) - plain)


class Stages(nn.Module):
    """VoVNet: stages that end in one concatenation of all their features."""

    class Stage(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
            self.mix = nn.Conv2d(4 * width, width, 1)

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(layer(features[-1]).relu())
            return self.mix(torch.cat(features, dim=1))

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), self.Stage(4), nn.MaxPool2d(2), self.Stage(4))

    def forward(self, x):
        return self.net(x)


class Ghost(ResNet):
    """Two branches of one tensor, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        h = self.stem(x)
        return self.head(torch.cat([self.a(h), self.b(h).relu()], dim=1))


@pytest.mark.parametrize("build", [ResNet, Dense, Reminded, Straight, TwoDecoders, Twice, Stages, Ghost])
def test_what_is_not_clearly_a_long_skip_is_refused_and_nothing_changes(build):
    net, x = build(), torch.randn(2, 3, 8, 8)
    before = footprint(net)[0]
    with pytest.raises(UnsupportedNetworkError, match=build.__name__):
        scalelong.apply(net, ConstantScaling(0.7), example=(x,))
    assert footprint(net)[0] == before


def test_candidates_can_be_pasted():
    net, x = TwoDecoders(), torch.randn(2, 3, 8, 8)
    with pytest.raises(UnsupportedNetworkError) as caught:
        scalelong.find_skips(net, x)
    lines = [
        line.strip().split(",  #")[0] for line in str(caught.value).splitlines() if line.strip().startswith("Site(")
    ]
    names = {"Site": scalelong.Site, "Join": scalelong.Join}
    sites = [eval(line, names) for line in lines]
    assert len(sites) == 4
    assert {site.source for site in sites} == {"stem", "down"}


class Changing(GALLERY["Add"]):
    """Adds once more in some passes."""

    more = False

    def join(self, h, skip, i):
        return h + self.k(i, skip) + skip if self.more else h + self.k(i, skip)


def test_a_pass_that_runs_differently_raises_instead_of_scaling_something_else():
    net, x = Changing(), torch.randn(2, 3, 8, 8)
    scalelong.apply(net, ConstantScaling(0.7), example=(x,))
    net(x)
    net.more = True
    with pytest.raises(UnsupportedNetworkError, match=r"4 joins.*example ran 2|2 joins"):
        net(x)
    net.more = False
    net(x)


class Recomputed(GALLERY["Add"]):
    """A function of the network, which holds the joins, is checkpointed."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_a_join_in_a_checkpointed_function_is_refused():
    net, x = Recomputed(), torch.randn(2, 3, 8, 8)
    scalelong.apply(net, ConstantScaling(0.7), example=(x,))
    with pytest.raises(UnsupportedNetworkError, match="checkpointed"):
        net(x)
    with torch.no_grad():
        net(x)


class CheckpointedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = GALLERY["Add"]()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


def test_a_checkpointed_module_with_joins_has_the_same_gradient():
    outer, x = CheckpointedModule(), torch.randn(2, 3, 8, 8)
    scalelong.apply(outer, ExplicitScaling([0.3, 0.7]), example=(x,))
    outer(x).square().sum().backward()
    gradient = outer.net.stem.weight.grad.clone()
    with scalelong.unscaled(outer):
        outer.zero_grad()
        by_hand(outer.net, (x,), (0.3, 0.7)).square().sum().backward()
    torch.testing.assert_close(outer.net.stem.weight.grad, gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every tensor of a frame
@pytest.mark.parametrize("name", ["Add", "Twice", "Shared"])
def test_a_compiled_network_is_one_graph_with_kappa_in_it(name):
    net, x, _ = build(name)
    scalelong.apply(net, LearnableScaling(), example=x)
    expected = net(*x)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*x), expected)


def test_the_monitor_records_joins_inside_a_forward():
    net, x, _ = build("Add")
    scalelong.apply(net, LearnableScaling(), example=x)
    monitor = scalelong.StabilityMonitor(net, every=1)
    with monitor.step(1):
        net(*x).square().mean().backward()
    norm = net.stem(x[0]).relu().square().sum((1, 2, 3)).mean().sqrt().item()
    assert monitor.last["train"]["skip"][0] == pytest.approx(norm, rel=1e-3)
    rows = scalelong.describe(net, *x).rows
    assert all(row.felt > 0 for row in rows)


# ------------------------------------------------------------------------- sites that come with an example


def test_given_sites_are_checked_and_completed():
    net, x, _ = build("Root")
    up1, up2 = scalelong.Site("up1", 0, channels=4, trailing=True), scalelong.Site("up2", 0, channels=6, trailing=True)
    scalelong.apply(net, ConstantScaling(0.7), sites=[up1, up2], example=x)
    assert [row.source for row in scalelong.describe(net).rows] == ["stem", "down"]
    for sites, match in (
        ([up2, up1], "outermost first"),
        ([scalelong.Site("up1", 0, channels=4, leading=True), up2], "site 1.*encoder"),
        ([scalelong.Site("up1", 0, channels=3, trailing=True), up2], "channels=4"),
        ([scalelong.Site("middle", 0), up2], "site 1.*encoder"),
    ):
        with pytest.raises(ScaleLongError, match=match):
            scalelong.apply(net, ConstantScaling(0.7), sites=sites, example=x, replace=True)
    blocks, y, _ = build("Blocks")
    scalelong.apply(
        blocks, LearnableScaling(), sites=["decoder.2", "decoder.1", "decoder.0"], example=y
    )  # widths found


def test_the_norm_behind_given_sites_is_looked_for():
    net, x, _ = build("ResidualCat")
    sites = [scalelong.Site(f"ups.{k}", 0, channels=4, trailing=True) for k in (3, 2, 1, 0)]
    with pytest.raises(UnsupportedNetworkError, match="looked for.*example="):
        scalelong.apply(net, ConstantScaling(0.7), sites=sites, placement="after_norm")
    scalelong.apply(net, ConstantScaling(0.7), sites=sites, placement="after_norm", example=x)
    assert [site.norm for site in net.skip_scaling.sites] == [f"ups.{k}.norm1" for k in (3, 2, 1, 0)]
    assert [site.shortcut for site in net.skip_scaling.sites] == [f"ups.{k}.short" for k in (3, 2, 1, 0)]
    assert scalelong.describe(net, *x).recommended == "after_norm"
    scalelong.apply(net, ConstantScaling(0.7), example=x, replace=True)
    assert scalelong.describe(net, *x).recommended == "after_norm"  # groups of the norm do not span the join
    plain, y, _ = build("Root")
    assert scalelong.describe(scalelong.apply(plain, ConstantScaling(0.7), example=y), *y).recommended == "join"


class PreNorm(GALLERY["Root"]):
    """The joined tensor is the residual stream of a pre-norm block: what follows its norm is added to it."""

    class Block(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.norm, self.inner, self.out = nn.GroupNorm(2, width), inner, nn.Conv2d(width, 4, 1)

        def forward(self, x):
            return self.out(x + self.inner(self.norm(x)))

    def __init__(self):
        super().__init__()
        self.up2, self.up1 = (self.Block(n, nn.Conv2d(n, n, 3, padding=1)) for n in (12, 8))


class NormInSequence(GALLERY["Root"]):
    """A norm, its activation and a convolution of the same width are one module; it does more than normalize."""

    def __init__(self):
        super().__init__()
        self.up2, self.up1 = (
            nn.Sequential(
                nn.Sequential(nn.GroupNorm(2, n), nn.SiLU(), nn.Conv2d(n, n, 3, padding=1)), nn.Conv2d(n, 4, 1)
            )
            for n in (12, 8)
        )


def test_after_norm_needs_a_module_that_only_normalizes_what_is_joined():
    x = torch.randn(2, 3, 8, 8)
    assert [site.norm for site in scalelong.find_skips(PreNorm(), x)] == [None, None]
    with pytest.raises(UnsupportedNetworkError, match="after_norm"):
        scalelong.apply(PreNorm(), ConstantScaling(0.7), placement="after_norm", example=(x,))
    assert [site.norm for site in scalelong.find_skips(NormInSequence(), x)] == ["up1.0.0", "up2.0.0"]


class NormConv(nn.Conv2d):
    """A norm in name only."""


def test_a_convolution_with_norm_in_its_name_is_no_norm():
    net, x, _ = build("Root")
    net.up2, net.up1 = NormConv(12, 4, 3, padding=1), NormConv(8, 4, 3, padding=1)
    assert [site.norm for site in scalelong.find_skips(net, *x)] == [None, None]


class ByKeyword(GALLERY["Root"]):
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv2d(width, 4, 3, padding=1)
            self.short = nn.Conv2d(width, 4, 1)

        def forward(self, x):
            return self.conv(self.norm(input=x)) + self.short(input=x)

    def __init__(self):
        super().__init__()
        self.up2, self.up1 = self.Block(12), self.Block(8)


def test_norm_and_shortcut_may_be_called_by_keyword():
    net, (x,), kappas = ByKeyword(), torch.randn(1, 2, 3, 8, 8), (0.5, 4.0)
    plain = net(x)
    scalelong.apply(net, ExplicitScaling(kappas), placement="after_norm", example=(x,))
    assert not torch.allclose(net(x), plain)
    scalelong.apply(net, ExplicitScaling([1.0, 1.0]), placement="after_norm", example=(x,), replace=True)
    assert torch.equal(net(x), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_network_may_have_scripted_parts():
    net, x, kappas = build("Root")
    expected = by_hand(net, x, kappas)
    net.middle = torch.jit.trace(net.middle, torch.randn(2, 6, 2, 2))
    scalelong.apply(net, ExplicitScaling(kappas), example=x)
    torch.testing.assert_close(net(*x), expected)


def test_an_example_is_a_tuple_a_dictionary_or_both():
    net, (x, t), kappas = build("Residual")
    expected = by_hand(net, (x, t), kappas)
    for given in ((x, t), {"x": x, "t": t}, ((x,), {"t": t}), (x, {"t": t})):
        scalelong.apply(net, ExplicitScaling(kappas), example=given, replace=True)
        assert torch.equal(net(x, t), expected)


def test_explain_says_what_was_found_and_what_was_left_out():
    net, x, _ = build("Residual")
    found = scalelong.find_skips(net, *x)
    text = found.explain()
    assert str(found) == text
    assert text.startswith("Residual: 4 long skips")
    assert "downs.1" in text
    assert "residual shortcut" in text
    assert len(found.left_out) > 5
