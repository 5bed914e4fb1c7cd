"""Checks that a plan's stored parameters fit the graph, and that its gradients, gathers and buckets fit them."""

from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import members
from meshwright.ir.placement import Flat, Partial, Placement, Placements, Shard, describe, flat_axis, nested
from meshwright.ir.stages import cut

if TYPE_CHECKING:
    from meshwright.ir.plan import Plan


def storage_problems(plan: "Plan", graph: Graph) -> Iterator[Problem]:
    """Problems of stored parameters: unknown names and axes, and placements that a parameter cannot have."""
    stored = [(index, *item) for index, stage in enumerate(plan.stages) for item in stage.storage.items()]
    for index, name, placements in stored:
        sizes = plan.submesh(index).sizes
        place = f"storage[{name!r}]"
        if any(stage.storage.get(name, placements) != placements for stage in plan.stages):
            yield place, "stages that share it store it in different ways", "store a tied parameter alike in all stages"
        if name not in graph.parameters:
            yield place, f"there is no parameter {name!r}", "remove the line"
        dims = graph.tensors[name].shape
        for axis, placement in placements.items():
            if axis not in sizes:
                yield place, f"unknown axis {axis!r}", f"axes are {', '.join(sizes)}"
            if isinstance(placement, Partial):
                yield place, "a parameter cannot be Partial", "make it shard or replicate"
            if isinstance(placement, Flat) and flat_axis(placements) != axis:
                yield place, "it is flat over two axes", "leave one of them out"
            if not isinstance(placement, Shard):
                continue
            alike = [one for one in placements if _factor(placements[one]) == _factor(placement)]
            parts = prod(sizes.get(one, 1) for one in alike)
            length = dims[placement.dim] if 0 <= placement.dim < len(dims) else 0
            units, rest = divmod(length, placement.outer * placement.unit)
            if rest or units < parts:
                problem = f"{placement} over {parts} ranks does not fit shape {list(dims)}"
                yield place, problem, "choose a dim, an outer and a unit that make as many units or more of it"
        cuts = [(axis, one) for axis, one in placements.items() if isinstance(one, Shard)]
        for (axis, one), (other, two) in combinations(sorted(cuts, key=lambda cut: cut[1].outer), 2):
            if one.dim == two.dim and not nested(one, sizes[axis], two, dims[one.dim]):
                both = f"{one} over {axis!r} and {two} over {other!r}"
                problem = f"{both} do not cut dim {one.dim} of {list(dims)} at factors of one size"
                yield place, problem, "cut another dim, or leave one axis out"


def _factor(placement: Placement) -> tuple[int, int] | None:
    return (placement.dim, placement.outer) if isinstance(placement, Shard) else None


def gather_problems(plan: "Plan", graph: Graph) -> Iterator[Problem]:
    """Problems of gathers and released parameters that are not stored Flat, and of gradients whose placements differ
    from those of their stored parameters."""
    seen: set[str] = set()
    for index, bucket in enumerate(plan.gathers):
        place = f"gathers[{index}]"
        for name in bucket.parameters:
            if not isinstance(plan.storage(name).get(bucket.axis), Flat):
                yield place, f"{name!r} is not flat over {bucket.axis!r}", "take it out of the bucket"
            if name in seen:
                yield place, f"{name!r} is gathered already", "take it out of one"
            seen.add(name)
        if len({graph.tensors[name].dtype for name in bucket.parameters}) > 1:
            yield place, "its parameters have several dtypes", "make a bucket for each"
    for number, stage in enumerate(plan.stages):
        for name in stage.released:
            if not flat_axis(stage.storage.get(name, {})):
                yield f"stages[{number}].released", f"{name!r} is not stored flat", "take it out"
        for name, placements in stage.gradients.items():
            if placements != stage.storage.get(name):
                problem = f"the gradient of {name!r} is summed up otherwise than the parameter is stored"
                yield f"stages[{number}].gradients", problem, "take it out, or give it the parameter's storage"


def bucket_problems(plan: "Plan", graph: Graph, placements: dict[str, Placements]) -> Iterator[Problem]:
    """Problems of gradients in buckets: each gradient must be Partial over the bucket's axes, and otherwise have the
    placements of its stored parameter."""
    gradients = {entry.parameter: entry.gradient for entry in graph.gradients}
    terms = cut(graph, plan.firsts).terms
    seen: set[str] = set()
    for index, bucket in enumerate(plan.buckets):
        place = f"buckets[{index}]"
        for parameter in bucket.parameters:
            if len(terms.get(parameter, ())) > 1:
                problem = f"several stages have terms of the gradient of {parameter!r}"
                yield place, problem, "take it out of the bucket"
        flat = {isinstance(plan.storage(name).get(bucket.axis), Flat) for name in bucket.parameters}
        if len(flat) > 1:
            yield place, f"some of its parameters are flat over {bucket.axis!r}, and some are not", "make two of it"
        for parameter in bucket.parameters:
            gradient = gradients.get(parameter) or parameter
            if gradient in seen:
                yield place, f"the gradient of {parameter!r} is in a bucket already", "take it out of one"
            seen.add(gradient)
            storage = plan.storage(parameter)
            wanted: Placements = {axis: one for axis, one in storage.items() if isinstance(one, Shard)}
            wanted |= dict.fromkeys((*members(bucket.axis), *bucket.across), Partial("sum"))
            have = {axis: one for axis, one in placements.get(gradient, {}).items() if axis != TIME}
            if have != wanted:
                problem = f"the gradient of {parameter!r} is {describe(have)}, and not {describe(wanted)}"
                yield place, problem, "take it out of the bucket"
