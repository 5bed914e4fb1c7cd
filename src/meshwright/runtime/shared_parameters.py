"""The parameters of a trainer that has another trainer beside it: one set of parameters, with several losses."""

from torch import nn

from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Placements
from meshwright.ir.plan import Plan
from meshwright.ir.stages import cut
from meshwright.runtime.state import LocalParameters


class SharedParameters(LocalParameters):
    """Parameters and buffers that another trainer holds too.

    Raises:
        LayoutError: the other trainer has another model or device, or stores a parameter otherwise.
    """

    def __init__(
        self, other: LocalParameters, model: nn.Module, graph: Graph, plan: Plan, groups: dict[str, AxisGroup]
    ) -> None:
        if other.model is not model:
            raise LayoutError(
                f"its model is another {type(other.model).__name__}", where="beside=", remedy="give both the same model"
            )
        self.graph, self.groups, self.model, self.device = graph, groups, model, other.device
        self.own, self.given, self.named_buffers = other.own, other.given, other.named_buffers
        self._owners = cut(graph, plan.firsts).pipeline_owners(plan.pipeline)
        self._placements = {
            name: {axis: placement for axis, placement in plan.storage(name).items() if axis in groups}
            for name in graph.parameters
        }
        for name in (*graph.parameters, *graph.buffers):
            here = self.placements(name), self.owners(name)
            there = other.placements(name), other.owners(name)
            if here != there:
                raise LayoutError(
                    f"this plan stores it as {_in_words(*here)}, the plan beside it as {_in_words(*there)}",
                    where=f"parameter or buffer {name}",
                    remedy="give both the same layout, without tensor parallelism of modules that only one loss trains "
                    "(Layout.pin), such as Layout(dp=-1, zero=3)",
                )

    def take_over(self) -> None:
        """Do nothing: the other trainer has put its meta tensors into the caller's module."""


def _in_words(placements: Placements, owners: tuple[int, ...]) -> str:
    parts = ", ".join(f"{axis}: {placement}" for axis, placement in placements.items()) or "whole"
    return f"{parts}, on stages {', '.join(map(str, owners))}"
