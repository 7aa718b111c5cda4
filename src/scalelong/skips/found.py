"""Long skips found from an example: complete sites, what was left out and why, and a check of sites that were given."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from scalelong._modules import parameters_of
from scalelong.errors import UnsupportedNetworkError, invalid
from scalelong.skips.finders import find_sites, is_registered
from scalelong.skips.hooks import Argument
from scalelong.skips.joins import matches
from scalelong.skips.provenance import MOVES, Candidate, Provenance
from scalelong.skips.sites import ROOT, Join, Site, declared_sites
from scalelong.skips.trace import Call, Given, Node, Trace

AFFINE = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "add", "__add__", "__radd__", "add_", "__iadd__",
          "to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "reshape", "view", "addcmul")  # fmt: skip
NORMS = ("group_norm", "layer_norm", "batch_norm", "instance_norm", "rms_norm")


class FoundSkips(list[Site]):
    """The sites of a network's long skips, outermost first: a list of `Site`.

    Args:
        network: Class name of the network.
        sites: The sites.
        left_out: (where, why) of the joins that are not long skips.

    Examples:
        >>> len(scalelong.find_skips(scalelong.StackedUNet(32, 3)))
        3
    """

    def __init__(self, network: str, sites: Iterable[Site], left_out: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(sites)
        self.network, self.left_out = network, tuple(left_out)  # (where, why)

    def explain(self) -> str:
        """Say what was found and what was left out.

        Returns:
            One line per skip, then the reasons.
        """
        lines = [f"{self.network}: {len(self)} long skips found by running it once"]
        for i, site in enumerate(self, start=1):
            lines.append(f"  {i}  from {site.source or '?'} to {site.path}: {site.channels} channels, {_how(site)}")
            if site.norm is not None:
                beside = f", beside {site.shortcut}" if site.shortcut else ""
                lines.append(f"     then {site.norm} normalizes the concatenation{beside}")
        why = Counter(reason for _, reason in self.left_out)
        if why:
            lines.append("left out:")
        for reason, count in why.most_common():
            where = [place for place, r in self.left_out if r == reason]
            lines.append(f"  {count} × {reason} ({', '.join(where[:2])}{', …' if count > 2 else ''})")
        return "\n".join(lines)

    __str__ = explain


def find_skips(net: nn.Module, *example: Any, **kwargs: Any) -> FoundSkips:
    """Run `net(*example, **kwargs)` once and return the sites of its long skips, outermost first.

    The network runs in eval mode without gradients; random numbers and buffers stay as they are. Raises an error with
    candidates to choose from if it is not clear which joins are long skips. Without an example only networks of a known
    structure are understood.

    Args:
        net: The network.
        *example: The arguments of one call.
        **kwargs: Its keyword arguments.

    Returns:
        A list of `Site`; `print(found.explain())` says what was found and what was left out.

    Examples:
        >>> from torch import nn
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.down, self.middle, self.up = (nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 8))
        ...     def forward(self, x):
        ...         skip = self.down(x)
        ...         return self.up(torch.cat([self.middle(skip), skip], dim=1))
        >>> found = scalelong.find_skips(Net(), torch.randn(1, 3, 8, 8))
        >>> found[0].source, found[0].channels, found[0].op
        ('down', 4, 'cat')
    """
    from scalelong.skips.application import unscaled, unwrapped

    root = unwrapped(net)
    if not example and not kwargs:
        return FoundSkips(type(root).__name__, find_sites(root))
    with unscaled(root):
        return _found(root, Provenance(Trace.of(root, example, kwargs)))


def sites_from(net: nn.Module, sites: Iterable[Site | str] | None, example: Any) -> list[Site]:
    """Return the sites of `apply`: of a known structure, found from the example, or given and then checked."""
    if example is None:
        return find_sites(net, sites)
    args, kwargs = as_call(net, example)
    if sites is None:
        return _known_or_found(net, args, kwargs)
    return _checked(net, find_sites(net, sites), Provenance(Trace.of(net, args, kwargs)))


def _known_or_found(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Site]:
    """Return the sites of a known structure if the pass confirms them, else those that it shows."""
    try:
        known = find_sites(net)
    except UnsupportedNetworkError:
        return _found(net, Provenance(Trace.of(net, args, kwargs)))
    try:
        found = _found(net, Provenance(Trace.of(net, args, kwargs)))
    except UnsupportedNetworkError:
        return known
    if len(found) != len(known) or not all(map(_agree, known, found)):
        return known if is_registered(net) else found
    return list(map(_completed, known, found))


def _agree(known: Site, seen: Site) -> bool:
    """Whether a structure's guess has the width that a pass shows, and the end of the concatenation."""
    first = seen.leading or (seen.join is not None and seen.op == "cat" and seen.join.operand == 0)
    end = not first if known.trailing else not seen.trailing if known.leading else True
    return end and known.channels in (None, seen.channels)


