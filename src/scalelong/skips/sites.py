"""Where a long skip is consumed, and how a network declares its own long skips."""

import math
from dataclasses import asdict, dataclass

from torch import nn

from scalelong.errors import InvalidValueError, invalid
from scalelong.scaling import SkipShape

ROOT = "(network)"  # path of a skip that the network consumes in its own `forward`


@dataclass(frozen=True)
class Join:
    """An operation in a module's own `forward` (not in its submodules) that joins a skip with the backbone.

    Args:
        op: "cat" (also `hstack`, `stack`) or "add" (also `+=`, `torch.add`, `-`, `torch.lerp`).
        operand: Position of the skip among the tensors that are joined.
        widths: Size of each of these tensors along the site's `dim`.
        nth: Which one, if `forward` runs several joins of the same widths, from 0.
        of: How many of these `forward` runs. Another number raises an error, since the network ran differently.

    Examples:
        >>> scalelong.Join("cat", operand=1, widths=(8, 4))
        Join(op='cat', operand=1, widths=(8, 4), nth=0, of=1)
    """

    op: str
    operand: int
    widths: tuple[int, ...]
    nth: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths) if isinstance(self.widths, (list, tuple)) else ())
        if self.op not in ("cat", "add"):
            raise invalid("op of a join", "'cat' or 'add'", self.op)
        if len(self.widths) < 2 or not all(isinstance(width, int) and width > 0 for width in self.widths):
            raise invalid("widths of a join", "the widths of two or more tensors", self.widths)
        for name, limit in (("operand", len(self.widths)), ("nth", self.of)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
                raise invalid(f"{name} of a join", f"an integer from 0 to {limit - 1}", value)


@dataclass(frozen=True)
class Site:
    """Where one long skip is consumed. A network's sites are listed outermost first.

    Args:
        path: The module that joins the skip with the backbone, such as "up_blocks.0.resnets.1".
        argument: The argument of its call that holds the skip, by name or position.
        item: The skip within that argument: an index if it is a tuple or list (-1: the last), a key if a dictionary.
        channels: The skip's number of channels. LS, `trailing` and `leading` require it.
        trailing: Whether the argument is already the concatenation, with the skip in its last `channels` channels.
        leading: The same with the skip in its first `channels` channels.
        dim: Axis of the channels: 1 for images and volumes, -1 for tokens (B, L, D).
        tokens: Number of tokens, if a learned position table fixes it.
        carrier: The module whose call receives the skip, if it is not `path` itself.
        source: The module that the skip comes from, for display.
        norm: The normalization of the concatenation, for `placement="after_norm"`.
        shortcut: The layer beside it that also sees the concatenation.
        join: The operation that joins the skip in the `forward` of the called module, if no argument holds the skip.
        call: Which call, from 0, if the network calls the module several times in one pass.
        calls: How many calls there are.
        backbone: See `SkipShape`.
        extras: See `SkipShape`.
        op: See `SkipShape`.

    Examples:
        >>> site = scalelong.Site("up", "skip", channels=4)
        >>> site.called, site.shape.channels
        ('up', 4)
    """

    path: str
    argument: int | str = 1
    item: int | str | None = None
    channels: int | None = None
    trailing: bool = False
    dim: int = 1
    tokens: int | None = None
    carrier: str | None = None
    source: str | None = None
    norm: str | None = None
    shortcut: str | None = None
    leading: bool = False
    join: Join | None = None
    call: int | None = None
    calls: int | None = None
    backbone: int | None = None
    extras: int | None = None
    op: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise invalid("path of a site", "the dotted name of a module", self.path)
        for names, allowed, least, expected in _FIELDS:
            for name in names.split():
                value = getattr(self, name)
                valid = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
                if not valid or (isinstance(value, int) and value < least):
                    raise invalid(f"{name} of site {self.path!r}", expected, value)
        if isinstance(self.join, dict):  # from JSON
            object.__setattr__(self, "join", Join(**self.join))
        if self.join is not None and not isinstance(self.join, Join):
            raise invalid(f"join of site {self.path!r}", "a scalelong.skips.Join or None", self.join)
        if self.op not in (None, "cat", "add"):
            raise invalid(f"op of site {self.path!r}", "'cat', 'add' or None", self.op)
        if self.op is None:  # what the other fields tell
            op = self.join.op if self.join else "cat" if self.trailing or self.leading or self.norm else None
            object.__setattr__(self, "op", op)
        if (self.trailing or self.leading or self.norm is not None) and not self.channels:
            raise InvalidValueError(f"site {self.path!r} has trailing, leading or norm set, which requires channels=…")
        if self.trailing and self.leading:
            raise InvalidValueError(f"site {self.path!r} has both trailing and leading set; the skip is at one end")
        if (self.call is None) != (self.calls is None) or (self.call or 0) >= (self.calls or 1):
            raise invalid(f"call of site {self.path!r}", f"below calls = {self.calls}, both given or none", self.call)

    @property
    def shape(self) -> SkipShape:
        """The shape of the skip."""
        return SkipShape(self.channels, self.dim, self.tokens, self.backbone, self.extras, self.op)

    @property
    def called(self) -> str:
        """The module whose call receives the skip."""
        return self.carrier or self.path


_FIELDS: tuple[tuple[str, tuple[type, ...], float, str], ...] = (  # names, types, least number, in words
    ("argument", (int, str), 0, "the name or the position of an argument"),
    ("channels tokens backbone", (int, type(None)), 1, "an integer >= 1 or None"),
    ("item", (int, str, type(None)), -math.inf, "an index, a key or None"),
    ("dim", (int,), -math.inf, "an integer"),
    ("call calls extras", (int, type(None)), 0, "an integer >= 0 or None"),
    ("trailing leading", (bool,), 0, "True or False"),
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
