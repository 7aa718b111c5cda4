"""U-ViT once more, from a state dict in the official names: plain functions, explicit softmax, no shared code.

Written from DESIGN's facts on the official code, to hold `scalelong.UViT` against a second derivation.
"""

import math

import torch
import torch.nn.functional as F


def make_state_dict(*, width, patches_side, patch, channels, n, mlp=4, classes=0, text=None, conv=True, time_mlp=False,
                    qkv_bias=False, se=None, generator):  # fmt: skip
    """Random weights in the official names. `se` is None, "shared" or "own"; `text` is (tokens, width)."""
    draw = lambda *shape: 0.2 * torch.randn(*shape, generator=generator) / math.sqrt(shape[-1] if len(shape) > 1 else 1)
    state = {"patch_embed.proj.weight": torch.randn(width, channels, patch, patch, generator=generator) * 0.3}
    state["patch_embed.proj.bias"] = draw(width)
    tokens = patches_side**2 + 1 + (1 if classes else 0) + (text[0] if text else 0)
    state["pos_embed"] = 0.5 * torch.randn(1, tokens, width, generator=generator)
    if time_mlp:
        state |= {"time_embed.0.weight": draw(4 * width, width), "time_embed.0.bias": draw(4 * width)}
        state |= {"time_embed.2.weight": draw(width, 4 * width), "time_embed.2.bias": draw(width)}
    if classes:
        state["label_emb.weight"] = torch.randn(classes, width, generator=generator)
    if text:
        state |= {"context_embed.weight": draw(width, text[1]), "context_embed.bias": draw(width)}
    for block in [*(f"in_blocks.{k}" for k in range(n)), "mid_block", *(f"out_blocks.{k}" for k in range(n))]:
        for norm in ("norm1", "norm2"):
            state |= {f"{block}.{norm}.weight": 1 + draw(width), f"{block}.{norm}.bias": draw(width)}
        state |= {f"{block}.attn.qkv.weight": 4 * draw(3 * width, width)}
        if qkv_bias:
            state |= {f"{block}.attn.qkv.bias": draw(3 * width)}
        state |= {f"{block}.attn.proj.weight": 3 * draw(width, width), f"{block}.attn.proj.bias": draw(width)}
        state |= {f"{block}.mlp.fc1.weight": 3 * draw(mlp * width, width), f"{block}.mlp.fc1.bias": draw(mlp * width)}
        state |= {f"{block}.mlp.fc2.weight": 3 * draw(width, mlp * width), f"{block}.mlp.fc2.bias": draw(width)}
        if block.startswith("out"):
            state |= {
                f"{block}.skip_linear.weight": 5 * draw(width, 2 * width),
                f"{block}.skip_linear.bias": draw(width),
            }
    state |= {"norm.weight": 1 + draw(width), "norm.bias": draw(width)}
    state |= {"decoder_pred.weight": draw(patch * patch * channels, width)}
    state |= {"decoder_pred.bias": draw(patch * patch * channels)}
    if conv:
        state["final_layer.weight"] = 0.3 * torch.randn(channels, channels, 3, 3, generator=generator)
        state["final_layer.bias"] = draw(channels)
    if se:
        hidden = max(1, tokens // 16)
        for prefix in ["se"] if se == "shared" else [f"se.{k}" for k in range(n)]:
            state |= {f"{prefix}.layer1.weight": 5 * draw(hidden, tokens), f"{prefix}.layer1.bias": draw(hidden)}
            state |= {f"{prefix}.layer2.weight": 5 * draw(tokens, hidden), f"{prefix}.layer2.bias": draw(tokens)}
    return state


def run(state, x, t, *, heads, y=None, context=None, kappa=None, uniform=None):
    """The network's output. `kappa` is CS's base, `uniform` a common factor; LS acts where `se.*` is there."""
    linear = lambda name, v: F.linear(v, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def attention(name, v):
        B, L, D = v.shape
        q, k, w = linear(f"{name}.attn.qkv", v).split(D, dim=-1)
        out = torch.empty_like(v)
        for h in range(heads):
            part = slice(h * D // heads, (h + 1) * D // heads)
            weights = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(D // heads), dim=-1)
            out[..., part] = weights @ w[..., part]
        return linear(f"{name}.attn.proj", out)

    def block(name, v):
        norm = lambda which, u: F.layer_norm(
            u, u.shape[-1:], state[f"{name}.{which}.weight"], state[f"{name}.{which}.bias"], 1e-5
        )
        v = v + attention(name, norm("norm1", v))
        hidden = linear(f"{name}.mlp.fc1", norm("norm2", v))
        return v + linear(f"{name}.mlp.fc2", 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))))

    projection = state["patch_embed.proj.weight"]
    width, channels, p, _ = projection.shape
    v = F.conv2d(x, projection, state["patch_embed.proj.bias"], stride=p).flatten(2).transpose(1, 2)
    B, patches, D = v.shape
    half = D // 2
    angles = t[:, None].double() * torch.tensor([10000 ** (-k / half) for k in range(half)], dtype=torch.double)
    time = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1).float()
    if "time_embed.0.weight" in state:
        time = linear("time_embed.2", F.silu(linear("time_embed.0", time)))
    tokens = [time[:, None]]
    if y is not None:
        tokens.insert(0, state["label_emb.weight"][y][:, None])
    if context is not None:
        tokens.append(linear("context_embed", context))
    v = torch.cat([*tokens, v], dim=1) + state["pos_embed"]
    n = len({k.split(".")[1] for k in state if k.startswith("in_blocks.")})
    kept = []
    for k in range(n):
        v = block(f"in_blocks.{k}", v)
        kept.append(v)
    v = block("mid_block", v)
    for k in range(n):
        skip = kept[n - 1 - k]
        if kappa is not None:
            skip = skip * kappa ** (n - 1 - k)
        if uniform is not None:
            skip = skip * uniform
        se = next((s for s in ("se", f"se.{k}") if f"{s}.layer1.weight" in state), None)
        if se:
            gate = torch.sigmoid(linear(f"{se}.layer2", torch.relu(linear(f"{se}.layer1", skip.mean(2)))))
            skip = skip * gate[:, :, None]
        v = linear(f"out_blocks.{k}.skip_linear", torch.cat([v, skip], dim=2))
        v = block(f"out_blocks.{k}", v)
    v = F.layer_norm(v, (D,), state["norm.weight"], state["norm.bias"], 1e-5)
    v = linear("decoder_pred", v)[:, -patches:]
    side = int(math.sqrt(patches))
    image = torch.empty(B, channels, side * p, side * p)
    for row in range(side):
        for column in range(side):
            piece = v[:, row * side + column].view(B, p, p, channels).permute(0, 3, 1, 2)
            image[:, :, row * p : (row + 1) * p, column * p : (column + 1) * p] = piece
    if "final_layer.weight" in state:
        image = F.conv2d(image, state["final_layer.weight"], state["final_layer.bias"], padding=1)
    return image