def _completed(site: Site, seen: Site) -> Site:
    """Add what a pass shows of a join, and a structure or a user may not have said."""
    about = ("backbone", "extras", "op")
    return dataclasses.replace(site, **{name: getattr(seen, name) for name in about if getattr(site, name) is None})


def as_call(net: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call from a tuple of them, a dictionary by name, or a tuple that ends with one."""
    if isinstance(example, dict):
        return (), example
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if len(args) == 2 and isinstance(args[0], (tuple, list)) and isinstance(args[1], dict):
        return tuple(args[0]), args[1]
    if len(args) > 1 and isinstance(args[-1], dict):
        parameters = parameters_of(net).values()
        names = {p.name for p in parameters}
        if set(args[-1]) <= names or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return args[:-1], args[-1]
    return args, {}


def _found(net: nn.Module, graph: Provenance) -> FoundSkips:
    chosen, others = graph.select()
    name = type(net).__name__
    if graph.trace.scaled and declared_sites(net) is None:
        return FoundSkips(name, _scaled_in_forward(name, graph, [*chosen, *others]))
    left_out = [(f"{c.node.call.path} ({c.node.join})", c.reason) for c in others]
    if graph.unets:
        each = ", ".join(dict.fromkeys(graph.unets))
        hint = "apply the scaling to each module, scalelong.apply(net.unet, scaling, example=…)"
        raise UnsupportedNetworkError(f"{name} runs {len(graph.unets)} U-Nets ({each}) that are not nested; {hint}")
    single = len(chosen) > 1 and len({c.node for c in chosen}) == 1  # all in one concatenation
    if chosen and not single and all(a.nests(b) for a in chosen for b in chosen if a is not b):
        return FoundSkips(name, [site_of(graph, c, chosen) for c in reversed(chosen)], left_out)
    shown = chosen or [c for c in others if not c.residual] or others
    seen = f"ran {name} once and found {sum(bool(node.join) for node in graph.nodes)} joins"
    if not shown:
        hint = "it has no long skips, or they are not concatenated or added"
        raise UnsupportedNetworkError(f"{seen}, none of a tensor with what was computed from it: {hint}")
    if single:
        problem = "but all in one concatenation, which may be no decoder"
    elif chosen:
        problem = "but they do not nest: the skip that is made last must be joined first"
    else:
        problem = "but it is not clear which are long skips: " + others[0].reason
    raise UnsupportedNetworkError(
        f"{seen}, {problem}. Choose from these, outermost first:\n{paste(graph, shown)}\nand pass them as sites=[…]"
    )


def _scaled_in_forward(name: str, graph: Provenance, candidates: list[Candidate]) -> list[Site]:
    """Return the sites of a network that calls `scale_skip` without declaring `long_skips`."""
    scaled, sites = graph.trace.scaled, []
    if sorted(scaled) != list(range(1, len(scaled) + 1)):
        raise UnsupportedNetworkError(f"{name} calls scale_skip with i = {sorted(scaled)}; expected 1 to {len(scaled)}")
    for i in sorted(scaled):
        dim = graph.axis(scaled[i])
        source = graph.made_by(scaled[i])
        sites.append(Site(ROOT, channels=graph.nodes[scaled[i]].shape[dim], dim=dim, source=source))
    return sites


def paste(graph: Provenance, candidates: list[Candidate], limit: int = 12) -> str:
    """Return lines of code, one site each, outermost first."""
    lines = []
    for c in sorted(candidates, key=lambda c: (c.fork, -c.node.index))[:limit]:
        file, number = c.node.line
        lines.append(f"    {code(site_of(graph, c, candidates))},  # {file.rsplit('/', 1)[-1]}:{number}")
    return "\n".join(lines)


def code(site: Site) -> str:
    """Return a site as the code that makes it, without defaults."""
    fields = [f for f in dataclasses.fields(site) if getattr(site, f.name) != f.default]
    values = [f"{f.name}={_short(getattr(site, f.name))}" for f in fields[1:]]
    return f"Site({', '.join([repr(site.path), *values])})"


def _short(value: Any) -> str:
    return f"Join{dataclasses.astuple(value)}" if isinstance(value, Join) else repr(value)


def _how(site: Site) -> str:
    where = f" of call {site.call + 1} of {site.calls}" if site.call is not None else ""
    if site.join is not None:
        verb = "added" if site.join.op == "add" else "concatenated"
        module = "the network" if site.called == ROOT else site.called
        return f"{verb} in the forward of {module} (operand {site.join.operand}){where}"
    if site.path == ROOT:
        return "passed to scale_skip"
    item = "" if site.item is None else f"[{site.item!r}]"
    part = "the first channels of " if site.leading else "the last channels of " if site.trailing else ""
    return f"{part}argument {site.argument!r}{item} of {site.called}{where}"


# --------------------------------------------------------------------------------- from a join to a site


def site_of(graph: Provenance, candidate: Candidate, chosen: list[Candidate]) -> Site:
    """Return the complete site of a join: by an argument of a call if that is exact, else by the operation."""
    node, joiner = candidate.node, candidate.node.call
    dim = graph.axis(candidate.skip)
    if node.axis is not None:
        axis = node.axis % len(node.shape)
        dim = axis if axis == 1 and len(node.shape) > 2 else axis - len(node.shape)
    consumer, given = graph.consumer(node)
    whole = consumer is not None and (joiner.path == ROOT or any(True for _ in consumer.module.children()))
    path = consumer.path if consumer is not None and whole else joiner.path
    last, first = candidate.operand == len(node.operands) - 1, candidate.operand == 0
    norm, shortcut = _norm_and_shortcut(graph, node) if node.axis is not None and (first or last) else (None, None)
    shape = graph.nodes[candidate.skip].shape
    other = node.shapes[1 - candidate.operand] if len(node.shapes) == 2 else ()
    site = Site(
        path, channels=shape[dim], dim=dim, source=graph.source(candidate), norm=norm, shortcut=shortcut, op=node.join,
        backbone=other[dim] if other else None, extras=0 if dim == -1 and len(shape) > 3 else None,
    )  # fmt: skip
    brought = _brought(graph, candidate)
    alone = sum(c.node is node for c in chosen) == 1
    if brought is not None and (norm is None or last):
        item = brought.item
        if isinstance(item, int):
            item -= brought.length  # counted from the end, as decoders take them
        site = dataclasses.replace(
            site, argument=_name(joiner.module, brought.argument), item=item,
            carrier=joiner.path if joiner.path != path else None,
        )  # fmt: skip
        return _numbered(graph, site, joiner)
    shown = given is not None and consumer is not None and _declared(consumer.module, given.argument)
    if consumer is not None and given is not None and shown and node.axis is not None and alone and (first or last):
        site = dataclasses.replace(
            site, path=consumer.path, argument=_name(consumer.module, given.argument), trailing=last, leading=not last
        )
        return _numbered(graph, site, consumer)
    carrier = joiner.path if joiner.path != path else None
    join = _join(graph, candidate, dim)
    leading = first and norm is not None
    return _numbered(graph, dataclasses.replace(site, carrier=carrier, join=join, leading=leading), joiner)


def _numbered(graph: Provenance, site: Site, call: Call) -> Site:
    """Add which call it is, if the module is called several times."""
    calls = [c for c in graph.trace.calls if c.module is call.module]
    if len(calls) == 1 or call.path == ROOT:
        return site
    return dataclasses.replace(site, call=calls.index(call), calls=len(calls), norm=None, shortcut=None)


def _name(module: nn.Module, argument: int | str) -> int | str:
    """Return the name of an argument instead of its position, where it has one."""
    if isinstance(argument, str):
        return argument
    parameters = parameters_of(module).values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return named[argument] if 0 < argument < len(named) else argument


def _declared(module: nn.Module, argument: int | str) -> bool:
    """Whether `forward` declares an argument, instead of taking it among `**kwargs`."""
    return isinstance(argument, int) or argument in parameters_of(module)


def _brought(graph: Provenance, candidate: Candidate) -> Given | None:
    """Return the argument of the joining call that holds the skip, if the join is all that it is used for."""
    call = candidate.node.call
    given = [g for g in call.arguments if g.node == candidate.skip]
    uses = [use for use in graph.uses(candidate.skip) if call.start <= use.index < call.end]
    single = len(given) == 1 and uses == [candidate.node] and candidate.node.operands.count(candidate.skip) == 1
    single = single and candidate.skip not in call.returned and _declared(call.module, given[0].argument)
    in_list = single and given[0].item is not None
    return given[0] if single and call.path != ROOT and not (in_list and call.mutates) else None


def _norm_and_shortcut(graph: Provenance, node: Node) -> tuple[str | None, str | None]:
    """Return the norm that the concatenation goes to, and the layer beside it; nothing else may see it."""
    calls = {use.call: use.op for use in graph.uses(node.index)}
    leaves = {call: op for call, op in calls.items() if _takes(call, node)}
    once = all(sum(c.module is call.module for c in graph.trace.calls) == 1 for call in leaves)
    norms = [
        call for call, op in leaves.items() if op in NORMS or ("Norm" in type(call.module).__name__ and not _mixes(op))
    ]
    others = [call for call in leaves if call not in norms]
    if len(norms) != 1 or len(others) > 1 or len(leaves) != len(calls) or not once or norms[0] is node.call:
        return None, None
    norm, shortcut = norms[0], others[0] if others else None
    if shortcut is not None and norm.inside(shortcut):
        return None, None  # a pre-norm block adds its input to what follows the norm: no module takes that alone
    while norm.parent is not None and _takes(norm.parent, node) and _only_normalizes(graph, norm, norm.parent):
        norm = norm.parent  # a norm made of several modules
    while (
        shortcut is not None and shortcut.parent and _takes(shortcut.parent, node) and not norm.inside(shortcut.parent)
    ):
        shortcut = shortcut.parent
    return norm.path, shortcut.path if shortcut else None


def _mixes(op: str) -> bool:
    """Whether an operation mixes channels, which no norm does: a convolution with a norm in its name."""
    return op.startswith(("conv", "_conv")) or op in ("linear", "matmul", "mm", "bmm", "einsum", "__matmul__")


def _takes(call: Call, node: Node) -> bool:
    return call.start > node.index and any(g.node == node.index for g in call.arguments)


def _only_normalizes(graph: Provenance, norm: Call, around: Call) -> bool:
    """Whether a module around a norm adds no more than gains, offsets and another layout or type to it."""
    if norm.output is None or around.output is None:
        return False
    way = [graph.nodes[n] for n in graph.between(norm.output, around.output)]
    same = graph.nodes[around.output].shape == graph.nodes[norm.output].shape
    return same and all(node.op in AFFINE or node.op in MOVES for node in way)


def _join(graph: Provenance, candidate: Candidate, dim: int) -> Join:
    """Return the operation: the n-th of its kind in the `forward` of the module, calls of submodules aside."""
    node, joiner = candidate.node, candidate.node.call
    if node.in_place and node.op in ("add_", "sub_", "lerp_") and candidate.operand == 0:
        raise UnsupportedNetworkError(
            f"{joiner.path} adds to the skip in place ({node.op}), so κ cannot act on it alone; write h = h + skip"
        )
    join = Join(node.join, candidate.operand, tuple(shape[dim] for shape in node.shapes))
    alike = [n for n in graph.nodes if n.join and _direct(n, joiner) and matches(join, dim, n.join, n.shapes)]
    return dataclasses.replace(join, nth=alike.index(node), of=len(alike))


def _direct(node: Node, joiner: Call) -> bool:
    """Whether `joiner` made the node itself, as `EnterChild` and `LeaveChild` tell it at run time."""
    for call in node.call.stack:
        if call is joiner:
            return True
        if call.module in joiner.frontier:
            return False
    return False


# --------------------------------------------------------------------------------- sites that were given


def _checked(net: nn.Module, sites: list[Site], graph: Provenance) -> list[Site]:
    """Compare given sites with the pass, and complete their channels, sources, norms and shortcuts."""
    chosen, others = graph.select()
    checked, forks = [], []
    for i, site in enumerate(sites, start=1):
        if site.path == ROOT and site.join is None:
            checked.append(site)
            continue
        candidate = _candidate_at(graph, site, i, [*chosen, *others])
        if candidate is None or (chosen and candidate not in chosen and not all(candidate.nests(c) for c in chosen)):
            why = "is not a tensor of the encoder that is carried past the middle"
            if candidate is not None:
                why = f"{why} but {candidate.reason.split(':')[0]}"
            hint = f" Found in this pass, outermost first:\n{paste(graph, chosen)}" if chosen else ""
            raise UnsupportedNetworkError(f"site {i}, {code(site)}: what it refers to {why}.{hint}")
        full = site_of(graph, candidate, chosen)
        dim = full.dim if site.channels is None else site.dim
        width = graph.nodes[candidate.skip].shape
        if site.channels not in (None, width[dim] if -len(width) <= dim < len(width) else None):
            expected = f"channels={full.channels}, dim={full.dim} for a skip of shape {width}"
            raise invalid(f"site {i} at {site.path}", expected, f"channels={site.channels}, dim={site.dim}")
        if site.item is not None and candidate.node.call.mutates:
            site = full  # the module takes skips off the list, so the operation has to show them
        norm, shortcut = (site.norm, site.shortcut) if site.norm else (full.norm, full.shortcut)
        last = candidate.operand == len(candidate.node.operands) - 1
        if not site.norm and not last and not site.leading:
            norm = shortcut = None
        source = site.source or full.source
        site = dataclasses.replace(site, channels=full.channels, dim=dim, source=source)
        checked.append(_completed(dataclasses.replace(site, norm=norm, shortcut=shortcut), full))
        forks.append(candidate.fork)
    if forks != sorted(forks):
        order = sorted(range(len(forks)), key=forks.__getitem__)
        raise invalid("sites", f"listed outermost first: {[sites[k].path for k in order]}", [s.path for s in sites])
    return checked


def _candidate_at(graph: Provenance, site: Site, i: int, candidates: list[Candidate]) -> Candidate | None:
    """Return the join that a site refers to."""
    module = graph.trace.net if site.called == ROOT else graph.trace.net.get_submodule(site.called)
    calls = [c for c in graph.trace.calls if c.module is module]
    if not calls:
        raise UnsupportedNetworkError(f"site {i}: the example does not call {site.called}")
    call = calls[site.call or 0]
    if site.join is not None:
        here = [c for c in candidates if c.node.call is call and c.operand == site.join.operand]
        return next((c for c in here if _join(graph, c, site.dim) == site.join), None)
    argument = Argument.of(module, site.argument)
    given = [g for g in call.arguments if g.argument in (argument.name, argument.position)]
    if isinstance(site.item, int) and given:
        given = [g for g in given if g.item == site.item % g.length]
    else:
        given = [g for g in given if g.item == site.item]
    if not given:
        raise UnsupportedNetworkError(f"site {i}, {code(site)}: the example passes no tensor there")
    index = given[0].node
    if site.trailing or site.leading:
        joined = graph.nodes[index]
        k = 0 if site.leading else len(joined.operands) - 1
        return next((c for c in candidates if c.node is joined and c.operand == k), None)
    later = [c for c in candidates if index == c.skip or (c.fork <= index < c.skip and index in _carried(graph, c))]
    return next((c for c in later if c.node.index >= call.start), None)


def _carried(graph: Provenance, candidate: Candidate) -> list[int]:
    return [candidate.fork, *graph.between(candidate.fork, candidate.skip)]
