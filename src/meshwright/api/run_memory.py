"""The memory of a run's ranks beside their steps: predicted, measured, and left free by the planner."""

import logging
import statistics
from collections.abc import Callable

import msgspec

from meshwright.comm.groups import from_every_rank
from meshwright.cost.copies import copies_of, mean_copies
from meshwright.cost.occupancy import box_of, room_of
from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.copies import KEPT, STAGED, MemoryPart, StateCopies
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Note, Plan
from meshwright.runtime.device import device_kind
from meshwright.runtime.loop import Loop
from meshwright.runtime.trainer import Trainer

log = logging.getLogger("meshwright")

Parts = dict[int, tuple[MemoryPart, ...]]
"""Maps a rank to the named parts of its peak."""


def held_besides(trainer: Trainer) -> int:
    """The bytes that this rank's process holds in addition to the parameters: interpreter, libraries, data. 0 if
    unknown."""
    read = device_kind(trainer.device).memory_now
    return read() - sum(value.nbytes for value in trainer.parameters.values().values()) if read is not None else 0


def memory_parts(trainer: Trainer, loop: Loop, optimizer: OptimizerCost) -> Parts:
    """The copies of the state during the measured steps, predicted and measured, on rank 0. Every rank must call it.

    A kind of copies of which no rank held any is left out: the run was too short for it, its launcher keeps no memory,
    or the copies lie in another memory than the tensors of steps."""
    held = [statistics.median(sizes) for sizes in zip(*loop.copies_held, strict=True)] or [0, 0]
    measured = from_every_rank(StateCopies(kept_bytes=round(held[0]), staged_bytes=round(held[1])))
    if trainer.rank != 0:
        return {}
    plan = trainer.plan
    predicted = copies_of(trainer.graph, plan, optimizer, loop.copies.num_hosts)
    result: Parts = {}
    for rank, own in enumerate(measured):
        foretold = predicted[plan.mesh.coordinates(rank).get("pp", 0)]
        result[rank] = tuple(
            MemoryPart(what=what, predicted_bytes=getattr(foretold, name), measured_bytes=getattr(own, name))
            for what, name in ((KEPT, "kept_bytes"), (STAGED, "staged_bytes"))
            if any(getattr(each, name) for each in measured)
        )
    return result


def beside_steps(graph: Graph, optimizer: OptimizerCost, cluster: Cluster, num_ranks: int) -> StateCopies:
    """The mean of the copies that a rank of ``meshwright train`` holds in the memory of its device: none on a GPU,
    whose copies lie in the memory of the host."""
    if cluster.device.kind != "cpu":
        return StateCopies()
    num_hosts = -(-num_ranks // max(1, box_of(cluster)))
    return mean_copies(graph, optimizer, num_ranks, num_hosts)


def leaving_room(
    search: Callable[[float | None], Plan], held: StateCopies, cluster: Cluster, num_ranks: int,
    memory_bytes: float | None,
) -> Plan:  # fmt: skip
    """The plan of a search that leaves memory for copies of the state. ``search`` takes the limit of a rank's memory
    (None: the device's). If no layout fits beside the copies, one is searched without: a run that lacks memory makes
    none, and goes on from the disk after a loss."""
    if not held.total_bytes or not cluster.homogeneous:
        return search(memory_bytes)
    limit = memory_bytes or room_of(cluster, range(num_ranks))
    try:
        chosen = search(max(1.0, limit - held.total_bytes))
    except LayoutError:
        chosen = search(memory_bytes)
        note = Note(module=_COPIES, split="no room", reason=f"a rank would need {held}")
    else:
        note = Note(module=_COPIES, split="left free", reason=f"of each rank's memory, {held}")
    return msgspec.structs.replace(chosen, notes=(*chosen.notes, note))


_COPIES = "(copies of the state)"
