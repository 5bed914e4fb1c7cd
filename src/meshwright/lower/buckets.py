"""Lowers buckets: parameters that one collective gathers together, and gradients that one collective reduces together.
A codec may encode their elements for sending."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from meshwright.ir.codec import codec_of
from meshwright.ir.graph import Tensor
from meshwright.ir.mesh import AxisGroup, members, sizes_of
from meshwright.ir.placement import Flat, Placements, local_shape, unflattened
from meshwright.ir.plan import Bucket, Plan
from meshwright.ir.program import CodecState, Value, coded_shapes
from meshwright.ir.shapes import flat_shapes
from meshwright.ir.stages import STEP
from meshwright.ops import collectives
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.hierarchy import read
from meshwright.schedules.collectives.operations import build

aten = torch.ops.aten
MOST_CHECKED = 16
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

    def __init__(
        self, plan: Plan, groups: Mapping[str, AxisGroup], tensors: Mapping[str, Tensor], emit: Emit, codecs: "Codecs"
    ) -> None:
        self._groups, self._tensors, self._emit, self._codecs = groups, tensors, emit, codecs
        self._sizes, self._at = sizes_of(groups)
        self._released = {name for stage in plan.stages for name in stage.released}
        self._values: dict[str, LoweredValue] = {}
        self._bucket_of = {
            name: bucket for bucket in plan.gathers if bucket.axis in groups for name in bucket.parameters
        }

    def __contains__(self, name: str) -> bool:
        return name in self._bucket_of

    def whole(self, name: str, stored: Mapping[str, LoweredValue], phase: str) -> LoweredValue:
        """The parameter called ``name``, gathered over the axis over which it is stored Flat. If parameters of the
        bucket are released after use, the nodes that gather the bucket are marked (``meta["released"]``), and
        ``lower/partition.py`` runs them again in backward."""
        if name not in self._values:
            bucket = self._bucket_of[name]
            group, names = self._groups[bucket.axis], [member for member in bucket.parameters if member in stored]
            nodes = [stored[member].node for member in names]
            released = not self._released.isdisjoint(names)
            started = self._emit(
                collectives.GATHER_PARTS,
                nodes,
                group.name,
                group.size,
                carried_by(bucket, bucket.axis, group),
                label=bucket.label,
                again=released,
                **self._codecs.of_parameters(bucket),
            )
            emitted, offset = [started, self._emit(collectives.WAIT, started)], 0
            for member, node in zip(names, nodes, strict=True):
                placements = unflattened(stored[member].placements)
                shape = local_shape(self._tensors[member].shape, placements, self._sizes, self._at)
                emitted.append(self._emit(aten.slice.Tensor, emitted[1], 0, offset, offset + prod(shape)))
                emitted.append(self._emit(aten.view.default, emitted[-1], list(shape)))
                emitted[-1].meta.update(local_shape=shape, dtype=node.meta["dtype"])
                self._values[member] = LoweredValue(emitted[-1], placements, phase=phase)
                offset += group.size * prod(node.meta["local_shape"])
            for node in emitted:
                node.meta.update(operator="gathers", backward=False, released=released)
        return self._values[name]


def is_cut(plan: Plan, bucket: Bucket) -> bool:
    """Whether the gradients of a bucket are reduce-scattered, so that each rank gets only its Flat part."""
    return isinstance(plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)


@lru_cache(maxsize=256)
def check_rides(codec: str, operation: str, algorithm: str, num_ranks: int) -> None:
    """Check that an algorithm may carry coded elements. A group of more than ``MOST_CHECKED`` ranks has many steps. It
    is checked as if it had ``MOST_CHECKED`` ranks.

    Raises:
        ScheduleError: the algorithm is unknown; or ranks would lose errors, or would end with different bits.
    """
    count = num_ranks if read(algorithm) is not None else min(num_ranks, MOST_CHECKED)
    coded(build(operation, algorithm, count, 4 * count), codec_of(codec))


def carried_by(bucket: Bucket, axis: str, group: AxisGroup) -> str:
    """The algorithm of a bucket's collective over an axis."""
    coding = bucket.coding(axis)
    if coding is not None:
        return coding.algorithm
    return bucket.algorithm if axis == bucket.axis else group.algorithm


