"""U-Nets as people write them. Each scales its own skips when `kappas` is set, for a reference by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong


def conv(a: int, b: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(a, b, 3, stride=stride, padding=1)


def up(x: Tensor, like: Tensor | None = None) -> Tensor:
    return F.interpolate(x, scale_factor=2.0) if like is None else F.interpolate(x, size=like.shape[2:])


class ByHand(nn.Module):
    """`self.k(i, skip)` is the skip, or κ_i·skip in the network that is scaled by hand."""

    n = 2
    kappas: tuple[float, ...] | None = None

    def k(self, i: int, skip: Tensor) -> Tensor:
        return skip if self.kappas is None else self.kappas[i - 1] * skip

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 8, 8),)


class Root(ByHand):
    """Everything in one `forward`: two levels; `join` says how the skip joins."""

    widths = (4, 6)
    cat = True

    def __init__(self) -> None:
        super().__init__()
        a, b = self.widths
        self.stem, self.down = conv(3, a), conv(a, b, 2)
        self.low, self.middle = conv(b, b, 2), conv(b, b)
        self.up2, self.up1 = conv(2 * b if self.cat else b, a), conv(2 * a if self.cat else a, a)
        self.head = conv(a, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = self.down(one).relu()
        h = up(self.middle(self.low(two).relu()))
        h = up(self.up2(self.join(h, two, 2)).relu())
        return self.head(self.up1(self.join(h, one, 1)).relu())

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.cat([h, self.k(i, skip)], dim=1)


class SkipFirst(Root):
    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.cat((self.k(i, skip), h), 1)


class Keywords(Root):
    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.concat(tensors=[h, self.k(i, skip)], dim=-3)


class HStack(Root):
    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.hstack([h, self.k(i, skip)])


class Add(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return h + self.k(i, skip)


class SkipPlus(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return self.k(i, skip) + h


class InPlace(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        h += self.k(i, skip)
        return h


class TorchAdd(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.add(h, other=self.k(i, skip), alpha=0.5)


class Lerped(Root):
    """k-diffusion's HDiT interpolates between skip and backbone; its sums have the shape of a pixel shuffle."""

    cat = False

    def __init__(self) -> None:
        super().__init__()
        self.share, self.middle, self.up2 = nn.Parameter(torch.tensor([0.4])), conv(6, 24), conv(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = self.down(one).relu()
        h = self.join(_shuffle(self.middle(self.low(two).relu())), two, 2)
        return self.head(self.up1(self.join(_shuffle(self.up2(h.relu())), one, 1)).relu())

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.lerp(self.k(i, skip), end=h, weight=self.share)


def _shuffle(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


class Unnamed(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.add(input=h, other=self.k(i, skip))


class StackedSum(Root):
    cat = False

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.stack([h, self.k(i, skip)]).mean(0)


class Twice(Root):
    """What is joined goes to two places, so no argument of one module is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.short2, self.short1 = nn.Conv2d(12, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        two = self.down(one.relu())
        h = self.join(up(self.middle(self.low(two))), two, 2)
        h = self.join(up(self.up2(h.relu()) + self.short2(h)), one, 1)
        return self.head(self.up1(h.relu()) + self.short1(h))


class Padded(Root):
    """Odd sizes: the backbone is cropped, the skip padded, or moved and made contiguous."""

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 9, 9),)

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        missing = h.shape[-1] - skip.shape[-1]
        skip = F.pad(skip, (0, missing, 0, missing)) if missing > 0 else skip[..., : h.shape[-2], : h.shape[-1]]
        skip = skip.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).to(h.dtype)
        return torch.cat([h, self.k(i, skip)], dim=1)


class Resized(Root):
    """The skip is resized to the backbone, with a norm of its own."""

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        skip = F.interpolate(skip, size=h.shape[2:], mode="bilinear")
        return torch.cat([h, self.k(i, F.layer_norm(skip, skip.shape[1:]))], dim=1)


class Gate(nn.Module):
    """Attention U-Net's: ψ(h, skip)·skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g, self.x, self.psi = nn.Conv2d(width, 2, 1), nn.Conv2d(width, 2, 1), nn.Conv2d(2, 1, 1)

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return skip * self.psi((self.g(h) + self.x(skip)).relu()).sigmoid()


class Gated(Root):
    widths = (4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.gate2, self.gate1 = Gate(4), Gate(4)

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.cat([h, self.k(i, getattr(self, f"gate{i}")(h, skip))], dim=1)


class Projected(Root):
    """A 1×1 convolution on each skip, at the join; a control signal is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.skip2, self.skip1 = nn.Conv2d(6, 6, 1), nn.Conv2d(4, 4, 1)
        self.control: Tensor | float = 0.0

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        skip = getattr(self, f"skip{i}")(skip) + torch.full_like(skip, 0.5)
        return torch.cat([h, self.k(i, skip)], dim=1)


class Refined(Root):
    """More layers on the skips than in the middle: which operand is the skip shows in the resolution only."""

    def __init__(self) -> None:
        super().__init__()
        self.refine2, self.refine1 = (
            nn.Sequential(*(layer for _ in range(4) for layer in (conv(n, n), nn.ReLU()))) for n in (6, 4)
        )

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        return torch.cat([h, self.k(i, getattr(self, f"refine{i}")(skip))], dim=1)


class OpenGates(Root):
    """Attention gates in the network's own forward, with and without the skip beside its gated self."""

    beside = False

    def __init__(self) -> None:
        super().__init__()
        self.gate2, self.gate1 = conv(12, 1), conv(8, 1)

    def join(self, h: Tensor, skip: Tensor, i: int) -> Tensor:
        gate = torch.cat([h, skip], dim=1)
        gated = skip * getattr(self, f"gate{i}")(gate).sigmoid()
        return torch.cat([h, self.k(i, skip + gated if self.beside else gated)], dim=1)


class BesideGates(OpenGates):
    beside = True


class Branches(Root):
    """The middle and the last step down concatenate branches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.one, self.two = conv(4, 3, 2), conv(6, 3), conv(6, 3)
        self.side = conv(4, 3, 2)

    def middle_of(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = torch.cat([self.down(one), self.side(one)], dim=1).relu()
        h = up(self.middle_of(self.low(two).relu()))
        h = up(self.up2(self.join(h, two, 2)).relu())
        return self.head(self.up1(self.join(h, one, 1)).relu())


class Attribute(Root):
    """The encoder leaves the skips on the network, in a dataclass."""

    @dataclass
    class Features:
        one: Tensor
        two: Tensor

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        self.features = self.Features(one, self.down(one))
        h = up(self.middle(self.low(self.features.two)))
        h = up(self.up2(self.join(h, self.features.two, 2)))
        return self.head(self.up1(self.join(h, self.features.one, 1)))


class Channels(ByHand):
    """Channels last, with linear layers and average pooling: (B, H, W, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.middle = nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 6)
        self.up2, self.up1 = nn.Linear(12, 4), nn.Linear(8, 3)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 8, 8, 3),)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = self.down(_pool(one)).relu()
        h = _grow(self.middle(_pool(two)))
        h = _grow(self.up2(torch.cat([h, self.k(2, two)], dim=-1)))
        return self.up1(torch.cat([h, self.k(1, one)], dim=-1))


def _pool(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))


def _grow(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)


# ------------------------------------------------------------------------------------------------ blocks


class Res(nn.Module):
    """A residual block with a time embedding: two additions that are not long skips."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.norm1, self.conv1, self.norm2, self.conv2 = nn.GroupNorm(2, a), conv(a, b), nn.GroupNorm(2, b), conv(b, b)
        self.emb, self.short = nn.Linear(5, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(emb)[:, :, None, None]
        return self.short(x) + self.conv2(F.silu(self.norm2(h)))


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return x + self.attend(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(x.shape)


class Residual(ByHand):
    """Additive skips among residual blocks, embeddings and attention; two skips per level, none left out."""

    n, cat = 4, False

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 5), nn.SiLU(), nn.Linear(5, 5))
        self.stem = conv(3, 4)
        self.downs = nn.ModuleList([Res(4, 4), conv(4, 4, 2), Res(4, 4)])
        self.middle = nn.ModuleList([Res(4, 4), Attend(4), Res(4, 4)])
        self.ups = nn.ModuleList([Res(self.joined, 4) for _ in range(4)])
        self.head = conv(4, 3)

    @property
    def joined(self) -> int:
        return 8 if self.cat else 4

    def example(self) -> tuple[Tensor, ...]:
        return torch.randn(2, 3, 8, 8), torch.rand(2, 1)

    def join(self, h: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([h, skip], dim=1) if self.cat else h + skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, h = self.time(t), self.stem(x)
        skips = [h]
        for down in self.downs:
            h = down(h, emb) if isinstance(down, Res) else down(h)
            skips.append(h)
        for block in self.middle:
            h = block(h, emb) if isinstance(block, Res) else block(h)
        for i, block in zip((4, 3, 2, 1), self.ups, strict=True):
            if h.shape[-1] < skips[i - 1].shape[-1]:
                h = up(h)
            h = block(self.join(h, self.k(i, skips[i - 1])), emb)
        return self.head(h)


class ResidualCat(Residual):
    cat = True


class Sparse(Residual):
    """Only every other encoder block sends a skip."""

    n = 2

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, one = self.time(t), self.stem(x)
        two = self.downs[1](self.downs[0](one, emb))
        h = up(self.middle[2](self.middle[0](self.downs[2](F.avg_pool2d(two, 2), emb), emb), emb))
        h = self.ups[1](self.ups[0](h, emb) + self.k(2, two), emb)
        return self.head(self.ups[3](self.ups[2](up(h), emb) + self.k(1, one), emb))


class Decoder(nn.Module):
    def __init__(self, owner: ByHand, i: int, way: str, width: int = 4) -> None:
        super().__init__()
        self.__dict__["owner"], self.i, self.way = owner, i, way
        self.mix = conv(2 * width, width)

    def forward(self, x: Tensor, skip) -> Tensor:
        if self.way == "pop":
            skip = skip.pop()
        elif self.way == "dict":
            skip = skip[f"level{self.i}"]
        elif self.way == "tuple":
            skip = skip[self.i - 1]
        return self.mix(torch.cat([up(x), self.owner.k(self.i, skip)], dim=1)).relu()


class Blocks(ByHand):
    """Blocks called with two tensors: `block(x, skip)`, or with a list, tuple or dictionary of skips."""

    way, n = "two", 3

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = conv(3, 4), conv(4, 4), conv(4, 3)
        self.encoder = nn.ModuleList(conv(4, 4, 2) for _ in range(3))
        self.decoder = nn.ModuleList(Decoder(self, i, self.way) for i in (3, 2, 1))

    def __deepcopy__(self, memo):
        again = type(self)()
        again.load_state_dict(self.state_dict(), strict=False)
        return again

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for block in self.encoder:
            skips.append(block(skips[-1]).relu())
        h = self.middle(skips.pop())
        for i, block in zip((3, 2, 1), self.decoder, strict=True):
            h = self.call(block, h, skips, i)
        return self.head(h)

    def call(self, block: nn.Module, h: Tensor, skips: list[Tensor], i: int) -> Tensor:
        match self.way:
            case "two":
                return block(h, skip=skips[i - 1])
            case "pop":
                return block(h, skips)
            case "tuple":
                return block(h, tuple(skips))
            case "dict":
                return block(h, {f"level{k}": skip for k, skip in enumerate(skips, start=1)})
        return block.forward(h, skips[i - 1])  # runs no hooks


class Popped(Blocks):
    way = "pop"


class Tuples(Blocks):
    way = "tuple"


class Dicts(Blocks):
    way = "dict"


class CallsForward(Blocks):
    way = "forward"


class Level(NamedTuple):
    skips: Any
    x: Tensor


class NamedTuples(Blocks):
    """The decoder takes backbone and skips in a named tuple."""

    class Decoder(Decoder):
        def forward(self, level: Level) -> Tensor:
            return super().forward(level.x, level.skips)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(self.Decoder(self, i, "two") for i in (3, 2, 1))

    def call(self, block: nn.Module, h: Tensor, skips: list[Tensor], i: int) -> Tensor:
        return block(Level(skips[i - 1], h))


class Returned(Blocks):
    """Blocks return the skip, which the network uses again."""

    class Decoder(Decoder):
        def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x, skip), skip

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(self.Decoder(self, i, "two") for i in (3, 2, 1))

    def call(self, block: nn.Module, h: Tensor, skips: list[Tensor], i: int) -> Tensor:
        h, skip = block(h, skips[i - 1])
        return h * skip.mean((1, 2, 3), keepdim=True).sigmoid()


class Overwritten(Blocks):
    """The decoder writes its results into the list of skips."""

    class Decoder(nn.Module):
        def __init__(self, owner: ByHand) -> None:
            super().__init__()
            self.__dict__["owner"] = owner
            self.mix = nn.ModuleList(conv(8, 4) for _ in range(3))

        def forward(self, features: list[Tensor]) -> None:
            for i in (3, 2, 1):
                joined = torch.cat([up(features[i]), self.owner.k(i, features[i - 1])], 1)
                features[i - 1] = self.mix[i - 1](joined).relu()

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.Decoder(self)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for block in self.encoder:
            features.append(block(features[-1]).relu())
        self.decoder(features)
        return self.head(features[0])


class FreeKeywords(Blocks):
    """The decoder's skips are keywords that its `forward` does not name."""

    class Decoder(Decoder):
        def forward(self, x: Tensor, **features: Tensor) -> Tensor:
            return super().forward(x, features["skip"])

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(self.Decoder(self, i, "two") for i in (3, 2, 1))


class Pairs(ByHand):
    """`ModuleList`s without a `forward`, as in lucidrains' networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle = conv(3, 4), conv(4, 4)
        self.downs = nn.ModuleList(nn.ModuleList([conv(4, 4), conv(4, 4, 2)]) for _ in range(2))
        self.ups = nn.ModuleList(nn.ModuleList([nn.Upsample(scale_factor=2), conv(4, 4)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.stem(x), []
        for block, down in self.downs:
            h = block(h).relu() + h  # a residual written in the network's own forward
            skips.append(h)
            h = down(h)
        h = self.middle(h).relu() + h
        for i, (grow, block) in zip((2, 1), self.ups, strict=True):
            h = grow(h) + self.k(i, skips[i - 1])
            h = block(h).relu() + h
        return h


class Shared(ByHand):
    """One decoder block for both levels, and one module that does every concatenation."""

    class Cat(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a, b], dim=1)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.middle = conv(3, 4), conv(4, 4, 2), conv(4, 4, 2)
        self.cat, self.mix, self.head = self.Cat(), conv(8, 4), conv(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        two = self.down(one).relu()
        h = self.mix(self.cat(up(self.middle(two)), self.k(2, two))).relu()
        return self.head(self.mix(self.cat(up(h), self.k(1, one))).relu())


class Recursive(ByHand):
    """pix2pix and MONAI's UNet: a block concatenates its input with what its submodule makes of it."""

    n = 3

    class Level(nn.Module):
        def __init__(self, owner: ByHand, i: int, inner: nn.Module) -> None:
            super().__init__()
            self.__dict__["owner"], self.i, self.inner = owner, i, inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.owner.k(self.i, x), self.inner(x)], dim=1)

    def __init__(self) -> None:
        super().__init__()
        inner: nn.Module = nn.Sequential(conv(4, 4), nn.ReLU(), conv(4, 4))  # no change of resolution at the bottom
        for i in (3, 2, 1):
            grow = nn.Upsample(scale_factor=2)
            level = self.Level(self, i, inner)
            inner = nn.Sequential(conv(4 if i > 1 else 3, 4, 2), nn.ReLU(), level, grow, conv(8, 4))
        self.net = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    __deepcopy__ = Blocks.__deepcopy__


