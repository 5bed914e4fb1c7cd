"""Clocks of replicas: when a replica may begin its next step. The runtime, the simulator and the tests use these
functions.

The clock of a replica is the number of steps whose results it has handed over: pushed, sent, or counted in a mean.
"""

from collections.abc import Mapping, Sequence

from meshwright.ir.consistency import (
    ASYNC,
    Consistency,
    DiLoCo,
    ElasticAverage,
    Ensemble,
    Gossip,
    Local,
    Partial,
    Server,
    Sync,
)  # fmt: skip
from meshwright.schedules.mixing import incoming


def awaited(rule: Consistency, members: Sequence[int], replica: int, clock: int) -> tuple[int, ...]:
    """The replicas whose clocks decide when ``replica`` may begin the step after its clock. ``members``: the
    replicas that are alive."""
    if isinstance(rule, Ensemble):
        return ()
    if isinstance(rule, Gossip):
        return tuple(peer for peer in incoming(rule, members, replica, clock - 1) if peer != replica) if clock else ()
    return tuple(peer for peer in members if peer != replica)


def least_clock(rule: Consistency, clock: int) -> int:
    """The clock that the awaited replicas must reach before a replica with this clock may begin its next step; 0 or
    less if it waits for no replica. With ``partial``, only some of them must reach it (see ``may_proceed``)."""
    match rule:
        case Sync() | Partial():
            return clock
        case Server(staleness=staleness) | Gossip(staleness=staleness):
            return 0 if staleness == ASYNC else clock - staleness
        case Local(every=every):
            return clock if clock % every == 0 else 0
        case ElasticAverage(every=every, asynchronous=asynchronous):
            return clock if clock % every == 0 and not asynchronous else 0
        case DiLoCo():
            sent = clock - rule.delay
            return sent if sent > 0 and fragment_due(rule, sent) is not None else 0
        case _:
            return 0


def may_proceed(rule: Consistency, clocks: Mapping[int, int], replica: int) -> bool:
    """Whether ``replica`` may begin its next step. ``clocks`` maps all replicas that are alive, including
    ``replica``, to their clocks.

    This function is the whole rule about time. Stale synchronous parallel with bound s lets a replica be s steps ahead
    of the slowest. Local SGD lets it continue within ``every`` steps. A partial collective needs the first ``least``
    replicas."""
    clock = clocks[replica]
    wanted = least_clock(rule, clock)
    if wanted <= 0:
        return True
    if isinstance(rule, Partial):
        return sum(other >= wanted for other in clocks.values()) >= rule.least(len(clocks))
    return all(clocks[peer] >= wanted for peer in awaited(rule, sorted(clocks), replica, clock))


def fragment_due(rule: DiLoCo, clock: int) -> int | None:
    """The fragment whose change replicas send after step ``clock`` (counted from 1); None: they send none."""
    part = rule.every // rule.fragments
    if clock <= 0 or clock % part:
        return None
    return (clock // part - 1) % rule.fragments


def staleness(clocks: Mapping[int, int], replica: int) -> int:
    """The number of steps by which the slowest replica is behind ``replica``; 0 if ``replica`` is the
    slowest."""
    return clocks[replica] - min(clocks.values())
