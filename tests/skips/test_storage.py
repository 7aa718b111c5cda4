"""A scaling beside its network's folder: comes back equal, says what differs, and never breaks on a broken file."""

import json
import logging
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skip_networks import NETWORKS, make, run
from test_every_network import footprint
from torch import nn

import scalelong
from scalelong import (
    ConstantScaling,
    ExplicitScaling,
    LearnableScaling,
    NoScaling,
    ScaleLongError,
    Site,
    UniformScaling,
)
from scalelong.errors import ScalingWarning, UnsupportedNetworkError
from scalelong.skips import scaling_of

FILES = ("scaling.json", "scaling.safetensors")


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_saved_scaling_comes_back_equal(name, tmp_path):
    placement = "after_norm" if NETWORKS[name].normed else "join"
    net = scalelong.apply(make(name), LearnableScaling(), placement=placement)
    assert scalelong.save_scaling(net, tmp_path / "scaling") == tmp_path / "scaling"
    again = make(name)
    assert scalelong.load_scaling(again, tmp_path / "scaling") is again
    assert torch.equal(run(again, name), run(net, name))
    assert scaling_of(again).placement == placement
    assert scaling_of(again).sites == scaling_of(net).sites


@pytest.mark.parametrize(
    "scaling",
    [
        NoScaling(), UniformScaling(), ConstantScaling(0.7, reverse=True), ExplicitScaling([1, 0, 0.5]),
        LearnableScaling(calibration="ie", init="identity"), LearnableScaling(calibration="scalar"),
        LearnableScaling(shared=False, gate="channels", activation="mish"), "stable", "rezero",
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_every_kind_of_scaling_comes_back(scaling, tmp_path):
    name = "scalelong.UViT"
    net = scalelong.apply(make(name), scaling)
    for parameter in scalelong.parameters(net):
        parameter.normal_()
    scalelong.save_scaling(net, tmp_path, allow_unscaled=True)
    assert (tmp_path / "scaling.safetensors").exists() == bool(list(scalelong.parameters(net)))
    again = scalelong.load_scaling(scalelong.apply(make(name), ConstantScaling(0.5)), tmp_path)
    assert torch.equal(run(again, name), run(net, name))
    assert scalelong.skips.scaling_of(again) is None or scaling_of(again).spec == scaling_of(net).spec


@pytest.mark.parametrize("composed", [False, True])
def test_a_u_vit_with_gains_that_were_measured_is_loaded_without_an_example(composed, tmp_path):
    net = scalelong.UViT(8, 4, embed_dim=16, depth=4, num_heads=2)
    x = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    scaling = scalelong.NormScaling(init="identity")
    scalelong.apply(net, scalelong.compose(scaling, scalelong.UniformScaling(0.5)) if composed else scaling, example=x)
    net.save_pretrained(tmp_path)
    assert torch.equal(scalelong.UViT.from_pretrained(tmp_path)(*x), net(*x))


def test_saving_again_leaves_no_old_weights(tmp_path):
    net = scalelong.apply(make("StackedUNet"), LearnableScaling())
    scalelong.save_scaling(net, tmp_path)
    scalelong.save_scaling(scalelong.apply(net, ConstantScaling(0.7), replace=True), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["scaling.json"]
    scalelong.save_scaling(scalelong.remove(net), tmp_path, allow_unscaled=True)
    scaled = scalelong.apply(make("StackedUNet"), ConstantScaling(0.7))
    assert scaling_of(scalelong.load_scaling(scaled, tmp_path)) is None


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def diffusers_warnings():
    handler, logger = Records(), logging.getLogger("diffusers")
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)


@pytest.mark.parametrize("scaling", [ConstantScaling(0.7), LearnableScaling()], ids=["CS", "LS"])
def test_a_diffusers_pipeline_and_its_scaling_come_back_equal(scaling, tmp_path, diffusers_warnings):
    from diffusers import DDPMPipeline, DDPMScheduler

    def images(pipe: DDPMPipeline):
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(3)
        return pipe(batch_size=1, generator=generator, num_inference_steps=2, output_type="np").images

    unet = scalelong.apply(make("UNet2DModel"), scaling)
    pipe = DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=10))
    with scalelong.unscaled(pipe.unet):
        pipe.save_pretrained(tmp_path)
    scalelong.save_scaling(pipe.unet, tmp_path / "scaling")

    again = DDPMPipeline.from_pretrained(tmp_path)
    assert not diffusers_warnings
    assert abs(images(again) - images(pipe)).max() > 1e-3
    scalelong.load_scaling(again.unet, tmp_path / "scaling")
    assert abs(images(again) - images(pipe)).max() < 1e-6  # weights at other addresses: unscaled networks differ so too
    there, here = again.unet.state_dict(), pipe.unet.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], here[key]) for key in here)


