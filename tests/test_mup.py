"""μP: roles from shapes, initial weights and learning rates, and the two rewritings that keep `forward` as it is."""

import copy
import math

import pytest
import torch
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, UViT, build_unet, mup
from scalelong.errors import InvalidValueError

SIZES = {"img_size": 8, "patch_size": 2, "in_chans": 1, "depth": 4, "mlp_time_embed": True}


def uvit(width=128, seed=0, **options):
    torch.manual_seed(seed)
    return UViT(**SIZES | {"embed_dim": width, "num_heads": width // 16} | options)


def unet(width=32, **options):
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "block_out_channels": (width, width, 2 * width, 2 * width), "norm_num_groups": 8}
    return build_unet("cifar10", **sizes, attention_head_dim=8, **options)


@pytest.mark.parametrize(
    ("name", "role"),
    {
        "patch_embed.proj.weight": "input",
        "pos_embed": "input",
        "label_emb.weight": "input",
        "in_blocks.0.norm1.weight": "input",
        "in_blocks.0.mlp.fc1.bias": "input",
        "time_embed.0.weight": "hidden",  # its input, the sinusoids, is as wide as the network
        "time_embed.2.weight": "hidden",
        "in_blocks.0.attn.qkv.weight": "hidden",
        "mid_block.attn.proj.weight": "hidden",
        "out_blocks.1.mlp.fc2.weight": "hidden",
        "out_blocks.0.skip_linear.weight": "hidden",
        "decoder_pred.weight": "output",
        "decoder_pred.bias": "finite",
        "final_layer.weight": "finite",
    }.items(),
)
def test_a_parameter_of_a_uvit_has_its_role(name, role):
    assert mup.roles(uvit(num_classes=11))[name].role == role


def test_text_tokens_enter_a_uvit_and_a_unet_through_input_weights():
    text = uvit(clip_dim=24, num_clip_token=3)
    assert mup.roles(text)["context_embed.weight"].role == "input"
    small = {"block_out_channels": (32, 64, 64), "cross_attention_dim": 24, "norm_num_groups": 8}
    rows = mup.roles(build_unet("coco", **small)).rows
    keys = [row.role for row in rows if ".attn2.to_k." in row.name or ".attn2.to_v." in row.name]
    assert set(keys) == {"input"}
    assert {row.role for row in rows if ".attn1.to_k." in row.name} == {"hidden"}


def test_a_unets_convolutions_have_their_roles():
    table = mup.roles(unet())
    assert table["conv_in.weight"].role == "input"
    assert table["conv_out.weight"].role == "output"
    assert {row.role for row in table.rows if row.name.endswith("conv1.weight")} == {"hidden"}


def test_factors_follow_the_exponents_at_four_times_the_base_width():
    table, width = mup.roles(uvit(256), base_width=64), 4
    hidden, entry, output = (table[n] for n in ("mid_block.mlp.fc1.weight", "pos_embed", "decoder_pred.weight"))
    assert (hidden.lr, hidden.init) == (1 / width, width**-0.5)
    assert (entry.lr, entry.init) == (1, 1)
    assert (output.lr, output.init) == (1 / width, 1 / width)  # (0, 1, 1), which Adam does not tell from (1, 0, 0)
    # PyTorch's own initialization already shrinks as 1/√fan_in
    conv = mup.roles(unet(64), base_width=16)["mid_block.resnets.0.conv1.weight"]
    assert (conv.lr, conv.init) == (1 / width, 1)


def test_initial_activations_do_not_depend_on_the_width():
    torch.manual_seed(1)
    x, t = torch.randn(16, 1, 8, 8), torch.rand(16) * 1000
    sizes = {64: [], 512: []}
    for width, seen in sizes.items():
        for seed in range(4):
            net = mup.init_(uvit(width, init_std=0.05, seed=seed), base_width=64)
            net.norm.register_forward_pre_hook(lambda _module, args, seen=seen: seen.append(args[0].std().item()))
            net(x, t)
    # Seeds differ by about 10 % at width 64; without μP the sizes differ by a factor of more than 2.
    assert sum(sizes[512]) == pytest.approx(sum(sizes[64]), rel=0.15)


def test_the_output_starts_at_zero_unless_asked_otherwise():
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    assert mup.init_(unet(), base_width=32)(x, t).sample.abs().max() == 0
    assert mup.init_(unet(), base_width=32, zero_output=False)(x, t).sample.abs().max() > 0


def test_at_its_base_width_the_network_is_bit_for_bit_the_standard_one():
    for net in (uvit(64), unet(32, scaling="ls")):
        before = copy.deepcopy(net.state_dict())
        width = 64 if isinstance(net, UViT) else 32
        mup.init_(net, base_width=width, zero_output=False)
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        (group,) = mup.param_groups(net, 1e-3, 0.03, base_width=width)
        assert (group["lr"], group["weight_decay"]) == (1e-3, 0.03)
        assert len(group["params"]) == len(list(net.parameters()))


def test_groups_hold_every_trainable_parameter_once_and_keep_lr_times_weight_decay():
    net = uvit(256, scaling=LearnableScaling())
    net.pos_embed.requires_grad_(False)
    groups = mup.param_groups(net, 1e-3, 0.03, base_width=64, eps=1e-8)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in net.parameters() if p.requires_grad)
    assert groups[0]["lr"] == 1e-3
    assert all(group["lr"] * group["weight_decay"] == pytest.approx(3e-5) for group in groups)
    torch.optim.AdamW(groups)


