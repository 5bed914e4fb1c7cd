"""The time of a collective's steps, either without other traffic or on the shared links of a cluster's levels."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial

from meshwright.cost.alpha_beta import gamma_s_per_byte
from meshwright.cost.fabric import Fabric
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.schedules.collectives.steps import Move, Steps, programs
from meshwright.simulate.network import Links

Link = Callable[[int, int], tuple[str, float, float]]
"""A function that maps two ranks to the link between them: the name of the link's ports, α in seconds, and β in seconds
per byte."""


def links_of(cluster: Cluster) -> Link:
    """A ``Link`` function for a cluster. Two ranks use the innermost level that joins them. Each rank has its own port
    into every level."""

    @cache
    def link(source: int, target: int) -> tuple[str, float, float]:
        level = cluster.level_of(source, target)
        return level.name, level.alpha_s, level.beta_s_per_byte

    return link


def alone_s(steps: Steps, link: Link, gamma_s_per_byte: float, item_bytes: int = 1) -> float:
    """Seconds until the last rank has finished, without other traffic. Each rank sends one message and receives one
    message at a time, as the closed forms assume (``cost/alpha_beta.py``).

    A message of n bytes takes α + nβ. If the target adds the message to its data, that takes nγ more. Messages of a
    round are sent in the order of the round's list.
    """
    ready = [0.0] * steps.num_ranks
    sends: dict[tuple[str, int], float] = {}
    takes: dict[tuple[str, int], float] = {}
    for moves in steps.rounds:
        after = list(ready)
        for move in moves:
            num_bytes = move.length * item_bytes
            if move.source == move.target:
                continue  # a copy, which the formulas leave out
            port, alpha_s, beta_s_per_byte = link(move.source, move.target)
            out, into = (port, move.source), (port, move.target)
            begin = max(ready[move.source], ready[move.target], sends.get(out, 0.0), takes.get(into, 0.0))
            sent = begin + alpha_s + num_bytes * beta_s_per_byte
            done = sent + num_bytes * gamma_s_per_byte * move.adds
            sends[out], takes[into] = sent, done
            after[move.source], after[move.target] = max(after[move.source], sent), max(after[move.target], done)
        ready = after
    return max(ready)


def shared_s(steps: Steps, cluster: Cluster, item_bytes: int = 1) -> float:
    """Seconds until the last rank has finished, if all current messages share the links of the cluster's levels.

    A rank starts all messages of a round at the same time, and adds received messages in the order of its program. It
    continues with the next round when its own messages have left and all messages to it have arrived.

    Raises:
        ClusterError: the units of a level are not all equal, or the cluster has fewer devices than the steps have
            ranks.
    """
    return _Play(steps, cluster, item_bytes).seconds()


class _Play:
    def __init__(self, steps: Steps, cluster: Cluster, item_bytes: int) -> None:
        self._links = Links(Fabric(cluster, Mesh.of(all=steps.num_ranks)))
        self._item_bytes, self._gamma = item_bytes, gamma_s_per_byte(cluster.device)
        self._programs = [deque(program) for program in programs(steps)]
        self._todo: list[deque[Move]] = [deque() for _ in self._programs]  # of this round
        self._leaving = [0] * len(self._programs)
        self._now = [0.0] * len(self._programs)
        self._arrivals: defaultdict[tuple[int, int], deque[float]] = defaultdict(deque)

    def seconds(self) -> float:
        for rank in range(len(self._programs)):
            self._go_on(rank, 0.0)
        while self._links.advance():
            pass
        assert not any(self._programs), "steps that wait for ever are refused by schedules.collectives.check"
        return max(self._now)

    def _go_on(self, rank: int, time_s: float) -> None:
        """Run the moves of ``rank`` at ``time_s`` until the rank must wait."""
        while True:
            todo = self._todo[rank]
            while todo:
                arrivals = self._arrivals[todo[0].source, rank]
                if not arrivals:
                    return
                taken = todo.popleft()
                added = taken.length * self._item_bytes * self._gamma * taken.adds
                self._now[rank] = max(self._now[rank], arrivals.popleft()) + added
            if self._leaving[rank] or not self._programs[rank]:
                return
            self._now[rank] = max(self._now[rank], time_s)
            messages = [move for move in self._programs[rank].popleft() if move.source != move.target]
            self._todo[rank] = deque(move for move in messages if move.target == rank)
            for move in messages:
                if move.source == rank:
                    self._leaving[rank] += 1
                    flows = self._links.message(move.length * self._item_bytes, rank, move.target)
                    self._links.start(partial(self._arrive, rank, move.target), self._now[rank], flows)

    def _arrive(self, source: int, target: int, time_s: float) -> None:
        self._arrivals[source, target].append(time_s)
        self._leaving[source] -= 1
        self._go_on(target, time_s)
        self._go_on(source, time_s)
