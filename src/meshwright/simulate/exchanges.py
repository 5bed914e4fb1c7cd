"""The exchanges of consistency rules in the simulator: when replicas send letters (messages with tensors), and what
they wait for.

Each class imitates the part of ``consistency/`` for its rules: it sends the same letters at the same moments of a step.
As in ``consistency/``, ``schedules/clocks.py`` decides which replicas may proceed.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from meshwright.errors import LayoutError
from meshwright.ir.codec import codec_of
from meshwright.ir.consistency import (
    Consistency,
    DiLoCo,
    ElasticAverage,
    Gossip,
    Local,
    Partial,
    Server,
    Sync,
)  # fmt: skip
from meshwright.schedules.clocks import fragment_due, may_proceed
from meshwright.schedules.mixing import outgoing
from meshwright.simulate.letters import Letters

R = TypeVar("R", bound=Consistency)
ITEM, LONG = 4, 2**20
"""Bytes of an element, and the number of elements in a message that is so long that a codec's headers do not matter."""


class ExchangeHost(Protocol):
    """The simulation, as far as exchanges use it."""

    clocks: dict[int, int]
    letters: Letters

    @property
    def members(self) -> list[int]:
        """The replicas that are alive, in rising order."""

    def look(self, time_s: float) -> None:
        """Check which replicas may begin now."""


class SimulatedExchange(ABC, Generic[R]):
    """The exchange of a rule, for all replicas."""

    def __init__(self, rule: R, host: ExchangeHost) -> None:
        self.rule, self.host, self.letters = rule, host, host.letters

    def begun(self, replica: int, time_s: float) -> None:
        """A replica begins a step."""

    def ended(self, replica: int, time_s: float) -> None:
        """A replica has finished the computing of a step: hand over its result."""
        self.host.clocks[replica] += 1

    def may_begin(self, replica: int) -> bool:
        """Whether a replica may begin its next step."""
        return may_proceed(self.rule, self.host.clocks, replica)

    def joined(self, replica: int, time_s: float) -> None:
        """A replica is alive from now on, and has a clock."""

    def left(self, replica: int, time_s: float) -> None:
        """A replica is no longer alive."""


class NoExchange(SimulatedExchange[Consistency]):
    """No exchange, for ``ensemble``."""


