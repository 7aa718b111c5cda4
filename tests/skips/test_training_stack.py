"""What a training stack does to a model, done to scaled networks: checkpoints, autocast, compile, DDP, FreeU, LoRA."""

import copy

import pytest
import torch
import torch._dynamo.testing
from ddp_worker import run_two_processes
from homemade import GuidedUNet
from skip_networks import NETWORKS, example, make, run
from torch import nn

import scalelong
from scalelong import ConstantScaling, ExplicitScaling, LearnableScaling, ScaleLongError
from scalelong.errors import UnsupportedNetworkError
from scalelong.skips import scaling_of

EVERY = pytest.mark.parametrize("name", NETWORKS)
CS, LS = ConstantScaling(0.7), LearnableScaling()


def gradients(net: nn.Module, name: str) -> dict[str, torch.Tensor]:
    net.zero_grad()
    run(net, name).square().mean().backward()
    return {key: p.grad.clone() for key, p in net.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------- gradient checkpointing


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.checkpoint])
def test_gradient_checkpointing_gives_equal_gradients(name):
    network = NETWORKS[name]
    net = scalelong.apply(make(name), LS, placement="after_norm" if network.normed else "join")
    expected = gradients(net, name)
    network.checkpoint(net)
    got = gradients(net, name)
    assert got.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------------------- mixed precision


@EVERY
def test_bf16_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(make(name), name)
        ones = scalelong.apply(make(name), ExplicitScaling([1.0] * NETWORKS[name].skips))
        assert torch.equal(run(ones, name), plain)
        net = scalelong.apply(make(name), LS)
        output = run(net, name)
        assert output.dtype == plain.dtype
        assert not torch.equal(output, plain)
        output.float().square().mean().backward()
    for parameter in scalelong.parameters(net):
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
    exact = run(net, name)
    assert (output - exact).norm() < 0.1 * exact.norm()  # bf16 keeps eight bits


# ----------------------------------------------------------------------------------------- torch.compile


def compiled_once(net: nn.Module, name: str, backend: str = "eager") -> None:
    """One graph, no break, the same output; steps that change weights and inputs compile nothing again."""
    torch._dynamo.reset()
    expected = run(net, name).detach()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    torch.testing.assert_close(run(compiled, name).detach(), expected, rtol=1e-4, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            run(compiled, name).square().mean().backward()
            optimizer.step()
        got = run(compiled, name).detach()
    torch.testing.assert_close(got, run(net, name).detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(got, expected)


@pytest.mark.parametrize("scaling", [CS, LS], ids=["CS", "LS"])
def test_compile_makes_one_graph_and_never_again(scaling):
    compiled_once(scalelong.apply(make("StackedUNet"), scaling), "StackedUNet")


def test_compile_behind_the_norms():
    net = scalelong.apply(GuidedUNet(channel_mult=(1,)), LS, placement="after_norm")
    compiled_once(net, "guided-diffusion")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if "BasicUNet" not in name])
def test_compile_of_every_network(name):
    compiled_once(scalelong.apply(make(name), LS), name)
    if NETWORKS[name].normed:
        compiled_once(scalelong.apply(make(name), CS, placement="after_norm"), name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks, at a break
@pytest.mark.parametrize("scaling", [CS, LS], ids=["CS", "LS"])
def test_compile_of_a_network_that_breaks_by_itself_adds_a_small_graph_a_skip_at_most(scaling):
    """MONAI's BasicUNet is not one graph: it breaks inside every block that consumes a skip."""

    def graphs(net: nn.Module) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        run(torch.compile(net, backend=counter), name)
        return counter.frame_count

    name = "MONAI BasicUNet 2D"
    untouched = graphs(make(name))
    assert untouched > 1
    assert graphs(scalelong.apply(make(name), scaling)) <= untouched + NETWORKS[name].skips


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", ["UNet2DModel", "scalelong.UViT"])
def test_compile_with_inductor(name):
    compiled_once(scalelong.apply(make(name), LS), name, backend="inductor")


def test_export_and_functional_call_run_the_scaling():
    name = "StackedUNet"
    net = scalelong.apply(make(name), LS)
    (x,) = example(name).args
    exported = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(exported(x), net(x))
    torch.manual_seed(1)  # the initial weights of LS depend on the random state
    other = scalelong.apply(make(name), LS)
    assert not torch.equal(other(x), net(x))
    assert torch.equal(torch.func.functional_call(net, other.state_dict(), (x,)), other(x))


# ------------------------------------------------------------------------------------------- two processes


def test_two_processes_follow_one_by_ddp_and_by_fsdp(tmp_path):
    run_two_processes(["guided-diffusion"], tmp_path)


@pytest.mark.slow
def test_two_ddp_processes_follow_one_with_every_network(tmp_path):
    run_two_processes(list(NETWORKS), tmp_path)


# ---------------------------------------------------------------------------------------------- FreeU, LoRA


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SDXL", "UNet3DConditionModel", "UNetMotionModel"])
@torch.no_grad()
def test_freeu_and_scaling_both_act_in_either_order(name):
    freeu = {"s1": 0.9, "s2": 0.2, "b1": 1.2, "b2": 1.4}
    net = make(name)
    plain = run(net, name)
    scaled_first = scalelong.apply(make(name), CS)
    only_scaled = run(scaled_first, name)
    scaled_first.enable_freeu(**freeu)
    net.enable_freeu(**freeu)
    only_freeu = run(net, name)
    both = run(scalelong.apply(net, CS), name)
    assert torch.equal(run(scaled_first, name), both)
    for one in (plain, only_scaled, only_freeu):
        assert not torch.allclose(both, one, rtol=1e-3, atol=1e-3)
    assert torch.equal(run(scalelong.remove(net), name), only_freeu)
    net.disable_freeu()
    assert torch.equal(run(net, name), plain)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["to_q", "to_v"])


