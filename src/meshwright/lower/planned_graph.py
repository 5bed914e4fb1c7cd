"""A graph with its plan, and what all stages of the plan read of both."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.stages import Cut, cut


@dataclass(frozen=True)
class PlannedGraph:
    """A graph and a plan for it. Facts about the whole graph are computed once, not once for each stage."""

    graph: Graph
    plan: Plan

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

    @cached_property
    def readers(self) -> Counter[str]:
        """The number of times that operators read each storage, not counting operators that make views of it."""
        tensors, result = self.graph.tensors, Counter[str]()
        for operator in self.graph.operators:
            views = {tensors[output].storage for output in operator.outputs}
            read = (tensors[name].storage for name in operator.inputs)
            result.update(storage for storage in read if storage not in views)
        return result
