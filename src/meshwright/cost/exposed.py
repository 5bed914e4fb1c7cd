"""Exposed communication: the time for which a stage's compute waits for gathers and reductions of buckets.

    compute  | F1 | F2 |   wait | B2 | B1 | wait |
    link     | gather 2 |            | reduce 2 | reduce 1 |

The reduction of a bucket starts when its last gradient is computed. Parameters are gathered one bucket ahead: a gather
starts when the gather before it has ended. An axis runs one collective at a time, as in the simulator.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.cost.collective import Network
from meshwright.cost.fabric import axis_group, piece_s
from meshwright.cost.host import waits_s
from meshwright.cost.node_costs import NodeCosts, communicated
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Plan
from meshwright.ir.program import Collective, Node, Program


class Moment(NamedTuple):
    """A piece of compute, and the event at its end. After ``compute_s`` seconds, one of three events happens: the stage
    waits for collectives that belong to no bucket (``others``: axis and seconds); it needs the gathered parameters
    ``wanted``; or it has computed the gradients of the parameters in
    ``gradients``."""

    compute_s: float
    others: tuple[tuple[str, float], ...] = ()
    wanted: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of compute and of collectives that belong to no bucket."""
        return self.compute_s + sum(seconds for _, seconds in self.others)


class BucketTransfer(NamedTuple):
    """The collective of a bucket on ``axis``. It takes ``seconds``, then ``after_s`` for sums over other axes, which do
    not overlap with anything. ``alone``: before the collective starts, compute waits until earlier reductions have
    ended. Without ``hides``, compute waits for the collective immediately, as on devices whose ranks move the bytes
    themselves. ``charge_s``: the time that this transfer must save, at least, when it is chosen among several
    (``least_exposed``)."""

    axis: str
    parameters: tuple[str, ...]
    seconds: float
    after_s: float = 0.0
    alone: bool = False
    hides: bool = True
    charge_s: float = 0.0


class Actions(NamedTuple):
    """The ``moments``, in order, that make up one kind of action of a stage; a step runs the action ``times`` times."""

    times: int
    moments: tuple[Moment, ...]


def stage_actions(program: Program, plan: Plan, cluster: Cluster) -> tuple[Actions, ...]:
    """The actions of a stage. Each bucket of ``plan`` must have a single parameter, so that all bucket sizes can be
    tried later."""
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
            others: tuple[tuple[str, float], ...] = (), wanted: tuple[str, ...] = (), gradients: tuple[str, ...] = ()
        ) -> None:
            cost = costs.of(pending)
            timeline.append(Moment(cost.seconds, others, wanted, gradients))
            launches_s.append(costs.launch_s * cost.launches)
            pending.clear()

        for node in (node for name in phases for node in program.phase(name).nodes):
            pending.append(node)
            for collective in node.inside:
                add(others=other(collective))
            if node.starts is not None:
                begun[node.name] = node.starts
                if (gradients := reduced.get((node.starts.axis, node.starts.label))) is not None:
                    add(gradients=gradients)
            if node.waits:
                collective = begun[node.waits]
                if (wanted := gathered.get((collective.axis, collective.label))) is not None:
                    add(wanted=wanted)
                elif collective.label not in labels:  # the transfer of a bucket includes its sums over other axes
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


MOST_LINES = 24
"""Largest number of timelines that ``least_exposed`` compares after each bucket."""


def exposed_s(
    actions: Iterable[Actions], gathers: Sequence[BucketTransfer], reductions: Sequence[BucketTransfer]
) -> float:
    """Seconds of a step in which a stage's compute waits for ``gathers`` and ``reductions``. Other parameters are
    ignored."""
    gathered, reduced = _by_parameter([each] for each in gathers), _by_parameter([each] for each in reductions)
    total = 0.0
    for action in actions:
        (line,) = _lines(action, gathered, reduced)
        total += action.times * (line.now_s - sum(moment.seconds for moment in action.moments))
    return total


def least_exposed(
    actions: Iterable[Actions], gathers: Sequence[BucketTransfer], choices: Iterable[Sequence[BucketTransfer]]
) -> tuple[BucketTransfer, ...]:
    """For each bucket in ``choices``, the transfer with which a stage waits least. The charges of transfers count as
    waiting. Only buckets of the stage are returned.

    A timeline is dropped if another timeline is better in everything: time, links and charges. So the result is the
    best of all combinations, with two exceptions: more than ``MOST_LINES`` timelines remain, or sums over several axes
    follow.
    """
    gathered, reduced = _by_parameter([each] for each in gathers), _by_parameter(choices)
    return tuple(
        transfer
        for action in actions
        for transfer in min(_lines(action, gathered, reduced), key=lambda line: line.total_s).chosen
    )


def computed_s(actions: Iterable[Actions]) -> float:
    """Seconds of a step in which a stage computes, or waits for collectives other than buckets."""
    return sum(action.times * moment.seconds for action in actions for moment in action.moments)


_Choice = tuple[BucketTransfer, ...]


def _by_parameter(choices: Iterable[Sequence[BucketTransfer]]) -> dict[str, _Choice]:
    choice_tuples = [tuple(choice) for choice in choices]
    return {name: choice for choice in choice_tuples for name in choice[0].parameters}


