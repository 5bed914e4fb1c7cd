"""The time of a step in closed form: an action takes equal times for all micro-batches of the pipeline's schedule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from meshwright.cost.collective import Network
from meshwright.cost.fabric import Fabric, axis_group, piece_s
from meshwright.cost.overlap import RankClocks, StagePiece, end_together
from meshwright.cost.work import Communicate, Compute, Piece, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.schedules.timing import ActionOrder, order_of

_SUMS = ActionKind.REDUCE_GRAD.value


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step in seconds. ``compute_s`` and ``communication_s`` are the times of the busiest rank."""

    step_s: float
    compute_s: float
    communication_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds in which the busiest rank waits for other ranks."""
        return max(0.0, self.step_s - self.compute_s - self.communication_s)


def predict_step(
    work: StepWork, schedule: Schedule, mesh: Mesh, cluster: Cluster, *, overlap: bool = False
) -> Predicted:  # fmt: skip
    """Predict a step of ``work`` under ``schedule``, which includes sends. The result includes the software's time that
    does not depend on micro-batches (``Software.step_s``). A transfer is assumed to share links only with equal
    transfers of other groups, as in ``Network``.

    Without ``overlap``, communication does not overlap with compute. With ``overlap``, collectives run beside kernels
    (``overlap.Streams``), sends do not block their rank, and ``communication_s`` has only the seconds in which kernels
    wait for collectives. Unlike in the simulation, collectives do not continue during the next action, except for those
    of a rank's last action."""
    (predicted,) = predict_steps(work, [schedule], mesh, cluster, overlap=overlap)
    return predicted


def predict_steps(
    work: StepWork, schedules: Sequence[Schedule], mesh: Mesh, cluster: Cluster, *, overlap: bool = False
) -> list[Predicted]:  # fmt: skip
    """``predict_step`` for schedules that differ only in their number of micro-batches."""
    predictions = (_beside if overlap else _in_turn)(work, schedules, Fabric(cluster, mesh))
    more_s = cluster.software.step_s
    return [msgspec.structs.replace(predicted, step_s=predicted.step_s + more_s) for predicted in predictions]


def _in_turn(work: StepWork, schedules: Sequence[Schedule], fabric: Fabric) -> Iterator[Predicted]:
    """Steps whose communication does not overlap with compute."""
    homes = schedules[0].homes

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
    for rank, stages in enumerate(_stages(homes, len(schedules[0].ranks))):
        pieces_outside = [
            piece for stage in stages for piece in (*work.stages[stage].before, *work.stages[stage].after)
        ]
        outside.append((fabric.pieces_s(pieces_outside, rank), _computing_s(pieces_outside)))
    for schedule in schedules:
        order = order_of(schedule)
        costs = [cost(*each) for each in order.distinct]
        ends = order.ends([seconds for seconds, _ in costs], [0.0] * len(outside))
        yield _predicted(
            max(end + rest_s for end, (rest_s, _) in zip(ends, outside, strict=True)), order, costs, outside
        )


def _beside(work: StepWork, schedules: Sequence[Schedule], fabric: Fabric) -> Iterator[Predicted]:
    """Steps whose collectives run beside kernels. Gradients are reduced after a rank's last action."""
    homes = schedules[0].homes

    known: dict[tuple[object, ...], tuple[RankClocks, tuple[float, float]]] = {}

    def run(number: int, kind: ActionKind) -> tuple[RankClocks, tuple[float, float]]:
        """The clocks after an action, and its cost. On equal devices, stages with the same work share them."""
        key = id(work.stages[number]) if fabric.alike else number, kind
        if key not in known:
            pieces = work.stages[number].pieces.get(kind.value, ()) if kind.computes else ()
            clocks = RankClocks(fabric, homes[number]).run(number, pieces)
            known[key] = clocks, (clocks.now_s, _computing_s(pieces))
        return known[key]

    def action(number: int, kind: ActionKind) -> RankClocks:
        clocks, _ = run(number, kind)
        return clocks.of_stage(number)

    def cost(number: int, kind: ActionKind) -> tuple[float, float]:
        """The seconds of an action, and the seconds of computing in it."""
        return run(number, kind)[1]

    @cache
    def late_s(number: int, kind: ActionKind) -> float:
        """The seconds of the message for which an action waits."""
        source = number - 1 if kind is ActionKind.F else number + 1
        if source not in homes:
            return 0.0
        num_bytes = work.stages[source].sent_up_bytes if source < number else work.stages[source].sent_down_bytes
        return fabric.send_s(num_bytes, homes[source], homes[number]) if num_bytes else 0.0

    begins, outside, last, after = [], [], [], []
    for rank, stages in enumerate(_stages(homes, len(schedules[0].ranks))):
        before = [(stage, piece) for stage in stages for piece in work.stages[stage].before]
        begins.append(_run_alone(RankClocks(fabric, rank), before))
        reduced = [each.stage for each in schedules[0].ranks[rank] if each.kind is ActionKind.REDUCE_GRAD]
        sums = [(stage, piece) for stage in reduced for piece in work.stages[stage].pieces.get(_SUMS, ())]
        after.append([*sums, *((stage, piece) for stage in stages for piece in work.stages[stage].after)])
        acting = [each for each in schedules[0].ranks[rank] if each.kind.computes]
        last.append(action(acting[-1].stage, acting[-1].kind) if acting else RankClocks(fabric, rank))
        seconds = begins[-1] + _run_alone(last[-1].continued(0.0), after[-1])
        outside.append((seconds, _computing_s(piece for _, piece in (*before, *after[-1]))))
    for schedule in schedules:
        order = order_of(schedule, direct=True)
        costs = [cost(*each) for each in order.distinct]
        ends = order.ends([seconds for seconds, _ in costs], begins, [late_s(*each) for each in order.distinct])
        clocks = [streams.continued(end) for streams, end in zip(last, ends, strict=True)]
        end_together(list(zip(clocks, after, strict=True)))
        yield _predicted(max(clock.now_s for clock in clocks), order, costs, outside)


def _run_alone(streams: RankClocks, pieces: Iterable[StagePiece]) -> float:
    """The seconds after a rank has run these pieces without waiting for other stages."""
    for stage, piece in pieces:
        streams.run(stage, [piece])
    return streams.now_s


def _stages(homes: Mapping[int, int], num_ranks: int) -> list[list[int]]:
    """The stages of each rank."""
    return [sorted(stage for stage, home in homes.items() if home == rank) for rank in range(num_ranks)]


def _predicted(
    step_s: float, order: ActionOrder, costs: Sequence[tuple[float, float]], outside: Sequence[tuple[float, float]]
) -> Predicted:  # fmt: skip
    """A step. ``costs`` has the seconds of each kind of action, and the seconds of computing in it. ``outside`` has the
    same for the work of each rank before and after its actions."""
    spent = np.array(outside)  # [rank]: all seconds, and those of computing
    np.add.at(spent, np.array(order.ranks, dtype=np.int64), np.array(costs)[np.array(order.kinds, dtype=np.int64)])
    compute_s, communication_s = max((compute, max(0.0, whole - compute)) for whole, compute in spent.tolist())
    return Predicted(step_s=step_s, compute_s=compute_s, communication_s=communication_s)


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
