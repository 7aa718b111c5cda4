"""Which sites a network has: registered adapters first, then the structures that the package knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from scalelong.errors import ScaleLongError, suggestion
from scalelong.skips.finders import KINDS
from scalelong.skips.sites import Site

FindSkips = Callable[[nn.Module], Iterable["Site | str"]]

_ADAPTERS: dict[str, FindSkips] = {}  # by qualified class name, so that nothing is imported to look


def register_adapter(cls: type[nn.Module] | str, find_skips: FindSkips) -> None:
    """Teach `apply` a network class (or its qualified name): `find_skips(net)` lists its sites, outermost first.

    A site is a `Site`, or the path of a module whose second argument is the skip.
    """
    if not callable(find_skips):
        raise ScaleLongError(f"find_skips is a function from a network to its sites, not {find_skips!r}")
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ScaleLongError(f"an adapter is registered for a network class or its qualified name, not {cls!r}")
    _ADAPTERS[cls if isinstance(cls, str) else _qualified(cls)] = find_skips


def find_sites(net: nn.Module, sites: Iterable[Site | str] | None = None) -> list[Site]:
    """The network's long skips, outermost first; an error that says what was looked for where there are none."""
    if sites is None:
        adapter = next((a for c in type(net).__mro__ if (a := _ADAPTERS.get(_qualified(c)))), None)
        if adapter is None:
            return _by_structure(net)
        sites = adapter(net)
    if isinstance(sites, (str, Site)) or not isinstance(sites, Iterable):
        raise ScaleLongError(f"sites is a list, one for each long skip, not {sites!r}")
    found = [Site(site) if isinstance(site, str) else site for site in sites]
    if not found:
        raise ScaleLongError(f"no sites were given for {type(net).__name__}; list one for each long skip")
    for site in found:
        if not isinstance(site, Site):
            raise ScaleLongError(f"a site is a scalelong.Site or a module's path, not {site!r}")
        for path in (site.path, site.called, site.norm, site.shortcut):
            _check_path(net, path)
    if len({(site.called, site.argument, site.item) for site in found}) != len(found):
        raise ScaleLongError("two sites name the same argument of the same module; each long skip has its own")
    return found


def _by_structure(net: nn.Module) -> list[Site]:
    for kind in KINDS:
        sites = kind.find(net)
        if sites:
            return sites
    looked_for = "; ".join(kind.looks_for for kind in KINDS)
    raise ScaleLongError(
        f"no long skips were understood in {_qualified(type(net))}. {_part_with_skips(net)}Looked for: {looked_for}. "
        "For another network list them yourself, outermost first: scalelong.apply(net, scaling, "
        "sites=[scalelong.Site('decoder.path', argument='skip'), …]), or once for all with "
        "scalelong.register_adapter(YourClass, find_skips)"
    )


def _part_with_skips(net: nn.Module) -> str:
    """A hint for somebody who gave what holds the network: a wrapper that adds the loss or the sampler."""
    for path, module in net.named_modules():
        if path and any(kind.find(module) for kind in KINDS):
            return f"Its part {path!r} ({type(module).__name__}) is understood: apply to net.{path}. "
    return ""


def _check_path(net: nn.Module, path: str | None) -> None:
    if path is None:
        return
    try:
        net.get_submodule(path)
    except AttributeError as error:
        names = [name for name, _ in net.named_modules() if name]
        raise ScaleLongError(f"{type(net).__name__} has no module {path!r}{suggestion(path, names)}") from error


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
