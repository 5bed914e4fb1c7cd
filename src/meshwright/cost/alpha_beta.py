"""Times of collectives that run step by step, from latency α, seconds per byte β, and seconds per added byte γ of each
level.

A message of n bytes takes α + nβ, with α and β of the level that joins its two ranks, and nγ more if the receiver adds
the bytes. At any time, a rank sends one message and receives one message. The busiest rank determines the time of a
collective. With p ranks on equal links and vectors of n bytes:

    butterfly     (α + nβ + nγ) lg p                     Thakur, Rabenseifner, Gropp 2005, section 4.4
    rabenseifner  2α lg p + (p-1)/p n (2β + γ)           the same
    ring          2α (p-1) + (p-1)/p n (2β + γ)          Patarasuk, Yuan 2009
    tree          (2α + 2nβ + nγ) lg p                   up and down a binomial tree
    star          (p-1) (2α + 2nβ + nγ)                  a parameter server, which is one of the p

If p is a power of two, the simulator gives the same times for the same steps (``simulate.collectives.alone_s``).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.ir.device import Device
from meshwright.schedules.collectives.choice import EXCHANGE
from meshwright.schedules.collectives.hierarchy import Boxes, Leveled, nested, read


class Hop(NamedTuple):
    """A level of the cluster that a group crosses. It has the number of the group's ranks within one unit of this
    level, and the latency and seconds per byte of a message over the level."""

    ranks: int
    alpha_s: float
    beta_s_per_byte: float


def gamma_s_per_byte(device: Device) -> float:
    """Seconds to add two vectors, per byte: two bytes are read and one is written, at the memory's bandwidth."""
    return 3 / device.memory_bandwidth_bytes_per_s


class RoundMessages(NamedTuple):
    """The messages that the busiest rank sends in a round: ``times`` messages to each rank at ``distances``. Each
    message carries the fraction ``share`` of the vector. ``adds``: the receiver adds the message to its own data.
    Messages over different levels travel at the same time. ``everyone``: ranks send over all levels up to the level of
    the distance, and the slowest level counts."""

    distances: tuple[int, ...]
    share: float
    adds: bool
    times: int = 1
    everyone: bool = False


def _doubling(p: int) -> list[int]:
    """The powers of two below ``p``, which is a power of two itself."""
    return [2**power for power in range(p.bit_length() - 1)]


def _mirrored(scatter: Sequence[RoundMessages]) -> list[RoundMessages]:
    """A reduce-scatter, followed by the all-gather with the same rounds in reverse."""
    return [*scatter, *_copied(reversed(scatter))]


def _copied(rounds: Iterable[RoundMessages]) -> list[RoundMessages]:
    return [this_round._replace(adds=False) for this_round in rounds]


def _halving(p: int) -> list[RoundMessages]:
    return [RoundMessages((distance,), distance / p, True) for distance in reversed(_doubling(p))]


def _around(p: int) -> list[RoundMessages]:
    """Every rank sends each other rank the part that this rank owns, in one message."""
    return [RoundMessages((p - 1,), 1 / p, True, p - 1, everyone=True)]


_Rounds = Callable[[int], list[RoundMessages]]
_SCATTERS: Mapping[str, _Rounds] = {"star": _around, "partitioned": _around, "ring": _around, "halving": _halving}
_ALL_REDUCES: Mapping[str, _Rounds] = {
    "star": lambda p: _mirrored([RoundMessages(tuple(range(1, p)), 1.0, True)]),
    "shares": lambda p: _mirrored(_around(p)),
    "partitioned": lambda p: _mirrored(_around(p)),
    "ring": lambda p: _mirrored(_around(p)),
    "tree": lambda p: _mirrored([RoundMessages((distance,), 1.0, True) for distance in _doubling(p)]),
    "butterfly": lambda p: [RoundMessages((distance,), 1.0, True) for distance in _doubling(p)],
    "rabenseifner": lambda p: _mirrored(_halving(p)),
}


def rounds_of(operation: str, algorithm: str, p: int) -> list[RoundMessages] | None:
    """The rounds of the busiest of ``p`` ranks. None if there is no closed form, because ``p`` is not a power of two,
    or the algorithm cuts the vector into pieces."""
    if p & (p - 1):
        return None
    algorithm = EXCHANGE.get(operation, "") if algorithm == "exchange" else algorithm
    if (leveled := read(algorithm)) is not None:
        fan_outs = _fan_outs(leveled)
        return None if math.prod(fan_outs) != p else _along(operation, leveled.inside, leveled.across, fan_outs)
    match operation:
        case "all_reduce":
            builder = _ALL_REDUCES.get(algorithm)
        case "reduce_scatter" | "all_gather":
            builder = _SCATTERS.get(algorithm)
        case "all_to_all":
            builder = _around if algorithm == "partitioned" else None
        case _:
            return None
    rounds = builder(p) if builder is not None else None
    return rounds if rounds is None or operation in ("all_reduce", "reduce_scatter") else _copied(reversed(rounds))


