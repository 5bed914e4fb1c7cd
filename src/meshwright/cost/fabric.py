"""The times of collectives and messages in the stages of a mesh, from the devices and links of each stage."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from meshwright.cost.coded import coded_s
from meshwright.cost.collective import Group, Network
from meshwright.cost.work import Communicate, Compute, Piece, Wait
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.part import part_of, stage_cluster


class Fabric:
    """The times of collectives along the axes of a mesh, and of messages between its stages, on a cluster.

    If stages or devices differ, each stage has the axes of its submesh, and the links between its ranks (``ir.part``).

    Raises:
        ClusterError: the mesh has more ranks than the cluster has devices.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        if mesh.world_size > cluster.num_devices:
            raise ClusterError(
                f"it has {cluster.num_devices} devices, the mesh {mesh.world_size} ranks",
                where=f"cluster {cluster.name}",
                remedy="take a smaller mesh or a larger cluster",
            )
        self.cluster, self.mesh = cluster, mesh
        # Whether all stages have equal devices and equal groups of ranks.
        self.alike = cluster.homogeneous and not mesh.stages
        self._network = Network(cluster)
        self._networks: dict[int, Network] = {}
        self._known: dict[tuple[object, ...], float] = {}
        self._sent: dict[tuple[int, int, int], float] = {}
        self._sizes: dict[tuple[str, int], int] = {}

    def size(self, axis: str, stage: int = 0) -> int:
        """The number of ranks along an axis, in the groups of pipeline rank ``stage`` (for ``pp``: the number of
        stages). 1 if there is no such axis."""
        if (axis, stage) not in self._sizes:
            mesh = self._mesh_of(axis, stage)
            self._sizes[axis, stage] = mesh.size(axis) if mesh.has(axis) else 1
        return self._sizes[axis, stage]

    def collective_s(self, piece: Communicate, stage: int) -> float:
        """Seconds of a collective along an axis, if all groups of pipeline rank ``stage`` run it at the same time."""
        place = 0 if self.alike or piece.axis == "pp" else stage
        key = (place, piece.collective, piece.axis, piece.bytes, piece.members, piece.coding, piece.part)
        if key not in self._known:
            if piece.axis == "pp" and not self.alike:
                network, group = self._between(piece.members or tuple(range(self.mesh.num_stages)))
            else:
                network = self._network_of(stage)
                group = axis_group(self._mesh_of(piece.axis, stage), piece.axis, piece.members)
            self._known[key] = piece_s(piece, network, group)
        return self._known[key]

    def pieces_s(self, pieces: Iterable[Piece], stage: int) -> float:
        """Seconds of pieces of pipeline rank ``stage`` that run one after the other. A ``Wait`` takes no time, because
        its collective was already counted."""
        return sum(
            piece.seconds if isinstance(piece, Compute) else self.collective_s(piece, stage)
            for piece in pieces
            if not isinstance(piece, Wait)
        )

    def send_s(self, num_bytes: int, source: int, target: int) -> float:
        """Seconds of a message between pipeline ranks, while all data-parallel copies send a message at the same time.
        0 from a rank to itself. ``source`` and ``target`` are coordinates on ``pp``."""
        if source == target:
            return 0.0
        if self.alike:
            return self._network.send_s(num_bytes, abs(target - source) * axis_group(self.mesh, "pp").stride)
        key = (num_bytes, source, target)
        if key not in self._sent:
            self._sent[key] = self._slowest_send_s(*key)
        return self._sent[key]

    def _slowest_send_s(self, num_bytes: int, source: int, target: int) -> float:
        """Seconds of the slowest message. Source ranks in the same unit share its links."""
        seconds, ranks = 0.0, self.mesh.stage_ranks(source)
        for rank in ranks:
            for other in self.mesh.linked_ranks(rank, target):
                level = self.cluster.level_of(rank, other)
                unit = self.cluster.unit_below(level.name, rank)
                senders = len(range(max(unit.start, ranks.start), min(unit.stop, ranks.stop)))
                beta = level.shared_beta_s_per_byte(senders) / level.ring_fraction(2)
                seconds = max(seconds, level.alpha_s + num_bytes * beta)
        return seconds

    def _between(self, stages: tuple[int, ...]) -> tuple[Network, Group]:
        """The network and the group of one rank of each of these stages."""
        stage_ranks = [self.mesh.stage_ranks(stage) for stage in sorted(stages)]
        gaps = [after.start - before.start for before, after in pairwise(stage_ranks)]
        network = Network(part_of(self.cluster, range(stage_ranks[0].start, stage_ranks[-1].stop)))
        return network, Group(len(stage_ranks), min(gaps, default=1))

    def _network_of(self, stage: int) -> Network:
        if self.alike:
            return self._network
        if stage not in self._networks:
            self._networks[stage] = Network(stage_cluster(self.cluster, self.mesh, stage))
        return self._networks[stage]

    def _mesh_of(self, axis: str, stage: int) -> Mesh:
        return self.mesh if self.alike or axis == "pp" else self.mesh.submesh(stage)


@lru_cache(maxsize=4096)
def axis_group(mesh: Mesh, axis: str, members: tuple[int, ...] = ()) -> Group:
    """The group of an axis or of joined axes; ``members`` selects ranks by their coordinates on the axis."""
    if not mesh.has(axis):
        return Group(1)
    ranks = mesh.group_ranks(axis, 0)
    ranks = tuple(ranks[coordinate] for coordinate in members) or ranks
    return Group(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)


def piece_s(piece: Communicate, network: Network, group: Group) -> float:
    """Seconds of a collective of a group, or of its parts. In coded form if the piece has a coding."""
    if piece.part:
        group = Group(piece.part, group.stride)
    if piece.coding is None:
        return network.collective_s(piece.collective, piece.bytes, group)
    return coded_s(network, piece.collective, piece.bytes, group, piece.coding)