@torch.no_grad()
def test_a_pipeline_saved_with_ls_in_its_own_file_comes_back_too_but_diffusers_complains(tmp_path, diffusers_warnings):
    from diffusers import UNet2DModel

    net = scalelong.apply(make("UNet2DModel"), LearnableScaling())
    with pytest.warns(ScalingWarning, match="unscaled"):
        net.save_pretrained(tmp_path)
    scalelong.save_scaling(net, tmp_path)
    again = UNet2DModel.from_pretrained(tmp_path)
    assert any("skip_scaling" in message for message in diffusers_warnings)
    assert torch.equal(run(scalelong.load_scaling(again, tmp_path), "UNet2DModel"), run(net, "UNet2DModel"))


def clear_by_remove(net, folder):
    scalelong.remove(net)


def clear_by_no_scaling(net, folder):
    scalelong.apply(net, scalelong.NoScaling())


def clear_by_loading_none(net, folder):
    scalelong.save_scaling(make("UNet2DModel"), folder, allow_unscaled=True)
    scalelong.load_scaling(net, folder)


@pytest.mark.parametrize("clear", [clear_by_remove, clear_by_no_scaling, clear_by_loading_none])
@pytest.mark.filterwarnings("ignore::scalelong.ScalingWarning")  # of `save_pretrained`, which is the case here
def test_the_config_of_a_loaded_network_forgets_a_scaling_that_it_does_not_have(clear, tmp_path):
    scalelong.apply(make("UNet2DModel"), scalelong.ConstantScaling(0.7)).save_pretrained(tmp_path / "scaled")
    net = type(make("UNet2DModel")).from_pretrained(tmp_path / "scaled")
    assert "scalelong" in net.config
    clear(net, tmp_path / "none")
    assert "scalelong" not in net.config
    net.save_pretrained(tmp_path / "again")
    assert "scalelong" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_the_scaling_of_a_wrapped_network_is_saved_from_inside(tmp_path):
    net = scalelong.apply(make("StackedUNet"), LearnableScaling())
    scalelong.save_scaling(nn.DataParallel(net), tmp_path)
    again = scalelong.load_scaling(make("StackedUNet"), tmp_path)
    assert torch.equal(run(again, "StackedUNet"), run(net, "StackedUNet"))
    assert len(list(scalelong.parameters(nn.DataParallel(net)))) == len(list(scalelong.parameters(net)))


# --------------------------------------------------------------------------------- a different network


@pytest.mark.parametrize(
    ("there", "here", "differences"),
    [
        ("UNet2DModel", "scalelong.UViT", ["4 long skips there, 3 here"]),
        ("UNet2DModel", "guided-diffusion", ["skip 1 is up_blocks.1.resnets.1", "output_blocks.3"]),
        ("scalelong.UViT", "guided-diffusion", ["(scalelong.models.uvit.UViT) than this GuidedUNet", "3 long skips"]),
        ("MONAI BasicUNet 2D", "StackedUNet", ["4 long skips there, 3 here"]),
    ],
)  # fmt: skip
def test_loading_into_another_network_says_what_differs(there, here, differences, tmp_path):
    scalelong.save_scaling(scalelong.apply(make(there), LearnableScaling()), tmp_path)
    net = scalelong.apply(make(here), ConstantScaling(0.7))
    before, former = footprint(net), scaling_of(net)
    with pytest.raises(UnsupportedNetworkError) as caught:
        scalelong.load_scaling(net, tmp_path)
    assert all(difference in str(caught.value) for difference in differences)
    assert footprint(net) == before
    assert scaling_of(net) is former


def test_loading_into_another_size_of_the_network_says_which_skip_differs(tmp_path):
    from diffusers import UNet2DModel

    net = make("UNet2DModel")
    scalelong.save_scaling(scalelong.apply(net, LearnableScaling()), tmp_path)
    config = {**net.config, "block_out_channels": (8, 32)}
    with pytest.raises(
        UnsupportedNetworkError,
        match=r"skip 4 is up_blocks.0.resnets.0 with 16 channels there, up_blocks.0.resnets.0 with 32 channels here",
    ):
        scalelong.load_scaling(UNet2DModel.from_config(config), tmp_path)
    longer = scalelong.UViT(img_size=16, patch_size=2, embed_dim=16, depth=6, num_heads=2)
    scalelong.save_scaling(scalelong.apply(make("scalelong.UViT"), LearnableScaling()), tmp_path)
    with pytest.raises(UnsupportedNetworkError, match=r"16 channels and 17 tokens there.* and 65 tokens here"):
        scalelong.load_scaling(longer, tmp_path)


