"""The points of a network at which the monitor records norms: long skips at their joins, and blocks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from scalelong.errors import ScaleLongError
from scalelong.scaling import NoScaling, Scaling
from scalelong.skips.application import sites_of
from scalelong.skips.finders import find_sites
from scalelong.skips.hooks import scaling_of
from scalelong.skips.sites import ROOT, Site

MEASURES = ("skip", "backbone", "out")  # recorded for each long skip, in this order


@dataclass(frozen=True)
class Point:
    """One recorded tensor. `module` is the module to inspect; `name` describes the point in messages."""

    module: str
    name: str
    skip: int | None = None  # the index i of the long skip; None for a block
    hidden: int | None = None  # i if it is h_i of Eq. 3 (0: the output); None for features of the encoder and others


@dataclass(frozen=True)
class Points:
    """All recorded points. For long skip i, outermost first:

    skip      x_i, the encoder's output, before κ_i
    backbone  h_i, the tensor that the skip joins; for the innermost skip, the middle block's output
    out       the output of the module that consumes both
    joined    κ_i·x_i, the skip as it arrives at the join

    and the output of every block; the last block is the whole network.
    """

    network: str
    sites: tuple[Site, ...]
    blocks: tuple[str, ...]

    @property
    def n(self) -> int:
        """The number of long skips."""
        return len(self.sites)

    @property
    def features(self) -> int:
        """The number of points with an oscillation: all but `joined`."""
        return len(MEASURES) * self.n + len(self.blocks)

    def start(self, measure: str) -> int:
        """Return the position of the first "skip", "backbone", "out", "blocks" or "joined" point."""
        return self.features if measure == "joined" else (*MEASURES, "blocks").index(measure) * self.n

    @cached_property
    def all(self) -> tuple[Point, ...]:
        sites = list(enumerate(self.sites, start=1))
        skips = [(i, site, site.source or site.path) for i, site in sites]
        return (
            *(Point(m, f"long skip {i}" + (f" (from {s.source})" if s.source else ""), i) for i, s, m in skips),
            *(Point(s.path, f"the backbone at the join of long skip {i} ({s.path})", i, i) for i, s in sites),
            *(Point(s.path, f"the output of {s.path}, which consumes long skip {i}", i, i - 1) for i, s in sites),
            *(
                Point(p, "the network's output" if p == ROOT else f"the output of {p}", None, self._hidden(p))
                for p in self.blocks
            ),
            *(Point(s.path, f"long skip {i} after scaling", i) for i, s in sites),
        )

    def _hidden(self, block: str) -> int | None:
        """The i of h_i that a block returns: the outermost long skip it consumes, minus 1; 0 for the network."""
        consumed = [i for i, s in enumerate(self.sites, start=1) if f"{s.path}.".startswith(f"{block}.")]
        return 0 if block == ROOT else min(consumed) - 1 if consumed else None

    def skip_of(self, module: str) -> int | None:
        """Return the index of the long skip that the module produces or consumes."""
        sites = enumerate(self.sites, start=1)
        found = (i for i, s in sites if module in (s.source, s.path) or s.path.startswith(f"{module}."))
        return next(found, None)


def find_points(root: nn.Module, sites: Iterable[Site | str] | None = None) -> Points:
    """Find the long skips (or take `sites`) and the blocks. An unsupported network has its blocks alone."""
    try:
        found = sites_of(root)[0] if sites is None else find_sites(root, sites)
    except ScaleLongError:
        if sites is not None:
            raise
        found = []
    name = next(cls.__name__ for cls in type(root).__mro__ if not cls.__name__.startswith("FSDP"))  # see fully_shard
    return Points(name, tuple(found), tuple(_blocks(root)))


def spec_of(root: nn.Module) -> Scaling:
    """Return the scaling that is applied to the network."""
    scaler = scaling_of(root)
    return NoScaling() if scaler is None else scaler.spec


def coefficients_of(root: nn.Module, n: int) -> tuple[float, ...] | None:
    """Return κ_1 … κ_N of a network with `n` long skips, or None if they are learned."""
    scaler = scaling_of(root)
    count = n if scaler is None else len(scaler.sites) or n
    return spec_of(root).coefficients(count) if n else ()


def _blocks(root: nn.Module) -> list[str]:
    """List the children with parameters, including those of ModuleLists. A single child that holds all is entered."""
    prefix, module = "", root
    while True:
        found = list(_children(module, prefix))
        if len(found) != 1 or not any(True for _ in found[0][1].children()):
            return [*(path for path, _ in found), ROOT]
        prefix, module = f"{found[0][0]}.", found[0][1]


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # containers that are never called
            yield from _children(child, f"{path}.")
        elif next(child.parameters(), None) is not None:
            yield path, child
