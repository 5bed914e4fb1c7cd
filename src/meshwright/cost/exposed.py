"""Exposed communication: the time for which a stage's compute waits for gathers and reductions of buckets.

    compute  | F1 | F2 |   wait | B2 | B1 | wait |
    link     | gather 2 |            | reduce 2 | reduce 1 |

The reduction of a bucket starts when its last gradient is computed. Parameters are gathered one bucket ahead: a gather
starts when the gather before it has ended. An axis runs one collective at a time, as in the simulator.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.cost.collective import Network
from meshwright.cost.fabric import axis_group, piece_s
from meshwright.cost.host import waits_s
from meshwright.cost.program import NodeCosts, communicated
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Plan
from meshwright.ir.program import Collective, Node, Program


class Moment(NamedTuple):
    """A piece of compute, and the event at its end. After ``compute_s`` seconds the stage waits for collectives of no
    bucket (``others``: axis and seconds), needs the gathered parameters ``wanted``, or has computed the gradients of
    the parameters ``made``."""

    compute_s: float
    others: tuple[tuple[str, float], ...] = ()
    wanted: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of compute and of collectives that belong to no bucket."""
        return self.compute_s + sum(seconds for _, seconds in self.others)


class BucketTransfer(NamedTuple):
    """The collective of a bucket on ``axis``. It takes ``seconds``, then ``after_s`` for sums over other axes, which
    overlap nothing. ``alone``: before the collective starts, compute waits until earlier reductions have ended. Without
    ``hides``, compute waits for the collective at once, as on devices whose ranks move the bytes themselves."""

    axis: str
    parameters: tuple[str, ...]
    seconds: float
    after_s: float = 0.0
    alone: bool = False
    hides: bool = True


class Actions(NamedTuple):
    """The ``moments``, in order, that make up one kind of action of a stage; a step runs the action ``times`` times."""

    times: int
    moments: tuple[Moment, ...]


def stage_actions(program: Program, plan: Plan, cluster: Cluster) -> tuple[Actions, ...]:
    """The actions of a stage. The buckets of ``plan`` must have one parameter each; then all sizes can be tried."""
    costs, network, each = NodeCosts(plan.mesh, cluster), Network(cluster), plan.microbatches
    begun: dict[str, Collective] = {}
    gathered = {(bucket.axis, bucket.label): bucket.parameters for bucket in plan.gathers}
    reduced = {(bucket.axis, bucket.reduction): bucket.parameters for bucket in plan.buckets}
    labels = {label for _, label in reduced}

    def other(collective: Collective) -> tuple[tuple[str, float], ...]:
        return (
            (
                collective.axis,
                piece_s(communicated("", collective, True), network, axis_group(plan.mesh, collective.axis)),
            ),
        )

    def moments(*phases: str) -> tuple[Moment, ...]:
        timeline: list[Moment] = []
        launches_s: list[float] = []
        pending: list[Node] = []

        def add(
            others: tuple[tuple[str, float], ...] = (), wanted: tuple[str, ...] = (), made: tuple[str, ...] = ()
        ) -> None:
            cost = costs.of(pending)
            timeline.append(Moment(cost.seconds, others, wanted, made))
            launches_s.append(costs.launch_s * cost.launches)
            pending.clear()

        for node in (node for name in phases for node in program.phase(name).nodes):
            pending.append(node)
            for collective in node.inside:
                add(others=other(collective))
            if node.starts is not None:
                begun[node.name] = node.starts
                if (gradients := reduced.get((node.starts.axis, node.starts.label))) is not None:
                    add(made=gradients)
            if node.waits:
                collective = begun[node.waits]
                if (wanted := gathered.get((collective.axis, collective.label))) is not None:
                    add(wanted=wanted)
                elif collective.label not in labels:  # a bucket's transfer includes its sums over other axes
                    add(others=other(collective))
        add()
        waits = waits_s(sum(moment.seconds for moment in timeline), launches_s)
        return tuple(
            moment._replace(compute_s=moment.compute_s + wait_s) for moment, wait_s in zip(timeline, waits, strict=True)
        )

    return (
        Actions(1, moments("prologue")),
        Actions(each, moments("forward")),
        Actions(each, moments("backward")),
        Actions(1, moments("reduce", "finish")),
    )


def exposed_s(
    actions: Iterable[Actions], gathers: Sequence[BucketTransfer], reductions: Sequence[BucketTransfer]
) -> float:
    """Seconds of a step in which a stage's compute waits for ``gathers`` and ``reductions``. Other parameters are
    ignored."""
    gathered = {name: transfer for transfer in gathers for name in transfer.parameters}
    reduced = {name: transfer for transfer in reductions for name in transfer.parameters}
    return sum(action.times * _stands_still_s(action.moments, gathered, reduced) for action in actions)


def computed_s(actions: Iterable[Actions]) -> float:
    """Seconds of a step in which a stage computes, or waits for collectives other than buckets."""
    return sum(action.times * moment.seconds for action in actions for moment in action.moments)


def _stands_still_s(
    moments: Sequence[Moment], gathered: Mapping[str, BucketTransfer], reduced: Mapping[str, BucketTransfer]
) -> float:
    line = _Line()
    wanted = [gathered[name] for moment in moments for name in moment.wanted if name in gathered]
    order = list(dict.fromkeys(wanted))
    waiting = [reduced[name] for moment in moments for name in moment.made if name in reduced]
    left = {transfer: waiting.count(transfer) for transfer in dict.fromkeys(waiting)}
    arrived = 0
    for moment in moments:
        line.now_s += moment.compute_s
        for axis, seconds in moment.others:
            line.wait(axis, seconds)
        for transfer in dict.fromkeys(gathered[name] for name in moment.wanted if name in gathered):
            if transfer in order[:arrived]:
                continue
            line.start(transfer)
            line.finish(transfer)
            arrived += 1
            if arrived < len(order):
                line.start(order[arrived])
        for transfer in [reduced[name] for name in moment.made if name in reduced]:
            left[transfer] -= 1
            if not left[transfer]:
                if transfer.alone:
                    line.finish_all(lambda other: other in left)
                line.start(transfer)
    line.finish_all(lambda other: True)
    return line.now_s - sum(moment.seconds for moment in moments)


class _Line:
    """The clock of a rank, and the times until which the links of its axes are busy."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_s: dict[str, float] = {}
        self._ends_s: dict[BucketTransfer, float] = {}

    def start(self, transfer: BucketTransfer) -> None:
        """Start a transfer as soon as its link is free, unless it is already started."""
        if transfer in self._ends_s:
            return
        end = max(self.now_s, self._free_s.get(transfer.axis, 0.0)) + transfer.seconds
        self._ends_s[transfer] = self._free_s[transfer.axis] = end
        if not transfer.hides:
            self.now_s = end

    def wait(self, axis: str, seconds: float) -> None:
        """Wait for a collective that overlaps nothing."""
        self.now_s = self._free_s[axis] = max(self.now_s, self._free_s.get(axis, 0.0)) + seconds

    def finish(self, transfer: BucketTransfer) -> None:
        """Wait for the end of a transfer, unless that was done before."""
        if transfer in self._ends_s:
            self.now_s = max(self.now_s, self._ends_s.pop(transfer)) + transfer.after_s

    def finish_all(self, which: Callable[[BucketTransfer], bool]) -> None:
        for transfer in [transfer for transfer in self._ends_s if which(transfer)]:
            self.finish(transfer)
