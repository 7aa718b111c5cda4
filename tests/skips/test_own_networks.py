"""Networks that no finder knows: `sites=` and `register_adapter`, for every way in which a skip may arrive."""

import pytest
import torch
from skip_networks import make, run
from torch import Tensor, nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, Site, UniformScaling
from scalelong.errors import UnsupportedNetworkError
from scalelong.skips import find_sites, finders


class Join(nn.Module):
    """A decoder block in the style that a test asks for; what it computes is always W[x, skip]."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([x, skip], dim=-1))


class KeywordJoin(Join):
    def forward(self, x: Tensor, *, skip: Tensor) -> Tensor:
        return super().forward(x, skip)


class TupleJoin(Join):
    def forward(self, x: Tensor, skips: tuple[Tensor, ...]) -> Tensor:
        for skip in skips:
            x = super().forward(x, skip)
        return x


class UNet(nn.Module):
    """Two skips of a linear network on tokens (B, L, 4), brought to the decoder in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.down, self.middle = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)
        kind = {"keyword": KeywordJoin, "tuple": TupleJoin}.get(way, Join)
        self.up = nn.ModuleList([kind() for _ in range(1 if way == "tuple" else 2)])

    def forward(self, x: Tensor) -> Tensor:
        one = self.down[0](x)
        two = self.down[1](one)
        x = self.middle(two)
        if self.way == "tuple":
            return self.up[0](x, (two, one))
        for join, skip in zip(self.up, (two, one), strict=True):
            if self.way == "concatenated":
                x = join.mix(torch.cat([x, skip], dim=-1))
            elif self.way == "positional":
                x = join(x, skip)
            else:
                x = join(x=x, skip=skip)
        return x


def by_hand(net: UNet, x: Tensor, kappas: tuple[float, float]) -> Tensor:
    """The same network with κ_1, κ_2 written into it."""
    one = net.down[0](x)
    two = net.down[1](one)
    x = net.middle(two)
    for k, skip in enumerate((kappas[1] * two, kappas[0] * one)):
        mix = net.up[0 if net.way == "tuple" else k].mix
        x = mix(torch.cat([x, skip], dim=-1))
    return x


SITES = {
    "positional": ["up.1", "up.0"],
    "named": [Site("up.1", "skip"), Site("up.0", "skip")],
    "keyword": [Site("up.1", "skip"), Site("up.0", "skip")],
    "concatenated": [Site(f"up.{k}.mix", 0, channels=4, trailing=True, dim=-1) for k in (1, 0)],
    "tuple": [Site("up.0", "skips", item=1), Site("up.0", "skips", item=-2)],
}


@pytest.mark.parametrize("way", SITES)
def test_kappa_reaches_the_skip_however_it_arrives(way):
    net, x = UNet(way), torch.randn(2, 3, 4)
    plain = net(x)
    torch.testing.assert_close(plain, by_hand(net, x, (1.0, 1.0)))
    expected = by_hand(net, x, (0.3, 1.7))
    scalelong.apply(net, ExplicitScaling([0.3, 1.7]), sites=SITES[way])
    torch.testing.assert_close(net(x), expected)
    assert all(row.felt > 0.01 for row in scalelong.describe(net, x).rows)
    assert torch.equal(scalelong.remove(net)(x), plain)


def test_ls_needs_the_channels_of_a_site():
    with pytest.raises(UnsupportedNetworkError, match=r"long skip 1.*Site\(channels=…\)"):
        scalelong.apply(UNet("positional"), LearnableScaling(), sites=["up.1", "up.0"])
    sites = [Site("up.1", channels=4, dim=-1), Site("up.0", channels=4, dim=-1)]
    net = scalelong.apply(UNet("positional"), LearnableScaling(), sites=sites)
    rows = scalelong.describe(net, torch.randn(2, 3, 4)).rows
    assert all(0 < row.coefficient < 1 for row in rows)
    scalelong.apply(net, LearnableScaling(calibration="scalar"), sites=["up.1", "up.0"], replace=True)


def test_ls_gates_tokens_where_their_number_is_given_and_rejects_another():
    sites = [Site(f"up.{k}", channels=4, dim=-1, tokens=3) for k in (1, 0)]
    net = scalelong.apply(UNet("positional"), LearnableScaling(), sites=sites)
    assert net(torch.randn(2, 3, 4)).shape == (2, 3, 4)
    with pytest.raises(UnsupportedNetworkError, match="long skip 2 has 5 tokens.* 3"):
        net(torch.randn(2, 5, 4))


