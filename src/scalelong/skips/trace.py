"""Record one pass of a network: which operation made which tensor from which, in which module call."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from scalelong._modules import leave_no_trace
from scalelong.skips.hooks import _TAPS
from scalelong.skips.joins import JOINS, axis_of, frontier, joinable, operands_of
from scalelong.skips.sites import ROOT


@dataclass(frozen=True)
class Given:
    """A tensor among the arguments of a call."""

    argument: int | str  # as it was passed
    item: int | str | None  # within a tuple, list or dictionary
    length: int  # of that tuple or list
    node: int


@dataclass(eq=False)
class Call:
    """One call of a module. Times are numbers of nodes: the call made the nodes from `start` to before `end`."""

    module: nn.Module
    path: str
    parent: Call | None
    start: int
    end: int = 0
    arguments: list[Given] = field(default_factory=list)
    output: int | None = None  # the node, if the module returns one tensor
    frontier: frozenset[nn.Module] = frozenset()
    returned: frozenset[int] = frozenset()  # all nodes that it returns
    lists: list[tuple[Any, list[Any]]] = field(default_factory=list)  # among the arguments, with their items
    mutates: bool = False  # whether it changed such a list, as `skips.pop()` does

    @property
    def stack(self) -> Iterator[Call]:
        """This call and those around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def inside(self, other: Call) -> bool:
        return any(call is other for call in self.stack)


@dataclass(eq=False)
class Node:
    """One tensor as an operation made it; changed in place, it is a new node."""

    index: int
    op: str
    inputs: tuple[int, ...]
    weighted: bool  # the operation also reads a parameter
    call: Call
    shape: tuple[int, ...]
    operands: tuple[int | None, ...] = ()  # of a join; None for parameters and constants
    shapes: tuple[tuple[int, ...], ...] = ()  # of its operands
    axis: int | None = None  # of a concatenation
    join: str = ""  # "cat", "add" or nothing
    line: tuple[str, int] = ("", 0)  # where the join stands
    in_place: bool = False


class Trace(TorchFunctionMode):
    """The nodes and calls of one pass: `with leave_no_trace(net), Trace(net): net(*example)`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.nodes, self.calls = net, list[Node](), list[Call]()
        self.scaled: dict[int, int] = {}  # the nodes that `scale_skip` was called with, by i
        self._paths = {id(module): path for path, module in reversed(list(net.named_modules()))}
        self._node_of = WeakTensorKeyDictionary()
        self.main: int | None = None  # the input that is shaped like the output, such as the image
        self._stack: list[Call] = []
        self._handles: list[Any] = []

    @staticmethod
    def of(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Run `net(*args, **kwargs)` once in eval mode; nothing of the network changes."""
        trace = Trace(net)
        state = {name: value.clone() for name, value in net.named_buffers()}
        try:
            with leave_no_trace(net), trace:
                net(*args, **kwargs)
        finally:
            for name, value in net.named_buffers():
                if name in state and not value.is_meta and not torch.equal(value, state[name]):
                    value.copy_(state[name])
        return trace

    def __enter__(self) -> Trace:
        for module in self.net.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        handle = RemovableHandle(_TAPS)
        _TAPS[handle.id] = (self.net, self, True)
        self._handles.append(handle)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def scale(self, skip: Tensor, i: int) -> Tensor:
        """Record a skip that the network passes through `scale_skip`."""
        if (node := self.node(skip)) is not None:
            self.scaled[i] = node
        return skip

    def node(self, tensor: Tensor) -> int | None:
        return self._node_of.get(tensor)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent = self._stack[-1] if self._stack else None
        path = self._paths.get(id(module), "") or ROOT
        call = Call(module, path, parent, len(self.nodes), frontier=frozenset(frontier(module)))
        self._stack.append(call)
        self.calls.append(call)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        if parent is None:
            for tensor in (t for _, value in given for t in tensors(value)):
                if self.node(tensor) is None:
                    self._add(tensor, "input", (), False)
        for argument, value in given:
            keyed: list[tuple[Any, Any]] = [(None, value)]
            if isinstance(value, (list, tuple)):
                keyed = list(enumerate(value))
            elif isinstance(value, dict):
                keyed = list(value.items())
            if isinstance(value, (list, dict)):
                call.lists.append((value, items_of(value)))
            for item, tensor in keyed:
                if isinstance(tensor, Tensor) and (node := self.node(tensor)) is not None:
                    call.arguments.append(Given(argument, item, len(keyed), node))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._stack.pop()
        call.mutates = any(list(map(id, items_of(value))) != list(map(id, items)) for value, items in call.lists)
        call.lists = []
        found = list(tensors(output))
        for tensor in found:  # made out of sight: by a compiled or scripted part
            if self.node(tensor) is None:
                inputs = tuple(dict.fromkeys(given.node for given in call.arguments))
                self._add(tensor, type(module).__name__, inputs, True, call)
        call.returned = frozenset(node for tensor in found if (node := self.node(tensor)) is not None)
        if len(found) == 1:
            call.output = self.node(found[0])
        call.end = len(self.nodes)
        if call.parent is None and found:
            shape = found[0].shape
            given = [node for node in self.nodes if node.op == "input" and len(node.shape) > 1]
            alike = [node for node in given if len(node.shape) == len(shape) and node.shape[2:] == shape[2:]]
            alike += [node for node in given if len(node.shape) == len(shape)] + given
            self.main = alike[0].index if alike else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [*tensors(args), *tensors(kwargs)]
        if not self._stack or not read:
            return func(*args, **kwargs)
        before = [(tensor, _version(tensor), self.node(tensor)) for tensor in read]
        operands = operands_of(func, args, kwargs) if func in JOINS else []
        joined = tuple(self.node(x) if isinstance(x, Tensor) else None for x in operands)
        shapes = [x.shape for x in operands if isinstance(x, Tensor)]
        output = func(*args, **kwargs)
        made = [tensor for tensor in tensors(output) if not any(tensor is old for old in read)]
        made += [tensor for tensor, version, _ in before if _version(tensor) != version]
        if not made:
            return output
        inputs = tuple(dict.fromkeys(node for _, _, node in before if node is not None))
        weighted = any(isinstance(tensor, nn.Parameter) for tensor in read)
        for tensor in made:
            node = self._add(tensor, getattr(func, "__name__", str(func)), inputs, weighted)
            node.in_place = any(tensor is old for old in read)
            if len(operands) > 1 and all(map(joinable, operands)):
                frame = sys._getframe(1)
                node.operands, node.join = joined, JOINS[func]
                node.shapes = tuple(tuple(shape) for shape in shapes)
                node.axis = axis_of(func, args, kwargs, operands[0])
                node.line = (frame.f_code.co_filename, frame.f_lineno)
        return output

    def _add(self, tensor: Tensor, op: str, inputs: tuple[int, ...], weighted: bool, call: Call | None = None) -> Node:
        node = Node(len(self.nodes), op, inputs, weighted, call or self._stack[-1], tuple(tensor.shape))
        self.nodes.append(node)
        self._node_of[tensor] = node.index
        return node


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a tensor, tuple, list, dictionary or dataclass, searched recursively."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors(getattr(value, entry.name, None))


def items_of(value: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