def _lines(action: Actions, gathered: Mapping[str, _Choice], reduced: Mapping[str, _Choice]) -> list["_Line"]:
    """The timelines of an action that may be the best, one for each combination of choices. If each bucket has only one
    possible transfer, there is a single timeline."""
    moments, lines = action.moments, [_Line(action.times)]
    order = list(dict.fromkeys(gathered[name][0] for moment in moments for name in moment.wanted if name in gathered))
    left = Counter(id(reduced[name]) for moment in moments for name in moment.gradients if name in reduced)
    arrived = 0
    for moment in moments:
        for line in lines:
            line.now_s += moment.compute_s
            for axis, seconds in moment.others:
                line.wait(axis, seconds)
        for transfer in dict.fromkeys(gathered[name][0] for name in moment.wanted if name in gathered):
            if transfer in order[:arrived]:
                continue
            arrived += 1
            for line in lines:
                line.start(transfer)
                line.finish(transfer)
                if arrived < len(order):
                    line.start(order[arrived])
        for choice in [reduced[name] for name in moment.gradients if name in reduced]:
            left[id(choice)] -= 1
            if left[id(choice)]:
                continue
            if len(choice) > 1:
                pairs = [(line.copy(), each) for line in lines for each in choice]
            else:
                pairs = [(line, choice[0]) for line in lines]
            for line, transfer in pairs:
                line.reduce(transfer)
            lines = _ahead([line for line, _ in pairs])
    for line in lines:
        line.finish_all(all_transfers=True)
    return lines


def _ahead(lines: list["_Line"]) -> list["_Line"]:
    """The timelines that no other timeline beats in everything."""
    if len(lines) == 1:
        return lines
    places = sorted({key for line in lines for key in line.free_s})
    pending = sorted({each.parameters for line in lines for each in line.ends_s if each.after_s})
    kept: list[tuple[tuple[float, ...], _Line]] = []
    for line in sorted(lines, key=lambda line: (line.total_s, line.charge_s)):
        state = line.state(places, pending)
        if not any(all(map(operator.le, other, state)) for other, _ in kept):
            kept.append((state, line))
    return [line for _, line in kept[:MOST_LINES]]


class _Line:
    """A timeline: the clock of a rank, and the times until which the links of its axes are busy. It also has the
    transfers that were ``chosen`` for reductions, with their charges. A step runs the action of the timeline ``times``
    times."""

    def __init__(self, times: int) -> None:
        self.now_s, self.charge_s, self.times = 0.0, 0.0, times
        self.free_s: dict[str, float] = {}
        self.ends_s: dict[BucketTransfer, float] = {}
        self.chosen: list[BucketTransfer] = []

    def copy(self) -> "_Line":
        """An independent copy of the timeline."""
        line = _Line(self.times)
        line.now_s, line.charge_s, line.chosen = self.now_s, self.charge_s, [*self.chosen]
        line.free_s, line.ends_s = {**self.free_s}, {**self.ends_s}
        return line

    @property
    def total_s(self) -> float:
        """The end of all transfers so far, with the charges."""
        return self.times * max(self.now_s, max(self.ends_s.values(), default=0.0)) + self.charge_s

    def state(self, axes: Iterable[str], pending: Iterable[tuple[str, ...]]) -> tuple[float, ...]:
        """The numbers on which the rest of the timeline depends. Smaller numbers never make the rest longer.
        ``pending`` has the parameters of transfers that are followed by sums over other axes."""
        ends = {each.parameters: (end, each.after_s) for each, end in self.ends_s.items() if each.after_s}
        links = (max(self.now_s, self.free_s.get(axis, 0.0)) for axis in axes)
        return self.now_s, self.charge_s, *links, *(number for each in pending for number in ends.get(each, (0.0, 0.0)))

    def reduce(self, transfer: BucketTransfer) -> None:
        """Start the reduction of a bucket."""
        if transfer.alone:
            self.finish_all(all_transfers=False)
        self.start(transfer)
        self.charge_s += transfer.charge_s
        self.chosen.append(transfer)

    def start(self, transfer: BucketTransfer) -> None:
        """Start a transfer as soon as its link is free, unless it is already started."""
        if transfer in self.ends_s:
            return
        end = max(self.now_s, self.free_s.get(transfer.axis, 0.0)) + transfer.seconds
        self.ends_s[transfer] = self.free_s[transfer.axis] = end
        if not transfer.hides:
            self.now_s = end

    def wait(self, axis: str, seconds: float) -> None:
        """Wait for a collective that does not overlap with anything."""
        self.now_s = self.free_s[axis] = max(self.now_s, self.free_s.get(axis, 0.0)) + seconds

    def finish(self, transfer: BucketTransfer) -> None:
        """Wait for the end of a transfer, unless its end was already awaited."""
        if transfer in self.ends_s:
            self.now_s = max(self.now_s, self.ends_s.pop(transfer)) + transfer.after_s

    def finish_all(self, *, all_transfers: bool) -> None:
        """Wait for the end of all reductions; with ``all_transfers``, of all transfers."""
        for transfer in list(self.ends_s) if all_transfers else [each for each in self.chosen if each in self.ends_s]:
            self.finish(transfer)