class AroundTheMiddle(ByHand):
    """DRUNet and SCUNet: sums that go to upsampling blocks alone, the innermost of them around the middle."""

    n = 3

    def __init__(self) -> None:
        super().__init__()
        self.head, self.down1, self.down2 = conv(3, 4), conv(4, 4, 2), conv(4, 4, 2)
        self.body = nn.Sequential(conv(4, 4), nn.ReLU(), conv(4, 4))
        self.up2, self.up1 = (nn.ConvTranspose2d(4, 4, 2, stride=2) for _ in range(2))
        self.tail = conv(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = self.head(x)
        two = self.down1(one)
        three = self.down2(two)
        h = self.up2(self.body(three) + self.k(3, three))
        h = self.up1(h + self.k(2, two))
        return self.tail(h + self.k(1, one))


class Styled(ByHand):
    """Cellpose: the encoder's last output is both backbone and skip, and gives a style to every block."""

    n = 3

    class Mix(nn.Module):
        def __init__(self, owner: ByHand, i: int) -> None:
            super().__init__()
            self.__dict__["owner"], self.i = owner, i
            self.style, self.conv = nn.Linear(4, 4), conv(4, 4)

        def forward(self, x: Tensor, style: Tensor, y: Tensor) -> Tensor:
            x = x + self.owner.k(self.i, y)
            return self.conv((x + self.style(style)[:, :, None, None]).relu())

    class Block(nn.Module):
        def __init__(self, owner: ByHand, i: int) -> None:
            super().__init__()
            self.short, self.first, self.mix = conv(4, 4), conv(4, 4), Styled.Mix(owner, i)

        def forward(self, x: Tensor, y: Tensor, style: Tensor) -> Tensor:
            return self.short(x) + self.mix(self.first(x), style, y)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down1, self.down2, self.head = conv(3, 4), conv(4, 4, 2), conv(4, 4, 2), conv(4, 3)
        self.ups = nn.ModuleList(self.Block(self, i) for i in (3, 2, 1))

    __deepcopy__ = Blocks.__deepcopy__

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        two = self.down1(one.relu())
        three = self.down2(two.relu())
        style = three.mean((2, 3))
        h = self.ups[0](three, three, style)
        h = self.ups[1](up(h), two, style)
        return self.head(self.ups[2](up(h), one, style))


class Restored(Root):
    """MixDehazeNet: the output is gain·input − offset + input, which joins no feature of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.head = conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        gain, offset = super().forward(x).split((1, 3), dim=1)
        return gain * x - offset + x


class Placeholder(Root):
    """segmentation-models' Mix Transformer: the outermost feature of the encoder has no channels."""

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = self.down(one).relu()
        h = up(self.middle(self.low(two).relu()))
        h = up(self.up2(self.join(h, two, 2)).relu())
        h = self.up1(self.join(h, one, 1)).relu()
        return self.head(torch.cat([h, x[:, :0]], dim=1))


class Three(ByHand):
    """Three operands: the backbone between two skips of one level."""

    n = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.more, self.down, self.middle = conv(3, 4), conv(4, 5), conv(5, 6, 2), conv(6, 6, 2)
        self.up2, self.up1 = conv(12, 6), conv(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x)
        two = self.more(one.relu())
        three = self.down(two.relu())
        h = self.up2(torch.cat([up(self.middle(three.relu())), self.k(3, three)], 1))
        return self.up1(torch.cat([self.k(2, two), up(h), self.k(1, one)], 1))


class Nested(ByHand):
    """U²-Net: every block is a U-Net of its own; the network's long skips are those between the blocks."""

    class Inner(nn.Module):
        def __init__(self, a: int) -> None:
            super().__init__()
            self.one, self.two, self.low, self.up2, self.up1 = (
                conv(a, 4),
                conv(4, 4),
                conv(4, 4),
                conv(8, 4),
                conv(8, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            one = self.one(x)
            two = self.two(F.max_pool2d(one, 2)).relu()
            h = up(self.low(F.max_pool2d(two, 2)), two)
            h = up(self.up2(torch.cat([h, two], 1)).relu(), one)
            return self.up1(torch.cat([h, one], 1)) + one

    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2, self.middle = self.Inner(3), self.Inner(4), self.Inner(4)
        self.dec2, self.dec1 = self.Inner(8), self.Inner(8)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(1, 3, 16, 16),)

    def forward(self, x: Tensor) -> Tensor:
        one = self.enc1(x)
        two = self.enc2(F.max_pool2d(one, 2))
        h = up(self.middle(F.max_pool2d(two, 2)), two)
        h = up(self.dec2(torch.cat((h, self.k(2, two)), 1)), one)
        return self.dec1(torch.cat((h, self.k(1, one)), 1))


# --------------------------------------------------------------------------------- other dimensions


class Volume(ByHand):
    """Three-dimensional, with instance norms and transposed convolutions."""

    dims = 3

    def __init__(self) -> None:
        super().__init__()
        layer = {1: nn.Conv1d, 3: nn.Conv3d}[self.dims]
        grow = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[self.dims]
        norm = {1: nn.InstanceNorm1d, 3: nn.InstanceNorm3d}[self.dims]
        self.stem, self.down = layer(2, 4, 3, padding=1), nn.Sequential(layer(4, 6, 2, stride=2), norm(6))
        self.low, self.up2 = layer(6, 6, 2, stride=2), grow(6, 6, 2, stride=2)
        self.mix2, self.up1, self.mix1 = layer(12, 6, 3, padding=1), grow(6, 4, 2, stride=2), layer(8, 2, 1)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(1, 2, *([8] * self.dims)),)

    def forward(self, x: Tensor) -> Tensor:
        one = self.stem(x).relu()
        two = self.down(one).relu()
        h = self.mix2(torch.cat([self.up2(self.low(two)), self.k(2, two)], 1)).relu()
        return self.mix1(torch.cat([self.up1(h), self.k(1, one)], 1))


class Sequence(Volume):
    dims = 1


class TokenBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Tokens(ByHand):
    """A transformer of one resolution whose own forward concatenates tokens with those of the mirror block."""

    n, cat = 3, True

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Linear(3, 8), nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(TokenBlock(8) for _ in range(7))
        self.mix = nn.ModuleList(nn.Linear(16 if self.cat else 8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 3),)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x) + self.table, []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        x = self.blocks[3](x)
        for i, mix, block in zip((3, 2, 1), self.mix, self.blocks[4:], strict=True):
            skip = self.k(i, skips.pop())
            x = block(mix(torch.cat([x, skip], dim=-1) if self.cat else x + skip))
        return self.head(x)


