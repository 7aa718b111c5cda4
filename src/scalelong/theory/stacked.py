"""The network of the paper's Eq. 3: matrices and ReLU in the shape of a U-Net."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from scalelong.errors import invalid, unknown
from scalelong.scaling import Scaling
from scalelong.skips import Site, apply, scale_skip

INITS = ("kaiming", "norm-preserving")


@dataclass(frozen=True)
class StackedFeatures:
    """The features of one forward pass of Eq. 3, indexed as in the paper, (B, m) each.

    skips: s_1 … s_N with s_i = a_i∘s_{i-1} and s_0 = x; skips[i - 1] is s_i, before κ_i.
    hidden: h_0 … h_N with h_i = f_i(s_i), the paper's hidden features; hidden[0] is the output.
    """

    skips: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


class Stack(nn.Module):
    """a∘x = W_l φ(W_{l-1} … φ(W_1 x)) with ReLU φ, without ReLU after the last matrix (Eq. 17)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        # StackedUNet initializes the matrices from its own seed.
        self.matrices = nn.ModuleList(skip_init(nn.Linear, width, width, bias=False) for _ in range(depth))

    @property
    def weights(self) -> list[Tensor]:
        """W_1 … W_l."""
        return [matrix.weight for matrix in self.matrices if isinstance(matrix, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:  # (B, m) -> (B, m)
        *inner, last = self.matrices
        for matrix in inner:
            x = torch.relu(matrix(x))
        return last(x)


class DecoderStack(Stack):
    """b∘[skip + x], with κ already applied to `skip`."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]  # (B, m), (B, m) -> (B, m)
        return super().forward(skip + x)


class StackedUNet(nn.Module):
    """UNet(x) = f_0(x), f_i(x) = b_{i+1}∘[κ_{i+1}·a_{i+1}∘x + f_{i+1}(a_{i+1}∘x)], f_N the middle block (Eq. 3).

    `encoders[i - 1]` is a_i and `decoders[i - 1]` is b_i.

    Args:
        width: m, the dimension of the input, the output and every hidden feature.
        num_skips: N, the number of long skips.
        block_depth: l, the number of matrices in each a_i, b_i and f_N.
        scaling: κ_1 … κ_N; None builds the unscaled network.
        init: "kaiming" draws every entry from N(0, 2/m), as in Theorem 3.1. Each block then doubles the squared norm,
            because no ReLU follows its last matrix. "norm-preserving" draws the last matrix of each block from
            N(0, 1/m), which preserves the norm. Both use the same normal numbers for the same seed.
        seed: seed of the initialization. The global random state is not used.

    Examples:
        >>> net = scalelong.StackedUNet(width=32, num_skips=3, scaling=scalelong.ConstantScaling(0.5))
        >>> net(torch.randn(4, 32)).shape, len(net.blocks)
        (torch.Size([4, 32]), 7)
        >>> len(net.features(torch.randn(4, 32)).hidden)  # h_0 … h_N
        4
    """

    def __init__(
        self,
        width: int,
        num_skips: int,
        block_depth: int = 2,
        scaling: Scaling | None = None,
        init: str = "kaiming",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("num_skips", num_skips), ("block_depth", block_depth)):
            if not isinstance(value, int) or value < 1:
                raise invalid(name, "an integer >= 1", value)
        if init not in INITS:
            raise unknown("init", init, INITS)
        self.width, self.num_skips, self.block_depth = width, num_skips, block_depth
        self.init = init
        self.encoders = nn.ModuleList(Stack(width, block_depth) for _ in range(num_skips))
        self.middle = Stack(width, block_depth)
        self.decoders = nn.ModuleList(DecoderStack(width, block_depth) for _ in range(num_skips))
        generator = torch.Generator().manual_seed(seed)
        for block in self.blocks:
            for p, weight in enumerate(block.weights, start=1):
                variance = 1.0 if init == "norm-preserving" and p == block_depth else 2.0
                nn.init.normal_(weight, std=math.sqrt(variance / width), generator=generator)
        self.long_skips = tuple(
            Site(f"decoders.{k}", "skip", channels=width, dim=-1, source=f"encoders.{k}", backbone=width, op="add")
            for k in range(num_skips)
        )
        if scaling is not None:
            apply(self, scaling)

    @property
    def blocks(self) -> list[Stack]:
        """a_1 … a_N, f_N, b_1 … b_N."""
        return [*self.encoders, self.middle, *self.decoders]

    def features(self, x: Tensor) -> StackedFeatures:
        """Run the network and keep its features.

        Args:
            x: Input, (B, m).

        Returns:
            s_1 … s_N and h_0 … h_N.
        """
        if x.shape[-1:] != (self.width,):
            raise invalid("the shape of x", f"(…, {self.width})", tuple(x.shape))
        skips: list[Tensor] = []
        for encoder in self.encoders:
            x = encoder(x)  # s_i = a_i∘s_{i-1}
            skips.append(x)
        hidden = [self.middle(x)]  # h_N = f_N(s_N)
        for i in range(self.num_skips, 0, -1):
            skip, h = scale_skip(self, skips[i - 1], i, hidden[-1])
            hidden.append(self.decoders[i - 1](h, skip))  # h_{i-1} = b_i∘[κ_i s_i + h_i]
        return StackedFeatures(tuple(skips), tuple(reversed(hidden)))

    def forward(self, x: Tensor) -> Tensor:  # (B, m) -> (B, m)
        """Return f_0(x).

        Args:
            x: Input, (B, m).

        Returns:
            Output, (B, m).

        Examples:
            >>> scalelong.StackedUNet(32, 3)(torch.zeros(1, 32)).abs().sum()
            tensor(0., grad_fn=<SumBackward0>)
        """
        return self.features(x).hidden[0]

    def extra_repr(self) -> str:
        return f"width={self.width}, num_skips={self.num_skips}, block_depth={self.block_depth}, init={self.init!r}"
