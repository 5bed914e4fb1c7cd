"""A graph with its plan, and facts about both that all stages need."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Placements, local_shape
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.program import Transfer, Value
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import Cut, border, cut


def with_time(groups: Mapping[str, AxisGroup], microbatches: int) -> dict[str, AxisGroup]:
    """A rank's groups, with the axis ``TIME`` if a step has several micro-batches."""
    return {**groups, **({TIME: AxisGroup(TIME, microbatches, 0)} if microbatches > 1 else {})}


@dataclass(frozen=True)
class PlannedGraph:
    """A graph and a plan for it. Facts about the whole graph are computed once, not once for each stage."""

    graph: Graph
    plan: Plan

    def following(self, plan: Plan) -> "PlannedGraph":
        """The same graph with another plan. Facts that do not depend on the plan are not computed again, and neither is
        the cut if it is the same."""
        other, own = PlannedGraph(self.graph, plan), {"graph", "plan", "strategies"}
        own |= {"divided"} if plan.firsts != self.plan.firsts else set()
        other.__dict__.update({name: fact for name, fact in self.__dict__.items() if name not in own})
        return other

    @cached_property
    def divided(self) -> Cut:
        """The graph, cut into the plan's stages.

        Raises:
            PlanError: the graph cannot be cut before the stages' first operators.
        """
        return cut(self.graph, self.plan.firsts)

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Maps every operator to its strategy in the stage that holds it."""
        return self.plan.strategies(self.graph, self.divided)

    @cached_property
    def makers(self) -> dict[str, Operator]:
        """Maps a tensor to the operator that makes it."""
        return self.graph.producers()

    @cached_property
    def consumers(self) -> dict[str, list[tuple[Operator, int]]]:
        """Maps a tensor to the operators that read it, each with the position of the tensor among its inputs."""
        return self.graph.consumers()

    @cached_property
    def modules(self) -> dict[str, str]:
        """Maps an operator to its module."""
        return {operator.name: operator.module for operator in self.graph.operators}

    def strategy(self, operator: Operator, sizes: Mapping[str, int]) -> Strategy:
        """An operator's strategy, without the axes of one rank. ``sizes`` has all other axes."""
        return {axis: choice for axis, choice in self.strategies[operator.name].items() if axis in sizes}

    def border(self, name: str, sizes: dict[str, int]) -> Placements:
        """The placements of a tensor while it is sent to another stage. ``sizes`` maps an axis to its size."""
        maker = self.makers[name]
        return border(self.graph, name, maker, self.strategy(maker, sizes), sizes, uneven=self.plan.uneven)

    def transfer(self, name: str, value: str, groups: Mapping[str, AxisGroup]) -> Transfer:
        """How a tensor is sent to another stage. ``value`` is the name of this rank's part of it, and ``groups`` are
        the rank's groups, with ``TIME`` if there are several micro-batches."""
        (sizes, at), tensor = sizes_of(groups), self.graph.tensors[name]
        placements = self.border(name, sizes)
        over_time = {axis: placement for axis, placement in placements.items() if axis == TIME}
        over_ranks = {axis: placement for axis, placement in placements.items() if axis != TIME}
        whole, local = (local_shape(tensor.shape, each, sizes, at) for each in (over_time, placements))
        codec = self.plan.border_codec if tensor.shape and getattr(torch, tensor.dtype).is_floating_point else ""
        return Transfer(name, Value(value, local, tensor.dtype, value), whole, codec, over_ranks)

    def passed(self, stage: int, operators: Iterable[Operator]) -> frozenset[str]:
        """The tensors that a stage with these ``operators`` sends on as it receives them, and does not read."""
        cut = self.divided
        read = {name for operator in operators for name in operator.inputs}
        read.update(name for terms in cut.terms.values() for name in terms.get(stage, ()))
        pairs = zip(cut.received(stage), cut.sent(stage), strict=True)
        return frozenset(name for received, sent in pairs for name in {*received}.intersection(sent) - read)

    def recomputation(self, stage: int) -> Recomputation:
        """The operators that a stage recomputes in backward."""
        return Recomputation(self.plan.stages[stage].recompute, self.modules)

    def mixtures_again(self, stage: int) -> frozenset[str]:
        """The mixtures of experts that a stage recomputes. They do not keep their activations. So plans that recompute
        different mixtures of experts have different calls (``lower.fuse``)."""
        again = self.recomputation(stage)
        return frozenset(filter(again.holds, self._mixtures)) if again.names else frozenset()

    @cached_property
    def _mixtures(self) -> list[str]:
        return [operator.name for operator in self.graph.operators if operator.target == "meshwright.experts.default"]

    @cached_property
    def readers(self) -> Counter[str]:
        """The number of times that operators read each storage, not counting operators that make views of it."""
        tensors, result = self.graph.tensors, Counter[str]()
        for operator in self.graph.operators:
            views = {tensors[output].storage for output in operator.outputs}
            read = (tensors[name].storage for name in operator.inputs)
            result.update(storage for storage in read if storage not in views)
        return result
