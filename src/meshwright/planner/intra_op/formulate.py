"""From a graph, a mesh and a cluster to a problem: its decisions with their choices, and the tensors between them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.own_samples import owned
from meshwright.ir.placement import Placements, Shard, input_placements, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.stages import given_batch
from meshwright.planner.intra_op.decisions import Decision, Decisions, decisions_of
from meshwright.planner.intra_op.moments import Moments, copies
from meshwright.planner.intra_op.options import Allows, Choice, Options, follow
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.intra_op.problem import Costs, Node, Places, Problem, Tensor

Keeps = Callable[[Operator, Strategy], bool]
"""Whether an operator may have a strategy."""


Merit = Callable[[Operator, Strategy], int]
"""How many of the wishes are met by a strategy of an operator."""


def anything(operator: Operator, strategy: Strategy) -> bool:
    """It may."""
    return True


def nothing(operator: Operator, strategy: Strategy) -> int:
    """There are no wishes."""
    return 0


Path = tuple[Operator, ...]
"""The views between a tensor and what reads it, from the tensor on."""


@dataclass
class Formulated:
    """A problem, and what its nodes stand for: decisions with their choices, then parameters with their placements (by
    node), then what is given or must come out whole."""

    graph: Graph
    sizes: dict[str, int]
    decisions: Decisions
    choices: list[list[Choice]]
    problem: Problem
    stored: dict[int, tuple[list[str], list[Placements]]] = field(default_factory=dict)


@dataclass
class _Read:
    """A reader of a tensor: a node, or a parameter whose gradient it is."""

    node: int
    key: tuple[object, ...]
    wants: list[Placements | None]


class _Formulation:
    def __init__(
        self, graph: Graph, prices: Prices, allows: Allows, keeps: Keeps, merit: Merit, marks: Mapping[str, object],
        optimizer: OptimizerCost, moments: Moments | None, uncut: Collection[str], own_statistics: bool,
    ) -> None:  # fmt: skip
        self.uncut = uncut
        self.graph, self.prices, self.optimizer, self.moments = graph, prices, optimizer, moments
        self.sizes = prices.sizes
        self.decisions = decisions_of(graph, marks)
        options = Options(graph, self.sizes, allows)
        self.choices: list[list[Choice]] = []
        for decision in self.decisions.found:
            kept = [one for one in options.choices(decision) if _all(keeps, decision, one)]
            if not kept:
                raise _contradiction(decision)
            merits = [sum(map(merit, decision.members, one)) for one in kept]
            best = [one for one, met in zip(kept, merits, strict=True) if met == max(merits)]
            self.choices.append([tuple(map(owned, decision.members, one)) for one in best] if own_statistics else best)
        self.consumers = graph.consumers()
        self.producers = graph.producers()
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.stored: dict[int, tuple[list[str], list[Placements]]] = {}
        self.gradient_of: dict[str, list[str]] = defaultdict(list)
        for entry in graph.gradients:
            if entry.gradient is not None:
                self.gradient_of[entry.gradient].append(entry.parameter)
        self.whole = {graph.loss, *graph.metrics.values(), *graph.buffer_updates.values()}
        self.parameter_node: dict[str, int] = {}
        self.outputs_of = {one.name: one.outputs for one in graph.operators}

    def formulate(self) -> Formulated:
        for decision, choices in zip(self.decisions.found, self.choices, strict=True):
            costs = [
                sum(self.prices.operator_s(m, s) for m, s in zip(decision.members, one, strict=True)) for one in choices
            ]
            self._node(decision.members[0].name, decision.times * np.array(costs), self._held(decision, choices))
        reads = self._reads()
        self._parameters(reads)
        self._tensors(reads)
        limits = self.moments.limits if self.moments is not None else np.zeros(0)
        problem = Problem(tuple(self.nodes), tuple(self.tensors), limits)
        return Formulated(self.graph, self.sizes, self.decisions, self.choices, problem, self.stored)

    def _node(self, name: str, costs: Costs, memory: Costs | None = None) -> int:
        moments = len(self.moments.positions) if self.moments is not None else 0
        self.nodes.append(
            Node(name, costs.astype(float), np.zeros((moments, len(costs))) if memory is None else memory)
        )
        return len(self.nodes) - 1

    def _held(self, decision: Decision, choices: list[Choice]) -> Costs | None:
        """What a decision's results hold at each moment, in all repetitions."""
        if self.moments is None:
            return None
        held = np.zeros((len(self.moments.positions), len(choices)))
        for member, (operator, twins) in enumerate(zip(decision.members, decision.twins, strict=True)):
            for output, name in enumerate(operator.outputs):
                alive = self.moments.owned(self.outputs_of[twin][output] for twin in twins)
                for number, choice in enumerate(choices) if alive.any() else ():
                    made = output_placements(operator.rule, choice[member], output, self.sizes) if operator.rule else {}
                    held[:, number] += alive * self.moments.size(name, made)
        return held

    # --- who reads what ----------------------------------------------------------------------------------------------

    def _reads(self) -> dict[str, list[tuple[Operator, int, Path]]]:
        """By tensor that is no result of a follower: its readers, through followers, and the views on the way."""
        found: dict[str, list[tuple[Operator, int, Path]]] = {}
        self.behind: dict[str, tuple[str, Path]] = {}
        for name in self.graph.tensors:
            maker = self.producers.get(name)
            if maker is None or maker.name not in self.decisions.followers:
                found[name] = []
                self._trace(name, name, (), found[name])
        return found

    def _trace(self, root: str, name: str, path: Path, found: list[tuple[Operator, int, Path]]) -> None:
        self.behind[name] = (root, path)
        for operator, position in self.consumers.get(name, ()):
            if operator.name in self.decisions.followers:
                self._trace(root, operator.outputs[0], (*path, operator), found)
            else:
                found.append((operator, position, path))

    def _pulled(self, wanted: Placements, path: Path) -> Placements | None:
        """How a tensor must lie so that the views behind it give what is wanted."""
        found: Placements | None = {axis: one for axis, one in wanted.items() if axis in self.sizes}
        for view in reversed(path):
            if found is None:
                return None
            followed = follow(view, found, self.sizes)
            found = followed[1] if followed is not None else None
        return found

    def _wants(self, operator: Operator, position: int, path: Path) -> list[Placements | None]:
        """By choice of the operator's decision."""
        index, member = self.decisions.place[operator.name]
        rule = self.decisions.found[index].members[member].rule
        if rule is None:
            return [self._pulled({}, path)] * len(self.choices[index])
        return [
            self._pulled(input_placements(rule, one[member], position, self.sizes), path) for one in self.choices[index]
        ]

    def _reader_keys(self, reads: list[tuple[Operator, int, Path]]) -> list[tuple[object, ...]]:
        keys: list[tuple[object, ...]] = []
        for operator, position, path in reads:
            views = tuple(str(view.rule.pattern) for view in path if view.rule is not None)
            keys.append((*self.decisions.place[operator.name], position, views))
        return keys

    # --- parameters --------------------------------------------------------------------------------------------------

    def _parameters(self, reads: dict[str, list[tuple[Operator, int, Path]]]) -> None:
        """A node for every parameter (one for those that are alike in repeated blocks): it may be stored in any
        placement that somebody wants it in, if it may be cut."""
        trained = {entry.parameter for entry in self.graph.gradients if entry.gradient is not None}
        known: dict[object, int] = {}
        for name in self.graph.parameters:
            tensor = self.graph.tensors[name]
            keys = self._reader_keys(reads[name])
            key = (tensor.shape, tensor.dtype, name in trained, name in self.uncut, tuple(sorted(map(repr, keys))))
            if key in known and keys:
                self.stored[known[key]][0].append(name)
                self.parameter_node[name] = known[key]
                continue
            places: dict[str, Placements] = {"": {}}
            for operator, position, path in reads[name] if name not in self.uncut else ():
                for wanted in self._wants(operator, position, path):
                    cuts: Placements = {axis: one for axis, one in (wanted or {}).items() if isinstance(one, Shard)}
                    places.setdefault(repr(sorted(cuts.items())) if cuts else "", cuts)
            options = list(places.values())
            costs = [self.prices.update_s(tensor, one, self.optimizer) if name in trained else 0.0 for one in options]
            memory = None
            if self.moments is not None:
                states = self.optimizer.states
                memory = np.stack([self.moments.parameter(name, one, states, name in trained) for one in options], 1)
            node = self._node(name, np.array(costs), memory)
            known[key] = self.parameter_node[name] = node
            self.stored[node] = ([name], options)
        for node, (names, _) in self.stored.items():
            one = self.nodes[node]
            self.nodes[node] = Node(one.name, one.costs * len(names), one.memory * len(names))

    # --- tensors -----------------------------------------------------------------------------------------------------

    def _tensors(self, reads: dict[str, list[tuple[Operator, int, Path]]]) -> None:
        alike: dict[object, list[str]] = defaultdict(list)
        for name, found in reads.items():
            readers = self._reader_keys(found)
            for tail, (root, path) in self._ends(name):
                views = tuple(str(view.rule.pattern) for view in path if view.rule is not None)
                readers += [("gradient", self.parameter_node[one], views) for one in self.gradient_of.get(tail, ())]
                readers += [("whole", views)] if tail in self.whole else []
                assert root == name
            if not readers:
                continue
            tensor = self.graph.tensors[name]
            alike[self._maker_key(name), tensor.shape, tensor.dtype, tuple(sorted(map(repr, readers)))].append(name)
        for names in alike.values():
            self._tensor(names, reads[names[0]])

    def _ends(self, name: str) -> list[tuple[str, tuple[str, Path]]]:
        """The tensor and the views of it by followers, as they may leave the graph."""
        return self._tails.get(name, [(name, (name, ()))])

    @property
    def _tails(self) -> dict[str, list[tuple[str, tuple[str, Path]]]]:
        if not hasattr(self, "_tails_of"):
            self._tails_of: dict[str, list[tuple[str, tuple[str, Path]]]] = defaultdict(list)
            for tail, (root, path) in self.behind.items():
                self._tails_of[root].append((tail, (root, path)))
        return self._tails_of

    def _maker_key(self, name: str) -> object:
        maker = self.producers.get(name)
        if maker is None:
            return ("parameter", self.parameter_node[name]) if name in self.parameter_node else ("given", name)
        return (*self.decisions.place[maker.name], maker.outputs.index(name))

    def _tensor(self, names: list[str], found: list[tuple[Operator, int, Path]]) -> None:
        """A tensor and those that are alike in repeated blocks."""
        name = names[0]
        tensor, maker = self.graph.tensors[name], self.producers.get(name)
        node, haves = self._made(name)
        reads = [
            _Read(self.decisions.place[operator.name][0], (), self._wants(operator, position, path))
            for operator, position, path in found
        ]
        gradient = False
        for tail, (_, path) in self._ends(name):
            for parameter in self.gradient_of.get(tail, ()):
                stored = self.parameter_node[parameter]
                reads.append(_Read(stored, (), [self._pulled(one, path) for one in self.stored[stored][1]]))
                gradient = True
            if tail in self.whole:
                reads.append(_Read(self._node(f"{tail} whole", np.zeros(1)), (), [self._pulled({}, path)]))
        places: dict[str, Placements | None] = {}

        def number(one: Placements | None) -> int:
            key = "none" if one is None else repr(sorted(one.items()))
            places.setdefault(key, one)
            return list(places).index(key)

        readers = tuple((read.node, np.array([number(one) for one in read.wants])) for read in reads)
        wanted = list(places.values())
        made: dict[str, Placements] = {}
        for one in haves:
            made.setdefault(repr(sorted(one.items())), one)
        have = np.array([list(made).index(repr(sorted(one.items()))) for one in haves])
        owned = len(reads) == 1 and maker is not None
        often = 1 if maker is None or gradient else self.prices.times(maker)
        prices = np.array([
            [
                np.inf if want is None else self.prices.reshard_s(tensor, one, want, owned, often, gradient)
                for want in wanted
            ]
            for one in made.values()
        ])  # fmt: skip
        memory = None
        if self.moments is not None:
            memory, alive = np.zeros((len(self.moments.positions), *prices.shape)), self.moments.read(names)
            for (h, one), (w, want) in itertools.product(enumerate(made.values()), enumerate(wanted)):
                if want is not None and copies(one, want):
                    memory[:, h, w] = alive * self.moments.size(name, want)
        if prices.any():
            self.tensors.append(Tensor(node, have, readers, prices * len(names), memory))
        self._halos(node, len(names), found)

    def _halos(self, node: int, times: int, found: list[tuple[Operator, int, Path]]) -> None:
        """The halos of a tensor, each paid once, however many operators read it."""
        priced: dict[object, float] = {None: 0.0}
        readers: list[tuple[int, Places]] = []
        for operator, position, path in found:
            index, member = self.decisions.place[operator.name]
            views = tuple(view.name for view in path)
            first = self.decisions.found[index].members[member]
            fetched = [self.prices.fetched(first, one[member], position) for one in self.choices[index]]
            keyed: list[dict[object, float]] = [
                {(views, key): seconds for key, seconds in one.items()} for one in fetched
            ]
            for one in keyed:
                priced |= one
            for number in range(max(map(len, keyed), default=0)):
                wants = [list(one)[number] if number < len(one) else None for one in keyed]
                readers.append((index, np.array([list(priced).index(want) for want in wants])))
        if readers:
            have = np.zeros(self.nodes[node].num_choices, dtype=np.int64)
            self.tensors.append(Tensor(node, have, tuple(readers), times * np.array([list(priced.values())])))

    def _made(self, name: str) -> tuple[int, list[Placements]]:
        """The node that says how a tensor lies, and how, by its choices."""
        maker = self.producers.get(name)
        if maker is not None:
            index, member = self.decisions.place[maker.name]
            rule, output = self.decisions.found[index].members[member].rule, maker.outputs.index(name)
            if rule is None:
                return index, [{} for _ in self.choices[index]]
            return index, [output_placements(rule, one[member], output, self.sizes) for one in self.choices[index]]
        if name in self.parameter_node:
            node = self.parameter_node[name]
            return node, list(self.stored[node][1])
        return self._node(f"{name} given", np.zeros(1)), [self._given(name)]

    def _given(self, name: str) -> Placements:
        """Inputs are cut over dp (and dp_shard) along their batch; buffers and constants are whole."""
        return given_batch(self.graph, name, self.sizes) if self.graph.tensors[name].kind == "input" else {}


