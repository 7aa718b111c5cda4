"""One call for every network, `eps = net(x, t, y=labels, context=tokens)`, in training and in sampling."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from scalelong.errors import ScaleLongError


class Denoiser(nn.Module):
    """Brings U-ViT, diffusers' `UNet2DModel` and `UNet2DConditionModel`, or a network of one's own to that call."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        inner = getattr(net, "module", getattr(net, "_orig_mod", net))  # DDP, torch.compile
        names = inspect.signature(inner.forward).parameters
        self.diffusers = "sample" in names and "timestep" in names
        self.takes = {
            "y": "class_labels" if self.diffusers else "y",
            "context": "encoder_hidden_states" if self.diffusers else "context",
        }
        self.known = {name for name, argument in self.takes.items() if argument in names}

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        conditions = {}
        for name, value in (("y", y), ("context", context)):
            if value is None:
                continue
            if name not in self.known:
                raise ScaleLongError(f"{type(self.net).__name__} takes no {self.takes[name]!r}, but {name} is given")
            conditions[self.takes[name]] = value
        if self.diffusers:
            return self.net(x, t, **conditions, return_dict=False)[0]
        return self.net(x, t, **conditions)
