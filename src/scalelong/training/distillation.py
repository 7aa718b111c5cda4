"""Contrastive self-distillation (DDAE++): features of two noised views of an image, of the network and of its average.

Views, times and noise are functions of (config, step, sample position), like everything else in training.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion.network import Denoiser, make_conditions
from scalelong.errors import InvalidValueError, invalid
from scalelong.representation.features import choose_blocks, recorded
from scalelong.runs.config import Config
from scalelong.skips.blocks import blocks_of
from scalelong.training.examples import Batch, Examples
from scalelong.training.update import Ema

SHIFT = 8  # views move by up to an eighth of the image
PREFIX = "distillation"


class Distillation:
    """Student, teacher (the EMA network) and a projector of each; the teacher's projector is an EMA too."""

    def __init__(self, config: Config, net: nn.Module, ema: Ema, examples: Examples, accelerator: Any) -> None:
        self.config, self.examples, self.accelerator = config.distillation, examples, accelerator
        self.seed, self.net, self.ema = config.seed, net, ema
        t, d = config.train, self.config
        for key, value, allowed in (
            ("train.compile", t.compile, ("off",)), ("train.precision", t.precision, ("fp32", "bf16", "auto")),
        ):  # fmt: skip
            if value not in allowed:
                raise invalid(key, f"one of {', '.join(allowed)} with distillation.weight > 0", value)
        count = t.batch_size // (accelerator.num_processes * t.accumulate)  # images of a process and part
        if count % d.stride or count // d.stride * accelerator.num_processes < 2:
            expected = f"a divisor of {count}, the images per process and part, that leaves two images or more"
            raise invalid("distillation.stride", expected, d.stride)
        blocks = blocks_of(net)
        block = d.block or config.self_conditioning.block or next((p for p in blocks if p == "mid_block"), None)
        if block is None:
            raise InvalidValueError(
                f"distillation.block must name a block of {type(net).__name__}, which has no mid_block"
            )
        (self.block,), _ = choose_blocks(net, [block])
        width = self._features(ema.net, self._view(examples.batch(1, 0, 1).to(accelerator.device), 1, 0, 0)).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            projector = nn.Sequential(nn.Linear(width, d.width), nn.GELU(), nn.Linear(d.width, d.width))
        self.projector = projector.to(accelerator.device)
        self.average = copy.deepcopy(self.projector).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.projector.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=True
        )

    def add_gradient(self, batch: Batch, step: int) -> Tensor:
        """Add the gradient of weight · loss to the network's, and return the loss. `batch` is this process's first."""
        net, average = self.net, self.ema.net
        rank, stride = self.accelerator.process_index, self.config.stride
        images = batch.every(stride)
        first, n = rank * len(batch.x_0) // stride, len(images.x_0)
        with self.accelerator.autocast():
            queries = self.projector(self._features(net, self._view(images, step, first, 0)))
            with torch.no_grad():
                keys = self.average(self._features(average, self._view(images, step, first, 1)))
                keys = self.accelerator.gather(keys)  # of all processes: two give the loss of one
        loss = info_nce(queries, keys, rank * n, self.config.temperature)
        parameters = [p for p in (*net.parameters(), *self.projector.parameters()) if p.requires_grad]
        gradients = torch.autograd.grad(self.config.weight * loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                gradient = self.accelerator.reduce(gradient, "mean") if self.accelerator.num_processes > 1 else gradient
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.accelerator.reduce(loss.detach(), "mean") if self.accelerator.num_processes > 1 else loss.detach()

    @torch.no_grad()
    def update(self, number: int, skipped: Tensor) -> None:
        """Step the projectors, unless the network's step was skipped, without waiting for the device."""
        self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.projector.zero_grad(set_to_none=True)
        weight = (1 - self.ema.decay_at(number)) * (1 - skipped.float())
        for average, parameter in zip(self.average.parameters(), self.projector.parameters(), strict=True):
            average.lerp_(parameter, weight.to(average.dtype))

    def state(self) -> dict[str, Tensor]:
        """Projectors and their optimizer, by name."""
        tensors = {f"{PREFIX}/projector/{k}": v for k, v in self.projector.state_dict().items()}
        tensors |= {f"{PREFIX}/average/{k}": v for k, v in self.average.state_dict().items()}
        for name, parameter in self.projector.named_parameters():
            tensors |= {f"{PREFIX}/{k}/{name}": v for k, v in self.optimizer.state.get(parameter, {}).items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            _, kind, name = key.split("/", 2)
            parts.setdefault(kind, {})[name] = value
        self.projector.load_state_dict(parts.pop("projector"))
        self.average.load_state_dict(parts.pop("average"))
        for kind, values in parts.items():
            for name, parameter in self.projector.named_parameters():
                self.optimizer.state[parameter][kind] = values[name].to(parameter.device).clone()

    def _view(self, batch: Batch, step: int, first: int, which: int) -> Batch:
        """One of two views: shifted, mirrored where training mirrors, at a time of the cleaner part, freshly noised."""
        x, n, process = batch.x_0, len(batch.x_0), self.examples.process
        u = counter.uniform(self.seed, Stream.VIEW, step, first, n, (2, 4))[:, which]  # (n, 4)
        eps = counter.normal(self.seed, Stream.VIEW_NOISE, step, first, n, (2, *x.shape[1:]))[:, which]
        height, width = x.shape[2:]
        reach = max(1, height // SHIFT)
        padded = F.pad(x, (reach,) * 4, mode="replicate")
        moves = (u[:, :2] * (2 * reach + 1)).long().tolist()
        x = torch.stack(
            [image[:, dy : dy + height, dx : dx + width] for image, (dy, dx) in zip(padded, moves, strict=True)]
        )
        if self.examples.config.data.flip:
            x = torch.where((u[:, 2] < 0.5).to(x.device).view(-1, 1, 1, 1), x.flip(-1), x)
        t = process.times(u[:, 3] * self.config.until)
        return Batch(x_0=x, t=t.to(x.device), eps=eps.to(x.device), y=batch.y, context=batch.context)

    def _features(self, net: nn.Module, view: Batch) -> Tensor:
        """Pooled features (n, C) of the block. The class is dropped where the network knows how to do without."""
        objective, null, tokens = self.examples.objective, self.examples.facts().null_y, self.examples.tokens
        y = view.y if view.y is None or null is None else torch.full_like(view.y, null)
        context = view.context
        if context is not None:
            context = torch.as_tensor(tokens.empty).to(context).expand_as(context)
        x_t = objective.process.add_noise(view.x_0, view.eps, view.t)
        with recorded(net, [self.block]) as outputs:
            Denoiser(net)(*objective.network_inputs(x_t, view.t), **make_conditions(y, context))
        return outputs[self.block]


def info_nce(queries: Tensor, keys: Tensor, first: int, temperature: float) -> Tensor:
    """−log softmax(q·k / τ) at the key of the same image, a mean over queries; key first + j belongs to query j."""
    q, k = F.normalize(queries.float(), dim=1), F.normalize(keys.float(), dim=1)
    return F.cross_entropy(q @ k.T / temperature, first + torch.arange(len(q), device=q.device))
