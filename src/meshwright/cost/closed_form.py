"""The time of a step in closed form: each action's pieces run one after the other, in the pipeline's schedule."""

from collections.abc import Iterable

import msgspec

from meshwright.cost.collective import Network
from meshwright.cost.fabric import Fabric, axis_group
from meshwright.cost.work import Communicate, Compute, Piece, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.schedules.timing import order_of


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step. ``compute_s`` and ``communication_s`` are those of the busiest rank."""

    step_s: float
    compute_s: float
    communication_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds in which the busiest rank waits for other ranks."""
        return max(0.0, self.step_s - self.compute_s - self.communication_s)


def predict_step(work: StepWork, schedule: Schedule, mesh: Mesh, cluster: Cluster) -> Predicted:
    """Predict a step of ``work`` under ``schedule``, which includes sends, with the time of the software that no
    micro-batch explains (``Software.step_s``). Communication is assumed not to overlap compute. A transfer is assumed
    to share links only with equal transfers of other groups, as in ``Network``."""
    fabric, homes, order = Fabric(cluster, mesh), schedule.homes, order_of(schedule)

    def cost(number: int, kind: ActionKind) -> tuple[float, float]:
        """The seconds of an action, and the part of them in which it computes."""
        stage = work.stages[number]
        sent = {ActionKind.SEND_F: (1, stage.sent_up_bytes), ActionKind.SEND_B: (-1, stage.sent_down_bytes)}
        if kind in sent:
            step, num_bytes = sent[kind]
            ends = homes[number], homes[number + step]
            return (fabric.send_s(num_bytes, *ends) if num_bytes else 0.0), 0.0
        pieces = stage.pieces.get(kind.value, ())
        return fabric.pieces_s(pieces, homes[number]), _computing_s(pieces)

    costs = [cost(*each) for each in order.distinct]
    times = order.times((costs[kind][0] for kind in order.kinds), len(schedule.ranks))
    spent, computing = [0.0] * len(times), [0.0] * len(times)
    for rank, kind in zip(order.ranks, order.kinds, strict=True):
        spent[rank] += costs[kind][0]
        computing[rank] += costs[kind][1]
    ends, busy = [], []
    for rank, each in enumerate(times):
        stages = sorted(stage for stage, home in homes.items() if home == rank)
        rest = [piece for stage in stages for piece in (*work.stages[stage].before, *work.stages[stage].after)]
        outside = fabric.pieces_s(rest, homes[stages[0]] if stages else 0)
        ends.append((each[-1][1] if each else 0.0) + outside + cluster.software.step_s)
        compute = computing[rank] + _computing_s(rest)
        busy.append((compute, max(0.0, spent[rank] + outside - compute)))
    compute_s, communication_s = max(busy)
    return Predicted(step_s=max(ends), compute_s=compute_s, communication_s=communication_s)


def pieces_s(pieces: Iterable[Piece], mesh: Mesh, network: Network) -> float:
    """Seconds of pieces that run one after the other; a ``Wait`` takes no time, because its collective is counted
    already."""
    total = 0.0
    for piece in pieces:
        if not isinstance(piece, Wait):
            total += piece.seconds if isinstance(piece, Compute) else collective_s(piece, mesh, network)
    return total


def _computing_s(pieces: Iterable[Piece]) -> float:
    return sum(piece.seconds for piece in pieces if isinstance(piece, Compute))


def collective_s(piece: Communicate, mesh: Mesh, network: Network) -> float:
    """Seconds of a collective along one axis of the mesh, while all groups of the axis run theirs."""
    return network.collective_s(piece.collective, piece.bytes, axis_group(mesh, piece.axis, piece.members))
