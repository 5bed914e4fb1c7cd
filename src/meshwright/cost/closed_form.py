"""The time of a step in closed form: each action's pieces run one after the other, in the pipeline's schedule."""

from collections.abc import Iterable
from functools import cache, lru_cache

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.cost.work import Communicate, Compute, Piece, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.schedules.timing import run


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
    """Predict a step of ``work`` under ``schedule``, which includes sends. Communication is assumed not to overlap
    compute. A transfer is assumed to share links only with equal transfers of other groups, as in ``Network``."""
    network = Network(cluster)
    count = len(schedule.ranks)
    stride = mesh.world_size // count

    @cache
    def cost(number: int, kind: ActionKind) -> tuple[float, float]:
        """The seconds of an action, and the part of them in which it computes."""
        stage = work.stages[number]
        sent = {ActionKind.SEND_F: (1, stage.sent_up_bytes), ActionKind.SEND_B: (-1, stage.sent_down_bytes)}
        if kind in sent:
            step, num_bytes = sent[kind]
            far = abs(number % count - (number + step) % count) * stride
            return (network.send_s(num_bytes, far) if num_bytes else 0.0), 0.0
        pieces = stage.pieces.get(kind.value, ())
        return pieces_s(pieces, mesh, network), _computing_s(pieces)

    times = run(schedule, lambda action: cost(action.stage, action.kind)[0])
    ends, busy = [], []
    for actions, each in zip(schedule.ranks, times, strict=True):
        stages = sorted({action.stage for action in actions})
        rest = [piece for stage in stages for piece in (*work.stages[stage].before, *work.stages[stage].after)]
        outside = pieces_s(rest, mesh, network)
        ends.append((each[-1][1] if each else 0.0) + outside)
        costs = [cost(action.stage, action.kind) for action in actions]
        compute = sum(computing for _, computing in costs) + _computing_s(rest)
        spent = sum(seconds for seconds, _ in costs) + outside
        busy.append((compute, max(0.0, spent - compute)))
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


@lru_cache(maxsize=4096)
def axis_group(mesh: Mesh, axis: str, members: tuple[int, ...] = ()) -> Group:
    """The group of an axis or of joined axes; ``members`` selects ranks by their coordinates on the axis."""
    if not mesh.has(axis):
        return Group(1)
    ranks = mesh.group_ranks(axis, 0)
    ranks = tuple(ranks[coordinate] for coordinate in members) or ranks
    return Group(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
