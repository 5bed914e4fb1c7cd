"""The time of a step in closed form: each action's pieces run one after the other, in the pipeline's schedule."""

from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from meshwright.cost.collective import Network
from meshwright.cost.fabric import Fabric, axis_group, piece_s
from meshwright.cost.work import Communicate, Compute, Piece, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.schedules.timing import order_of


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step in seconds. ``compute_s`` and ``communication_s`` are the times of the busiest rank."""

    step_s: float
    compute_s: float
    communication_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds in which the busiest rank waits for other ranks."""
        return max(0.0, self.step_s - self.compute_s - self.communication_s)


def predict_step(work: StepWork, schedule: Schedule, mesh: Mesh, cluster: Cluster) -> Predicted:
    """Predict a step of ``work`` under ``schedule``, which includes sends. The result includes the software's time that
    does not depend on micro-batches (``Software.step_s``). Communication is assumed not to overlap with compute. A
    transfer is assumed to share links only with equal transfers of other groups, as in ``Network``."""
    (predicted,) = predict_steps(work, [schedule], mesh, cluster)
    return predicted


def predict_steps(work: StepWork, schedules: Sequence[Schedule], mesh: Mesh, cluster: Cluster) -> list[Predicted]:
    """``predict_step`` for schedules that differ only in their number of micro-batches."""
    fabric, homes = Fabric(cluster, mesh), schedules[0].homes

    @cache
    def cost(number: int, kind: ActionKind) -> tuple[float, float]:
        """The seconds of an action, and the seconds of computing in it."""
        stage = work.stages[number]
        sent = {ActionKind.SEND_F: (1, stage.sent_up_bytes), ActionKind.SEND_B: (-1, stage.sent_down_bytes)}
        if kind in sent:
            step, num_bytes = sent[kind]
            ends = homes[number], homes[number + step]
            return (fabric.send_s(num_bytes, *ends) if num_bytes else 0.0), 0.0
        pieces = stage.pieces.get(kind.value, ())
        return fabric.pieces_s(pieces, homes[number]), _computing_s(pieces)

    outside = []
    for rank in range(len(schedules[0].ranks)):
        stages = sorted(stage for stage, home in homes.items() if home == rank)
        rest = [piece for stage in stages for piece in (*work.stages[stage].before, *work.stages[stage].after)]
        outside.append((fabric.pieces_s(rest, homes[stages[0]] if stages else 0), _computing_s(rest)))
    result = []
    for schedule in schedules:
        order = order_of(schedule)
        costs = [cost(*each) for each in order.distinct]
        ends = order.ends([seconds for seconds, _ in costs], len(outside))
        spent, computing = [0.0] * len(outside), [0.0] * len(outside)
        for rank, kind in zip(order.ranks, order.kinds, strict=True):
            spent[rank] += costs[kind][0]
            computing[rank] += costs[kind][1]
        busy = []
        for rank, (outside_s, rest_s) in enumerate(outside):
            compute = computing[rank] + rest_s
            busy.append((compute, max(0.0, spent[rank] + outside_s - compute)))
        step_s = max(end + outside_s for end, (outside_s, _) in zip(ends, outside, strict=True))
        compute_s, communication_s = max(busy)
        result.append(
            Predicted(step_s=step_s + cluster.software.step_s, compute_s=compute_s, communication_s=communication_s)
        )
    return result


def pieces_s(pieces: Iterable[Piece], mesh: Mesh, network: Network) -> float:
    """Seconds of pieces that run one after the other. A ``Wait`` takes no time, because its collective was already
    counted."""
    total = 0.0
    for piece in pieces:
        if not isinstance(piece, Wait):
            total += piece.seconds if isinstance(piece, Compute) else collective_s(piece, mesh, network)
    return total


def _computing_s(pieces: Iterable[Piece]) -> float:
    return sum(piece.seconds for piece in pieces if isinstance(piece, Compute))


def collective_s(piece: Communicate, mesh: Mesh, network: Network) -> float:
    """Seconds of a collective along one axis of the mesh, while all groups of the axis run it."""
    return piece_s(piece, network, axis_group(mesh, piece.axis, piece.members))
