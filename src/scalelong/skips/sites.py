"""Where a long skip is consumed, and how a network declares its own long skips."""

import math
from dataclasses import asdict, dataclass

from torch import nn

from scalelong.errors import InvalidValueError, invalid
from scalelong.scaling import SkipShape

ROOT = "(network)"  # path of a skip that the network consumes in its own `forward`


@dataclass(frozen=True)
class Site:
    """Where one long skip is consumed. A network's sites are listed outermost first.

    Args:
        path: The module that joins the skip with the backbone, such as "up_blocks.0.resnets.1".
        argument: The argument of its call that holds the skip, by name or position.
        item: Index of the skip within that argument if it is a tuple or list (-1: the last).
        channels: The skip's number of channels. LS and `trailing` require it.
        trailing: Whether the argument is already the concatenation, with the skip in its last `channels` channels.
        dim: Axis of the channels: 1 for images and volumes, -1 for tokens (B, L, D).
        tokens: Number of tokens, if a learned position table fixes it.
        carrier: The module whose call receives the skip, if it is not `path` itself.
        source: The module that the skip comes from, for display.
        norm, shortcut: Modules that see the concatenation, for `placement="after_norm"`.
    """

    path: str
    argument: int | str = 1
    item: int | None = None
    channels: int | None = None
    trailing: bool = False
    dim: int = 1
    tokens: int | None = None
    carrier: str | None = None
    source: str | None = None
    norm: str | None = None
    shortcut: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise invalid("path of a site", "the dotted name of a module", self.path)
        for names, allowed, least, expected in _FIELDS:
            for name in names.split():
                value = getattr(self, name)
                valid = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
                if not valid or (isinstance(value, int) and value < least):
                    raise invalid(f"{name} of site {self.path!r}", expected, value)
        if (self.trailing or self.norm is not None) and not self.channels:
            raise InvalidValueError(f"site {self.path!r} has trailing or norm set, which requires channels=…")

    @property
    def shape(self) -> SkipShape:
        return SkipShape(channels=self.channels, dim=self.dim, tokens=self.tokens)

    @property
    def called(self) -> str:
        """The module whose call receives the skip."""
        return self.carrier or self.path


_FIELDS: tuple[tuple[str, tuple[type, ...], float, str], ...] = (  # names, types, least number, in words
    ("argument", (int, str), 0, "the name or the position of an argument"),
    ("channels tokens", (int, type(None)), 1, "an integer >= 1 or None"),
    ("item", (int, type(None)), -math.inf, "an integer or None"),
    ("dim", (int,), -math.inf, "an integer"),
    ("trailing", (bool,), 0, "True or False"),
    ("carrier source norm shortcut", (str, type(None)), 0, "the dotted name of a module or None"),
)


def declared_sites(net: nn.Module) -> list[Site] | None:
    """Return the sites of a network that declares `long_skips` and calls `scale_skip`; None for any other network."""
    declared = getattr(net, "long_skips", None)
    if not isinstance(declared, (tuple, list)):
        return None
    if not declared:
        raise invalid(f"{type(net).__name__}.long_skips", "one entry per long skip, outermost first", declared)
    sites = []
    for skip in declared:
        if isinstance(skip, bool) or not isinstance(skip, (int, SkipShape, Site)):
            raise invalid(f"{type(net).__name__}.long_skips", "a tuple of channel widths, SkipShapes or Sites", skip)
        shape = SkipShape(skip) if isinstance(skip, int) else skip
        sites.append(shape if isinstance(shape, Site) else Site(ROOT, **asdict(shape)))
    return sites
