"""Fill buckets, in the order of use. A bucket holds parameters that are gathered together, or gradients that are
reduced together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from meshwright.ir.graph import ITEM_BYTES, Graph, Tensor
from meshwright.ir.layout import TIME
from meshwright.ir.placement import REPLICATE, Partial, Placement, Placements, flat_axis, local_shape, unflattened
from meshwright.ir.plan import Bucket
from meshwright.ir.resharding import Mover
from meshwright.ir.stages import Cut

BUCKET_BYTES = 8 * 2**20
"""Upper limit on the bytes of a bucket, unless ``planner/bucket_size.py`` chooses the size."""


class BucketMember(NamedTuple):
    """A parameter or its gradient, which may share a bucket with members of the same ``key``.

    ``key`` has the stages, the axis, the other axes over which the gradient is summed, whether the parameter is stored
    Flat, its ZeRO stage, and the dtype. If several modules share a gathered parameter, the names of these modules
    follow the dtype. If gradients are coded, the names of the axes that split the gradient follow too. ``num_bytes`` is
    the size on one rank before ZeRO shards the parameter or gradient.
    """

    key: "_Together"
    name: str
    num_bytes: int


_Together = tuple[tuple[int, ...], str, tuple[str, ...], bool, int, str]


def filled(
    members: Sequence[BucketMember], most_bytes: float, algorithms: Mapping[str, str], base: Sequence[Bucket] = ()
) -> tuple[Bucket, ...]:
    """Fill members into buckets of at most ``most_bytes``, and return the buckets in the order in which they are
    completed. A member that is larger than ``most_bytes`` gets a bucket of its own. Members that share a bucket in
    ``base`` also share a bucket here, whatever its size."""
    home = {name: index for index, bucket in enumerate(base) for name in bucket.parameters}
    pending: dict[tuple[_Together, int], list[BucketMember]] = {}
    buckets: list[Bucket] = []

    def close(held: list[BucketMember]) -> None:
        _, axis, across, _, _, _ = held[0].key
        buckets.append(
            Bucket(
                axis=axis, parameters=tuple(m.name for m in held), num_bytes=sum(m.num_bytes for m in held),
                algorithm=algorithms.get(axis, "native"), across=across,
            )
        )  # fmt: skip

    for member in members:
        number = home.get(member.name, -1)
        held = pending.setdefault((member.key, number), [])
        if held and number < 0 and sum(m.num_bytes for m in held) + member.num_bytes > most_bytes:
            close(held)
            held = pending[member.key, number] = []
        held.append(member)
    for held in pending.values():
        close(held)
    return tuple(buckets)


def gathered_members(
    graph: Graph,
    divided: Cut,
    storage: dict[str, dict[str, Placement]],
    axis_sizes: dict[str, int],
    zero: Mapping[str, int],
) -> tuple[BucketMember, ...]:
    """The parameters that are stored Flat, in the order of their first use. ``zero`` has the ZeRO stage of each
    parameter; parameters of different stages do not share buckets. A parameter of several modules shares a
    bucket only with parameters of the same modules. The reason is that all parameters of a bucket stay in memory until
    the last use of any of them."""
    consumers = graph.consumers()
    order = {operator.name: index for index, operator in enumerate(graph.operators)}
    first = {
        name: min((order[operator.name] for operator, _ in consumers.get(name, ())), default=len(order))
        for name in graph.parameters
    }
    members = []
    for name in sorted(graph.parameters, key=first.__getitem__):
        here = {mesh_axis: placement for mesh_axis, placement in storage[name].items() if mesh_axis in axis_sizes}
        axis = flat_axis(here)
        if axis:
            tensor = graph.tensors[name]
            num_bytes = part_bytes(tensor, unflattened(here), axis_sizes)
            modules = sorted({operator.module for operator, _ in consumers.get(name, ()) if not operator.backward})
            shared = " ".join(modules) if len(modules) > 1 else ""
            key = (divided.owners[name], axis, (), True, zero.get(name, 0), tensor.dtype + shared)
            members.append(BucketMember(key, name, num_bytes))
    return tuple(members)


def reduced_members(
    graph: Graph,
    divided: Cut,
    placements: dict[str, Placements],
    storage: dict[str, dict[str, Placement]],
    mover: Mover,
    zero: Mapping[str, int],
    *,
    coded: bool = False,
) -> tuple[BucketMember, ...]:
    """The gradients that need only a sum over ranks, in the order in which backward makes them.

    If the parameter is stored Flat over an axis, the gradient is summed over this axis first, because the
    reduce-scatter leaves each rank only a part of the gradient. Sums over the other axes follow one after the other.
    For all other gradients, a sum over several axes runs over one joined axis if ``mover`` finds that cheaper, else
    over one axis after the other.

    ``coded``: the gradients have codecs. Gradients then share a bucket only if the same axes split them. Otherwise,
    ranks with equal gradients would encode them together with different other gradients, and would end with different
    values.
    """
    consumers = graph.consumers()
    order = {output: index for index, operator in enumerate(graph.operators) for output in operator.outputs}
    members: list[BucketMember] = []
    entries = [entry for entry in graph.gradients if entry.gradient is not None]
    counts = Counter(entry.gradient for entry in entries)
    for entry in sorted(entries, key=lambda entry: order.get(entry.gradient or "", -1)):
        gradient = entry.gradient or ""
        stages = divided.terms[entry.parameter]
        have, want = dict(placements.get(gradient, {})), storage.get(entry.parameter, {})
        have.pop(TIME, None)
        axes = [axis for axis, placement in have.items() if placement == Partial("sum")]
        rest = {axis: placement for axis, placement in have.items() if axis not in axes and placement != REPLICATE}
        flat = flat_axis(want)
        if not axes or (flat and flat not in axes):
            continue
        axis, *across = [flat, *(other for other in axes if other != flat)] if flat else _summed_over(axes, mover)
        if rest != {a: p for a, p in unflattened(want).items() if a in mover.sizes}:
            continue
        if counts[gradient] > 1 or consumers.get(gradient) or len(stages) > 1:
            continue
        tensor = graph.tensors[gradient]
        num_bytes = part_bytes(tensor, rest, mover.sizes)
        alike = tensor.dtype + (f" {' '.join(sorted(rest))}" if coded else "")
        key = (tuple(stages), axis, tuple(across), bool(flat), zero.get(entry.parameter, 0), alike)
        members.append(BucketMember(key, entry.parameter, num_bytes))
    return tuple(members)


def _summed_over(axes: list[str], mover: Mover) -> list[str]:
    """The axes over which a bucket is summed: one joined axis if ``mover`` finds that cheaper, else several axes in
    turn."""
    have: Placements = dict.fromkeys(axes, Partial("sum"))
    moves = mover.moves(have, {}, (BUCKET_BYTES // 4,), 4)
    return [moves[0].axis] if len(moves) == 1 else [axis for axis in mover.sizes if axis in axes]


def part_bytes(tensor: Tensor, placements: Placements, axis_sizes: Mapping[str, int]) -> int:
    """The bytes of a rank's part of a tensor. If the parts differ, the bytes of the largest part."""
    return prod(local_shape(tensor.shape, placements, axis_sizes)) * ITEM_BYTES[tensor.dtype]
