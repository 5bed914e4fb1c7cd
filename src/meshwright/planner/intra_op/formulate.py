"""Formulate the choice of strategies as a problem: decisions with their choices, and tensors between decisions."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import numpy as np

from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.own_samples import owned
from meshwright.ir.placement import Flat, Placements, Shard, input_placements, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.stages import given_batch
from meshwright.planner.buckets import part_bytes
from meshwright.planner.intra_op.decisions import Decision, decisions_of
from meshwright.planner.intra_op.moments import Moments, copies
from meshwright.planner.intra_op.options import Allows, Choice, Options, follow
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.intra_op.problem import Costs, Places, Problem, ProblemNode, ProblemTensor
from meshwright.planner.intra_op.storage import Storage, storages

P = TypeVar("P", bound="Storage | None")
Path = tuple[Operator, ...]
"""The view operators between a tensor and its reader, in order from the tensor to the reader."""


class Formulation:
    """The ``problem`` of a graph.

    The first nodes of the problem are decisions with their ``choices``. Then come nodes for parameters; ``stored`` maps
    such a node to its parameters and their possible placements. The last nodes stand for tensors with a fixed
    placement. These are inputs, buffers and constants, and results that must be whole.

    Args:
        keeps: says whether an operator may have a strategy.
        merit: gives the score of a strategy. For each decision, only the choices with the highest total score are kept.
        marks: maps an operator to its pins (see ``decisions_of``).
        moments: the moments at which memory is limited; None: memory is not limited.
        uncut: parameters that are stored whole.
        zero: the axis over which ZeRO may divide the storage of each parameter; empty: none.
        parameter_bytes: the limit of the parameters that a rank stores between steps; None: not limited.
        own_statistics: whether batch norm computes statistics from each rank's own samples.

    Raises:
        LayoutError: an operator has no allowed strategy.
    """

    def __init__(
        self, graph: Graph, prices: Prices, allows: Allows, keeps: Callable[[Operator, Strategy], bool],
        merit: Callable[[Operator, Strategy], int], marks: Mapping[str, object], optimizer: OptimizerCost,
        moments: Moments | None, uncut: Collection[str], own_statistics: bool, zero: str = "",
        parameter_bytes: float | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.prices, self.optimizer, self.moments, self.uncut = graph, prices, optimizer, moments, uncut
        self.zero, self.times = zero, len(moments.limits) if moments is not None else 0
        self.limits = moments.limits if moments is not None else np.zeros(0)
        self.limits = np.append(self.limits, [] if parameter_bytes is None else [parameter_bytes])
        self.sizes = prices.sizes
        self.decisions = decisions_of(graph, marks)
        options = Options(graph, self.sizes, allows)
        self.choices: list[list[Choice]] = []
        for decision in self.decisions.entries:
            kept = [choice for choice in options.choices(decision) if all(map(keeps, decision.members, choice))]
            if not kept:
                raise _contradiction(decision)
            merits = [sum(map(merit, decision.members, choice)) for choice in kept]
            best = [choice for choice, met in zip(kept, merits, strict=True) if met == max(merits)]
            self.choices.append([tuple(map(owned, decision.members, way)) for way in best] if own_statistics else best)
        self.consumers, self.producers = graph.consumers(), graph.producers()
        self.outputs_of = {operator.name: operator.outputs for operator in graph.operators}
        self.nodes: list[ProblemNode] = []
        self.tensors: list[ProblemTensor] = []
        self.stored: dict[int, tuple[list[str], list[Storage]]] = {}
        self.parameter_node: dict[str, int] = {}
        self.gradient_of: dict[str, list[str]] = defaultdict(list)
        for entry in graph.gradients:
            if entry.gradient is not None:
                self.gradient_of[entry.gradient].append(entry.parameter)
        self.late = {graph.tensors[name].storage for op in graph.operators if op.backward for name in op.inputs}
        self.whole = {graph.loss, *graph.metrics.values(), *graph.buffer_updates.values()}
        self.reads: dict[str, list[tuple[Operator, int, Path]]] = defaultdict(list)
        """Maps a tensor that no follower makes (see ``Decisions``) to its readers: (operator, input number, views on
        the way)."""
        self.ends: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        """Maps each of these tensors to itself and to the outputs of the followers after it: (name, views on the way).
        Any of these outputs may be an output of the graph."""
        for name in graph.tensors:
            maker = self.producers.get(name)
            if maker is None or maker.name not in self.decisions.followers:
                self._trace(name, name, ())
        self._decided()
        self._parameters()
        self._tensors()
        self.problem = Problem(tuple(self.nodes), tuple(self.tensors), self.limits)

    def _node(self, name: str, costs: Costs, memory: Costs | None = None) -> int:
        held = np.zeros((len(self.limits), len(costs)))
        if memory is not None:
            held[: len(memory)] = memory
        self.nodes.append(ProblemNode(name, costs.astype(float), held))
        return len(self.nodes) - 1

    def _decided(self) -> None:
        """Add a node for every decision."""
        for decision, choices in zip(self.decisions.entries, self.choices, strict=True):
            costs = [sum(map(self.prices.operator_s, decision.members, choice)) for choice in choices]
            self._node(decision.members[0].name, decision.times * np.array(costs), self._held(decision, choices))

    def _held(self, decision: Decision, choices: list[Choice]) -> Costs | None:
        """An array [moments, choices]: the bytes of a decision's results, summed over all repetitions of its block."""
        if self.moments is None:
            return None
        held = np.zeros((self.times, len(choices)))
        for member, (operator, twins) in enumerate(zip(decision.members, decision.twins, strict=True)):
            for output, name in enumerate(operator.outputs):
                alive = self.moments.owned(self.outputs_of[twin][output] for twin in twins)
                for number, choice in enumerate(choices) if alive.any() else ():
                    have = output_placements(operator.rule, choice[member], output, self.sizes) if operator.rule else {}
                    held[:, number] += alive * self.moments.size(name, have)
        return held

    # --- readers -----------------------------------------------------------------------------------------------------

    def _trace(self, root: str, name: str, path: Path) -> None:
        self.ends[root].append((name, path))
        for operator, position in self.consumers.get(name, ()):
            if operator.name in self.decisions.followers:
                self._trace(root, operator.outputs[0], (*path, operator))
            else:
                self.reads[root].append((operator, position, path))

    def _pulled(self, wanted: Placements, path: Path) -> Placements | None:
        """The placement that a tensor needs before the views in ``path``, so that it has the placement ``wanted`` after
        them. None if there is no such placement. A Flat part has the same size before and after a view."""
        placements: Placements = {axis: placement for axis, placement in wanted.items() if axis in self.sizes}
        flat: Placements = {axis: placement for axis, placement in placements.items() if isinstance(placement, Flat)}
        placements = {axis: placement for axis, placement in placements.items() if axis not in flat}
        for view in reversed(path):
            followed = follow(view, placements, self.sizes)
            if followed is None:
                return None
            placements = followed[1]
        return placements | flat

    def _place(self, operator: Operator) -> tuple[int, int, Operator]:
        """The index of the operator's decision, the index of the member that stands for the operator, and this
        member."""
        index, member = self.decisions.place[operator.name]
        return index, member, self.decisions.entries[index].members[member]

    def _wants(self, operator: Operator, position: int, path: Path) -> list[Placements | None]:
        """For each choice of the operator's decision, the placement that the tensor needs before ``path``."""
        index, member, first = self._place(operator)
        if first.rule is None:
            return [self._pulled({}, path)] * len(self.choices[index])
        return [
            self._pulled(input_placements(first.rule, choice[member], position, self.sizes), path)
            for choice in self.choices[index]
        ]

    def _reader_keys(self, name: str) -> list[tuple[object, ...]]:
        return [
            (*self.decisions.place[operator.name], position, _patterns(path))
            for operator, position, path in self.reads[name]
        ]

    # --- parameters --------------------------------------------------------------------------------------------------

    def _parameters(self) -> None:
        """Add a node for every parameter (one node for equal parameters of repeated blocks). A node has the following
        choices: to store the parameter whole, or in any split that a reader needs (unless it is in ``uncut``); and each
        of these also with ZeRO."""
        trained = {entry.parameter for entry in self.graph.gradients if entry.gradient is not None}
        known: dict[object, int] = {}
        for name in self.graph.parameters:
            tensor = self.graph.tensors[name]
            keys = self._reader_keys(name)
            key = (tensor.shape, tensor.dtype, name in trained, name in self.uncut, tuple(sorted(map(repr, keys))))
            if key in known and keys:
                self.stored[known[key]][0].append(name)
                self.parameter_node[name] = known[key]
                continue
            places: dict[str, Placements] = {"": {}}
            for operator, position, path in self.reads[name] if name not in self.uncut else ():
                for wanted in self._wants(operator, position, path):
                    cuts: Placements = {axis: part for axis, part in (wanted or {}).items() if isinstance(part, Shard)}
                    places.setdefault(repr(sorted(cuts.items())) if cuts else "", cuts)
            axis = self.zero if name in trained and name not in self.uncut else ""
            accumulates = self.prices.microbatches > 1
            stages = (1, 2, 3) if accumulates else (2, 3) if name in self.late else (2,)
            options = storages(places.values(), axis, stages)
            costs = [
                self.prices.update_s(tensor, option.placements, self.optimizer) if name in trained else 0.0
                for option in options
            ]
            memory = np.zeros((len(self.limits), len(options)))
            for number, option in enumerate(options):
                if self.moments is not None:
                    states = self.optimizer.states
                    memory[: self.times, number] = self.moments.parameter(name, option, states, name in trained)
                memory[self.times :, number] = part_bytes(tensor, option.placements, self.sizes)
            node = self._node(name, np.array(costs), memory)
            known[key] = self.parameter_node[name] = node
            self.stored[node] = ([name], options)
        for node, (names, _) in self.stored.items():
            single = self.nodes[node]
            self.nodes[node] = ProblemNode(single.name, single.costs * len(names), single.memory * len(names))

    # --- tensors -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> None:
        alike: dict[object, list[str]] = defaultdict(list)
        for name, ends in self.ends.items():
            readers = self._reader_keys(name)
            for tail, path in ends:
                views = _patterns(path)
                readers += [
                    ("gradient", self.parameter_node[parameter], views) for parameter in self.gradient_of.get(tail, ())
                ]
                readers += [("whole", views)] if tail in self.whole else []
            if readers:
                tensor, key = self.graph.tensors[name], tuple(sorted(map(repr, readers)))
                alike[self._maker_key(name), tensor.shape, tensor.dtype, key].append(name)
        for names in alike.values():
            self._tensor(names)

    def _maker_key(self, name: str) -> object:
        maker = self.producers.get(name)
        if maker is None:
            return ("parameter", self.parameter_node[name]) if name in self.parameter_node else ("given", name)
        return (*self.decisions.place[maker.name], maker.outputs.index(name))

    def _tensor(self, names: list[str]) -> None:
        """Add one tensor for all of ``names``, which are equal tensors of repeated blocks."""
        name = names[0]
        tensor, maker = self.graph.tensors[name], self.producers.get(name)
        node, haves = self._producer_of(name)
        reads: list[tuple[int, list[Storage | None]]] = [
            (self.decisions.place[operator.name][0], _stored(self._wants(operator, position, path)))
            for operator, position, path in self.reads[name]
        ]
        gradient = False
        for tail, path in self.ends[name]:
            for parameter in self.gradient_of.get(tail, ()):
                stored = self.parameter_node[parameter]
                ways = self.stored[stored][1]
                pulled = [(self._pulled(way.placements, path), way.zero) for way in ways]
                reads.append((stored, [None if lies is None else Storage(lies, zero) for lies, zero in pulled]))
                gradient = True
            if tail in self.whole:
                reads.append((self._node(f"{tail} whole", np.zeros(1)), _stored([self._pulled({}, path)])))
        wanted: dict[str, Storage | None] = {}
        readers = tuple((reader, _numbered(wants, wanted)) for reader, wants in reads)
        offered: dict[str, Storage] = {}
        have = _numbered(haves, offered)
        owned = len(reads) == 1 and maker is not None
        late = name in self.late
        often = 1 if maker is None or gradient else self.prices.times(maker)

        def price(offer: Storage, want: Storage | None) -> float:
            if want is None:
                return np.inf
            micro = self.prices.microbatches
            times = offer.gathers(micro, late) if offer.zero else want.reductions(micro) if want.zero else often
            return self.prices.reshard_s(tensor, offer.placements, want.placements, owned, times, gradient)

        prices = np.array([[price(offer, want) for want in wanted.values()] for offer in offered.values()])
        memory = None
        if self.moments is not None:
            memory = np.zeros((len(self.limits), *prices.shape))
            for (h, offer), (w, want) in itertools.product(enumerate(offered.values()), enumerate(wanted.values())):
                if want is not None and copies(offer.placements, want.placements):
                    zero = offer.zero
                    alive = self.moments.gathered(names, zero) if zero else self.moments.read(names)
                    memory[: self.times, h, w] = alive * self.moments.size(name, want.placements)
        if prices.any():
            self.tensors.append(ProblemTensor(node, have, readers, prices * len(names), memory))
        self._halos(node, names)

    def _halos(self, node: int, names: list[str]) -> None:
        """Add the costs of the halos of ``names`` (equal tensors). The cost of a halo counts once, even if several
        operators read the halo."""
        priced: dict[object, float] = {None: 0.0}
        readers: list[tuple[int, Places]] = []
        for operator, position, path in self.reads[names[0]]:
            index, member, first = self._place(operator)
            views = tuple(view.name for view in path)
            fetched = [self.prices.fetched(first, choice[member], position) for choice in self.choices[index]]
            keyed: list[dict[object, float]] = [
                {(views, key): seconds for key, seconds in halos.items()} for halos in fetched
            ]
            for halos in keyed:
                priced |= halos
            for number in range(max(map(len, keyed), default=0)):
                wants = [list(halos)[number] if number < len(halos) else None for halos in keyed]
                readers.append((index, np.array([list(priced).index(want) for want in wants])))
        if readers:
            have = np.zeros(self.nodes[node].num_choices, dtype=np.int64)
            self.tensors.append(
                ProblemTensor(node, have, tuple(readers), len(names) * np.array([list(priced.values())]))
            )

    def _producer_of(self, name: str) -> tuple[int, list[Storage]]:
        """The node that decides a tensor's placement, and the placement under each choice of this node. Inputs of the
        step are split over dp (and dp_shard) along their batch; buffers and constants are whole."""
        maker = self.producers.get(name)
        if maker is not None:
            index, member, first = self._place(maker)
            if first.rule is None:
                return index, [Storage({}) for _ in self.choices[index]]
            output = maker.outputs.index(name)
            return index, [
                Storage(output_placements(first.rule, choice[member], output, self.sizes))
                for choice in self.choices[index]
            ]
        if name in self.parameter_node:
            node = self.parameter_node[name]
            return node, self.stored[node][1]
        given = given_batch(self.graph, name, self.sizes) if self.graph.tensors[name].kind == "input" else {}
        return self._node(f"{name} given", np.zeros(1)), [Storage(given)]


def _stored(places: list[Placements | None]) -> list[Storage | None]:
    return [None if place is None else Storage(place) for place in places]


def _patterns(path: Path) -> tuple[str, ...]:
    return tuple(view.rule.pattern for view in path if view.rule is not None)


def _numbered(places: list[P], known: dict[str, P]) -> Places:
    """Replace placements by their indices in ``known``. Placements that ``known`` lacks are added to it."""
    keys = ["none" if place is None else f"{place.zero} {sorted(place.placements.items())}" for place in places]
    for key, place in zip(keys, places, strict=True):
        known.setdefault(key, place)
    number = {key: index for index, key in enumerate(known)}
    return np.array([number[key] for key in keys])


def _contradiction(decision: Decision) -> LayoutError:
    operator = decision.leads[0]
    return LayoutError(
        f"no strategy of {operator.name} satisfies the pins: an operator and its gradients have the same split",
        where=f"layout: pin, module {operator.module or '(model)'}",
        remedy=f"its factors are: batch, none, {', '.join(operator.classes)}",
    )
