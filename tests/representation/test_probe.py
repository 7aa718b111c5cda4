"""The linear probe against closed forms, scikit-learn, and networks whose features are known."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import scalelong
from scalelong.errors import DataError, InvalidValueError, UnknownNameError
from scalelong.models.unet import unet_settings
from scalelong.representation import linear_probe, probe_features
from scalelong.representation.linear import _lbfgs
from scalelong.representation.probe import wilson


def gaussians(n, classes, distance, dim=4, seed=0):
    """Features of equally likely classes with means at `distance` times unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    x = torch.randn(n, dim, generator=generator)
    x[torch.arange(n), labels] += distance
    return x, labels


class Passing(nn.Module):
    """A network whose first block is the identity, and whose second forgets everything but the noise level."""

    def __init__(self):
        super().__init__()
        self.keep, self.forget = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        nn.init.eye_(self.keep.weight.data.view(3, 3))
        nn.init.zeros_(self.forget.weight)
        nn.init.zeros_(self.keep.bias)

    def forward(self, x, t):
        return self.forget(self.keep(x))


def coloured(n, seed):
    """Images of one of three colours with noise, as uint8, and the colour."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    images = rng.integers(0, 100, (n, 8, 8, 3))
    images[np.arange(n), :, :, labels] += 60
    return images.astype(np.uint8), labels


class TestTheClassifier:
    def test_two_gaussians_give_the_accuracy_of_the_closed_form(self):
        # Means at distance d·√2: the best linear rule is right with probability Φ(d/√2).
        distance = 1.5
        train, test = gaussians(4000, 2, distance, seed=1), gaussians(4000, 2, distance, seed=2)
        expected = 0.5 * (1 + math.erf(distance / 2))
        low, high = wilson(probe_features(*train, *test), 4000)
        assert low < expected < high + 0.002  # 0.002: what 4,000 training samples leave to learn

    def test_separable_features_give_one(self):
        (x, y), (test_x, test_y) = gaussians(2000, 4, 12.0, seed=1), gaussians(2000, 4, 12.0, seed=2)
        assert probe_features(x, y, test_x, test_y) == 1.0

    def test_shuffled_labels_give_chance(self):
        (x, y), (test_x, test_y) = gaussians(4000, 4, 2.0, seed=1), gaussians(4000, 4, 2.0, seed=2)
        generator = torch.Generator().manual_seed(3)
        y, test_y = (z[torch.randperm(4000, generator=generator)] for z in (y, test_y))
        low, high = wilson(probe_features(x, y, test_x, test_y), 4000)
        assert low < 0.25 < high

    def test_it_agrees_with_scikit_learn(self):
        from sklearn.datasets import load_digits
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        x, y = load_digits(return_X_y=True)
        scaler = StandardScaler().fit(x[:1200])
        theirs = LogisticRegression(max_iter=1000).fit(scaler.transform(x[:1200]), y[:1200])
        expected = theirs.score(scaler.transform(x[1200:]), y[1200:])
        tensors = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
        ours = probe_features(tensors[0][:1200], tensors[1][:1200], tensors[0][1200:], tensors[1][1200:])
        assert abs(ours - expected) <= 2 / 597

    def test_two_classes_have_scikit_learns_penalty(self):
        from sklearn.linear_model import LogisticRegression

        x, y = gaussians(60, 2, 3.0, seed=1)
        theirs = LogisticRegression(tol=1e-8).fit(x.numpy(), y.numpy()).coef_[0]
        layer = nn.Linear(4, 2)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        _lbfgs(layer, x, y, 0)
        difference = layer.weight[1] - layer.weight[0]
        assert difference.tolist() == pytest.approx(theirs.tolist(), rel=0.02)

    def test_the_recipe_of_ddae_comes_close_where_there_is_data_enough(self):
        train, test = gaussians(6000, 3, 2.0, seed=1), gaussians(3000, 3, 2.0, seed=2)
        assert probe_features(*train, *test, fit="adam") == pytest.approx(probe_features(*train, *test), abs=0.01)

    def test_features_of_any_scale_and_constant_ones_are_fine(self):
        (x, y), (test_x, test_y) = gaussians(1000, 2, 3.0, seed=1), gaussians(1000, 2, 3.0, seed=2)
        scaled = [torch.cat([1e6 * z, torch.full((len(z), 1), 7.0)], dim=1) for z in (x, test_x)]
        assert probe_features(scaled[0], y, scaled[1], test_y) == probe_features(x, y, test_x, test_y)

    @pytest.mark.parametrize("right", [0, 90, 100])
    def test_the_interval_is_wilsons(self, right):
        from scipy.stats import binomtest

        expected = binomtest(right, 100).proportion_ci(0.95, method="wilson")
        assert wilson(right / 100, 100) == pytest.approx((expected.low, expected.high), abs=1e-9)


class TestNetworks:
    def test_blocks_that_keep_the_class_are_told_from_those_that_forget_it(self):
        result = linear_probe(Passing(), coloured(300, 0), coloured(300, 1), t=(0.01, 0.1))
        assert result.blocks == ("keep",)  # the output of `forget` is the same for all images: no features
        assert min(result.accuracy[0]) > 0.95
        assert result.pixels is not None
        assert result.pixels > 0.95

    @pytest.mark.parametrize("batch_size", [1, 7, 256])
    def test_blocks_without_features_are_left_out_at_every_batch_size(self, batch_size):
        result = linear_probe(Passing(), coloured(30, 0), coloured(9, 1), t=0.1, batch_size=batch_size, pixels=False)
        assert result.blocks == ("keep",)

    @pytest.mark.parametrize("times", [np.array([0.25, 0.5]), torch.tensor([0.25, 0.5]), (np.float32(0.25), 0.5)])
    def test_times_may_be_an_array_or_a_tensor(self, times):
        result = linear_probe(Passing(), coloured(30, 0), coloured(9, 1), t=times, pixels=False)
        assert result.times == (0.25, 0.5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_network_in_half_precision_is_probed(self, dtype):
        torch.manual_seed(0)
        net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2, clip_dim=4, num_clip_token=3).to(dtype)
        sets, conditions = (coloured(60, 0), coloured(60, 1)), {"context": torch.zeros(3, 4)}
        result = linear_probe(net, *sets, t=0.05, conditions=conditions, pixels=False)
        assert result.best.accuracy > 0.9

    def test_a_time_below_one_is_a_share_of_a_range_of_whole_numbers(self):
        sets = coloured(60, 0), coloured(60, 1)
        result = linear_probe(Passing(), *sets, t=(0.05, 50, 0.0001), objective="ddpm", pixels=False)
        assert result.times == (50.0, 1.0)
        with pytest.raises(InvalidValueError, match="from 1 to 1000, an integer"):
            linear_probe(Passing(), *sets, t=2.5, objective="ddpm")

    def test_noise_hides_the_class(self):
        result = linear_probe(Passing(), coloured(300, 0), coloured(300, 1), t=(0.01, 1.0), pixels=False)
        ((clean, noisy),) = result.accuracy
        low, high = wilson(noisy, 300)
        assert clean > 0.95
        assert low < 1 / 3 < high

    @pytest.mark.parametrize("kind", ["uvit", "unet"])
    def test_the_blocks_of_our_networks_are_found_in_order(self, kind):
        torch.manual_seed(0)
        if kind == "uvit":
            net = scalelong.UViT(img_size=8, embed_dim=16, depth=4, num_heads=2, num_classes=3)
            blocks = ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
        else:
            net = scalelong.build_unet(unet_settings(8, (8, 16), 1, ()), in_channels=3, num_class_embeds=3)
            blocks = ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]
        before = {name: value.clone() for name, value in net.state_dict().items()}
        result = linear_probe(
            net.train(), coloured(90, 0), coloured(60, 1), t=0.05, conditions={"y": 0}, untrained=net, pixels=False
        )
        assert list(result.blocks) == blocks
        assert result.untrained == result.accuracy
        assert result.best.low <= result.best.accuracy <= result.best.high
        assert result.conditioning_block in blocks[:-1]
        scalelong.apply(copy.deepcopy(net), scalelong.SelfConditioning(result.conditioning_block))  # accepts it
        assert net.training
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    @pytest.mark.parametrize(
        ("layers", "expected"),
        [("mid_block", "mid_block"), ("out_blocks.0", None), (["out_blocks.0", "in_blocks.0.attn"], None)],
    )
    def test_the_block_for_conditioning_is_one_that_another_block_of_the_network_follows(self, layers, expected):
        net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2)
        result = linear_probe(net, coloured(30, 0), coloured(9, 1), t=0.1, layers=layers, pixels=False)
        assert result.conditioning_block == expected

    def test_a_network_that_self_conditioning_does_not_know_has_no_block_for_it(self):
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1))
        options = {"t": 0.1, "call": lambda net, x, t: net(x), "pixels": False}
        assert linear_probe(net, coloured(30, 0), coloured(9, 1), **options).conditioning_block is None

    def test_a_network_with_other_arguments_takes_a_call(self):
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8))
        sets = coloured(90, 0), coloured(60, 1)
        result = linear_probe(net, *sets, layers="1", t=0.05, call=lambda net, x, t: net(x), pixels=False)
        assert result.blocks == ("1",)

    def test_cached_features_give_the_same_result_without_a_pass(self, tmp_path):
        net, sets, passes = Passing(), (coloured(90, 0), coloured(60, 1)), []
        first = linear_probe(net, *sets, t=0.1, cache=tmp_path)
        net.register_forward_hook(lambda *call: passes.append(1))
        assert linear_probe(net, *sets, t=0.1, cache=tmp_path) == first
        assert not passes
        with torch.no_grad():
            net.keep.weight.mul_(2)
        linear_probe(net, *sets, t=0.1, cache=tmp_path)
        assert passes

    def test_cached_features_belong_to_their_conditions(self, tmp_path):
        """Two contexts that differ only where a printed tensor has dots."""
        net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2, clip_dim=64, num_clip_token=20)
        contexts = [torch.zeros(20, 64), torch.zeros(20, 64)]
        contexts[1][5:15] = 3.0
        sets, files = (coloured(90, 0), coloured(60, 1)), []
        for context in contexts:
            linear_probe(net, *sets, t=0.1, cache=tmp_path, conditions={"context": context}, pixels=False)
            files.append(len(list(tmp_path.iterdir())))
        assert files == [1, 2]
        with pytest.raises(InvalidValueError, match="cache and call"):
            linear_probe(net, *sets, t=0.1, cache=tmp_path, call=lambda net, x, t: net(x, t))

    @pytest.mark.parametrize("change", ["num_heads", "base_head_width", "placement", "sites", "buffer"])
    def test_cached_features_belong_to_what_weights_do_not_tell(self, tmp_path, change):
        nets = [cached_pair(change, which) for which in (0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        sets, options = (coloured(30, 0), coloured(9, 1)), {"t": 0.1, "cache": tmp_path, "pixels": False}
        files = []
        for net in (*nets, cached_pair(change, 1).train()):  # the third is the second again
            linear_probe(net, *sets, **options)
            files.append(len(list(tmp_path.iterdir())))
        assert files == [1, 2, 2]


def cached_pair(change, which):
    """One of two networks with the same weights that print alike and compute differently."""
    torch.manual_seed(0)
    if change in ("num_heads", "base_head_width"):
        options = {"num_heads": 2, change: (2, 4)[which]}
        return scalelong.UViT(img_size=8, embed_dim=16, depth=2, **options)
    if change == "buffer":
        net = Passing()
        net.register_buffer("offset", torch.tensor(float(which)), persistent=False)
        return net
    net = scalelong.build_unet(unet_settings(8, (8, 16), 1, ()), in_channels=3)
    if change == "placement":
        return scalelong.apply(net, scalelong.UniformScaling(0.5), placement=("join", "after_norm")[which])
    sites = scalelong.find_skips(net)
    return scalelong.apply(net, scalelong.UniformScaling(0.5), sites=sites[which : len(sites) - 1 + which])


class TestInvalidInput:
    def test_float_images_from_0_to_255(self):
        images, labels = coloured(9, 0)
        wrong = torch.from_numpy(images).movedim(-1, 1).float(), labels
        with pytest.raises(DataError, match=r"images of test must be in \[-1, 1\], got values from 0 to .* uint8"):
            linear_probe(Passing(), (images, labels), wrong)
        latents = torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 3, labels
        assert linear_probe(Passing(), latents, latents, t=0.1).n_test == 9

    def test_data_without_classes(self):
        with pytest.raises(DataError, match="classes"):
            linear_probe(Passing(), (coloured(9, 0)[0], None), coloured(9, 0))
        with pytest.raises(DataError, match="two classes"):
            linear_probe(Passing(), (coloured(9, 0)[0], np.zeros(9, int)), coloured(9, 0))

    def test_an_unknown_block_lists_the_known_ones(self):
        net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2)
        with pytest.raises(UnknownNameError, match=r"mid_blok.*mid_block.*in_blocks\.0, mid_block, out_blocks\.0"):
            linear_probe(net, coloured(9, 0), coloured(9, 0), layers=["mid_blok"])

    @pytest.mark.parametrize(
        "options",
        [
            {"t": 2.0},
            {"t": []},
            {"t": "soon"},
            {"t": [[0.1], [0.1, 0.2]]},
            {"fit": "svm"},
            {"layers": []},
            {"batch_size": 0},
            {"objective": "nonsense"},
        ],
    )
    def test_other_values_that_cannot_be_used(self, options):
        with pytest.raises(InvalidValueError):
            linear_probe(Passing(), coloured(9, 0), coloured(9, 0), **options)

    @pytest.mark.parametrize("labels", [np.zeros(8, int), np.zeros(9), np.full(9, -1), np.zeros((9, 1), int)])
    def test_labels_that_do_not_fit_the_images(self, labels):
        with pytest.raises(InvalidValueError, match="labels of train"):
            linear_probe(Passing(), (coloured(9, 0)[0], labels), coloured(9, 0))

    def test_a_module_without_features_of_each_image(self):
        net = scalelong.UViT(img_size=8, embed_dim=16, depth=2, num_heads=2)
        with pytest.raises(InvalidValueError, match="no features"):
            linear_probe(net, coloured(9, 0), coloured(9, 0), layers="in_blocks")