class Codecs:
    """The codecs of a stage's buckets. ``given`` adds a placeholder for a codec's memory (``Emission.given``).

    Attributes:
        states: the memory that codecs keep from step to step, in the order of their collectives.
        random_key: the node of the number from which random numbers follow. It must be set before the first bucket.
    """

    def __init__(self, given: Callable[..., fx.Node], sizes: Mapping[str, int]) -> None:
        self._given, self._sizes = given, sizes
        self.states: list[CodecState] = []
        self.random_key: fx.Node | None = None

    def of_parameters(self, bucket: Bucket) -> dict[str, Any]:
        """The arguments of a coded gather of parameters; empty if the gather is not coded."""
        coding = bucket.coding(bucket.axis)
        if coding is not None:
            check_rides(coding.codec, "all_gather", coding.algorithm, self._sizes[bucket.axis])
        return {"codec": coding.codec, "draw": self.random_key} if coding else {}

    def of_gradients(
        self, bucket: Bucket, axis: str, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
        rows: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of a coded reduction of gradients over an axis; empty if the reduction is not coded.

        ``shapes`` are the shapes of the gradients on this rank. ``rows`` is the number of rows into which each gradient
        is cut, with zeros as padding. Row r of all gradients is summed on rank r."""
        coding = bucket.coding(axis)
        if coding is None:
            return {}
        text = coding.codec
        if codec_of(text).exchange in ("hops", "merges"):
            check_rides(text, "all_reduce" if rows == 1 else "reduce_scatter", coding.algorithm, self._sizes[axis])
        result: dict[str, Any] = {"codec": text, "draw": self.random_key}
        if length := sum(codec_of(text).state_lengths(coded_shapes(shapes, rows)).values()):
            kept = torch.promote_types(dtype, torch.float32)
            nodes = [self._given(name, STEP, (length,), kept) for name in ("codec_state", "codec_state_before")]
            text_of = str(kept).removeprefix("torch.")
            value, before = (Value(node.name, (length,), text_of, node.name) for node in nodes)
            order = (bucket.axis, *bucket.across)
            axes = tuple(each for joined in order[order.index(axis) :] for each in members(joined))
            self.states.append(CodecState(text, axes, tuple(names), tuple(map(tuple, shapes)), value, before, rows))
            result |= {"state": nodes[0], "before": nodes[1]}
        return result


def start_cut(
    emit: Emit, nodes: Sequence[fx.Node], bucket: Bucket, groups: Mapping[str, AxisGroup], coded: Mapping[str, Any],
    *, again: bool = False,
) -> fx.Node:  # fmt: skip
    """Start the reduce-scatter of a bucket's gradients. ``coded``: the arguments of a codec.

    ``again``: the reduce-scatter runs in every micro-batch. Its result is added to a running sum, and the memory of the
    result is reused.
    """
    group = groups[bucket.axis]
    return emit(
        collectives.REDUCE_TO_PARTS,
        list(nodes),
        group.name,
        group.size,
        carried_by(bucket, bucket.axis, group),
        label=bucket.reduction,
        again=again,
        **coded,
    )


def start_sum(
    emit: Emit, flat: fx.Node, bucket: Bucket, axis: str, groups: Mapping[str, AxisGroup], coded: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> fx.Node:  # fmt: skip
    """Start the all-reduce of a vector of gradients of ``shapes`` over an axis."""
    group = groups[axis]
    algorithm = carried_by(bucket, axis, group)
    more = {**coded, "shapes": flat_shapes(shapes)} if coded else {}
    return emit(collectives.ALL_REDUCE, flat, "sum", group.name, algorithm, label=bucket.reduction, **more)


def finish(
    emit: Emit, started: fx.Node, bucket: Bucket, groups: Mapping[str, AxisGroup], names: Sequence[str],
    shapes: Sequence[tuple[int, ...]], codecs: Codecs, dtype: torch.dtype,
) -> list[fx.Node]:  # fmt: skip
    """Wait for a bucket's reduction, all-reduce the result over the other axes, and split it into the gradients of
    ``names``, which have ``shapes``."""
    flat = emit(collectives.WAIT, started)
    for axis in bucket.across:
        coded = codecs.of_gradients(bucket, axis, names, shapes, dtype)
        flat = emit(collectives.WAIT, start_sum(emit, flat, bucket, axis, groups, coded, shapes))
    parts = emit(aten.split_with_sizes.default, flat, [prod(shape) for shape in shapes])
    return [emit(aten.view.default, emit(getitem, parts, index), list(shape)) for index, shape in enumerate(shapes)]
