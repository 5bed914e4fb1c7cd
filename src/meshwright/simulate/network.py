"""Communication in the simulator as flows that share the links of the cluster's levels."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import msgspec

from meshwright.cost.collective import SHORT_RING, Group, Network
from meshwright.cost.fabric import Fabric
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.level import Level
from meshwright.ir.program import CollectiveKind

Resource = tuple[str, int, int]
"""A shared resource: (kind, level, unit). The kinds ``out`` and ``in`` are the links from a unit into the level and
back. The kind ``core`` is the connection between the units inside one unit of the next level."""


Finish = Callable[[float], None]
"""A function that is called with the end time of a transfer."""


class Flow(msgspec.Struct, frozen=True):
    """``bytes`` that move through several resources at one rate, after ``latency_s``. ``uses`` maps each resource to
    the number of its links that a rate of 1 byte/s takes. The rate is at most ``limit_bytes_per_s``. Flows share a
    resource in proportion to their ``weight``."""

    latency_s: float
    bytes: float
    uses: dict[Resource, float]
    limit_bytes_per_s: float
    weight: float = 1.0


class Links:
    """The transfers under way and their rates: fluid flows share the links fairly (max-min, by weight).

    A unit's links into a level carry ``Level.links`` times the rate of one link, in each direction. Between the units,
    the level carries the sum of their rates divided by ``Level.contention``. So if all groups of an axis (or all
    data-parallel copies of a stage) communicate at the same time, a transfer takes the time of the closed form. It is
    faster if fewer groups communicate, and slower if other transfers share the links.

    Raises:
        ClusterError: the units of a level are not all equal.
    """

    def __init__(self, fabric: Fabric) -> None:
        cluster = fabric.cluster
        if not cluster.homogeneous:
            raise ClusterError(
                "link contention is simulated between like units only",
                where=f"cluster {cluster.name}",
                remedy="simulate without contention, or describe a cluster without members",
            )
        self._network, self._levels = Network(cluster), cluster.levels
        self._unmeasured = Network(msgspec.structs.replace(cluster, collectives=()))
        self._below = [math.prod(level.fan_out for level in self._levels[:index]) for index in range(len(self._levels))]
        self._capacity: dict[Resource, float] = {}
        self._pending: list[tuple[float, int, Finish, tuple[Flow, ...]]] = []
        self._numbers = itertools.count()
        self._active: dict[int, tuple[Finish, tuple[Flow, ...]]] = {}
        self._left: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._now_s = 0.0

    def start(self, finish: Finish, time_s: float, flows: tuple[Flow, ...]) -> None:
        """Begin a transfer, whose ``flows`` run one after the other. ``time_s`` must not be before the last end that
        was reported."""
        heapq.heappush(self._pending, (time_s + flows[0].latency_s, next(self._numbers), finish, flows))

    def call_at(self, time_s: float, finish: Finish) -> None:
        """Call ``finish`` at a time, as if a transfer ended then. The time must not be before the last end that was
        reported."""
        heapq.heappush(self._pending, (time_s, next(self._numbers), finish, ()))

    def advance(self) -> bool:
        """Advance to the next time at which transfers end or a call is due, and call their ``finish`` functions.
        Returns False if no transfer and no call is left."""
        while self._pending or self._active:
            ending = {number: left / self._rates[number] for number, left in self._left.items()}
            next_end = self._now_s + min(ending.values(), default=math.inf)
            if self._pending and self._pending[0][0] <= next_end:
                self._move(self._pending[0][0])
                if not self._pending[0][3]:
                    heapq.heappop(self._pending)[2](self._now_s)
                    return True
                while self._pending and self._pending[0][0] <= self._now_s and self._pending[0][3]:
                    _, number, finish, flows = heapq.heappop(self._pending)
                    self._active[number], self._left[number] = (finish, flows), flows[0].bytes
                self._share()
                continue
            first = min(ending.values())
            done = [number for number, seconds in ending.items() if seconds <= first * (1 + 1e-12)]
            self._move(next_end)
            ended = []
            for number in done:
                finish, flows = self._active.pop(number)
                del self._left[number], self._rates[number]
                if len(flows) > 1:
                    self.start(finish, self._now_s, flows[1:])
                else:
                    ended.append(finish)
            self._share()
            for finish in ended:
                finish(self._now_s)
            if ended:
                return True
        return False

    def _move(self, time_s: float) -> None:
        passed = time_s - self._now_s
        for number in self._left:
            self._left[number] = max(0.0, self._left[number] - passed * self._rates[number])
        self._now_s = time_s

    def _share(self) -> None:
        """Set max-min fair rates (Bertsekas and Gallager 1992, section 6.5.2): all rates rise together, and the rate of
        a flow stops at its own limit, or when a resource that it uses is full."""
        flows = {number: flows[0] for number, (_, flows) in self._active.items()}
        free = {resource: self._capacity[resource] for flow in flows.values() for resource in flow.uses}
        rising = dict(flows)
        self._rates = dict.fromkeys(flows, 0.0)
        while rising:
            load: dict[Resource, float] = dict.fromkeys(free, 0.0)
            for flow in rising.values():
                for resource, links in flow.uses.items():
                    load[resource] += links * flow.weight
            step = min(
                min((flow.limit_bytes_per_s - self._rates[number]) / flow.weight for number, flow in rising.items()),
                min((free[resource] / used for resource, used in load.items() if used), default=math.inf),
            )
            for number, flow in rising.items():
                self._rates[number] += step * flow.weight
            full = set()
            for resource, used in load.items():
                free[resource] -= step * used
                if used and free[resource] <= 1e-12 * self._capacity[resource]:
                    full.add(resource)
            rising = {
                number: flow
                for number, flow in rising.items()
                if self._rates[number] < flow.limit_bytes_per_s * (1 - 1e-12) and not full & flow.uses.keys()
            }

    # --- the resources of a transfer -------------------------------------------------------------------------------

    def message(self, num_bytes: int, source: int, target: int) -> tuple[Flow, ...]:
        """The flow of a message between two ranks."""
        for index, level in enumerate(self._levels):
            here, there = self._unit(index, source), self._unit(index, target)
            if here // level.fan_out == there // level.fan_out and here != there:
                uses = self._uses(index, {here}, {there}, _beta(level))
                return (Flow(level.alpha_s, float(num_bytes), uses, 1 / _beta(level)),)
        raise AssertionError("a rank sends to itself")

    def collective(
        self, collective: CollectiveKind, num_bytes: float, ranks: Sequence[int], alone_s: float | None = None
    ) -> tuple[Flow, ...]:
        """The flows of a collective between ``ranks``, which must be equally spaced. ``alone_s``: its seconds without
        other traffic, if its elements are coded. It is then treated as a plain collective with the number of bytes that
        takes this time."""
        size, (latency_s, slower) = len(ranks), self._measured(collective, num_bytes, ranks)
        if alone_s is not None:
            whole_s = self._network.collective_s(collective, num_bytes, Group(size, ranks[1] - ranks[0]))
            slower *= max(0.0, alone_s - latency_s) / (whole_s - latency_s) if whole_s > latency_s else 1.0
        num_bytes *= slower
        if collective == "all_to_all":
            return self._pairwise(num_bytes, ranks, latency_s)
        sent = num_bytes * {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "halo": 1.0, "shift": 1.0}.get(
            collective, (size - 1) / size
        )
        uses: dict[Resource, float] = {}
        limit, weight = math.inf, 1.0
        for index, units, inside in self._crossed(ranks):
            # A ring enters and leaves a unit once, through its members' share of the links of the unit.
            level, members = self._levels[index], size / len(units)
            slow = 1 - SHORT_RING / inside**2 if self._below[index] == 1 else 1.0
            uses |= self._uses(index, units, units, _beta(level) / slow)
            limit, weight = min(limit, members / _beta(level) * slow), members
        return (Flow(latency_s, sent, uses, limit, weight),)

    def _measured(self, collective: CollectiveKind, num_bytes: float, ranks: Sequence[int]) -> tuple[float, float]:
        """The latency of a collective, and the factor by which measurements are slower than the β of its levels
        predicts."""
        group = Group(len(ranks), ranks[1] - ranks[0])
        (latency_s, whole_s), (least_s, most_s) = (
            [network.collective_s(collective, size, group) for size in (0, num_bytes)]
            for network in (self._network, self._unmeasured)
        )
        return latency_s, max(0.0, whole_s - latency_s) / (most_s - least_s) if most_s > least_s else 1.0

    def _pairwise(self, num_bytes: float, ranks: Sequence[int], latency_s: float) -> tuple[Flow, ...]:
        flows, before = list[Flow](), 1
        for index, units, inside in self._crossed(ranks):
            level, members = self._levels[index], len(ranks) / len(units)
            uses = self._uses(index, units, units, _beta(level) * members)
            sent = num_bytes * (inside - before) / len(ranks)
            flows.append(Flow(0.0 if flows else latency_s, sent, uses, 1 / _beta(level)))
            before = inside
        return tuple(flows)

    def _crossed(self, ranks: Sequence[int]) -> list[tuple[int, set[int], int]]:
        """(index, units, inside) of each level that joins the ranks. ``units`` are the units that hold ranks and that
        the level joins. ``inside`` is the number of ranks in each unit of the next level."""
        crossings = []
        for index, level in enumerate(self._levels):
            units = {self._unit(index, rank) for rank in ranks}
            above = {unit // level.fan_out for unit in units}
            if len(units) > len(above):
                if len(ranks) % len(units) or len(units) % len(above):
                    raise LayoutError(
                        f"{len(ranks)} ranks lie unevenly in units of level {level.name!r}",
                        where="mesh",
                        remedy="simulate without contention, or choose sizes that divide those of the cluster",
                    )
                crossings.append((index, units, len(ranks) // len(above)))
        return crossings

    def _unit(self, index: int, rank: int) -> int:
        return rank // self._below[index]

    def _uses(self, index: int, sending: set[int], receiving: set[int], links: float) -> dict[Resource, float]:
        level = self._levels[index]
        uses = {("out", index, unit): links for unit in sending} | {("in", index, unit): links for unit in receiving}
        for resource in uses:
            self._capacity[resource] = float(level.links)
        for unit in sending:
            core = ("core", index, unit // level.fan_out)
            uses[core] = uses.get(core, 0.0) + links
            self._capacity[core] = level.fan_out * min(level.links, self._below[index]) / level.contention
        return uses


def _beta(level: Level) -> float:
    return max(level.beta_s_per_byte, 1e-30)  # a link may be infinitely fast, but a rate must be finite
