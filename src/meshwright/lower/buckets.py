"""Handles buckets: parameters that one collective gathers together, and gradients that one collective reduces
together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from meshwright.ir.graph import Tensor
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Flat, Placements, local_shape, unflattened
from meshwright.ir.plan import Bucket, Plan
from meshwright.ops import collectives

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


@dataclass
class LoweredValue:
    """A tensor of the graph on this rank, and its versions under other placements."""

    node: fx.Node
    placements: Placements
    owned: bool = False
    versions: dict[tuple[tuple[str, Any], ...], Any] = field(default_factory=dict)
    phase: str = ""


class Gathers:
    """Gathers parameters that are stored Flat. The first use of a parameter gathers its whole bucket."""

    def __init__(self, plan: Plan, groups: Mapping[str, AxisGroup], tensors: Mapping[str, Tensor], emit: Emit) -> None:
        self._groups, self._tensors, self._emit = groups, tensors, emit
        self._sizes, self._at = sizes_of(groups)
        self._released = {name for stage in plan.stages for name in stage.released}
        self._found: dict[str, LoweredValue] = {}
        self._bucket_of = {
            name: bucket for bucket in plan.gathers if bucket.axis in groups for name in bucket.parameters
        }

    def __contains__(self, name: str) -> bool:
        return name in self._bucket_of

    def whole(self, name: str, stored: Mapping[str, LoweredValue], phase: str) -> LoweredValue:
        """The parameter called ``name``, gathered over the axis over which it is stored Flat. If parameters of the
        bucket are released after use, the nodes that gather the bucket are marked (``meta["released"]``), and
        ``lower/partition.py`` runs them again in backward."""
        if name not in self._found:
            bucket = self._bucket_of[name]
            group, names = self._groups[bucket.axis], [member for member in bucket.parameters if member in stored]
            nodes = [stored[member].node for member in names]
            released = not self._released.isdisjoint(names)
            started = self._emit(
                collectives.GATHER_PARTS,
                nodes,
                group.name,
                group.size,
                bucket.algorithm,
                label=bucket.label,
                again=released,
            )
            emitted, offset = [started, self._emit(collectives.WAIT, started)], 0
            for member, node in zip(names, nodes, strict=True):
                placements = unflattened(stored[member].placements)
                shape = local_shape(self._tensors[member].shape, placements, self._sizes, self._at)
                emitted.append(self._emit(aten.slice.Tensor, emitted[1], 0, offset, offset + prod(shape)))
                emitted.append(self._emit(aten.view.default, emitted[-1], list(shape)))
                emitted[-1].meta.update(local_shape=shape, dtype=node.meta["dtype"])
                self._found[member] = LoweredValue(emitted[-1], placements, phase=phase)
                offset += group.size * prod(node.meta["local_shape"])
            for node in emitted:
                node.meta.update(operator="gathers", backward=False, released=released)
        return self._found[name]


def is_cut(plan: Plan, bucket: Bucket) -> bool:
    """Whether the gradients of a bucket are reduce-scattered: each rank gets only its Flat part."""
    return isinstance(plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)


def start_cut(
    emit: Emit, nodes: Sequence[fx.Node], bucket: Bucket, groups: Mapping[str, AxisGroup], *, again: bool = False
) -> fx.Node:
    """Start the reduce-scatter of a bucket's gradients.

    ``again``: the reduce-scatter runs in every micro-batch. Its result is added to a running sum, and the memory of the
    result is reused.
    """
    group = groups[bucket.axis]
    return emit(
        collectives.REDUCE_TO_PARTS,
        list(nodes),
        group.name,
        group.size,
        bucket.algorithm,
        label=bucket.reduction,
        again=again,
    )


def finish(
    emit: Emit, started: fx.Node, bucket: Bucket, groups: Mapping[str, AxisGroup], shapes: Sequence[tuple[int, ...]]
) -> list[fx.Node]:
    """Wait for a bucket's reduction, all-reduce the result over the other axes, and split it into gradients of
    ``shapes``."""
    flat = emit(collectives.WAIT, started)
    for group in (groups[axis] for axis in bucket.across):
        started = emit(collectives.ALL_REDUCE, flat, "sum", group.name, group.algorithm, label=bucket.reduction)
        flat = emit(collectives.WAIT, started)
    parts = emit(aten.split_with_sizes.default, flat, [prod(shape) for shape in shapes])
    return [emit(aten.view.default, emit(getitem, parts, index), list(shape)) for index, shape in enumerate(shapes)]