def wake(net: nn.Module) -> nn.Module:
    """LoRA starts as nothing: give it something to say, the same each time."""
    generator = torch.Generator().manual_seed(5)
    for key, parameter in net.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(std=0.5, generator=generator)
        if "lora_A" in key:
            parameter.data.normal_(generator=generator)
    return net


@pytest.mark.parametrize("scaling", [CS, LearnableScaling(calibration="ie")], ids=["CS", "LS"])
@pytest.mark.parametrize("way", ["add_adapter", "get_peft_model"])
@torch.no_grad()
def test_lora_and_scaling_both_act_in_either_order(way, scaling):
    from peft import get_peft_model

    def with_lora(net: nn.Module) -> nn.Module:
        if way == "get_peft_model":
            return wake(get_peft_model(net, lora()))
        net.add_adapter(lora())
        return wake(net)

    name = "UNet2DConditionModel"
    scaled_first = with_lora(scalelong.apply(make(name), scaling))
    lora_first = with_lora(make(name))
    only_lora = run(lora_first, name)
    assert scalelong.apply(lora_first, scaling) is lora_first
    both = run(lora_first, name)
    assert torch.equal(run(scaled_first, name), both)
    assert not torch.equal(both, only_lora)
    assert not torch.equal(both, run(scalelong.apply(make(name), scaling), name))
    for net in (scaled_first, lora_first):
        assert len(scalelong.describe(net).rows) == 4
        assert torch.equal(run(scalelong.remove(net), name), only_lora)


def test_ls_parameters_train_beside_a_lora():
    """get_peft_model freezes everything that was there before; LS is free again by one line."""
    from peft import get_peft_model

    name = "UNet2DConditionModel"
    lora_first = scalelong.apply(get_peft_model(make(name), lora()), LS)
    assert all(p.requires_grad for p in scalelong.parameters(lora_first))
    scaled_first = get_peft_model(scalelong.apply(make(name), LS), lora())
    assert not any(p.requires_grad for p in scalelong.parameters(scaled_first))
    for parameter in scalelong.parameters(scaled_first):
        parameter.requires_grad_(True)
    for net in (lora_first, scaled_first):
        run(net, name).square().mean().backward()
        trained = {key for key, p in net.named_parameters() if p.grad is not None}
        assert any("skip_scaling" in key for key in trained)
        assert all("skip_scaling" in key or "lora_" in key for key in trained)


def test_unscaled_leaves_trainable_what_became_so_after_apply():
    name = "UNet2DConditionModel"
    net = scalelong.apply(make(name).train(), scalelong.SkipAdapter(4))
    net.add_adapter(lora())
    net.conv_out.requires_grad_(True)
    before = {key: p.requires_grad for key, p in net.named_parameters()}
    assert {True, False} == set(before.values())
    for _ in range(2):
        with scalelong.unscaled(net):
            pass
        assert {key: p.requires_grad for key, p in net.named_parameters()} == before
    with pytest.raises(ScaleLongError):  # a replacement that fails restores the former scaling
        scalelong.apply(net, scalelong.ExplicitScaling([1.0]), replace=True)
    assert {key: p.requires_grad for key, p in net.named_parameters()} == before
    plain = scalelong.apply(make(name).train(), scalelong.SkipAdapter(4))
    with scalelong.unscaled(plain):
        assert all(p.requires_grad for p in plain.parameters())
    assert not plain.conv_out.weight.requires_grad
    assert all(p.requires_grad for p in scalelong.remove(plain).parameters())


