"""How long computing stands still for buckets: gathers and reductions, beside what one stage computes.

    compute  | F1 | F2 |   wait | B2 | B1 | wait |
    link     | gather 2 |            | reduce 2 | reduce 1 |

A bucket of gradients starts when its last gradient is made. Parameters are gathered one bucket ahead: the next starts
when one has arrived. The collectives of an axis go one after the other, as in the simulator.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.cost.closed_form import axis_group
from meshwright.cost.collective import Network
from meshwright.cost.program import NodeCosts
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Plan
from meshwright.ir.program import Collective, Node, Program


class Moment(NamedTuple):
    """Computing, ``compute_s`` long, after which other collectives are waited for (``others``: axis and seconds),
    parameters are wanted whole, or gradients are made."""

    compute_s: float
    others: tuple[tuple[str, float], ...] = ()
    wanted: tuple[str, ...] = ()
    made: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Without any buckets."""
        return self.compute_s + sum(seconds for _, seconds in self.others)


class Transfer(NamedTuple):
    """A bucket on an axis: ``seconds`` under way, then ``after_s`` of sums over other axes, which hide behind nothing.
    ``alone``: it starts when those before have ended, and computing waits for that. One that does not hide is waited
    for at once, as where ranks move the bytes themselves."""

    axis: str
    parameters: tuple[str, ...]
    seconds: float
    after_s: float = 0.0
    alone: bool = False
    hides: bool = True


class Actions(NamedTuple):
    """The moments of one kind of action of a stage, which a step has so often."""

    times: int
    moments: tuple[Moment, ...]


def stage_actions(program: Program, plan: Plan, cluster: Cluster) -> tuple[Actions, ...]:
    """What a stage computes, wants and makes, of a plan whose buckets have one parameter each."""
    costs, network, each = NodeCosts(plan.mesh, cluster), Network(cluster), plan.microbatches
    begun: dict[str, Collective] = {}
    gathered = {(one.axis, one.label): one.parameters for one in plan.gathers}
    reduced = {(one.axis, f"gradients of {one.label}"): one.parameters for one in plan.buckets}
    labels = {label for _, label in reduced}

    def other(one: Collective) -> tuple[tuple[str, float], ...]:
        return ((one.axis, network.collective_s(one.kind, one.bytes, axis_group(plan.mesh, one.axis))),)

    def moments(*phases: str) -> tuple[Moment, ...]:
        found: list[Moment] = []
        pending: list[Node] = []

        def add(
            others: tuple[tuple[str, float], ...] = (), wanted: tuple[str, ...] = (), made: tuple[str, ...] = ()
        ) -> None:
            found.append(Moment(costs.of(pending).seconds, others, wanted, made))
            pending.clear()

        for node in (node for name in phases for node in program.phase(name).nodes):
            pending.append(node)
            for one in node.inside:
                add(others=other(one))
            if node.starts is not None:
                begun[node.name] = node.starts
                if (made := reduced.get((node.starts.axis, node.starts.label))) is not None:
                    add(made=made)
            if node.waits:
                one = begun[node.waits]
                if (wanted := gathered.get((one.axis, one.label))) is not None:
                    add(wanted=wanted)
                elif one.label not in labels:  # of a bucket, other axes too are in its transfer
                    add(others=other(one))
        add()
        return tuple(found)

    return (
        Actions(1, moments("prologue")),
        Actions(each, moments("forward")),
        Actions(each, moments("backward")),
        Actions(1, moments("reduce", "finish")),
    )


def exposed_s(actions: Iterable[Actions], gathers: Sequence[Transfer], reductions: Sequence[Transfer]) -> float:
    """Seconds of a step for which a stage's computing stands still for these buckets; others' parameters are passed
    over."""
    gathered = {name: one for one in gathers for name in one.parameters}
    reduced = {name: one for one in reductions for name in one.parameters}
    return sum(one.times * _stands_still_s(one.moments, gathered, reduced) for one in actions)


def computed_s(actions: Iterable[Actions]) -> float:
    """Seconds of a step for which a stage does anything else."""
    return sum(one.times * moment.seconds for one in actions for moment in one.moments)


def _stands_still_s(
    moments: Sequence[Moment], gathered: Mapping[str, Transfer], reduced: Mapping[str, Transfer]
) -> float:
    line = _Line()
    wanted = [gathered[name] for moment in moments for name in moment.wanted if name in gathered]
    order = list(dict.fromkeys(wanted))
    waiting = [reduced[name] for moment in moments for name in moment.made if name in reduced]
    left = {one: waiting.count(one) for one in dict.fromkeys(waiting)}
    arrived = 0
    for moment in moments:
        line.now_s += moment.compute_s
        for axis, seconds in moment.others:
            line.wait(axis, seconds)
        for one in dict.fromkeys(gathered[name] for name in moment.wanted if name in gathered):
            if one in order[:arrived]:
                continue
            line.start(one)
            line.finish(one)
            arrived += 1
            if arrived < len(order):
                line.start(order[arrived])
        for one in [reduced[name] for name in moment.made if name in reduced]:
            left[one] -= 1
            if not left[one]:
                if one.alone:
                    line.finish_all(lambda other: other in left)
                line.start(one)
    line.finish_all(lambda other: True)
    return line.now_s - sum(moment.seconds for moment in moments)


class _Line:
    """The time on a rank, and until when the links of its axes are taken."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_s: dict[str, float] = {}
        self._ends_s: dict[Transfer, float] = {}

    def start(self, one: Transfer) -> None:
        """As soon as the link is free; nothing, where it has been started."""
        if one in self._ends_s:
            return
        end = max(self.now_s, self._free_s.get(one.axis, 0.0)) + one.seconds
        self._ends_s[one] = self._free_s[one.axis] = end
        if not one.hides:
            self.now_s = end

    def wait(self, axis: str, seconds: float) -> None:
        """Stand still for a collective that hides behind nothing."""
        self.now_s = self._free_s[axis] = max(self.now_s, self._free_s.get(axis, 0.0)) + seconds

    def finish(self, one: Transfer) -> None:
        """Stand still until it has come; nothing, where it was waited for."""
        if one in self._ends_s:
            self.now_s = max(self.now_s, self._ends_s.pop(one)) + one.after_s

    def finish_all(self, which: Callable[[Transfer], bool]) -> None:
        for one in [one for one in self._ends_s if which(one)]:
            self.finish(one)
