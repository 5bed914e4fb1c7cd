"""Times of collectives that are run step by step: latency α, seconds per byte β, seconds per added byte γ, by level.

One message of n bytes takes α + nβ of the level that joins its two ranks, and nγ where it is added; a rank sends one
and takes one at a time. Only what the busiest rank does counts: with p ranks on equal links and n bytes a vector,

    butterfly     (α + nβ + nγ) lg p                     Thakur, Rabenseifner, Gropp 2005, section 4.4
    rabenseifner  2α lg p + (p-1)/p n (2β + γ)           the same
    ring          2α (p-1) + (p-1)/p n (2β + γ)          Patarasuk, Yuan 2009
    tree          (2α + 2nβ + nγ) lg p                   up and down a binomial tree
    star          (p-1) (2α + 2nβ + nγ)                  a parameter server, which is one of the p

These are what the simulator finds for the same steps (``simulate.collectives.alone_s``) where p is a power of two.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.ir.device import Device
from meshwright.schedules.collectives.choice import EXCHANGE
from meshwright.schedules.collectives.hierarchy import Boxes, Leveled, nested, read


class Hop(NamedTuple):
    """A level that a group crosses: how many of its ranks a unit made up by the level has, and a message's times."""

    ranks: int
    alpha_s: float
    beta_s_per_byte: float


def gamma_s_per_byte(device: Device) -> float:
    """To add a byte to another: two are read, one is written, at the memory's rate."""
    return 3 / device.memory_bandwidth_bytes_per_s


class Round(NamedTuple):
    """What the busiest rank sends: to ranks so far away, beside each other where their levels differ, ``times``
    messages each, of this share of the vector, and whether they are added there. In a round of ``everyone`` ranks next
    to each other send over all levels up to that of the distance, and the slowest counts."""

    distances: tuple[int, ...]
    share: float
    adds: bool
    times: int = 1
    everyone: bool = False


def _doubling(p: int) -> list[int]:
    """1, 2, 4, ... below a power of two."""
    return [2**power for power in range(p.bit_length() - 1)]


def _mirrored(scatter: Sequence[Round]) -> list[Round]:
    """A reduce-scatter, and the all-gather that is the same backwards."""
    return [*scatter, *_copied(reversed(scatter))]


def _copied(rounds: Iterable[Round]) -> list[Round]:
    return [one._replace(adds=False) for one in rounds]


def _halving(p: int) -> list[Round]:
    return [Round((distance,), distance / p, True) for distance in reversed(_doubling(p))]


def _around(p: int) -> list[Round]:
    """Every rank sends each other rank the part that the receiver owns, one message each."""
    return [Round((p - 1,), 1 / p, True, p - 1, everyone=True)]


_Rounds = Callable[[int], list[Round]]
_SCATTERS: Mapping[str, _Rounds] = {"star": _around, "partitioned": _around, "ring": _around, "halving": _halving}
_ALL_REDUCES: Mapping[str, _Rounds] = {
    "star": lambda p: _mirrored([Round(tuple(range(1, p)), 1.0, True)]),
    "shares": lambda p: _mirrored(_around(p)),
    "partitioned": lambda p: _mirrored(_around(p)),
    "ring": lambda p: _mirrored(_around(p)),
    "tree": lambda p: _mirrored([Round((distance,), 1.0, True) for distance in _doubling(p)]),
    "butterfly": lambda p: [Round((distance,), 1.0, True) for distance in _doubling(p)],
    "rabenseifner": lambda p: _mirrored(_halving(p)),
}


def rounds_of(operation: str, algorithm: str, p: int) -> list[Round] | None:
    """What the busiest of ``p`` ranks sends; None where there is no closed form: ``p`` is no power of two, or the
    algorithm sends in several pieces."""
    if p & (p - 1):
        return None
    algorithm = EXCHANGE.get(operation, "") if algorithm == "exchange" else algorithm
    if (leveled := read(algorithm)) is not None:
        fan_outs = _fan_outs(leveled)
        return None if math.prod(fan_outs) != p else _along(operation, leveled.inside, leveled.across, fan_outs)
    match operation:
        case "all_reduce":
            found = _ALL_REDUCES.get(algorithm)
        case "reduce_scatter" | "all_gather":
            found = _SCATTERS.get(algorithm)
        case "all_to_all":
            found = _around if algorithm == "partitioned" else None
        case _:
            return None
    rounds = found(p) if found is not None else None
    return rounds if rounds is None or operation in ("all_reduce", "reduce_scatter") else _copied(reversed(rounds))


def steps_s(
    operation: str, algorithm: str, hops: Sequence[Hop], num_bytes: float, gamma_s_per_byte: float
) -> float | None:
    """Seconds of a collective of all ranks of the last of ``hops`` (innermost first) by an algorithm of
    ``schedules.collectives``, while nobody else is in the way; None where there is no closed form."""
    found = rounds_of(operation, algorithm, hops[-1].ranks)
    if found is None:
        return None
    total = 0.0
    for one in found:
        sent = one.share * num_bytes
        ports = [0.0] * len(hops)
        for distance in one.distances:
            reached = next(at for at, hop in enumerate(hops) if hop.ranks > distance)
            for at in range(0 if one.everyone else reached, reached + 1):
                ports[at] += hops[at].alpha_s + sent * (hops[at].beta_s_per_byte + gamma_s_per_byte * one.adds)
        total += one.times * max(ports)
    return total


def _fan_outs(leveled: Leveled) -> tuple[int, ...]:
    """Of equal boxes of neighbouring ranks, innermost first; nothing of others, and where there are several pieces."""
    sizes: list[int] = []
    unit: Boxes | int = leveled.boxes
    while not isinstance(unit, int):
        sizes.insert(0, len(unit))
        unit = unit[0]
    return tuple(sizes) if leveled.pieces == 1 and nested(sizes) == leveled.boxes else (0,)


def _along(operation: str, inside: str, across: str, fan_outs: Sequence[int]) -> list[Round]:
    """Scattered inside of every level but the outermost, across that by an algorithm of its own, and gathered. Where
    each rank has its own place in the vector, what goes to another lies in several pieces, a message each."""
    whole = operation == "all_reduce"
    up, stride, outside = list[Round](), 1, math.prod(fan_outs)
    for fan in fan_outs[:-1]:
        outside //= fan
        up += _wider(_SCATTERS[inside](fan), stride, 1 if whole else outside)
        stride *= fan
    if whole:
        return [*up, *_wider(_ALL_REDUCES[across](fan_outs[-1]), stride), *_copied(reversed(up))]
    for one in _wider(_SCATTERS[across](fan_outs[-1]), stride):
        pieces = round(one.share * math.prod(fan_outs)) if across == "halving" else 1
        up.append(one._replace(share=one.share / pieces, times=one.times * pieces))
    return up if operation == "reduce_scatter" else _copied(reversed(up))


def _wider(rounds: Sequence[Round], stride: int, pieces: int = 1) -> list[Round]:
    """Rounds of an outer level: ``stride`` ranks lie between its ranks, which hold as much less of the vector."""
    return [
        Round(
            tuple(distance * stride for distance in one.distances),
            one.share / stride / pieces,
            one.adds,
            one.times * pieces,
        )
        for one in rounds
    ]