class AddedTokens(Tokens):
    cat = False


class NoMiddle(Tokens):
    """E2-TTS and F5-TTS: no block stands in the middle, so the innermost skip joins the tensor with itself."""

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x) + self.table, []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        for i, mix, block in zip((3, 2, 1), self.mix, self.blocks[4:], strict=True):
            x = block(mix(self.join(x, self.k(i, skips.pop()))))
        return self.head(x)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([x, skip], dim=-1)


class GatedSums(NoMiddle):
    """modded-nanoGPT: learned gains on skips that are added, without a middle."""

    cat = False

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))  # a power of two: gains and κ may change places, bit for bit

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.gain * skip + x


class OpenBlocks(Tokens):
    """The residual additions of the blocks stand in the network's own forward, beside the skips that are added."""

    cat = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x) + self.table, []
        for k, block in enumerate(self.blocks):
            if k < 3:
                skips.append(x)
            if k > 3:
                x = x + self.k(7 - k, skips.pop())
            x = x + block(x).relu()
        return self.head(x)


class Outside(ByHand):
    """x-transformers: the layers are a module of their own; the outermost skip is its input, made outside of it."""

    n = 3

    class Combine(nn.Module):
        def __init__(self, owner: ByHand, i: int) -> None:
            super().__init__()
            self.__dict__["owner"], self.i, self.mix = owner, i, nn.Linear(16, 8)

        def forward(self, x: Tensor, hiddens: list[Tensor]) -> Tensor:
            return self.mix(torch.cat((self.owner.k(self.i, hiddens[self.i - 1]), x), dim=-1))

    class Layers(nn.Module):
        def __init__(self, owner: ByHand) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(TokenBlock(8) for _ in range(6))
            self.combines = nn.ModuleList(Outside.Combine(owner, i) for i in (3, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            hiddens = []
            for block in self.blocks[:3]:
                hiddens.append(x)
                x = block(x)
            for combine, block in zip(self.combines, self.blocks[3:], strict=True):
                x = block(combine(x, hiddens))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(3, 8), self.Layers(self), nn.Linear(8, 3)

    __deepcopy__ = Blocks.__deepcopy__

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(2, 5, 3),)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class Act(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = conv(a, b)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


class OutputBlocks(ByHand):
    """guided-diffusion's names, with the skip first."""

    def __init__(self) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList([Act(3, 4), Act(4, 8)])
        self.middle_block = Act(8, 8)
        self.output_blocks = nn.ModuleList([Act(16, 4), Act(8, 4)])
        self.out = conv(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.input_blocks:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle_block(x)
        for block in self.output_blocks:
            i = len(skips)
            x = block(torch.cat([self.k(i, skips.pop()), up(x)], 1))
        return self.out(x)


class Narrowing(ByHand):
    """DiC's names; the decoder's blocks make the backbone narrower where they take a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.enc_blocks = nn.ModuleList([nn.Sequential(Act(3, 4), Act(4, 4)), nn.Sequential(Act(4, 8), Act(8, 8))])
        self.dec_blocks = nn.ModuleList([nn.Sequential(Act(16, 4), Act(4, 4)), nn.Sequential(Act(8, 3), Act(3, 3))])
        self.mid = Act(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        one = self.enc_blocks[0](x)
        two = self.enc_blocks[1](F.avg_pool2d(one, 2))
        x = up(self.mid(F.avg_pool2d(two, 2)))
        x = self.dec_blocks[0](torch.cat([x, self.k(2, two)], 1))
        return self.dec_blocks[1](torch.cat([up(x), self.k(1, one)], 1))


class Annotated(ByHand):
    """Hugging Face's "The Annotated Diffusion Model": lucidrains' names, and no skip to `final_conv`."""

    def __init__(self) -> None:
        super().__init__()
        self.init_conv = conv(3, 4)
        stages = [[Act(4, 6), Act(6, 6), conv(6, 6, 2)], [Act(6, 8), Act(8, 8), conv(8, 8, 2)], [Act(8, 8), Act(8, 8)]]
        self.downs = nn.ModuleList(map(nn.ModuleList, [*stages[:2], [*stages[2], nn.Identity()]]))
        self.mid = Act(8, 8)
        ups = [
            [Act(16, 8), Act(8, 8), nn.Upsample(scale_factor=2)],
            [Act(16, 6), Act(6, 6), nn.Upsample(scale_factor=2)],
        ]
        self.ups = nn.ModuleList(map(nn.ModuleList, ups))
        self.final_conv = nn.Sequential(Act(6, 6), conv(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.init_conv(x), []
        for one, two, down in self.downs:
            x = two(one(x))
            skips.append(x)
            x = down(x)
        x = self.mid(x)
        for i, (one, two, rise) in zip((2, 1), self.ups, strict=True):
            x = rise(two(one(torch.cat((x, self.k(i, skips.pop())), dim=1))))
        return self.final_conv(x)


class OwnScaling(Root):
    """Calls `scale_skip` and declares nothing."""

    def k(self, i: int, skip: Tensor) -> Tensor:
        return scalelong.scale_skip(self, skip, i) if self.kappas is None else self.kappas[i - 1] * skip


GALLERY = {cls.__name__: cls for cls in (
    Root, SkipFirst, Keywords, HStack, Add, SkipPlus, InPlace, TorchAdd, Lerped, Unnamed, StackedSum, Twice, Padded,
    Resized, Gated, Refined, OpenGates, BesideGates, Branches, Projected, Attribute, Channels, Residual, ResidualCat,
    Sparse, Blocks, Popped, Tuples, Dicts, NamedTuples, Returned, Overwritten, FreeKeywords, CallsForward, Pairs,
    Shared, Recursive, AroundTheMiddle, Styled, Restored, Placeholder, Three, Nested, Volume, Sequence, Tokens,
    AddedTokens, NoMiddle, GatedSums, OpenBlocks, Outside, OutputBlocks, Narrowing, Annotated, OwnScaling,
)}  # fmt: skip
