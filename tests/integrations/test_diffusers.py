"""diffusers' training scripts with LS: checkpoints resume exactly, and the average keeps LS."""

import subprocess
import sys

import pytest
import torch
import training_flow
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel

import scalelong
from scalelong import ConstantScaling, LearnableScaling
from scalelong.errors import InvalidValueError, ScalingStateError
from scalelong.integrations.diffusers import from_pretrained, load_ema, register_hooks, save_ema, save_pretrained


def tiny():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)


def test_both_scripts_resume_in_a_fresh_process_as_if_never_stopped(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training_flow.run(tmp_path, "first")
    torch.set_num_threads(threads)
    result = subprocess.run([sys.executable, training_flow.__file__, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    for task in ("unconditional", "text"):
        whole, resumed = (torch.load(tmp_path / f"{task}-{part}.pt") for part in ("first", "resumed"))
        assert any("ema.skip_scaling" in name for name in whole)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
        checkpoint = tmp_path / task / "checkpoint"
        assert {path.name for path in checkpoint.iterdir()} >= {"unet", "unet_ema"}


def test_the_average_keeps_ls(tmp_path):
    net = scalelong.apply(tiny(), LearnableScaling())
    ema = EMAModel(net.parameters(), decay=0.5, model_cls=UNet2DModel, model_config=net.config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    ema.step(net.parameters())
    ema.step(net.parameters())
    save_ema(ema, net, tmp_path)
    again = load_ema(UNet2DModel, tmp_path)
    assert len(again.shadow_params) == len(ema.shadow_params)
    assert all(torch.equal(a, b) for a, b in zip(again.shadow_params, ema.shadow_params, strict=True))
    assert (again.decay, again.optimization_step) == (0.5, 2)


def test_an_average_from_before_apply_is_refused(tmp_path):
    net = tiny()
    ema = EMAModel(net.parameters(), model_cls=UNet2DModel, model_config=net.config)
    with pytest.raises(ScalingStateError, match="after scalelong.apply"):
        save_ema(ema, scalelong.apply(net, LearnableScaling()), tmp_path)


@pytest.mark.parametrize("scaling", ["none", ConstantScaling(0.7), LearnableScaling()], ids=str)
def test_a_network_comes_back_with_its_scaling(scaling, tmp_path):
    net = scalelong.apply(tiny(), scaling)
    save_pretrained(net, tmp_path)
    again = from_pretrained(UNet2DModel, tmp_path)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1, 500])
    with torch.no_grad():
        assert torch.equal(again(x, t).sample, net(x, t).sample)


class Accelerator:
    """The part of accelerate's that the hooks use."""

    device, is_main_process = torch.device("cpu"), True

    def register_save_state_pre_hook(self, hook):
        self.save = hook

    def register_load_state_pre_hook(self, hook):
        self.load = hook

    def unwrap_model(self, model):
        return model


def test_another_scaling_than_the_checkpoints_and_a_wrong_number_of_names_are_refused(tmp_path):
    accelerator = Accelerator()
    register_hooks(accelerator)
    net, weights = scalelong.apply(tiny(), LearnableScaling()), [{}]
    accelerator.save([net], weights, str(tmp_path))
    assert not weights
    with pytest.raises(ScalingStateError, match="LearnableScaling.*None"):
        accelerator.load([tiny()], str(tmp_path))
    with pytest.raises(InvalidValueError, match="2 prepared"):
        accelerator.load([net, net], str(tmp_path))
