"""A long skip's place in a network."""

from __future__ import annotations

from dataclasses import dataclass

from scalelong.errors import ScaleLongError
from scalelong.scaling import SkipShape


@dataclass(frozen=True)
class Site:
    """Where one long skip is consumed. A network's sites are listed outermost first.

    path       the module that joins the skip with the backbone, e.g. "up_blocks.0.resnets.1"
    argument   which argument of the call brings the skip: its name or its position
    item       the skip's place in that argument where it is a tuple or list (−1: the last)
    channels   the skip's number of channels: needed by LS, and where `trailing`
    trailing   the argument is the concatenation already and the skip is its last `channels` channels
    dim        the axis of the channels: 1 for maps and volumes, −1 for tokens (B, L, D)
    tokens     the number of tokens, where a learned position table fixes it
    carrier    the module whose call brings the skip, where it is not `path` itself
    source     the module that the skip comes from, for people
    norm, shortcut   modules that see the concatenation, for placement="after_norm"
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
            raise ScaleLongError(f"a site's path is the dotted name of a module, not {self.path!r}")
        for name, (allowed, what) in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, allowed) or (isinstance(value, bool) and name != "trailing"):
                raise ScaleLongError(f"site {self.path!r}: {name} is {what}, not {value!r}")
        for name in ("channels", "tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ScaleLongError(f"site {self.path!r}: {name} is a whole number from 1 up, not {value}")
        if isinstance(self.argument, int) and self.argument < 0:
            raise ScaleLongError(f"site {self.path!r}: argument counts from 0, not {self.argument}")
        if (self.trailing or self.norm is not None) and not self.channels:
            raise ScaleLongError(f"site {self.path!r}: the number of the skip's channels is needed (channels=…)")

    @property
    def shape(self) -> SkipShape:
        return SkipShape(channels=self.channels, dim=self.dim, tokens=self.tokens)

    @property
    def called(self) -> str:
        """The module whose call brings the skip."""
        return self.carrier or self.path


_OPTIONAL_INT, _OPTIONAL_PATH = ((int, type(None)), "a whole number"), ((str, type(None)), "a module's dotted name")
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "argument": ((int, str), "the name or the position of an argument"),
    "item": _OPTIONAL_INT,
    "channels": _OPTIONAL_INT,
    "trailing": ((bool,), "true or false"),
    "dim": ((int,), "a whole number"),
    "tokens": _OPTIONAL_INT,
    "carrier": _OPTIONAL_PATH,
    "source": _OPTIONAL_PATH,
    "norm": _OPTIONAL_PATH,
    "shortcut": _OPTIONAL_PATH,
}
