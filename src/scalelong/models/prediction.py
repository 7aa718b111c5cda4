"""What a network returns: a tensor that diffusers' pipelines accept as well."""

from typing import Any

import torch
from torch import Tensor


class Prediction(Tensor):
    """The predicted noise: a tensor whose `.sample` is itself, so that `eps = net(x, t)` and `net(x, t).sample` agree.

    diffusers' pipelines read `.sample`. As with `nn.Parameter`, the type does not spread: whatever is computed, copied
    or saved from it is a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def sample(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.sample.__reduce_ex__(protocol)


def as_prediction(output: Any) -> Any:
    """Return a tensor, or the `.sample` of diffusers' output classes, as a `Prediction`; anything else as it is."""
    value = getattr(output, "sample", output)
    return value.as_subclass(Prediction) if type(value) is Tensor else output  # not the fake tensors of torch.export


def prediction_hook(net: Any, inputs: Any, output: Any) -> Any:
    """A forward hook for networks of diffusers: `net(x, t)` returns a tensor, as U-ViT does."""
    return as_prediction(output)
