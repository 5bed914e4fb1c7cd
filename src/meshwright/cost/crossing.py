"""Tensors that cross between stages: the bytes that ranks send, and the gathers of the ranks that receive."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from meshwright.cost.work import Communicate
from meshwright.ir.codec import codec_of
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.mesh import JOIN, Mesh
from meshwright.ir.placement import Placement, Placements, Shard
from meshwright.ir.plan import Plan
from meshwright.ir.program import Program, Transfer
from meshwright.ir.schedule import ActionKind
from meshwright.schedules.reshard import Box, transfer
from meshwright.schedules.timing import PARTNER


class Crossed(NamedTuple):
    """A tensor that crosses between two stages: the shape of all its parts together, the bytes of an element, the codec
    (empty: none), and its placements in the stage that sends it (``source``) and in the stage that receives it."""

    name: str
    whole: tuple[int, ...]
    item_bytes: int
    source: Placements
    target: Placements
    codec: str = ""


class Crossing(NamedTuple):
    """The tensors of one micro-batch that cross between two stages in one direction.

    The busiest rank sends ``sent_bytes``. The receiving ranks then complete their parts in ``gathers``, one for each
    tensor. In a gather, every rank sends its chunk directly to the other ranks, so it takes the time of an
    all-to-all."""

    sent_bytes: int
    gathers: tuple[Communicate, ...]


NOTHING = Crossing(0, ())


def received(programs: Sequence[Program], plan: Plan, stage: int, receives: ActionKind) -> Crossing:
    """The crossing into a stage by an action of the kind ``receives``. If stages have equal submeshes, and the plan
    names no ranks that receive together, every rank sends its part to one rank."""
    near = stage + PARTNER[receives][0]
    arriving = programs[stage].crossing(receives)
    if not arriving:
        return NOTHING
    sent = {each.tensor: each for each in programs[near].crossing(PARTNER[receives][1])}
    receivers = plan.stages[stage].receivers.get(receives, ())
    if plan.pipeline.rank_of(near) == plan.pipeline.rank_of(stage) or not (plan.uneven or receivers):
        return Crossing(sum(map(_whole_bytes, sent.values())), ())
    tensors = [
        Crossed(
            each.tensor, each.whole, ITEM_BYTES[each.value.dtype], sent[each.tensor].placements, each.placements,
            each.codec,
        )
        for each in arriving
    ]  # fmt: skip
    return crossing(tensors, plan.submesh(near), plan.submesh(stage), receivers)


def crossing(tensors: Iterable[Crossed], source: Mesh, target: Mesh, receivers: tuple[int, ...] = ()) -> Crossing:
    """The crossing of ``tensors`` between stages with the meshes ``source`` and ``target``. ``receivers`` are the ranks
    that receive together (``schedules.reshard.transfer``)."""
    total, gathers = 0, list[Communicate]()
    for tensor in tensors:
        ends = (*tensor.source.items(),), source, (*tensor.target.items(),), target
        sent, part, chunk = _moved(tensor.whole, *ends, receivers)
        total += _message_bytes(sent, tensor.item_bytes, tensor.codec)
        if part:
            free = [axis for axis, size in target.sizes.items() if size > 1 and not _splits(tensor.target, axis)]
            size = part * chunk * tensor.item_bytes
            gathers.append(Communicate(f"gather of {tensor.name}", "all_to_all", JOIN.join(free), size, part=part))
    return Crossing(total, tuple(gathers))


def _whole_bytes(sent: Transfer) -> int:
    """The bytes of a message with a rank's whole part."""
    return _message_bytes(prod(sent.value.shape), ITEM_BYTES[sent.value.dtype], sent.codec)


_Placed = tuple[tuple[str, Placement], ...]
"""Axes with their placements."""


@lru_cache(maxsize=4096)
def _moved(
    whole: tuple[int, ...], source: _Placed, source_mesh: Mesh, target: _Placed, target_mesh: Mesh,
    receivers: tuple[int, ...],
) -> tuple[int, int, int]:  # fmt: skip
    """The elements that the busiest rank sends, the ranks of the largest gather (0: no gather), and the elements of the
    largest chunk. Borders between equal stages share them."""
    moves = transfer(whole, dict(source), source_mesh.sizes, dict(target), target_mesh.sizes, receivers)
    elements: Counter[int] = Counter()
    for piece in moves.pieces:
        elements[piece.source] += _elements(piece.source_box)
    part = max((len(gather.ranks) for gather in moves.gathers), default=0)
    chunks = (_elements(box) for gather in moves.gathers for box in gather.boxes if box is not None)
    return max(elements.values(), default=0), part, max(chunks, default=0)


def _message_bytes(elements: int, item_bytes: int, codec: str) -> int:
    return codec_of(codec).message_bytes(elements, item_bytes) if codec else elements * item_bytes


def _splits(placements: Placements, axis: str) -> bool:
    return isinstance(placements.get(axis), Shard)


def _elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)
