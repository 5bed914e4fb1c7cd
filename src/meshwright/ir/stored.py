"""Whether what a plan says of parameters in memory, and of their gradients, holds together."""

from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from meshwright.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import members
from meshwright.ir.placement import Flat, Partial, Placement, Placements, Shard, describe, flat_axis, nested
from meshwright.ir.stages import cut

if TYPE_CHECKING:
    from meshwright.ir.plan import Plan


def check_storage(plan: "Plan", graph: Graph, where: str) -> None:
    """That parameters are cut between factors, in whole units, over axes that exist."""
    stored = [(index, *item) for index, stage in enumerate(plan.stages) for item in stage.storage.items()]
    for index, name, placements in stored:
        sizes = {axis.name: axis.size for axis in plan.submesh(index).axes}
        if any(stage.storage.get(name, placements) != placements for stage in plan.stages):
            raise PlanError(
                "stages that share it store it in different ways",
                where=f"{where}: storage[{name!r}]",
                remedy="store a tied parameter alike in all stages",
            )
        place = f"{where}: storage[{name!r}]"
        if name not in graph.parameters:
            raise PlanError(f"there is no parameter {name!r}", where=place, remedy="remove the line")
        for axis, placement in placements.items():
            if axis not in sizes:
                raise PlanError(f"unknown axis {axis!r}", where=place, remedy=f"axes are {', '.join(sizes)}")
            if isinstance(placement, Partial):
                raise PlanError("a parameter cannot be Partial", where=place, remedy="make it shard or replicate")
            if isinstance(placement, Flat) and flat_axis(placements) != axis:
                raise PlanError("it is flat over two axes", where=place, remedy="leave one of them out")
            if not isinstance(placement, Shard):
                continue
            dims = graph.tensors[name].shape
            alike = [one for one in placements if _factor(placements[one]) == _factor(placement)]
            parts = prod(sizes.get(one, 1) for one in alike)
            length = dims[placement.dim] if 0 <= placement.dim < len(dims) else 0
            units, rest = divmod(length, placement.outer * placement.unit)
            if rest or units < parts:
                raise PlanError(
                    f"{placement} over {parts} ranks does not fit shape {list(dims)}",
                    where=place, remedy="choose a dim, an outer and a unit that make as many units or more of it",
                )  # fmt: skip
        cuts = [(axis, one) for axis, one in placements.items() if isinstance(one, Shard)]
        for (axis, one), (other, two) in combinations(sorted(cuts, key=lambda cut: cut[1].outer), 2):
            if one.dim == two.dim and not nested(one, sizes[axis], two, graph.tensors[name].shape[one.dim]):
                raise PlanError(
                    f"{one} over {axis!r} and {two} over {other!r} do not cut dim {one.dim} of "
                    f"{list(graph.tensors[name].shape)} at factors of one size",
                    where=f"{where}: storage[{name!r}]", remedy="cut another dim, or leave one axis out",
                )  # fmt: skip


def _factor(placement: Placement) -> tuple[int, int] | None:
    return (placement.dim, placement.outer) if isinstance(placement, Shard) else None


def check_gathers(plan: "Plan", graph: Graph, where: str) -> None:
    """That what is gathered together, or again, or summed up in parts, is stored so."""
    seen: set[str] = set()
    for index, bucket in enumerate(plan.gathers):
        place = f"{where}: gathers[{index}]"
        for name in bucket.parameters:
            if not isinstance(plan.storage(name).get(bucket.axis), Flat):
                raise PlanError(
                    f"{name!r} is not flat over {bucket.axis!r}", where=place, remedy="take it out of the bucket"
                )
            if name in seen:
                raise PlanError(f"{name!r} is gathered already", where=place, remedy="take it out of one")
            seen.add(name)
        if len({graph.tensors[name].dtype for name in bucket.parameters}) > 1:
            raise PlanError("its parameters have several dtypes", where=place, remedy="make a bucket for each")
    for number, stage in enumerate(plan.stages):
        place = f"{where}: stages[{number}]"
        for name in stage.released:
            if not flat_axis(stage.storage.get(name, {})):
                raise PlanError(f"{name!r} is not stored flat", where=f"{place}.released", remedy="take it out")
        for name, placements in stage.gradients.items():
            if placements != stage.storage.get(name):
                raise PlanError(
                    f"the gradient of {name!r} is summed up otherwise than the parameter is stored",
                    where=f"{place}.gradients", remedy="take it out, or give it the parameter's storage",
                )  # fmt: skip


def check_buckets(plan: "Plan", graph: Graph, placements: dict[str, Placements], where: str) -> None:
    """That the gradients in buckets lie as their parameters do, but for the sum over the bucket's axis."""
    gradients = {entry.parameter: entry.gradient for entry in graph.gradients}
    terms = cut(graph, plan.firsts).terms
    seen: set[str] = set()
    for index, bucket in enumerate(plan.buckets):
        for parameter in bucket.parameters:
            if len(terms.get(parameter, ())) > 1:
                raise PlanError(
                    f"several stages have terms of the gradient of {parameter!r}",
                    where=f"{where}: buckets[{index}]", remedy="take it out of the bucket",
                )  # fmt: skip
        flat = {isinstance(plan.storage(name).get(bucket.axis), Flat) for name in bucket.parameters}
        if len(flat) > 1:
            raise PlanError(
                f"some of its parameters are flat over {bucket.axis!r}, and some are not",
                where=f"{where}: buckets[{index}]", remedy="make two of it",
            )  # fmt: skip
        for parameter in bucket.parameters:
            gradient = gradients.get(parameter) or parameter
            if gradient in seen:
                raise PlanError(
                    f"the gradient of {parameter!r} is in a bucket already",
                    where=f"{where}: buckets[{index}]", remedy="take it out of one",
                )  # fmt: skip
            seen.add(gradient)
            storage = plan.storage(parameter)
            wanted: Placements = {axis: one for axis, one in storage.items() if isinstance(one, Shard)}
            wanted |= dict.fromkeys((*members(bucket.axis), *bucket.across), Partial("sum"))
            have = dict(placements.get(gradients.get(parameter) or "", {}))
            have.pop(TIME, None)
            if have != wanted:
                raise PlanError(
                    f"the gradient of {parameter!r} is {describe(have)}, and not {describe(wanted)}",
                    where=f"{where}: buckets[{index}]", remedy="take it out of the bucket",
                )  # fmt: skip
