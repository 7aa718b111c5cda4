"""Find the long skips in a recorded pass: by where each joined tensor comes from, not by names.

At a join, *skip* and *backbone* have a tensor in common, the *fork*, from which the backbone was computed. Forks and
joins that nest (the last made is the first consumed) around lower resolutions, or around a middle, are long skips.
Residual shortcuts follow one another, embeddings broadcast, and attention and dense connections do not nest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from scalelong.skips.sites import ROOT
from scalelong.skips.trace import Call, Given, Node, Trace

MOVES = ("permute", "transpose", "movedim", "swapaxes", "t", "T")
GATES = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply", "div", "__truediv__", "where", "masked_fill")


@dataclass(eq=False)
class Candidate:
    """A join where one operand, the skip, forks off before the other, the backbone."""

    node: Node
    operand: int
    skip: int  # nodes
    backbone: int
    fork: int
    first: int  # the first node that is computed from the fork on the backbone's way
    level: Call  # the innermost call that holds both fork and join
    reason: str = ""  # why it is left out; empty for a long skip

    @property
    def residual(self) -> bool:
        """Whether one call takes the fork, computes the backbone from it and joins both, as residual blocks do."""
        return self.fork < self.node.call.start <= self.first

    @property
    def argument(self) -> bool:
        """Whether skip and backbone both come into the call that joins them."""
        return self.first < self.node.call.start and self.skip < self.node.call.start

    @property
    def place(self) -> tuple[tuple[str, int], str]:
        """The line of code, and whether it adds or concatenates there."""
        return self.node.line, self.node.join

    def around(self, other: Candidate) -> bool:
        return self.fork <= other.fork and other.node.index < self.node.index

    def nests(self, other: Candidate) -> bool:
        if self.node is other.node:
            return self.fork != other.fork
        return self.around(other) or other.around(self)


class Provenance:
    """What the graph of a trace says about its joins."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.nodes = trace, trace.nodes
        self.root = trace.calls[0]
        self.ancestors: list[int] = []  # of each node, itself included, as a bit set
        self.layer: list[bool] = []  # reads parameters, or what was computed from them alone
        self.raw: list[bool] = []  # computed from the network's inputs without parameters
        self.channels: list[tuple[int | None, int]] = []  # their axis and number
        self.carried: list[int] = []  # the tensor that a gated one was before its gates
        inputs = sum(1 << node.index for node in self.nodes if node.op == "input")
        for node in self.nodes:
            bits = 1 << node.index
            for i in node.inputs:
                bits |= self.ancestors[i]
            self.ancestors.append(bits)
            state = [i for i in node.inputs if not self.ancestors[i] & inputs and self.layer[i]]
            self.layer.append(node.weighted or bool(state))
            self.raw.append(not self.layer[-1] and all(self.raw[i] for i in node.inputs))
            self.channels.append(self._channels(node))
            gated = self._gated(node)
            self.carried.append(self.carried[min(gated)] if gated else node.index)
        self.cut: set[tuple[int, int]] = set()  # edges (operand, join) of long skips
        self.unets: list[str] = []  # their modules, if the network runs several side by side

    # ------------------------------------------------------------------------------------------ resolution

    def axis(self, index: int) -> int:
        """Return the axis of a tensor's channels: that of the layer it comes from. Negative unless it is 1."""
        node, (axis, _) = self.nodes[index], self.channels[index]
        if axis is None:
            axis = 1 if len(node.shape) > 3 else len(node.shape) - 1
        return axis if axis == 1 and len(node.shape) > 2 else axis - len(node.shape)

    def _channels(self, node: Node) -> tuple[int | None, int]:
        """Return axis and number of the channels: known after layers, kept by what changes shape or resolution."""
        shape, last = node.shape, len(node.shape) - 1
        if _first_axis(node.op) and last > 0:
            return 1, shape[1]
        if not shape or node.op in ("linear", "layer_norm", "rms_norm", "embedding"):
            return last, shape[-1] if shape else 1
        known = sorted((i for i in node.inputs if self.nodes[i].shape), key=lambda i: -_size(self.nodes[i]))
        for i in known:
            axis, width = self.channels[i]
            same = len(self.nodes[i].shape) == len(shape)
            if same and axis is not None and node.op not in MOVES:
                return axis, shape[axis]
            axes = [a for a in range(len(shape)) if shape[a] == width and (not same or a != axis)]
            if axes and width > 1:
                at_end = axis is None or axis == len(self.nodes[i].shape) - 1
                return axes[-1] if at_end != same or len(axes) == 1 else axes[0], width
            if _size(self.nodes[i]) == _size(node):  # such as into heads
                return None, width
        axis = 1 if last > 2 else last
        return axis, shape[axis]

    def positions(self, index: int) -> float:
        """Return the resolution of a tensor: its elements per channel."""
        return _size(self.nodes[index]) / max(1, self.channels[index][1])

    # ------------------------------------------------------------------------------------------ candidates

    def fork(self, operand: int, other: int) -> int:
        """Return where `operand` forks off from what `other` is computed from; -1 if they have nothing in common."""
        node = self.nodes[operand]
        if self.ancestors[other] >> operand & 1:
            return operand
        if gated := self._gated(node):
            return min(self.fork(i, other) for i in gated) if node.op in GATES else self.fork(min(gated), other)
        if len(node.inputs) == 1:
            return self.fork(node.inputs[0], other)
        return (self.ancestors[operand] & self.ancestors[other]).bit_length() - 1

    def _gated(self, node: Node) -> list[int]:
        """Return what a gate multiplies that is as large as its output: among it, the tensor that is carried.

        A tensor plus its gated self, or plus an offset for each channel, is carried as well.
        """
        full = [i for i in node.inputs if _size(self.nodes[i]) == _size(node)]
        if node.op in GATES:
            return full
        return full if node.join == "add" and len({self.carried[i] for i in full}) == 1 else []

    def between(self, fork: int, end: int) -> list[int]:
        """Return the nodes on the ways from `fork` to `end`, both excluded from the start but `end` included."""
        reached = [n for n in range(fork + 1, end + 1) if self.ancestors[end] >> n & 1]
        return [n for n in reached if self.ancestors[n] >> fork & 1]

    def candidates(self) -> list[Candidate]:
        """Return every join of a tensor with what was computed from it, or from where it forks off."""
        found = []
        for node in self.nodes:
            operands = [(k, i) for k, i in enumerate(node.operands) if i is not None and _size(self.nodes[i])]
            if node.join == "add" and len({self.nodes[i].shape for _, i in operands}) > 1:
                continue  # broadcast: an embedding, a bias
            if len(operands) < 2 or len(node.shape) < 2:
                continue
            if node.axis is not None and node.axis % len(node.shape) == 0:
                continue  # a batch of both
            backbone = self._backbone([i for _, i in operands])
            for k, i in operands:
                if i == backbone:
                    continue
                fork = self.fork(i, backbone)
                if fork < 0 or self.raw[self.carried[i]] or not self.ancestors[fork] >> (self.trace.main or 0) & 1:
                    continue  # from an input, or from a condition
                if self.raw[fork] and not any(self.layer[n] for n in self.between(fork, i)):
                    continue
                way = self.between(fork, backbone)
                if not any(self.layer[n] for n in way):
                    continue
                found.append(Candidate(node, k, i, backbone, fork, way[0], self._level(fork, node)))
        return found

    def _level(self, fork: int, node: Node) -> Call:
        """Return the innermost call that makes both the fork and the join."""
        made = self.nodes[fork].call
        return next(c for c in node.call.stack if c.start <= fork < node.index and made.inside(c))

    def _backbone(self, operands: list[int]) -> int:
        """Return the operand that forks off last.

        Of equal ones it is the one that comes from a lower resolution, then the one with more layers since, ungated.
        """

        def depth(operand: int) -> tuple[int, bool, int, bool]:
            others = [o for o in operands if o != operand] or [operand]
            fork, carried = max(self.fork(operand, other) for other in others), self.carried[operand]
            since = self.ancestors[carried] & ~self.ancestors[fork] if fork >= 0 else 0
            here = fork >= 0 and self.positions(fork) == self.positions(operand)
            return fork, here and self._lower(fork, operand, others[0]), since.bit_count(), carried == operand

        return max(operands, key=depth)

    def narrows(self, candidate: Candidate) -> bool:
        """Whether every way of the backbone from fork to join, long skips aside, goes through a lower resolution."""
        return self._lower(candidate.fork, candidate.backbone, candidate.skip)

    def _lower(self, fork: int, end: int, other: int) -> bool:
        """Whether every way from `fork` to `end`, which joins `other`, goes through a lower resolution."""
        shape = self.nodes[other].shape

        def positions(index: int) -> float:  # what is shaped like the other has its resolution, however it was made
            return self.positions(other if self.nodes[index].shape == shape else index)

        least = min(positions(end), positions(fork))
        widest = {fork: float("inf")}
        for n in self.between(fork, end):
            ways = [widest[i] for i in self.nodes[n].inputs if i in widest and (i, n) not in self.cut]
            if ways:
                widest[n] = min(max(ways), positions(n))
        return widest.get(end, float("inf")) < 0.9 * least

    # ------------------------------------------------------------------------------------------- selection

    def select(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the long skips, innermost first, and the other candidates with the reason that leaves them out."""
        every = self.candidates()
        gates = [c for c in every if any(self._gates(c, other) for other in every)]
        others = list(gates)
        for place in {c.place for c in every if c.residual}:  # residual blocks: some follow one another
            alike = [c for c in every if c.place == place and c.residual]
            if not _nested(alike):
                others += alike
        strong: list[Candidate] = []
        for candidate in every:
            if candidate not in others and self.narrows(candidate):
                strong.append(candidate)
                self.cut.add((candidate.skip, candidate.node.index))
        chosen = self._main_group(strong)
        rest = [c for c in every if c not in gates]
        chosen = self._extended(chosen, rest) if chosen else self._without_resolutions(rest)
        chosen += self._doubled(chosen)
        for candidate in every:
            if candidate not in chosen:
                candidate.reason = self._reason(candidate, strong, chosen)
        return sorted(chosen, key=_decoder_order), [c for c in every if c not in chosen]

    def _gates(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a join only computes a gate for a skip: the gated skip depends on it, from the same fork on."""
        at = candidate.node.index
        return candidate.fork == other.fork and other.skip >= at and bool(self.ancestors[other.skip] >> at & 1)

    def _group(self, candidate: Candidate) -> object:
        """Residual-shaped joins belong together by the line of code (a recursive U-Net), others by their level."""
        return candidate.place if candidate.residual else candidate.level

    def _main_group(self, strong: list[Candidate]) -> list[Candidate]:
        """Return the U-Net that is the network, not one inside a block: the outermost level with two skips or more."""
        groups = self._grouped(strong, self._group)
        several = [group for group in groups if len(group) > 1]
        main = min(several or groups, key=_outermost, default=[])
        equal = [group for group in several if _outermost(group) == _outermost(main)]
        self.unets = [group[0].level.path for group in equal] if len(equal) > 1 else []
        return main

    def _grouped(self, candidates: list[Candidate], key: Callable[[Candidate], object]) -> list[list[Candidate]]:
        """Group candidates; joins in one line that nest belong together, as those of a recursive U-Net do."""
        groups: dict[object, list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            groups[key(candidate)].append(candidate)
        for place in {c.place for c in candidates}:
            alike = [c for c in candidates if c.place == place]
            if _nested(alike):
                merged = [c for group in {id(g): g for g in (groups[key(c)] for c in alike)}.values() for c in group]
                groups.update(dict.fromkeys(map(key, alike), merged))
        return list({id(group): group for group in groups.values()}.values())

    def _extended(self, chosen: list[Candidate], every: list[Candidate]) -> list[Candidate]:
        """Add what nests with the skips and joins in the same way, at the lowest resolution."""
        kinds, places = {c.node.join for c in chosen}, {c.place for c in chosen}
        ends = {c.operand for c in chosen}
        groups = {self._group(c) for c in chosen}
        for candidate in sorted(every, key=lambda c: c.fork):
            if candidate in chosen or self._group(candidate) not in groups:
                continue
            alike = candidate.place in places
            cat = candidate.node.join == "cat" in kinds and candidate.operand in ends and self._whole(candidate)
            argument = candidate.argument and candidate.node.join in kinds
            if not (alike or cat or argument or self._mirrors(candidate, chosen)):
                continue
            if all(candidate.nests(other) for other in chosen):
                chosen = [*chosen, candidate]
        return chosen

    def _doubled(self, chosen: list[Candidate]) -> list[Candidate]:
        """Return the join of a tensor with itself, in the code of the other joins: the innermost of all, if any.

        A decoder that follows its encoder without a middle first takes back what the encoder gave it last.
        """
        like = {c.place: c for c in chosen}
        for node in self.nodes:
            model = like.get((node.line, node.join))
            carried = {i if i is None else self.carried[i] for i in node.operands}
            if model is None or len(carried) > 1 or len(node.operands) != 2 or None in carried:
                continue
            skip, backbone = (node.operands[k] for k in (model.operand, 1 - model.operand))
            assert skip is not None
            assert backbone is not None
            fork = self.carried[skip]
            level = self._level(fork, node)
            candidate = Candidate(node, model.operand, skip, backbone, fork, node.index, level)
            if all(other.around(candidate) for other in chosen):
                return [candidate]
        return []

    def _whole(self, candidate: Candidate) -> bool:
        """Whether the skip is what the backbone was computed from, not another branch beside it."""
        return self.carried[candidate.skip] == self.carried[candidate.fork]

    def _mirrors(self, candidate: Candidate, chosen: list[Candidate]) -> bool:
        """Whether an addition around the middle is a long skip, not a residual shortcut: it continues the pattern.

        The encoder's last block lowers the resolution and returns the skip; each sum goes to one block of the decoder
        alone, which raises it. The outermost sum may go to the output layer.
        """
        inner = sorted(chosen, key=lambda c: c.fork)[1:]
        if not inner or candidate.residual or any(c.node.join != candidate.node.join for c in chosen):
            return False
        fork = self.positions(candidate.fork)
        made = [call for call in self.trace.calls if call.output == candidate.fork]
        lowers = any(self.positions(given.node) > fork for call in made for given in call.arguments)
        return lowers and all(map(self._goes_up, [*inner, candidate]))

    def _goes_up(self, candidate: Candidate) -> bool:
        consumer, _ = self.consumer(candidate.node)
        output = None if consumer is None else consumer.output
        return output is not None and self.positions(output) > self.positions(candidate.node.index)

    def _without_resolutions(self, every: list[Candidate]) -> list[Candidate]:
        """Find the skips of a network of one resolution: two or more that nest, at the outermost level possible."""
        chains = []
        operands = Counter(c.node for c in every)  # one concatenation of all features is no decoder
        usable = [c for c in every if not c.residual]
        for group in self._grouped(usable, lambda c: (c.level, c.node.join)):
            lines = defaultdict(list)
            for c in group:
                lines[c.place].append(c)
            nested = [c for members in lines.values() if _nested(members) for c in members]
            joined = Counter(self.carried[c.skip] for c in nested)
            nested = [c for c in nested if joined[self.carried[c.skip]] == operands[c.node] == 1]
            chain = [c for c in nested if all(a is c or a.nests(c) for a in nested)]
            join, only = group[0].node.join, group[0]
            here = only.argument or only.node.call is self.root
            alone = len(group) == 1 and join == "cat" and here and self._whole(only)
            if len(chain) > 1 or alone:
                chains.append((join != "cat", _outermost(group), -len(chain), chain))
        return min(chains, key=lambda entry: entry[:3])[3] if chains else []

    def _reason(self, candidate: Candidate, strong: list[Candidate], chosen: list[Candidate]) -> str:
        if candidate in strong and not candidate.residual:
            return f"a long skip inside {candidate.level.path}"
        if candidate.residual:
            return "a residual shortcut: one call takes the tensor and joins what it computed from it"
        if chosen and not all(candidate.nests(c) for c in chosen):
            return "a shortcut within encoder, middle or decoder: it does not lead past the middle"
        if not chosen:
            return "it nests with no other join, and the resolution does not change in between"
        return "joined in another way than the long skips"

    # --------------------------------------------------------------------------------- where from, where to

    def uses(self, index: int) -> list[Node]:
        return [node for node in self.nodes[index + 1 :] if index in node.inputs]

    def consumer(self, node: Node) -> tuple[Call | None, Given | None]:
        """Return the call that takes the joined tensor and in which all its uses are, and the argument."""
        uses = self.uses(node.index)
        for call in self.trace.calls:
            if call.start <= node.index or node.call.inside(call):
                continue
            given = next((g for g in call.arguments if g.node == node.index and g.item is None), None)
            if given is not None and uses and all(call.start <= use.index < call.end for use in uses):
                return call, given
        return None, None

    def source(self, candidate: Candidate) -> str | None:
        user = candidate.node.call
        return self.made_by(candidate.fork, user) or self.made_by(candidate.skip, user)

    def made_by(self, index: int, user: Call | None = None) -> str | None:
        """Return the module that made a tensor: the outermost one that returned it and that `user` is not part of."""
        while True:
            made = [c for c in self.trace.calls if c.output == index and c.start <= index and c.path != ROOT]
            outermost = next((c for c in made if user is None or not user.inside(c)), None)
            if outermost is not None:
                return outermost.path
            node = self.nodes[index]
            if not node.inputs:
                return None
            index = min(self._gated(node) or [max(node.inputs)])


def _decoder_order(candidate: Candidate) -> tuple[int, int]:
    return candidate.node.index, -candidate.fork


def _nested(candidates: list[Candidate]) -> bool:
    return all(a is b or a.nests(b) for a in candidates for b in candidates)


def _outermost(group: list[Candidate]) -> int:
    """Return how deep in the network the outermost level of a group is."""
    return min(sum(1 for _ in c.level.stack) for c in group)


def _size(node: Node) -> int:
    size = 1
    for width in node.shape:
        size *= width
    return size


def _first_axis(op: str) -> bool:
    """Whether a layer has its channels at axis 1."""
    return op.startswith(("conv", "_conv")) or op in ("group_norm", "batch_norm", "instance_norm")
