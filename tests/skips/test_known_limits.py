"""What scaling does not do: each test states what would be right, and is expected to fail.

None of these is silent for somebody who looks: the docs name each, and `describe` or an error shows it.
"""

import pytest
import torch
from skip_networks import make, run
from test_training_stack import wake
from torch import nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, Site


def limit(reason):
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


@limit("hooks are of the module that was there; scale again after exchanging a block")
@torch.no_grad()
def test_a_block_exchanged_after_apply_is_scaled():
    net, reference = make("guided-diffusion"), make("guided-diffusion")
    scalelong.apply(net, ConstantScaling(0.5))
    net.output_blocks[0] = make("guided-diffusion").output_blocks[0]
    assert torch.equal(
        run(net, "guided-diffusion"), run(scalelong.apply(reference, ConstantScaling(0.5)), "guided-diffusion")
    )


class CallsForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return self.join.forward(x, x)


@limit("a network that calls block.forward(…) instead of block(…) runs no hooks")
def test_blocks_called_through_forward_are_scaled():
    net, x = CallsForward().eval(), torch.randn(2, 4)  # in training a warning says that the skip is not reached
    before = net(x)
    scalelong.apply(net, ConstantScaling(0.5, reverse=True), sites=[Site("join")])
    assert scalelong.describe(net, x).rows[0].note == "the example did not use this skip"
    assert not torch.equal(net(x), before)


@limit("a group that holds channels of both sides has one mean and one deviation")
@torch.no_grad()
def test_behind_a_norm_with_mixed_groups_kappa_of_zero_cuts_a_skip():
    """`placement="after_norm"`: skip 3 has 8 of the 24 channels of a join whose groups are 6 wide."""
    net = scalelong.apply(make("UNet2DModel"), ExplicitScaling([1, 1, 0, 1]), placement="after_norm")
    x, temb = torch.randn(1, 16, 4, 4), torch.randn(1, 32)
    skips = torch.randn(1, 8, 4, 4), torch.randn(1, 16, 4, 4)
    disturbed = skips[0] + torch.randn(1, 8, 4, 4), skips[1]
    assert torch.allclose(net.up_blocks[0](x, skips, temb), net.up_blocks[0](x, disturbed, temb), atol=1e-5)


@limit("PEFT wraps the layer that the hook is on; put the LoRA on first, then scale")
@torch.no_grad()
def test_behind_the_norm_a_lora_put_on_the_shortcut_later_sees_the_scaled_skip():
    from peft import LoraConfig, get_peft_model

    def with_lora(net):
        return wake(get_peft_model(net, LoraConfig(r=2, target_modules=["conv_shortcut"])))

    def scaled(net):
        return scalelong.apply(net, ConstantScaling(0.5), placement="after_norm")

    name = "UNet2DModel"
    assert torch.equal(run(with_lora(scaled(make(name))), name), run(scaled(with_lora(make(name))), name))


@limit("PEFT trains a copy of the module; give scalelong.parameters(net) to the optimizer")
def test_modules_to_save_trains_the_scaling():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["skip_scaling"])
    net = get_peft_model(scalelong.apply(make("UNet2DConditionModel"), LearnableScaling()), config)
    run(net, "UNet2DConditionModel").square().mean().backward()
    assert any("skip_scaling" in key and p.grad is not None for key, p in net.named_parameters())
