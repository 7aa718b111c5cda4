"""The blocks of a network in the order of a pass, and the average of a block's output over space or tokens."""

from torch import Tensor, nn

# Encoder, middle and decoder of our U-ViT and of diffusers' U-Nets
FAMILIES = (("in_blocks", "mid_block", "out_blocks"), ("down_blocks", "mid_block", "up_blocks"))


def blocks_of(net: nn.Module) -> list[str]:
    """Return the paths of the blocks of a U-ViT or a diffusers U-Net, from input to output; of others, nothing."""
    for family in FAMILIES:
        parts = [net._modules.get(name) for name in family]
        if isinstance(parts[0], nn.ModuleList) and isinstance(parts[2], nn.ModuleList):
            paths: list[str] = []
            for name, part in zip(family, parts, strict=True):
                paths += [f"{name}.{k}" for k in range(len(part))] if isinstance(part, nn.ModuleList) else []
                paths += [name] if part is not None and not isinstance(part, nn.ModuleList) else []
            return paths
    return []


def pooled(x: Tensor, extras: int = 0) -> Tensor:
    """Average features over space, (B, C, …), or tokens, (B, L, D), without the first `extras` tokens: (B, C)."""
    if x.ndim == 3:
        return x[:, extras:].mean(1)
    return x.flatten(2).mean(2) if x.ndim > 3 else x