def steps_s(
    operation: str, algorithm: str, hops: Sequence[Hop], num_bytes: float, gamma_s_per_byte: float
) -> float | None:
    """Seconds of a collective by an algorithm of ``schedules.collectives``, without other traffic on the links.
    ``hops`` are the levels that the ranks cross, innermost first. None if the algorithm has no closed form."""
    rounds = rounds_of(operation, algorithm, hops[-1].ranks)
    if rounds is None:
        return None
    total = 0.0
    for this_round in rounds:
        sent = this_round.share * num_bytes
        ports = [0.0] * len(hops)
        for distance in this_round.distances:
            reached = next(at for at, hop in enumerate(hops) if hop.ranks > distance)
            for at in range(0 if this_round.everyone else reached, reached + 1):
                ports[at] += hops[at].alpha_s + sent * (hops[at].beta_s_per_byte + gamma_s_per_byte * this_round.adds)
        total += this_round.times * max(ports)
    return total


class Carried(NamedTuple):
    """The costs of coding per byte of elements: ``bytes`` that a message then has, and the seconds to encode and to
    decode."""

    bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0


def coded_steps_s(
    operation: str,
    algorithm: str,
    hops: Sequence[Hop],
    num_bytes: float,
    gamma_s_per_byte: float,
    carried: Callable[[int, bool], Carried],
) -> float | None:
    """Seconds of a collective whose messages are coded, as ``steps_s`` counts them.

    ``carried`` gives these costs for a sum over a number of ranks. Its second argument says whether the receiver adds
    the message (True) or stores it. In a hierarchical collective (``star+ring@2x4``), only messages over the outermost
    hop are coded. A sum is encoded once, and then forwarded unchanged. None if the algorithm has no closed form.
    """
    num_ranks = hops[-1].ranks
    rounds = rounds_of(operation, algorithm, num_ranks)
    if rounds is None:
        return None
    leveled = read(algorithm)
    inside = hops[-2].ranks if leveled and len(hops) > 1 else 1
    accumulates = (leveled.across if leveled else algorithm) == "ring"
    total, terms = 0.0, inside
    for this_round in rounds:
        is_coded = leveled is None or max(this_round.distances) >= inside
        sent, gamma = this_round.share * num_bytes, gamma_s_per_byte if this_round.adds else 0.0
        if is_coded:
            # A message in a ring carries a sum over the ranks that it has passed: on average, over half of the ranks.
            passed = (this_round.times - 1) * inside // 2 if accumulates else 0
            mean = terms + passed if this_round.adds else num_ranks
            each = carried(max(1, mean), this_round.adds)
            bytes_sent, gamma = sent * each.bytes, each.decode_s
            if this_round.adds:
                gamma += each.encode_s
            elif terms:  # the complete sum is encoded once; received messages are forwarded unchanged
                total, terms = total + sent * each.encode_s, 0
            terms = min(num_ranks, 2 * terms) if this_round.adds and len(this_round.distances) == 1 else terms
        else:
            bytes_sent = sent
        ports = [0.0] * len(hops)
        for distance in this_round.distances:
            reached = next(at for at, hop in enumerate(hops) if hop.ranks > distance)
            for at in range(0 if this_round.everyone else reached, reached + 1):
                ports[at] += hops[at].alpha_s + bytes_sent * hops[at].beta_s_per_byte + sent * gamma
        total += this_round.times * max(ports)
    return total


def _fan_outs(leveled: Leveled) -> tuple[int, ...]:
    """The fan-outs of the levels, innermost first, if all boxes of a level are equal and hold neighbouring ranks.
    Otherwise, and if the vector is cut into pieces, (0,)."""
    sizes: list[int] = []
    unit: Boxes | int = leveled.boxes
    while not isinstance(unit, int):
        sizes.insert(0, len(unit))
        unit = unit[0]
    return tuple(sizes) if leveled.pieces == 1 and nested(sizes) == leveled.boxes else (0,)


def _along(operation: str, inside: str, across: str, fan_outs: Sequence[int]) -> list[RoundMessages]:
    """The rounds of a hierarchical collective: a reduce-scatter inside every level but the outermost, ``across`` on the
    outermost level, and then all-gathers inside. In a reduce-scatter or an all-gather, each rank owns a fixed part of
    the vector. The data for another rank then lie in several pieces, each of which is a message."""
    whole = operation == "all_reduce"
    up, stride, outside = list[RoundMessages](), 1, math.prod(fan_outs)
    for fan in fan_outs[:-1]:
        outside //= fan
        up += _wider(_SCATTERS[inside](fan), stride, 1 if whole else outside)
        stride *= fan
    if whole:
        return [*up, *_wider(_ALL_REDUCES[across](fan_outs[-1]), stride), *_copied(reversed(up))]
    for this_round in _wider(_SCATTERS[across](fan_outs[-1]), stride):
        pieces = round(this_round.share * math.prod(fan_outs)) if across == "halving" else 1
        up.append(this_round._replace(share=this_round.share / pieces, times=this_round.times * pieces))
    return up if operation == "reduce_scatter" else _copied(reversed(up))


def _wider(rounds: Sequence[RoundMessages], stride: int, pieces: int = 1) -> list[RoundMessages]:
    """The rounds on an outer level, on which ranks are ``stride`` apart and each holds 1 / ``stride`` of the vector."""
    return [
        RoundMessages(
            tuple(distance * stride for distance in this_round.distances),
            this_round.share / stride / pieces,
            this_round.adds,
            this_round.times * pieces,
        )
        for this_round in rounds
    ]