class Normed(nn.Module):
    """A norm and a shortcut see the concatenation [x, skip]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.short = nn.GroupNorm(2, 8), nn.Conv1d(8, 4, 1), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x)) + self.short(x)


class NormedUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Conv1d(4, 4, 1), Normed()

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        return self.block(torch.cat([skip.flip(-1) + 1, skip], dim=1))


def test_a_site_that_names_its_norm_has_the_placement_behind_it():
    net, x = NormedUNet(), torch.randn(2, 4, 6)
    site = Site("block", 0, channels=4, trailing=True, norm="block.norm", shortcut="block.short")
    scalelong.apply(net, UniformScaling(0.5), sites=[site])
    assert scalelong.describe(net, x).rows[0].norm_passes < 0.01
    scalelong.apply(net, UniformScaling(0.5), sites=[site], placement="after_norm", replace=True)
    assert scalelong.describe(net, x).rows[0].norm_passes == pytest.approx(1.0, rel=1e-3)
    joined = torch.cat([net.enter(x).flip(-1) + 1, net.enter(x)], dim=1)
    kappa = torch.tensor([1.0] * 4 + [0.5] * 4)[:, None]
    with scalelong.unscaled(net):
        expected = net.block.mix(net.block.norm(joined) * kappa) + net.block.short(joined * kappa)
    torch.testing.assert_close(net(x), expected)


class SkipFirst(nn.Module):
    """Concatenates the skip first, or passes it in a dictionary."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.enter, self.middle, self.mix = nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(8, 4)
        self.up = FromDict(self.mix)

    def forward(self, x: Tensor, kappa: float = 1.0) -> Tensor:
        skip = self.enter(x)
        h = self.middle(skip)
        if self.way == "dict":
            return self.up(h, {"other": x, "skip": kappa * skip})
        return self.mix(torch.cat([kappa * skip, h], dim=-1))


class FromDict(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, h: Tensor, features: dict[str, Tensor]) -> Tensor:
        return self.mix(torch.cat([features["skip"], h], dim=-1))


@pytest.mark.parametrize(
    ("way", "site"),
    [
        ("leading", Site("mix", 0, channels=3, leading=True, dim=-1)),
        ("dict", Site("up", "features", item="skip", channels=3, dim=-1)),
    ],
)
def test_a_skip_that_comes_first_or_in_a_dictionary(way, site):
    net, x = SkipFirst(way), torch.randn(2, 6, 4)
    expected = net(x, kappa=0.3)
    scalelong.apply(net, UniformScaling(0.3), sites=[site])
    torch.testing.assert_close(net(x), expected)
    assert scalelong.describe(net, x).rows[0].shape == (2, 6, 3)


@pytest.mark.parametrize(
    "site",
    [Site("up", "features", item="skips"), Site("up", "features", item="skip", channels=3, dim=1),
     Site("up", "features", item="skip", channels=3, dim=3)],
    ids=["key", "width of the axis", "axis"],
)  # fmt: skip
def test_a_missing_key_and_a_wrong_axis_are_rejected(site):
    net = scalelong.apply(SkipFirst("dict"), UniformScaling(0.3), sites=[site])
    with pytest.raises(UnsupportedNetworkError, match=r"'skips'|axis 1|axis 3"):
        net(torch.randn(2, 6, 4))


@pytest.fixture
def no_adapters(monkeypatch):
    monkeypatch.setattr(finders, "_ADAPTERS", {})


class Child(UNet):
    pass


@pytest.mark.usefixtures("no_adapters")
@pytest.mark.parametrize("key", [UNet, f"{UNet.__module__}.UNet"], ids=["class", "qualified name"])
def test_an_adapter_serves_a_class_and_its_children(key):
    scalelong.register_adapter(key, lambda net: ["up.1", "up.0"])
    for net in (UNet("positional"), Child("positional")):
        x = torch.randn(2, 3, 4)
        scalelong.apply(net, ConstantScaling(0.5))
        torch.testing.assert_close(net(x), by_hand(net, x, (1.0, 0.5)))
    scalelong.register_adapter(Child, lambda net: ["up.0"])  # the nearest class wins
    assert len(find_sites(Child("positional"))) == 1


@pytest.mark.usefixtures("no_adapters")
@torch.no_grad()
def test_an_adapter_goes_before_what_is_known():
    net = make("original U-ViT")
    scalelong.register_adapter(type(net), lambda net: find_innermost(net))
    assert [row.path for row in scalelong.describe(net).rows] == ["out_blocks.0"]
    plain = run(net, "original U-ViT")
    assert not torch.equal(run(scalelong.apply(net, UniformScaling(0.5)), "original U-ViT"), plain)


def find_innermost(net: nn.Module) -> list[Site]:
    return [Site("out_blocks.0", "skip", channels=16, dim=-1)]
