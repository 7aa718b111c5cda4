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


def test_a_scaling_whose_weights_were_measured_has_roles():
    net = UViT(8, 4, embed_dim=32, depth=4, num_heads=2)
    example = (torch.randn(2, 3, 8, 8), torch.full((2,), 500.0))
    scalelong.apply(net, scalelong.NormScaling(init="identity"), example=example)
    assert {row.name for row in mup.roles(net, base_width=16).rows} == dict(net.named_parameters()).keys()


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


class Gated(nn.Module):
    """A gate of a fixed width inside, as in squeeze-and-excitation or LoRA, before the read-out."""

    def __init__(self, width):
        super().__init__()
        self.first, self.squeeze, self.expand = nn.Linear(3, width), nn.Linear(width, 4), nn.Linear(4, width)
        self.last = nn.Linear(width, 3)
        self.long_skips = (width,)


@pytest.mark.parametrize("scaling", [None, LearnableScaling()])
def test_only_the_read_out_is_zeroed(scaling):
    torch.manual_seed(0)
    net, base = Gated(64), Gated(16)
    if scaling is not None:  # its own layers come last and map to a fixed width too
        net, base = (scalelong.apply(one, scaling) for one in (net, base))
    drawn = net.squeeze.weight.clone()
    mup.init_(net, base=base)
    assert not net.last.weight.any()
    assert not net.last.bias.any()
    assert torch.allclose(net.squeeze.weight, drawn / 2)  # std ∝ 1/m, of which PyTorch draws 1/√m
    assert net.squeeze.bias.any()


def test_the_caller_may_name_what_starts_at_zero():
    net = mup.init_(Gated(64), base=Gated(16), zero_output="first")
    assert not net.first.weight.any()
    assert net.last.weight.any()
    same = Gated(16)
    assert not mup.init_(same, base=Gated(16), zero_output=["last"]).last.weight.any()  # at the base width too
    with pytest.raises(InvalidValueError, match="zero_output must be"):
        mup.init_(Gated(64), base=Gated(16), zero_output="lost")


class Layers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(width, 2, kdim=24, vdim=24)
        self.gru, self.lstm = nn.GRU(5, width, num_layers=2), nn.LSTM(5, width, proj_size=4)
        self.cell = nn.GRUCell(width, width)
        self.up, self.between = nn.ConvTranspose2d(3, width, 3), nn.ConvTranspose2d(width, width, 3)
        self.out, self.last = nn.ConvTranspose2d(width, 3, 3), nn.Linear(width, 64)


def test_initial_stds_follow_the_roles_of_every_layer_of_pytorch():
    torch.manual_seed(0)
    m, base, net = 16, Layers(16), Layers(256)
    mup.init_(net, base=base, zero_output=False)
    table = mup.roles(net, base=base)
    exponents, wide = {"input": 0, "hidden": 0.5, "output": 1, "finite": 0}, dict(net.named_parameters())
    for name, parameter in base.named_parameters():
        if parameter.numel() >= 48 and parameter.any():  # 48 numbers know their std to within 25 % (four errors)
            expected = parameter.std().item() * m ** -exponents[table[name].role]
            assert wide[name].std().item() == pytest.approx(expected, rel=0.25), name


@pytest.mark.parametrize(
    ("name", "role", "init"),
    [
        ("attention.in_proj_weight", "hidden", 1),  # Xavier draws 1/√n
        ("attention.bias_k", "input", 4),
        ("cross.k_proj_weight", "input", math.sqrt((256 + 24) / (16 + 24))),
        ("gru.weight_ih_l0", "input", 4),  # all of a GRU is drawn with 1/√hidden_size
        ("gru.weight_hh_l0", "hidden", 1),
        ("gru.bias_hh_l1", "input", 4),
        ("lstm.weight_hr_l0", "output", 1 / 4),
        ("cell.weight_ih", "hidden", 1),
        ("up.weight", "input", 4),  # PyTorch divides by the output's channels
        ("up.bias", "input", 4),
        ("between.weight", "hidden", 1),
        ("out.weight", "output", 1 / 16),
        ("out.bias", "finite", 1),
        ("last.weight", "output", 1 / 4),
        ("last.bias", "finite", 4),  # drawn with 1/√fan_in
    ],
)
def test_a_layer_of_pytorch_has_its_role_and_initial_factor(name, role, init):
    with torch.device("meta"):
        row = mup.roles(Layers(256), base=Layers(16))[name]
    assert row.role == role
    assert row.init == pytest.approx(init)


def test_factors_are_the_same_from_base_width_and_from_a_base_network():
    with torch.device("meta"):
        for net, base, width in ((unet(64), unet(16), 16), (uvit(128), uvit(32), 32)):
            for own, other in zip(mup.roles(net, width).rows, mup.roles(net, base=base).rows, strict=True):
                assert (own.lr, own.init, own.eps) == pytest.approx((other.lr, other.init, other.eps)), own.name


def test_a_layer_alone_and_tied_weights_have_roles():
    assert mup.roles(nn.Linear(64, 2), base=nn.Linear(16, 2))["bias"].init == 2

    def tied(width):
        net = nn.ModuleList([nn.Embedding(5, width), nn.Linear(width, 5)])
        net[1].weight = net[0].weight
        return net

    assert mup.roles(tied(64), base=tied(16))["1.bias"].init == 2


@pytest.mark.parametrize("width", [32, 64, 256])
def test_the_first_group_has_the_learning_rate_itself_at_every_width(width):
    groups = mup.param_groups(uvit(width), 1e-3, base_width=64, eps=1e-8)
    assert groups[0]["lr"] == 1e-3


def test_another_network_called_uvit_is_not_ours():
    other = type("UViT", (Gated,), {})
    with pytest.raises(InvalidValueError, match="pass base="):
        mup.roles(other(64), base_width=16)
    assert mup.roles(other(64), base=other(16)) == mup.roles(Gated(64), base=Gated(16))


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
