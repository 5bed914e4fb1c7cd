"""Simulate replicas under a consistency rule, step by step: computing, waiting, and traffic over links."""

import math
from collections import Counter
from functools import partial

import msgspec

from meshwright.errors import LayoutError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import Consistency
from meshwright.ir.trace import Span, Trace
from meshwright.schedules.clocks import staleness
from meshwright.simulate.exchanges import exchange_of
from meshwright.simulate.faults import ReplicaFaults
from meshwright.simulate.letters import Letters, ReplicaStep
from meshwright.simulate.spans import COMPUTE, WAIT

STEPS = 200


class ReplicaTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The course of a simulation until all replicas together have made ``num_steps`` steps.

    ``end_s``: the time at this moment. ``step_s``: the time in which P replicas make P steps. ``staleness``: a
    histogram. It maps a staleness (the clock of a replica minus the slowest clock) to the number of steps that began
    with it. ``steps``, ``waited_s``, ``sent_bytes`` and ``received_bytes`` have an entry for each replica. They count
    bytes between different ranks, without the bytes of servers. ``server_bytes``: the bytes that each server sends and
    receives."""

    rule: str
    num_replicas: int
    num_steps: int
    end_s: float
    step_s: float
    staleness: dict[int, int]
    steps: tuple[int, ...]
    waited_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    server_bytes: tuple[float, ...] = ()
    trace: Trace

    @property
    def mean_staleness(self) -> float:
        """The mean over all steps."""
        return sum(value * count for value, count in self.staleness.items()) / max(1, sum(self.staleness.values()))

    @property
    def waited_share(self) -> float:
        """The fraction of the replicas' time in which they wait."""
        return sum(self.waited_s) / (self.end_s * self.num_replicas)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a replica sends in a step, on average."""
        return sum(self.sent_bytes) / self.num_steps


def simulate_replicas(
    rule: Consistency,
    num_replicas: int,
    step: ReplicaStep,
    cluster: Cluster,
    *,
    steps: int = STEPS,
    faults: ReplicaFaults | None = None,
) -> ReplicaTimes:
    """Simulate replicas until they have made ``steps`` steps each on average. Under some rules, fast replicas make more
    steps than slow replicas. A step counts when its replica may begin the next step.

    A dying replica leaves the view immediately. A joining replica first gets the state of the replica with the lowest
    number. Then it continues with the clock with which that replica begins its next step.

    Raises:
        LayoutError: the faults name a replica that does not exist, all replicas or all copies of a range die, or the
            cluster's units are not equal.
        ClusterError: the cluster is too small.
    """
    faults = faults or ReplicaFaults()
    faults.check(num_replicas)
    run = _Run(rule, num_replicas, step, cluster, steps, faults)
    run.run()
    return run.times()


class _Run:
    """The state of the simulation.

    Attributes:
        clocks: the number of steps whose results each replica has handed over.
        members: the replicas that are alive.
    """

    def __init__(
        self, rule: Consistency, num_replicas: int, step: ReplicaStep, cluster: Cluster, steps: int,
        faults: ReplicaFaults,
    ) -> None:  # fmt: skip
        self._rule, self._step, self._faults = rule, step, faults
        self._num_replicas, self._budget = num_replicas, steps * num_replicas
        self.clocks = dict.fromkeys(range(num_replicas), 0)
        self.members = [replica for replica in range(num_replicas) if not _joins_first(faults, replica)]
        self.letters = Letters(rule, num_replicas, step, cluster)
        self._exchange = exchange_of(rule, step.exposed_s)(self)
        self._factors = [faults.factors(replica, num_replicas) for replica in range(num_replicas)]
        self._ready_s: dict[int, float] = {}
        """The time since when each replica waits."""
        self._computed: set[int] = set()
        """The replicas whose last step is not counted yet."""
        self._began_s: dict[int, float] = {}
        self._joining: list[int] = []
        self._lives = [0] * num_replicas
        self._end_s = math.inf
        self._steps, self._waited_s = [0] * num_replicas, [0.0] * num_replicas
        self._staleness: Counter[int] = Counter()
        self._spans: list[Span] = []

    def run(self) -> None:
        links = self.letters.links
        for replica, time_s in self._faults.each.deaths_s.items():
            links.call_at(time_s, partial(self._die, replica))
        for replica, time_s in self._faults.joins_s.items():
            links.call_at(time_s, partial(self._ask_to_join, replica))
        self._ready_s = dict.fromkeys(self.members, 0.0)
        self.look(0.0)
        while self._end_s == math.inf and links.advance():
            pass
        if self._end_s < math.inf:
            return
        if not self.members:
            raise LayoutError("all replicas have died", where="faults", remedy="let a replica live, or simulate less")
        problem = f"replicas {', '.join(map(str, self._ready_s))} wait for ever"
        raise ScheduleError(problem, where=f"consistency {str(self._rule)!r}", remedy="report this as a defect")

    def times(self) -> ReplicaTimes:
        replicas, letters = range(self._num_replicas), self.letters
        servers = sorted(each for each in {*letters.sent, *letters.received} if each not in replicas)
        num_steps = sum(self._steps)
        return ReplicaTimes(
            rule=str(self._rule), num_replicas=self._num_replicas, num_steps=num_steps, end_s=self._end_s,
            step_s=self._end_s * self._num_replicas / num_steps, staleness=dict(sorted(self._staleness.items())),
            steps=tuple(self._steps), waited_s=tuple(self._waited_s),
            sent_bytes=tuple(letters.sent[replica] for replica in replicas),
            received_bytes=tuple(letters.received[replica] for replica in replicas),
            server_bytes=tuple(letters.sent[each] + letters.received[each] for each in servers),
            trace=Trace(source="simulated", spans=tuple(self._spans)),
        )  # fmt: skip

    # --- a step ------------------------------------------------------------------------------------------------------

    def look(self, time_s: float) -> None:
        """Begin the next step of each waiting replica that may begin it."""
        for replica in sorted(self._ready_s):
            if replica in self._ready_s and self._end_s == math.inf and self._exchange.may_begin(replica):
                self._begin(replica, time_s)

    def _begin(self, replica: int, time_s: float) -> None:
        ready_s = self._ready_s.pop(replica)
        self._waited_s[replica] += time_s - ready_s
        if time_s > ready_s:
            self._spans.append(Span(replica, WAIT, f"{self._rule}", ready_s, time_s))
        if replica in self._computed:
            self._computed.discard(replica)
            self._steps[replica] += 1
            if sum(self._steps) == self._budget:
                self._end_s = time_s
                return
        if replica == self.members[0] and self._joining:
            self._let_join(replica, time_s)
        self._staleness[staleness({member: self.clocks[member] for member in self.members}, replica)] += 1
        self._exchange.begun(replica, time_s)
        self._began_s[replica] = time_s
        end_s = time_s + self._step.step_s * next(self._factors[replica])
        self.letters.links.call_at(end_s, partial(self._ended, replica, self._lives[replica]))

    def _ended(self, replica: int, life: int, time_s: float) -> None:
        if replica not in self.members or life != self._lives[replica]:
            return
        self._spans.append(Span(replica, COMPUTE, "step", self._began_s.pop(replica), time_s))
        self._computed.add(replica)
        self._ready_s[replica] = time_s
        self._exchange.ended(replica, time_s)
        self.look(time_s)

    # --- deaths and joins --------------------------------------------------------------------------------------------

    def _die(self, replica: int, time_s: float) -> None:
        if replica not in self.members:
            return
        self.members.remove(replica)
        self._lives[replica] += 1
        self._ready_s.pop(replica, None)
        self._computed.discard(replica)
        if (began_s := self._began_s.pop(replica, None)) is not None:
            self._spans.append(Span(replica, COMPUTE, "step", began_s, time_s))
        if self.members:
            self._exchange.left(replica, time_s)
            self.look(time_s)

    def _ask_to_join(self, replica: int, time_s: float) -> None:
        """Get the state of a living replica."""
        if not self.members or replica in self.members:
            return
        size = self._step.num_bytes
        letters = [(self.members[0], replica, 1 + self._step.state_bytes / size)] if size else []
        self.letters.send(lambda _: self._joining.append(replica), time_s, letters)

    def _let_join(self, giver: int, time_s: float) -> None:
        """The replicas that have the state of ``giver`` begin their next step with it."""
        joining, self._joining = self._joining, []
        for replica in joining:
            self.members = sorted([*self.members, replica])
            self.clocks[replica] = self.clocks[giver]
            self._exchange.joined(replica, time_s)
            self._ready_s[replica] = time_s
        self.letters.links.call_at(time_s, self.look)


def _joins_first(faults: ReplicaFaults, replica: int) -> bool:
    """Whether a replica joins before it can die."""
    return replica in faults.joins_s and faults.joins_s[replica] <= faults.each.deaths_s.get(replica, math.inf)