def _all(keeps: Keeps, decision: Decision, choice: Choice) -> bool:
    return all(keeps(member, strategy) for member, strategy in zip(decision.members, choice, strict=True))


def _contradiction(decision: Decision) -> LayoutError:
    operator = decision.leads[0]
    return LayoutError(
        f"no strategy of {operator.name} is what the pins ask for: an operator and its gradients are split alike",
        where=f"layout: pin, module {operator.module or '(model)'}",
        remedy=f"its factors are: batch, none, {', '.join(operator.classes)}",
    )


def formulate(
    graph: Graph, prices: Prices, allows: Allows, keeps: Keeps = anything, merit: Merit = nothing,
    marks: Mapping[str, object] | None = None, optimizer: OptimizerCost = ADAMW, moments: Moments | None = None,
    uncut: Collection[str] = (), own_statistics: bool = False,
) -> Formulated:  # fmt: skip
    """The problem of a graph.

    Args:
        keeps: which strategies an operator may have at all.
        merit: of these only those that meet most wishes are regarded.
        marks: by operator what is asked of it in particular (see ``decisions_of``).
        moments: at which memory is limited.
        uncut: parameters that are stored whole.
        own_statistics: batch norm takes them of each rank's samples.

    Raises:
        LayoutError: an operator may have no strategy.
    """
    return _Formulation(
        graph, prices, allows, keeps, merit, marks or {}, optimizer, moments, uncut, own_statistics
    ).formulate()