@torch.no_grad()
def test_lora_on_the_layer_that_joins_is_understood():
    from peft import LoraConfig, get_peft_model

    name = "scalelong.UViT"
    net = wake(get_peft_model(make(name), LoraConfig(r=2, target_modules=["skip_linear"])))
    plain = run(net, name)
    scalelong.apply(net, CS)
    assert len(scalelong.describe(net).rows) == 3
    assert not torch.equal(run(net, name), plain)
    assert torch.equal(run(scalelong.remove(net), name), plain)


def test_modules_to_save_of_the_scaling_is_refused_when_it_is_looked_at():
    """PEFT would train a copy that the hooks do not run."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["skip_scaling"])
    net = get_peft_model(scalelong.apply(make("UNet2DConditionModel"), LS), config)
    for look in (scalelong.describe, lambda net: list(scalelong.parameters(net)), scalelong.remove):
        with pytest.raises(ScaleLongError, match="modules_to_save made a copy"):
            look(net)


# --------------------------------------------------------------------------------------------------- EMA


def test_torch_ema_averages_the_ls_weights():
    name = "UNet2DModel"
    net = scalelong.apply(make(name), LS)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    ema.update_parameters(net)  # the first takes the weights as they are
    start = [p.detach().clone() for p in scalelong.parameters(net)]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    ema.update_parameters(net)
    for averaged, before in zip(scalelong.parameters(ema.module), start, strict=True):
        torch.testing.assert_close(averaged, before + 0.5)
    assert scaling_of(ema.module) is not scaling_of(net)


def test_diffusers_ema_carries_the_scaling(tmp_path):
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    name = "UNet2DModel"
    net = scalelong.apply(make(name), LS)
    ema = EMAModel(net.parameters(), model_cls=UNet2DModel, model_config=net.config)
    other = scalelong.apply(copy.deepcopy(make(name)), LS)
    ema.copy_to(other.parameters())
    assert torch.equal(run(other, name), run(net, name))
    assert len(ema.shadow_params) == len(list(net.parameters())) > len(list(make(name).parameters()))


def test_channels_last_keeps_its_format():
    net = scalelong.apply(make("UNet2DModel"), LS).to(memory_format=torch.channels_last)
    x, t = example("UNet2DModel").args
    expected = run(net, "UNet2DModel")
    output = net(x.to(memory_format=torch.channels_last), t).sample
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


class Mixed(nn.Module):
    """Blocks in another dtype than the first parameters, as guided-diffusion's `convert_to_fp16` leaves them."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(4, 8)
        self.stem, self.down, self.up = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 3, 3, 1, 1)
        for module in (self.stem, self.down, self.up):
            module.bfloat16()

    def forward(self, x, t):
        skip = self.stem(x.bfloat16())
        h = (self.down(skip) + self.time(t)[:, :, None, None].bfloat16()).relu()
        return self.up(torch.cat([nn.functional.interpolate(h, scale_factor=2.0), skip], 1)).float()


@pytest.mark.parametrize("scaling", [scalelong.LearnableScaling(), scalelong.SkipAdapter(2)])
def test_blocks_may_have_another_dtype_than_the_first_parameters(scaling):
    x, t = torch.randn(2, 3, 8, 8), torch.randn(2, 4)
    net = scalelong.apply(Mixed(), scaling, example=(x, t))
    net(x, t).square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in scalelong.parameters(net))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_that_joins_is_refused(reentrant):
    """It would be recomputed without κ."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.low, self.head = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)
            self.checkpoints = False

        def forward(self, x):
            skip = self.stem(x)
            if not self.checkpoints:
                return self.decode(skip)
            return torch.utils.checkpoint.checkpoint(self.decode, skip, use_reentrant=reentrant)

        def decode(self, skip):
            return self.head(nn.functional.interpolate(self.low(skip.relu()), scale_factor=2.0) + skip)

    x = torch.randn(2, 3, 8, 8)
    net = scalelong.apply(Net(), scalelong.UniformScaling(0.5), example=(x,))
    net.checkpoints = True
    with pytest.raises(UnsupportedNetworkError, match="checkpointed function"):
        net(x)


def test_applying_ls_leaves_the_random_state_alone_and_depends_on_it():
    made = []
    for seed in (0, 0, 1):
        net = make("UNet2DModel")  # the same weights each time
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        scalelong.apply(net, LearnableScaling())
        assert torch.equal(torch.random.get_rng_state(), before)
        made.append(torch.cat([p.detach().flatten() for p in scalelong.parameters(net)]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
