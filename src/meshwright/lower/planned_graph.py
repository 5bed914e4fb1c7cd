"""A graph with its plan, and facts about both that all stages need."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import Cut, cut


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