def _train(parameters, loss, steps=20):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-30)
    values = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def test_adam_does_not_tell_a_factor_on_the_output_from_scaled_weights_and_learning_rate():
    torch.manual_seed(0)
    m, W_0 = 4.0, torch.randn(3, 8, dtype=torch.float64)
    x, y = torch.randn(20, 16, 8, dtype=torch.float64), torch.randn(20, 16, 3, dtype=torch.float64)
    factor = nn.Parameter(W_0.clone())  # (1, 0, 0): W = W̃/m
    folded = nn.Parameter(W_0 / m)  # (0, 1, 1)
    groups = [{"params": [folded], "lr": 0.01 / m, "weight_decay": 0.1 * m}]
    first = _train([factor], lambda step: (x[step] @ (factor / m).T - y[step]).square().mean())
    second = _train(groups, lambda step: (x[step] @ folded.T - y[step]).square().mean())
    assert second == pytest.approx(first, rel=1e-9)


def test_completep_on_residual_branches_equals_a_factor_in_forward():
    class Scaled(nn.Module):  # x + f(x)/m_L, written out
        def __init__(self, block, factor):
            super().__init__()
            self.block, self.factor = block, factor

        def forward(self, x, skip=None):
            b = self.block
            x = x if b.skip_linear is None else b.skip_linear(torch.cat([x, skip], dim=-1))
            x = x + self.factor * b.attn(b.norm1(x))
            return x + self.factor * b.mlp(b.norm2(x))

    folded, written = uvit(32).double(), uvit(32).double()
    mup.init_(folded, base_depth=2, zero_output=False)  # depth 4: m_L = 2
    for blocks in (written.in_blocks, written.out_blocks):
        for k, block in enumerate(blocks):
            blocks[k] = Scaled(block, 0.5)
    written.mid_block = Scaled(written.mid_block, 0.5)
    torch.manual_seed(1)
    batches = [
        (torch.randn(4, 1, 8, 8).double(), torch.rand(4) * 1000, torch.randn(4, 1, 8, 8).double()) for _ in range(6)
    ]

    def loss_of(net):
        return lambda step: (net(batches[step][0], batches[step][1]) - batches[step][2]).square().mean()

    first = _train(list(written.parameters()), loss_of(written), 6)
    second = _train(mup.param_groups(folded, 0.01, 0.1, base_depth=2), loss_of(folded), 6)
    assert second == pytest.approx(first, rel=1e-6)  # the time sinusoids are computed in fp32


def test_attention_of_growing_heads_is_scaled_by_their_width():
    wide = uvit(64, num_heads=2, base_head_width=8)  # heads of width 32
    assert wide.mid_block.attn.scale == math.sqrt(8) / 32
    assert uvit(64).mid_block.attn.scale is None
    with pytest.raises(InvalidValueError, match="base_head_width"):
        uvit(64, base_head_width=0)


def test_roles_are_the_same_on_meta_compiled_and_in_ddp(tmp_path):
    net = uvit(64, scaling=LearnableScaling())
    expected = mup.roles(net, base_width=16)
    with torch.device("meta"):
        assert mup.roles(uvit(64, scaling=LearnableScaling()), base_width=16) == expected
    assert mup.roles(torch.compile(net, backend="eager"), base_width=16) == expected
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert mup.roles(nn.parallel.DistributedDataParallel(net), base_width=16) == expected
        from torch.distributed.fsdp import fully_shard

        sharded = uvit(64, scaling=LearnableScaling())
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert mup.roles(sharded, base_width=16) == expected
        mup.init_(sharded, base_width=16)
        whole = mup.init_(net, base_width=16).mid_block.mlp.fc1.weight
        assert torch.equal(sharded.mid_block.mlp.fc1.weight.full_tensor(), whole)
    finally:
        torch.distributed.destroy_process_group()


def test_roles_survive_saving_and_loading(tmp_path):
    net = uvit(64, scaling=ConstantScaling(0.7))
    net.save_pretrained(tmp_path)
    assert mup.roles(UViT.from_pretrained(tmp_path), base_width=32) == mup.roles(net, base_width=32)


class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(1, width, 3), nn.Conv2d(width, width, 3), nn.Linear(width, 2)
        self.up = nn.ConvTranspose2d(width, 3, 2)


def test_any_network_gets_roles_from_the_same_network_at_its_base_width():
    with torch.device("meta"):
        base = Own(8)
    table = mup.roles(Own(32), base=base)
    assert [table[f"{name}.weight"].role for name in ("first", "middle", "last", "up")] == [
        "input", "hidden", "output", "output",
    ]  # fmt: skip
    assert table["middle.weight"].lr == 1 / 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mup.roles(nn.Linear(2, 2)), "base="),
        (lambda: mup.roles(uvit(), base_width=0), "base_width must be an integer >= 1, got 0"),
        (lambda: mup.roles(unet(), base_depth=4), "base_depth"),
        (lambda: mup.roles(uvit(), base_width=64, base=uvit(64)), "exclude each other"),
        (lambda: mup.roles(uvit(), base=uvit(64, depth=6)), "counterpart"),
        (lambda: mup.param_groups(uvit(), -1.0, base_width=64), "lr must be"),
    ],
)
def test_invalid_input_names_the_value_and_what_is_allowed(call, words):
    with pytest.raises(InvalidValueError, match=words):
        call()


def test_the_table_prints_name_role_exponents_and_factors():
    text = str(scalelong.mup.roles(uvit(), base_width=64))
    assert "decoder_pred.weight" in text
    assert "(0, 0.5, 1)" in text
    assert "× 0.5" in text