class Means(SimulatedExchange[Sync | Local | DiLoCo | ElasticAverage]):
    """Means over all replicas, for ``sync``, ``local``, ``diloco`` and synchronous ``easgd``. A mean begins when its
    last contributor is ready. It has two rounds of letters: segments are sent to their owners, and the owners send the
    means to all. ``exposed_s``: the time of a mean in seconds, if it is given instead of being computed from
    letters."""

    def __init__(
        self, rule: Sync | Local | DiLoCo | ElasticAverage, host: ExchangeHost, exposed_s: float | None
    ) -> None:
        super().__init__(rule, host)
        self._exposed_s = exposed_s if isinstance(rule, Sync) else None
        self._senders: dict[int, set[int]] = {}
        self._done: set[int] = set()
        self._known = dict.fromkeys(host.clocks, 0)
        self._joined_at = dict.fromkeys(host.clocks, 0)
        """The clocks with which replicas joined. They do not contribute to means up to these clocks."""
        self._share = 1.0
        if isinstance(rule, DiLoCo):
            self._share = 1 / rule.fragments
            if rule.codec:
                self._share *= codec_of(rule.codec).message_bytes(LONG, ITEM) / (ITEM * LONG)

    def ended(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        super().ended(replica, time_s)
        clock = self.host.clocks[replica]
        if not self._is_due(clock):
            return
        self._known[replica] = clock
        self._senders.setdefault(clock, set()).add(replica)
        self._start_complete(time_s)

    def may_begin(self, replica: int) -> bool:
        """See ``SimulatedExchange``."""
        clock = self.host.clocks[replica]
        match self.rule:
            case DiLoCo(delay=delay):
                needed = clock - delay
            case ElasticAverage():  # the mean is computed while gradients are computed
                needed = clock - 1
            case _:
                needed = clock
        if self._is_due(needed) and needed not in self._done:
            return False
        known = {member: self._known[member] for member in self.host.members} | {replica: clock}
        return may_proceed(self.rule, known, replica)

    def joined(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        self._known[replica] = self._joined_at[replica] = self.host.clocks[replica]

    def left(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        self._start_complete(time_s)

    def _is_due(self, clock: int) -> bool:
        match self.rule:
            case Sync():
                return clock > 0
            case DiLoCo():
                return fragment_due(self.rule, clock) is not None
            case _:
                return clock > 0 and clock % self.rule.every == 0

    def _start_complete(self, time_s: float) -> None:
        """Begin the means to which all required living replicas have contributed."""
        for clock, senders in list(self._senders.items()):
            members = self.host.members
            if not all(member in senders or self._joined_at[member] >= clock for member in members):
                continue
            del self._senders[clock]
            among = [member for member in members if member in senders]
            open_ones = set(among)
            for member in among:
                finish = partial(self._finish, clock, open_ones, member)
                if self._exposed_s is not None:
                    self.letters.links.call_at(time_s + self._exposed_s, finish)
                    continue
                letters = [(member, peer, self._share / len(among)) for peer in among if peer != member]
                self.letters.send(finish, time_s, letters, rounds=2)

    def _finish(self, clock: int, open_ones: set[int], member: int, time_s: float) -> None:
        open_ones.discard(member)
        if not open_ones:
            self._done.add(clock)
            self.host.look(time_s)


class Ranges(SimulatedExchange[Server | Partial]):
    """Servers that hold ranges of the parameters, for ``server``; and the server that adds up gradients, for
    ``partial``. A push goes to the first living copy of each range, and from there to the other copies. After that it
    may be answered.

    Attributes:
        pushed: maps replicas to the clock of the last push that has reached all servers.
    """

    def __init__(self, rule: Server | Partial, host: ExchangeHost) -> None:
        super().__init__(rule, host)
        self._servers = rule.servers if isinstance(rule, Server) else 1
        self.pushed = dict.fromkeys(host.clocks, 0)
        self._asks: set[int] = set()
        self._waits: set[int] = set()

    def ended(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        super().ended(replica, time_s)
        self._waits.add(replica)
        clock = self.host.clocks[replica]
        self.letters.send(partial(self._forward, replica, clock), time_s, self._pushes(replica))

    def may_begin(self, replica: int) -> bool:
        """See ``SimulatedExchange``."""
        return replica not in self._waits

    def joined(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        self.pushed[replica] = self.host.clocks[replica]

    def left(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        self._asks.discard(replica)
        self._waits.discard(replica)
        self.settle(time_s)

    def settle(self, time_s: float) -> None:
        """Answer the replicas that may begin their next step according to the rule."""
        clocks = {member: self.pushed[member] for member in self.host.members}
        for replica in sorted(self._asks):
            if may_proceed(self.rule, clocks, replica):
                self.answer(replica, time_s)

    def answer(self, replica: int, time_s: float, shares: float = 1.0) -> None:
        """Send a replica ``shares`` times the bytes of the parameters."""
        self._asks.discard(replica)
        letters = [(source, replica, shares * share) for _, source, share in self._pushes(replica)]
        self.letters.send(partial(self.answered, replica), time_s, letters)

    def answered(self, replica: int, time_s: float) -> None:
        """The answer has arrived."""
        self._waits.discard(replica)
        self.host.look(time_s)

    def _pushes(self, replica: int) -> list[tuple[int, int, float]]:
        return [(replica, self._copies(index)[0], 1 / self._servers) for index in range(self._servers)]

    def _copies(self, index: int) -> list[int]:
        """The living copies of a range, beginning with the primary."""
        members, beside = self.host.members, isinstance(self.rule, Partial) or self.rule.place == "beside"
        num_replicas = len(self.host.clocks)
        living = [
            self.letters.server(index, copy)
            for copy in range(self.rule.copies)
            if not beside or (index + copy) % num_replicas in members
        ]
        if not living:
            problem = f"all copies of range {index} have died, with the parameters that they hold"
            remedy = f"simulate copies={self.rule.copies + 1}, or fewer deaths"
            raise LayoutError(problem, where=f"consistency {str(self.rule)!r}", remedy=remedy)
        return living

    def _forward(self, replica: int, clock: int, time_s: float) -> None:
        """The primaries have received a push, and send it to the other copies."""
        letters = []
        for index in range(self._servers):
            primary, *others = self._copies(index)
            letters += [(primary, other, 1 / self._servers) for other in others]
        self.letters.send(partial(self._pushed, replica, clock), time_s, letters)

    def _pushed(self, replica: int, clock: int, time_s: float) -> None:
        if replica not in self.host.members:
            return
        self.pushed[replica] = clock
        self._asks.add(replica)
        self.settle(time_s)


class Rounds(Ranges):
    """For ``partial``: a replica that has applied k - 1 rounds computes for round k. Its clock is the number of rounds
    that it has applied. A round closes when enough replicas have pushed for it. Late gradients count in the next
    round."""

    def __init__(self, rule: Partial, host: ExchangeHost) -> None:
        super().__init__(rule, host)
        self._closed = 0

    def settle(self, time_s: float) -> None:
        """See ``Ranges``."""
        clocks, number = {member: self.pushed[member] for member in self.host.members}, self._closed + 1
        fresh = next((member for member, clock in clocks.items() if clock == number), None)
        if fresh is not None and may_proceed(self.rule, clocks, fresh):
            self._closed = number
        for replica in sorted(self._asks):
            if self.pushed[replica] <= self._closed:
                self.answer(replica, time_s, self._closed - self.pushed[replica] + 1)

    def answered(self, replica: int, time_s: float) -> None:
        """See ``Ranges``."""
        if replica in self.host.members:
            self.host.clocks[replica] = max(self.host.clocks[replica], self._closed)
        super().answered(replica, time_s)


class Neighbours(SimulatedExchange[Gossip]):
    """The exchange of ``gossip``. Without staleness, and with push-sum, replicas send after a step. Otherwise they send
    before it, so that letters travel while gradients are computed."""

    def __init__(self, rule: Gossip, host: ExchangeHost) -> None:
        super().__init__(rule, host)
        self._heard: dict[int, dict[int, int]] = {replica: {} for replica in host.clocks}
        self._handed = dict.fromkeys(host.clocks, 0)
        self._early = rule.staleness != 0 and not rule.push

    def begun(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        clock = self.host.clocks[replica]
        if self._early and clock > self._handed[replica]:
            self._send(replica, clock + max(0, self.rule.staleness) - 1, time_s)

    def ended(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        super().ended(replica, time_s)
        if not self._early:
            self._send(replica, self.host.clocks[replica] - 1, time_s)

    def may_begin(self, replica: int) -> bool:
        """See ``SimulatedExchange``."""
        heard = self._heard[replica]
        clocks = {member: heard.get(member, 0) for member in self.host.members}
        return may_proceed(self.rule, clocks | {replica: self.host.clocks[replica]}, replica)

    def joined(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        self._handed[replica] = self.host.clocks[replica]
        self.left(replica, time_s)

    def left(self, replica: int, time_s: float) -> None:
        """There is a new view: all replicas send their clocks to all others."""
        for heard in self._heard.values():
            heard |= self._handed

    def _send(self, replica: int, step: int, time_s: float) -> None:
        clock = self._handed[replica] = self.host.clocks[replica]
        if peers := outgoing(self.rule, self.host.members, replica, step):
            letters = [(replica, peer, 1.0) for peer in peers]
            self.letters.send(partial(self._arrived, replica, peers, clock), time_s, letters)

    def _arrived(self, replica: int, peers: Sequence[int], clock: int, time_s: float) -> None:
        for peer in peers:
            self._heard[peer][replica] = max(clock, self._heard[peer].get(replica, 0))
        self.host.look(time_s)


class Center(SimulatedExchange[ElasticAverage]):
    """Asynchronous ``easgd``: a replica's parameters are sent to the center's first keeper, the change to the second
    keeper, and then back to the replica. Replicas never wait. While an answer is on its way, a replica sends no further
    request."""

    def __init__(self, rule: ElasticAverage, host: ExchangeHost) -> None:
        super().__init__(rule, host)
        self._asked: set[int] = set()

    def begun(self, replica: int, time_s: float) -> None:
        """See ``SimulatedExchange``."""
        clock = self.host.clocks[replica]
        if not clock or clock % self.rule.every or replica in self._asked:
            return
        self._asked.add(replica)
        head, *others = self.host.members
        tail = others[0] if others else head
        self._relay([(replica, head, 1.0), (head, tail, 1.0), (tail, replica, 1.0)], replica, time_s)

    def _relay(self, letters: list[tuple[int, int, float]], replica: int, time_s: float) -> None:
        if letters:
            self.letters.send(partial(self._relay, letters[1:], replica), time_s, letters[:1])
        else:
            self._asked.discard(replica)


def exchange_of(rule: Consistency, exposed_s: float | None) -> Callable[[ExchangeHost], SimulatedExchange[Consistency]]:
    """The exchange of a rule."""
    match rule:
        case Server():
            return lambda host: Ranges(rule, host)  # type: ignore[return-value]
        case Partial():
            return lambda host: Rounds(rule, host)  # type: ignore[return-value]
        case Gossip():
            return lambda host: Neighbours(rule, host)  # type: ignore[return-value]
        case ElasticAverage(asynchronous=True):
            return lambda host: Center(rule, host)  # type: ignore[return-value]
        case Sync() | Local() | DiLoCo() | ElasticAverage():
            return lambda host: Means(rule, host, exposed_s)  # type: ignore[return-value]
        case _:
            return lambda host: NoExchange(rule, host)