# --------------------------------------------------------------------------------------- sites of one's own


class Own(nn.Module):
    """A network that no finder knows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Bilinear(4, 4, 4), nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return self.two(self.one(x, 2 * x), x)


def test_sites_of_ones_own_come_back(tmp_path):
    sites = [Site("two", "input2", channels=4), Site("one", "input2", channels=4)]
    net = scalelong.apply(Own(), LearnableScaling(), sites=sites)
    scalelong.save_scaling(net, tmp_path)
    again = Own()
    again.load_state_dict(scalelong.remove(net).state_dict())
    scalelong.load_scaling(net, tmp_path)
    scalelong.load_scaling(again, tmp_path)
    x = torch.randn(3, 4)
    assert torch.equal(again(x), net(x))
    assert [row.path for row in scalelong.describe(again).rows] == ["two", "one"]
    with pytest.raises(UnsupportedNetworkError, match="skip 1 ends at two"):
        scalelong.load_scaling(nn.Sequential(), tmp_path)


@torch.no_grad()
def test_some_of_a_known_networks_skips_come_back_as_some(tmp_path):
    name = "UNet2DModel"
    two = list(scaling_of(scalelong.apply(make(name), ConstantScaling(0.5))).sites)[2:]
    net = scalelong.apply(make(name), ConstantScaling(0.5), sites=two)
    scalelong.save_scaling(net, tmp_path)
    again = scalelong.load_scaling(make(name), tmp_path)
    assert torch.equal(run(again, name), run(net, name))
    assert [row.coefficient for row in scalelong.describe(again).rows] == [1.0, 0.5]


# ------------------------------------------------------------------------------------------- broken files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    scalelong.save_scaling(scalelong.apply(make("StackedUNet"), LearnableScaling()), folder)
    return folder


def load_error(folder):
    """Load into a fresh network; return the message of a ScaleLongError, after which the network is unchanged."""
    net = make("StackedUNet")
    before = footprint(net)
    try:
        scalelong.load_scaling(net, folder)
    except ScaleLongError as error:
        assert footprint(net) == before
        return str(error)
    return ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), cut=st.floats(0, 1), garbage=st.binary(max_size=6), at=st.floats(0, 1))
def test_a_corrupted_file_loads_or_raises_our_error(saved, tmp_path_factory, file, cut, garbage, at):
    folder = tmp_path_factory.mktemp("broken")
    for name in FILES:
        shutil.copy(saved / name, folder)
    data = (saved / file).read_bytes()
    data = data[: round(cut * len(data))] if cut < 0.3 else data
    place = round(at * len(data))
    (folder / file).write_bytes(data[:place] + garbage + data[place + len(garbage) :])
    load_error(folder)
    shutil.rmtree(folder)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON_VALUES)
def test_a_changed_json_loads_or_raises_our_error(saved, tmp_path_factory, data, value):
    record = json.loads((saved / "scaling.json").read_text())
    key = data.draw(st.sampled_from(sorted(record)))
    inner = record[key]
    if isinstance(inner, dict):
        inner[data.draw(st.sampled_from(sorted(inner)))] = value
    elif isinstance(inner, list) and isinstance(inner[0], dict) and data.draw(st.booleans()):
        inner[0][data.draw(st.sampled_from(sorted(inner[0])))] = value
    else:
        record[key] = value
    folder = tmp_path_factory.mktemp("changed")
    (folder / "scaling.json").write_text(json.dumps(record))
    shutil.copy(saved / "scaling.safetensors", folder)
    load_error(folder)
    shutil.rmtree(folder)


def test_errors_about_broken_files_name_what_is_wrong(saved, tmp_path):
    def broken(**changes):
        record = {**json.loads((saved / "scaling.json").read_text()), **changes}
        (tmp_path / "scaling.json").write_text(json.dumps(record))
        return load_error(tmp_path)

    assert "scaling.json; save_scaling(net, folder) writes it" in load_error(tmp_path)
    assert "scaling.safetensors cannot be read" in broken()
    shutil.copy(saved / "scaling.safetensors", tmp_path)
    assert broken() == ""
    assert "has format 2" in broken(format=2)
    assert "'sites' must be a list" in broken(sites=None)
    assert "{'paths': 'a'}" in broken(sites=[{"paths": "a"}])
    assert "unknown scaling 'scale'" in broken(scaling={"kind": "scale"})
    assert "unknown placement 'before'" in broken(placement="before")
    fixed = broken(scaling={"kind": "cs", "kappa": 0.7})
    assert "do not fit the scaling: unexpected: networks.zeta.layer1.bias" in fixed
    (tmp_path / "scaling.json").write_text("{")
    assert "not valid JSON" in load_error(tmp_path)
