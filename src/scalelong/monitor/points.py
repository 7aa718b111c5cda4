"""What is watched in a network: its long skips where they join the backbone, and its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from scalelong.errors import InvalidValueError, ScaleLongError, ScalingStateError
from scalelong.skips.adapters import find_sites
from scalelong.skips.application import _root, sites_of
from scalelong.skips.sites import Site

ROOT = "(network)"  # the root as a block: its output, and the parameters that are its own
MEASURES = ("skip", "backbone", "out")  # of one long skip, in the order of the points


@dataclass(frozen=True)
class Points:
    """The points at which norms are taken. Of long skip i (outermost first):

    skip      x_i, as the encoder gives it, before κ_i
    backbone  h_i, what the skip is joined with; of the innermost skip it is the middle block's output
    out       the output of the module that consumes both
    joined    κ_i·x_i, as it arrives at the join

    and the output of every block, the whole network as the last.
    """

    network: str
    sites: tuple[Site, ...]
    blocks: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.sites)

    @property
    def features(self) -> int:
        """The number of points whose oscillation is followed: all but `joined`."""
        return len(MEASURES) * self.n + len(self.blocks)

    @property
    def size(self) -> int:
        return self.features + self.n

    def point(self, measure: str, i: int) -> int:
        """The place of a measure of long skip i (from 1)."""
        return (self.features if measure == "joined" else MEASURES.index(measure) * self.n) + i - 1

    def block(self, k: int) -> int:
        """The place of block k (from 0)."""
        return len(MEASURES) * self.n + k

    def module_of(self, point: int) -> str:
        """The module that a person should look at for a point."""
        i = self.skip_of(point)
        if i is None:
            return self.blocks[point - len(MEASURES) * self.n]
        site = self.sites[i - 1]
        return site.source or site.path if point < self.n else site.path

    def skip_of(self, point: int) -> int | None:
        """The long skip i of a point, or None for a block."""
        if point >= self.features:
            return point - self.features + 1
        return None if point >= len(MEASURES) * self.n else point % self.n + 1

    def name_of(self, point: int) -> str:
        """A point in words."""
        i = self.skip_of(point)
        if i is None:
            module = self.module_of(point)
            return "the network's output" if module == ROOT else f"the output of {module}"
        path = self.sites[i - 1].path
        words = {
            "skip": f"long skip {i}" + (f" (from {source})" if (source := self.sites[i - 1].source) else ""),
            "backbone": f"the backbone at the join of long skip {i} ({path})" + (", the innermost" * (i == self.n)),
            "out": f"the output of {path}, which consumes long skip {i}",
            "joined": f"long skip {i} after scaling",
        }
        measure = "joined" if point >= self.features else MEASURES[point // self.n]
        return words[measure]

    def to_dict(self) -> dict[str, Any]:
        return {
            "network": self.network,
            "skips": [{"i": i, "from": s.source, "to": s.path} for i, s in enumerate(self.sites, start=1)],
            "blocks": list(self.blocks),
        }


def find_points(root: nn.Module, sites: Iterable[Site | str] | None = None) -> Points:
    """The long skips that are known (or given) and the blocks; a network without known skips has its blocks alone."""
    if sites is not None:
        found = find_sites(root, sites)
    else:
        try:
            found, _ = sites_of(root)
        except ScaleLongError:
            found = []
    return Points(type(root).__name__, tuple(found), tuple(_blocks(root)))


def _blocks(root: nn.Module) -> list[str]:
    """The modules with parameters right below the root, lists of modules opened; one that holds all is entered."""
    prefix, module = "", root
    while True:
        found = list(_below(module, prefix))
        if len(found) != 1 or not any(True for _ in found[0][1].children()):
            break
        prefix, module = f"{found[0][0]}.", found[0][1]
    return [*(path for path, _ in found), ROOT]


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # holds modules, is never called
            yield from _below(child, f"{path}.")
        elif next(child.parameters(), None) is not None:
            yield path, child


def unwrapped(net: Any) -> nn.Module:
    """Return the network inside DDP, DataParallel, torch.compile or PEFT. Raises for FSDP."""
    for cls in type(net).__mro__:
        if cls.__name__ in ("FullyShardedDataParallel", "FSDPModule"):
            raise ScalingStateError(
                "the monitor cannot record a network sharded by FSDP, because no process holds its whole parameters; "
                "use one device or DistributedDataParallel"
            )
    if not isinstance(net, nn.Module):
        raise InvalidValueError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    return _root(net, wrapped=True)
