"""Communication: the seconds of collectives and of messages between ranks, by level, group size and bytes."""

import math
import operator
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

import msgspec

from meshwright.cost.alpha_beta import Carried, Hop, coded_steps_s, gamma_s_per_byte, steps_s
from meshwright.ir.cluster import NETWORK, Cluster
from meshwright.ir.level import Level
from meshwright.ir.program import CollectiveKind
from meshwright.ir.resharding import AxisLink
from meshwright.schedules.collectives.choice import CHOSEN, NATIVE, runs, written

START_S = 28e-6
"""Seconds before a GPU collective moves its first byte: launch, rendezvous of the ranks, protocol (NCCL on A100)."""

PEER_START_S = 8e-6
"""Seconds before a copy into another GPU's memory moves its first byte. Assumed, until a machine with several GPUs has
measured products in pieces."""

SHORT_RING = 0.72
"""A ring of p ranks reaches the fraction 1 - SHORT_RING / p**2 of the rate of its links."""


LARGE_BYTES = 16 * 2**20
"""Bytes of a message that is so large that its latency does not matter."""


class Group(msgspec.Struct, frozen=True):
    """The ranks of a group along a mesh axis: ``size`` ranks with a distance of ``stride`` ranks."""

    size: int
    stride: int = 1


class Network:
    """Predicts the times of communication on a cluster by α-β models. All groups of an axis are assumed to communicate
    at once, so the ranks of one box share its links (``Level.shared_beta_s_per_byte``).

    The bytes of a collective are those of the whole vector that each rank holds before an all-reduce, a reduce-scatter
    or an all-to-all, or after an all-gather or a broadcast. For a halo they are the bytes that the busiest rank
    receives. If the cluster's file has measured times for a group with the same number of ranks at each level, they
    replace the model. The fastest measured algorithm counts; times between measured sizes are interpolated.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.start_s = START_S if cluster.device.kind != "cpu" else 0.0
        self._levels, self._gamma = cluster.levels, gamma_s_per_byte(cluster.device)
        self._factor = cluster.software.communication
        self._measured: dict[tuple[str, str, tuple[int, ...]], dict[str, list[tuple[float, float]]]] = {}
        for row in cluster.collectives:
            tables = self._measured.setdefault((row.operation, row.level, row.fan_outs or (row.ranks,)), {})
            tables.setdefault(row.algorithm, []).append((row.bytes, row.time_s))
        self._sizes = tuple(accumulate((level.fan_out for level in cluster.levels), operator.mul))
        self._known: dict[tuple[str, float, Group, str], float] = {}

    def collective_s(self, operation: CollectiveKind, num_bytes: float, group: Group, algorithm: str = NATIVE) -> float:
        """Seconds of a collective of a group, while all groups of its axis run the same collective. Planning, estimates
        and the simulator all use this model.

        Measured times are used if the cluster has them. Otherwise the time follows from the steps of ``algorithm``
        (``alpha_beta.py``). Native collectives, and algorithms without a closed form, are modelled in the way in which
        NCCL runs them: an all-reduce over a ring or a pipelined tree, whichever is faster (Thakur et al. 2005); a
        reduce-scatter or an all-gather over a ring, and a shift as one of its steps; a broadcast down a tree; an
        all-to-all pairwise. A halo is modelled
        as simultaneous messages to and from the neighbours, over the slowest level that has ranks on both sides.
        """
        key = operation, num_bytes, group, algorithm
        if key not in self._known:
            self._known[key] = self._factor * self._collective_s(operation, num_bytes, group, algorithm)
        return self._known[key]

    def _collective_s(self, operation: CollectiveKind, num_bytes: float, group: Group, algorithm: str) -> float:
        if group.size < 2:
            return 0.0
        asked = ("send", Group(2, group.stride)) if operation in ("halo", "shift") else (operation, group)
        if (measured := self._table_s(asked[0], num_bytes, asked[1])) is not None:
            return measured
        if algorithm != NATIVE and (steps := self._steps_s(operation, num_bytes, group, algorithm)) is not None:
            return steps
        if operation == "all_to_all":
            return self.start_s + self._pairwise_s(num_bytes, group)
        if operation == "halo":
            return self.start_s + self._halo_s(num_bytes, group)
        ring, tree, beta = self._path(group)
        passed = (group.size - 1) / group.size * num_bytes * beta
        match operation:
            case "all_reduce":
                return self.start_s + 2 * min(ring, tree) + 2 * passed
            case "broadcast":
                return self.start_s + tree + num_bytes * beta
            case "shift":  # one step of a ring
                start_s = min(self.start_s, PEER_START_S) if self._shares_memory(group) else self.start_s
                return start_s + ring / (group.size - 1) + num_bytes * beta
            case _:
                return self.start_s + ring + passed

    def _steps_s(self, operation: str, num_bytes: float, group: Group, algorithm: str) -> float | None:
        seconds = steps_s(operation, algorithm, self._hops(group), num_bytes, self._gamma)
        return None if seconds is None else self.start_s + seconds

    def coded_steps_s(
        self, operation: CollectiveKind, algorithm: str, num_bytes: float, group: Group,
        carried: Callable[[int, bool], Carried], rounds: int = 1,
    ) -> float:  # fmt: skip
        """Seconds of a collective whose messages are coded (``alpha_beta.coded_steps_s``). If the algorithm has no
        closed form for the group, the collective is modelled as a ring that carries complete sums."""
        if group.size < 2:
            return 0.0
        seconds = coded_steps_s(operation, algorithm, self._hops(group), num_bytes, self._gamma, carried)
        if seconds is None:
            ring, _, beta = self._path(group)
            passed = (group.size - 1) / group.size * num_bytes
            seconds = 0.0
            for adds in (True, False) if operation == "all_reduce" else (operation == "reduce_scatter",):
                each = carried(group.size, adds)
                seconds += rounds * ring + passed * (beta * each.bytes + each.encode_s * adds + each.decode_s)
        return self._factor * (self.start_s + seconds)

    def _hops(self, group: Group) -> list[Hop]:
        return [
            Hop(inside, level.alpha_s, level.shared_beta_s_per_byte(unit) / level.ring_fraction(2))
            for level, _, inside, unit in self._members(group)
        ]

    def _pairwise_s(self, num_bytes: float, group: Group) -> float:
        """Seconds of an all-to-all. Each rank sends a part to every other rank, over the level that joins the two
        ranks."""
        seconds = 0.0
        for level, before, inside, unit in self._members(group):
            sent = num_bytes * (inside - before) / group.size
            seconds += (inside - before) * level.alpha_s + sent * level.shared_beta_s_per_byte(unit)
        return seconds

    def _halo_s(self, num_bytes: float, group: Group) -> float:
        # Only the group's ranks at the border of a unit send messages out of the unit.
        times = (
            level.alpha_s + num_bytes * level.shared_beta_s_per_byte(max(1, unit // before))
            for level, before, _, unit in self._members(group)
        )
        return max(times, default=0.0)

    def send_s(self, num_bytes: float, stride: int) -> float:
        """Seconds of a message to the rank at distance ``stride``, while all ranks that share the links send
        messages."""
        if (measured := self._table_s("send", num_bytes, Group(2, stride))) is not None:
            return self._factor * measured
        for level, _, _, unit in self._members(Group(2, stride)):
            message_s = level.alpha_s + num_bytes * level.shared_beta_s_per_byte(unit) / level.ring_fraction(2)
            return self._factor * message_s
        return 0.0

    def link(self, group: Group) -> AxisLink:
        """Latency and seconds per byte of a group, for the search for cheap resharding. They follow from an all-reduce
        of 0 bytes and an all-reduce of ``LARGE_BYTES``."""
        least, most = (self.collective_s("all_reduce", num_bytes, group) for num_bytes in (0, LARGE_BYTES))
        sent = 2 * (group.size - 1) / group.size * LARGE_BYTES
        return AxisLink(latency_s=least / (2 * math.ceil(math.log2(group.size))), byte_s=max(0.0, most - least) / sent)

    def algorithms(self, group: Group) -> str:
        """The fastest algorithms by operation and vector size, as text for a plan
        (``schedules/collectives/choice.py``). The text is empty if the cluster's file has no measurements for such a
        group."""
        ranges: dict[str, list[tuple[int, str]]] = {}
        for operation in CHOSEN:
            tables = self._tables(operation, group)
            if runnable := {name: rows for name, rows in tables.items() if runs(operation, name)}:
                ranges[operation] = _ranges(runnable)
        return written(ranges) if ranges else ""

    def measured_s(self, operation: str, algorithm: str, num_bytes: float, group: Group) -> float | None:
        """Seconds of one algorithm, from the measurements in the cluster's file. None if the algorithm was not
        measured, or only at smaller sizes while other algorithms were measured at larger sizes."""
        tables = self._tables(operation, group)
        rows = tables.get(algorithm)
        if rows is None:
            return None
        known = max(size for table in tables.values() for size, _ in table)
        return None if max(size for size, _ in rows) < min(num_bytes, known) else _between(rows, num_bytes)

    def _table_s(self, operation: str, num_bytes: float, group: Group) -> float | None:
        """The measured seconds of the fastest algorithm; None without a measurement."""
        tables = self._tables(operation, group)
        return min((_between(rows, num_bytes) for rows in tables.values()), default=None)

    def _tables(self, operation: str, group: Group) -> dict[str, list[tuple[float, float]]]:
        """Map each measured algorithm to its points (bytes, seconds)."""
        members = self._members(group) if self._measured else []
        if not members or any(inside % before for _, before, inside, _ in members):  # the group's parts are unequal
            return {}
        return self._measured.get((operation, members[-1][0].name, self.fan_outs(group)), {})

    def _shares_memory(self, group: Group) -> bool:
        """Whether the accelerators of a group write to each other's memory: those of one box."""
        return self.cluster.device.kind != "cpu" and len(self._members(group)) == 1 and group.size <= self._sizes[0]

    def leaves_box(self, group: Group) -> bool:
        """Whether the group has ranks in several boxes of CPUs, between which the system carries messages while the
        ranks compute."""
        crossed = self._members(group)
        return bool(crossed) and crossed[-1][0].name == NETWORK

    def fan_outs(self, group: Group) -> tuple[int, ...]:
        """The number of units of a group that each level joins, innermost first; empty if parts of the group are
        unequal."""
        members = self._members(group)
        if any(inside % before for _, before, inside, _ in members):
            return ()
        return tuple(inside // before for _, before, inside, _ in members)

    def _members(self, group: Group) -> list[tuple[Level, int, int, int]]:
        """Return for each level that the group crosses: the level, the group's members within one unit below the level,
        its members within one unit of the level, and the devices of one unit below the level."""
        crossings, before, below = [], 1, 1
        for level, size in zip(self._levels, self._sizes, strict=True):
            inside = min(group.size, math.ceil(size / group.stride))
            if inside > before:
                crossings.append((level, before, inside, below))
                before = inside
            below = size
        if before < group.size and self._levels:  # the outermost level joins surplus ranks too
            crossings.append((self._levels[-1], before, group.size, below))
        return crossings

    def _path(self, group: Group) -> tuple[float, float, float]:
        """Return the latency once around a ring, the latency down a tree, and the seconds per byte of the slowest
        level."""
        ring, tree, beta = 0.0, 0.0, 0.0
        for level, before, inside, unit in self._members(group):
            fan = inside / before
            ring += (inside - before) / inside * group.size * level.alpha_s if inside < group.size else 0.0
            if inside == group.size:
                ring += (fan - 1) * level.alpha_s
            tree += math.log2(fan) * level.alpha_s if unit > 1 else (fan - 1) * level.alpha_s
            # A ring enters and leaves a unit once, so all members share the links of the unit's devices.
            shared = level.shared_beta_s_per_byte(unit) / before
            if level.rings:
                shared /= level.ring_fraction(inside)
            elif unit == 1:
                shared /= 1 - SHORT_RING / inside**2
            beta = max(beta, shared)
        return ring, tree, beta


def _ranges(tables: Mapping[str, list[tuple[float, float]]]) -> list[tuple[int, str]]:
    """Pairs of a smallest size and the algorithm that is fastest from that size on. Where the fastest
    algorithm changes between two measured sizes, the new range begins at their geometric mean."""
    sizes = sorted({size for rows in tables.values() for size, _ in rows})
    ranges: list[tuple[int, str]] = []
    before = 0.0
    for size in sizes:
        best = min(tables, key=lambda name: _between(tables[name], size))
        if not ranges or ranges[-1][1] != best:
            ranges.append((round(math.sqrt(before * size)) if ranges else 0, best))
        before = size
    return ranges


def _between(rows: list[tuple[float, float]], num_bytes: float) -> float:
    """Seconds at ``num_bytes``: linear between measured points (bytes, seconds); beyond the last point, at its rate."""
    points = sorted(rows)
    if num_bytes <= points[0][0] or len(points) == 1:
        return points[0][1] * max(1.0, num_bytes / max(1.0, points[0][0]))
    for (low, least), (high, most) in pairwise(points):
        if num_bytes <= high:
            return least + (most - least) * (num_bytes - low) / (high - low)
    return points[-1][1] * num_bytes / points[-1][0]
