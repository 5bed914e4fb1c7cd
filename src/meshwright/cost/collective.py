"""Communication: the seconds of collectives and messages between ranks, by level, group size and bytes."""

import math

import msgspec

from meshwright.ir.cluster import Cluster, Level

START_S = 28e-6
"""Before the first byte of a collective on GPUs moves: launch, rendezvous of the ranks, protocol (NCCL on A100)."""

SHORT_RING = 0.72
"""A ring of p ranks reaches 1 - SHORT_RING / p**2 of its links' rate: rings of two and three fill them less."""


class Group(msgspec.Struct, frozen=True):
    """``size`` ranks, each ``stride`` after the one before, as an axis of a mesh makes them."""

    size: int
    stride: int = 1


class Network:
    """The cluster as the α-β models need it. All groups of an axis are taken to communicate at once, so that ranks of
    one box share its links (``Level.shared_beta_s_per_byte``).

    ``bytes`` is the whole vector: what each rank holds before an all-reduce, a reduce-scatter or an all-to-all, and
    after an all-gather.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.start_s = START_S if cluster.device.kind != "cpu" else 0.0
        self._levels = cluster.levels
        self._sizes = tuple(math.prod(level.fan_out for level in cluster.levels[: i + 1]) for i in range(self._depth))

    @property
    def _depth(self) -> int:
        return len(self._levels)

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        """Ring or tree, whichever is faster (Thakur et al. 2005; the tree as in NCCL, pipelined over its depth)."""
        if group.size < 2:
            return 0.0
        ring, tree, beta = self._path(group)
        wire = 2 * (group.size - 1) / group.size * num_bytes
        return self.start_s + 2 * min(ring, tree) + wire * beta

    def reduce_scatter_s(self, num_bytes: float, group: Group) -> float:
        """Ring."""
        if group.size < 2:
            return 0.0
        ring, _, beta = self._path(group)
        return self.start_s + ring + (group.size - 1) / group.size * num_bytes * beta

    def all_gather_s(self, num_bytes: float, group: Group) -> float:
        """Ring; the mirror image of the reduce-scatter."""
        return self.reduce_scatter_s(num_bytes, group)

    def all_to_all_s(self, num_bytes: float, group: Group) -> float:
        """Pairwise: each rank sends its part to every other, over the level that joins the two."""
        if group.size < 2:
            return 0.0
        seconds, before = self.start_s, 1
        for level, inside, unit in self._members(group):
            sent = num_bytes * (inside - before) / group.size
            seconds += (inside - before) * level.alpha_s + sent * level.shared_beta_s_per_byte(unit)
            before = inside
        return seconds

    def send_s(self, num_bytes: float, stride: int) -> float:
        """A message to the rank ``stride`` further, while all ranks of a unit send theirs."""
        for level, _, unit in self._members(Group(2, stride)):
            return level.alpha_s + num_bytes * level.shared_beta_s_per_byte(unit) / level.ring_fraction(2)
        return 0.0

    def _members(self, group: Group) -> list[tuple[Level, int, int]]:
        """By level that the group crosses: how many of its members are inside one unit made up by that level, and how
        many devices a unit below the level has."""
        found, before, below = [], 1, 1
        for level, size in zip(self._levels, self._sizes, strict=True):
            inside = min(group.size, math.ceil(size / group.stride))
            if inside > before:
                found.append((level, inside, below))
                before = inside
            below = size
        if before < group.size and self._levels:  # more ranks than the cluster's levels hold: the outermost joins them
            found.append((self._levels[-1], group.size, below))
        return found

    def _path(self, group: Group) -> tuple[float, float, float]:
        """Latency once around the ring, latency down the tree, and seconds per byte of the slowest level."""
        ring, tree, beta, before = 0.0, 0.0, 0.0, 1
        for level, inside, unit in self._members(group):
            fan = inside / before
            ring += (inside - before) / inside * group.size * level.alpha_s if inside < group.size else 0.0
            if inside == group.size:
                ring += (fan - 1) * level.alpha_s
            tree += math.log2(fan) * level.alpha_s if unit > 1 else (fan - 1) * level.alpha_s
            # A ring enters and leaves a unit once: its members share what the unit's devices have of the links.
            shared = level.shared_beta_s_per_byte(unit) / before
            if level.rings:
                shared /= level.ring_fraction(inside)
            elif unit == 1:
                shared /= 1 - SHORT_RING / inside**2
            beta = max(beta, shared)
            before = inside
        return ring, tree, beta
