"""Find the long skips of a network: declared ones, registered adapters, then known structures."""

from collections.abc import Callable, Iterable

from torch import nn

from scalelong._modules import parameters_of
from scalelong.errors import UnsupportedNetworkError, invalid, suggestion
from scalelong.skips.sites import ROOT, Site, declared_sites
from scalelong.skips.structures import STRUCTURES, find_uvit

FindSkips = Callable[[nn.Module], Iterable[Site | str]]

_ADAPTERS: dict[str, FindSkips] = {}  # by qualified class name, so that no package needs to be imported


def register_adapter(cls: type[nn.Module] | str, find_skips: FindSkips) -> None:
    """Teach scalelong a network class.

    Args:
        cls: The class or its qualified name. Subclasses are included.
        find_skips: A function from a network to its sites, outermost first. A site is a `Site`, or the path of a
            module whose second argument is the skip.

    Examples:
        >>> class Up(torch.nn.Module):
        ...     def forward(self, x, skip):
        ...         return x + skip
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = Up()
        ...     def forward(self, x):
        ...         return self.up(x, 2 * x)
        >>> scalelong.register_adapter(Net, lambda net: ["up"])
        >>> scalelong.apply(Net(), scalelong.UniformScaling(0.5))(torch.ones(1))
        tensor([2.])
    """
    if not callable(find_skips):
        raise invalid("find_skips", "a function from a network to its sites", find_skips)
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise invalid("cls", "a subclass of torch.nn.Module or its qualified name", cls)
    _ADAPTERS[cls if isinstance(cls, str) else _qualified(cls)] = find_skips


def find_sites(net: nn.Module, sites: Iterable[Site | str] | None = None) -> list[Site]:
    """Return the long skips of a network, outermost first, after checking `sites` if they are given."""
    if (declared := declared_sites(net)) is not None:
        if sites is not None:
            raise UnsupportedNetworkError(f"{type(net).__name__} declares its own long_skips; do not pass sites")
        return declared
    if sites is None:
        adapter = _adapter(net)
        if adapter is None:
            return _by_structure(net)
        sites = adapter(net)
    if isinstance(sites, (str, Site)) or not isinstance(sites, Iterable):
        raise invalid("sites", "a list with one entry per long skip", sites)
    checked = [Site(site) if isinstance(site, str) else site for site in sites]
    if not checked:
        raise invalid("sites", f"a list with one entry per long skip of {type(net).__name__}", checked)
    names = {ROOT, *(name for name, _ in net.named_modules(remove_duplicate=False) if name)}
    for site in checked:
        if not isinstance(site, Site):
            raise invalid("sites", "scalelong.Site objects or module paths", site)
        for path in (site.path, site.called, site.norm, site.shortcut):
            if path is not None and path not in names:
                raise UnsupportedNetworkError(f"{type(net).__name__} has no module {path!r}{suggestion(path, names)}")
        called = net if site.called == ROOT else net.get_submodule(site.called)
        if getattr(called.forward, "__func__", None) is nn.Module.forward:  # ModuleList, ModuleDict, ParameterList
            problem = f"site {site.called!r} is a {type(called).__name__}, which is never called"
            raise UnsupportedNetworkError(f"{problem}; name the module in it that receives the skip")
    targets = [(s.called, s.argument, s.item, s.join, s.call) for s in checked if s.path != ROOT or s.join]
    if len(set(targets)) != len(targets):
        raise UnsupportedNetworkError("two sites refer to the same argument of the same module")
    return checked


def is_registered(net: nn.Module) -> bool:
    """Whether the network declares its long skips or an adapter lists them, so that nothing is guessed."""
    return declared_sites(net) is not None or _adapter(net) is not None


def _adapter(net: nn.Module) -> FindSkips | None:
    return next((a for c in type(net).__mro__ if (a := _ADAPTERS.get(_qualified(c)))), None)


def _by_structure(net: nn.Module) -> list[Site]:
    hint = ""
    for path, module in net.named_modules():  # the network, or one inside a wrapper with the loss or the sampler
        sites = next((found for find in STRUCTURES.values() if (found := find(module))), None)
        if sites and not path:
            return sites
        if sites:
            hint = f"Its submodule {path!r} ({type(module).__name__}) is supported: pass net.{path}. "
            break
    parts = [f"{name} ({type(child).__name__})" for name, child in net.named_children()]
    seen = ", ".join(parts[:8]) + (", …" if len(parts) > 8 else "")
    raise UnsupportedNetworkError(
        f"found no known structure of long skips in {_qualified(type(net))} with {seen or 'no submodules'}. {hint}"
        "To find them, run it once: scalelong.apply(net, scaling, example=(x, t)), with the arguments of one call. "
        f"To list them, outermost first: sites=[{_guesses(net)}]; for a whole class use scalelong.register_adapter, in "
        "your own forward scalelong.scale_skip."
    )


def _guesses(net: nn.Module) -> str:
    """Return sites to start from: blocks whose `forward` takes a skip, the last one first."""
    found = []
    for path, module in net.named_modules():
        if path and type(module).__module__.split(".")[0] != "torch":
            names = list(parameters_of(module))
            found += [f"scalelong.Site({path!r}, {name!r})" for name in names[1:] if "skip" in name]
    return ", ".join([*found[::-1][:3], "…"] if found else ["scalelong.Site('decoder.2', 'skip')", "…"])


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def find_branches(net: nn.Module, kind: str) -> list[list[str]]:
    """Return the residual branches of each block of a U-ViT, in the order of the forward pass (Table 3)."""
    n = len(find_uvit(net) or ())
    blocks = [*(f"in_blocks.{k}" for k in range(n)), "mid_block", *(f"out_blocks.{k}" for k in range(n))]
    branches = [[f"{block}.attn", f"{block}.mlp"] for block in blocks]
    if not n or not {path for paths in branches for path in paths} <= {name for name, _ in net.named_modules()}:
        requires = "acts on block outputs and requires a U-ViT (blocks with attn and mlp)"
        raise UnsupportedNetworkError(f"scaling {kind!r} {requires}, got {type(net).__name__}")
    return branches
