"""Letters (messages with tensors) between replicas and servers in the simulator: flows on the cluster's shared links,
and their bytes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from meshwright.cost.fabric import Fabric
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import Consistency, Partial, Server
from meshwright.ir.mesh import Mesh
from meshwright.simulate.network import Finish, Flow, Links, Resource

Letter = tuple[int, int, float]
"""A letter: (source, target, share). Source and target are participants. The share is a fraction of the parameters."""


class ReplicaStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The step of one replica without faults. ``num_ranks``: the number of ranks of a replica. ``parts`` maps the ranks
    that exchange parameters to the bytes that each exchanges. Ranks are counted from the replica's first rank.
    ``state_bytes``: the bytes that a joining replica gets in addition to the parameters, such as optimizer state.
    ``exposed_s``: the additional seconds of a synchronous step of all replicas, compared with a step of one replica,
    because of its all-reduce. None: all-reduces begin when gradients are ready, and are not hidden."""

    step_s: float
    parts: dict[int, float] = {}
    num_ranks: int = 1
    state_bytes: float = 0.0
    exposed_s: float | None = None

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise LayoutError(f"it takes {self.step_s:g} s", where="step of a replica", remedy="give a time above 0")

    @property
    def num_bytes(self) -> float:
        """The bytes of the parameters."""
        return sum(self.parts.values())


class Letters:
    """Sends letters over the links of a cluster. Replica r has the ranks that begin at ``r * num_ranks``. Servers come
    after the replicas: copy k of range q is the participant ``server(q, k)``. It is in the process of replica q + k,
    or, with ``place=own``, on a separate rank after all replicas.

    Letters that are sent together are one transfer: they progress in proportion to their bytes, and end together. The
    same holds for the parts of a letter between the ranks of two replicas. A letter from a rank to itself takes no
    time.

    Attributes:
        sent: maps participants to the bytes that they have sent to other ranks, in letters that have arrived.
        received: the same for received bytes.
    """

    def __init__(self, rule: Consistency, num_replicas: int, step: ReplicaStep, cluster: Cluster) -> None:
        servers, copies = (rule.servers, rule.copies) if isinstance(rule, Server) else (1, 1)
        self._copies = rule.copies if isinstance(rule, Server | Partial) else 1
        own = servers * copies if isinstance(rule, Server) and rule.place == "own" else 0
        self.links = Links(Fabric(cluster, Mesh.of(all=num_replicas * step.num_ranks + own)))
        self._step, self._num_replicas, self._own = step, num_replicas, own
        self._parts = [(rank, size / step.num_bytes) for rank, size in step.parts.items()] if step.num_bytes else []
        self._messages: dict[tuple[int, int], Flow] = {}
        self.sent: defaultdict[int, float] = defaultdict(float)
        self.received: defaultdict[int, float] = defaultdict(float)

    def server(self, index: int, copy: int) -> int:
        """The participant that holds this copy of this range."""
        return self._num_replicas + index * self._copies + copy

    def send(self, finish: Finish, time_s: float, letters: Sequence[Letter], rounds: int = 1) -> None:
        """Send letters at the time ``time_s``. ``finish`` is called when all letters have arrived. ``rounds``: the
        number of times that the letters are sent, one after the other."""
        flow = self._flow(letters)
        if flow is None:
            self.links.call_at(time_s, finish)
        else:
            self.links.start(partial(self._arrived, finish, letters, rounds), time_s, (flow,) * rounds)

    def _arrived(self, finish: Finish, letters: Sequence[Letter], rounds: int, time_s: float) -> None:
        for source, target, share in letters:
            for a, b, num_bytes in self._pieces(source, target, share):
                if a != b:
                    self.sent[source] += num_bytes * rounds
                    self.received[target] += num_bytes * rounds
        finish(time_s)

    def _flow(self, letters: Sequence[Letter]) -> Flow | None:
        """All letters as one flow; None if no letter goes to another rank."""
        pieces = [piece for letter in letters for piece in self._pieces(*letter) if piece[0] != piece[1]]
        total = sum(num_bytes for *_, num_bytes in pieces)
        if not total:
            return None
        uses: dict[Resource, float] = {}
        latency_s, limit = 0.0, float("inf")
        for source, target, num_bytes in pieces:
            if (source, target) not in self._messages:
                self._messages[source, target] = self.links.message(0, source, target)[0]
            flow, share = self._messages[source, target], num_bytes / total
            for resource, links in flow.uses.items():
                uses[resource] = uses.get(resource, 0.0) + share * links
            latency_s = max(latency_s, flow.latency_s)
            limit = min(limit, flow.limit_bytes_per_s / share)
        return Flow(latency_s, total, uses, limit)

    def _pieces(self, source: int, target: int, share: float) -> Iterable[tuple[int, int, float]]:
        for offset, part in self._parts:
            yield self._rank(source, offset), self._rank(target, offset), share * part * self._step.num_bytes

    def _rank(self, participant: int, offset: int) -> int:
        server = participant - self._num_replicas
        if server < 0:
            return participant * self._step.num_ranks + offset
        if self._own:
            return self._num_replicas * self._step.num_ranks + server
        return sum(divmod(server, self._copies)) % self._num_replicas * self._step.num_ranks + offset
