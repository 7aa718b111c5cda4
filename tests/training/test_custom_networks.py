"""Networks of one's own: registered from Python, trained, resumed, sampled and loaded like the built-in ones."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling, load_run
from scalelong.errors import InvalidValueError, RunError, UnknownNameError
from scalelong.models.registry import MODELS, Model
from scalelong.runs.generate import Request
from scalelong.training import train
from tiny_runs import losses, tiny_config


class SmallUNet(nn.Module):
    """A plain U-Net on 8×8 images with two long skips."""

    def __init__(self, channels, width):
        super().__init__()
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, channels, 3, padding=1)
        self.time = nn.Linear(1, width)

    def forward(self, x, t):
        h1 = self.enter(x) + self.time(t[:, None] / 1000)[:, :, None, None]
        h2 = self.down(h1.relu())
        h = self.middle(h2.relu())
        h = self.up(torch.cat([h, self.skip(h2, 2)], 1).relu())
        return self.leave(torch.cat([h, self.skip(h1, 1)], 1).relu())

    def skip(self, h, i):
        return h


class SavingUNet(ModelMixin, ConfigMixin):
    """A network with diffusers' save_pretrained."""

    @register_to_config
    def __init__(self, channels=1, width=4):
        super().__init__()
        self.inner = SmallUNet(channels, width)

    def forward(self, x, t):
        return self.inner(x, t)


@pytest.fixture
def registered(monkeypatch):
    def register(network):
        build = lambda model, shapes: network(shapes.channels, **model.options)
        monkeypatch.setitem(MODELS, "mine", Model(build=build))

    return register


def own_config(**settings):
    return tiny_config(model__kind="mine", model__options={"width": 4}, **settings)


@pytest.mark.parametrize("network", [SmallUNet, SavingUNet])
def test_a_network_of_ones_own_trains_resumes_samples_and_loads(tmp_path, registered, network):
    registered(network)
    train(own_config(), tmp_path / "whole", quiet=True)
    train(own_config(train__steps=3), tmp_path / "parts", quiet=True)
    train(own_config(), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    run = load_run(tmp_path / "whole")
    assert type(run.net) is network
    again = load_run(tmp_path / "parts")
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in run.net.state_dict().items())
    assert np.concatenate(list(run.generate(Request(n=2, steps=2)))).shape == (2, 8, 8, 1)


def test_options_reach_the_network_and_are_compared_on_resume(tmp_path, registered):
    registered(SmallUNet)
    train(own_config(train__steps=1), tmp_path / "run", quiet=True)
    assert load_run(tmp_path / "run").net.middle.weight.shape == (4, 4, 3, 3)
    wider = tiny_config(model__kind="mine", model__options={"width": 8})
    with pytest.raises(RunError, match=r"model\.options\.width: 4 → 8"):
        train(wider, tmp_path / "run", quiet=True)


def test_a_run_whose_network_is_not_registered_says_so(tmp_path, registered, monkeypatch):
    registered(SmallUNet)
    train(own_config(train__steps=1), tmp_path / "run", quiet=True)
    code = f"import scalelong; scalelong.load_run({str(tmp_path / 'run')!r})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UnknownNameError" in answer.stderr
    assert "MODELS['mine']" in answer.stderr
    monkeypatch.delitem(MODELS, "mine")
    with pytest.raises(UnknownNameError, match=r"MODELS\['mine'\]"):
        load_run(tmp_path / "run")


def test_another_network_under_the_same_name_is_refused(tmp_path, registered):
    registered(SmallUNet)
    train(own_config(train__steps=1), tmp_path / "run", quiet=True)
    registered(SavingUNet)
    with pytest.raises(RunError, match="'SmallUNet'.*'SavingUNet'"):
        load_run(tmp_path / "run")


def test_damaged_weights_of_ones_own_network_are_a_run_error(tmp_path, registered):
    registered(SmallUNet)
    train(own_config(train__steps=1), tmp_path / "run", quiet=True)
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match="could not load"):
        load_run(tmp_path / "run")


def test_gradient_checkpointing_needs_a_network_that_supports_it(tmp_path, registered):
    registered(SmallUNet)
    with pytest.raises(InvalidValueError, match=r"gradient_checkpointing.*SmallUNet"):
        train(own_config(train__gradient_checkpointing=True), tmp_path / "run", quiet=True)


def test_an_adapter_brings_another_signature_to_the_one_call(tmp_path, monkeypatch):
    class Swapped(SmallUNet):
        def forward(self, sigma, image):
            return super().forward(image, sigma)

    class Adapter(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, t):
            return self.net(t, x)

    monkeypatch.setitem(MODELS, "mine", Model(build=lambda m, s: SmallUNet(s.channels, **m.options)))
    train(own_config(), tmp_path / "plain", quiet=True)
    monkeypatch.setitem(MODELS, "mine", Model(build=lambda m, s: Swapped(s.channels, **m.options), adapt=Adapter))
    train(own_config(), tmp_path / "adapted", quiet=True)
    assert losses(tmp_path / "adapted") == losses(tmp_path / "plain")


@pytest.mark.parametrize("scaling", [ConstantScaling(0.5), LearnableScaling()], ids=lambda s: s.kind)
def test_scaling_is_applied_to_a_network_that_calls_scale_skip(tmp_path, registered, scaling):
    class Scaled(SmallUNet):
        def __init__(self, channels, width):
            super().__init__(channels, width)
            self.long_skips = (width, width)

        def skip(self, h, i):
            return scalelong.scale_skip(self, h, i)

    registered(Scaled)
    train(own_config(scaling=scaling), tmp_path / "scaled", quiet=True)
    train(own_config(scaling=NoScaling()), tmp_path / "none", quiet=True)
    assert losses(tmp_path / "scaled")[0] != losses(tmp_path / "none")[0]
    net = load_run(tmp_path / "scaled").net
    assert net.skip_scaling.spec == scaling
    if scaling.kind == "cs":
        assert [row.coefficient for row in scalelong.describe(net).rows] == [1.0, 0.5]
