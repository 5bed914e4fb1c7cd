"""The exchange of gradients between data-parallel ranks, with or without a codec: the fastest algorithm, its seconds
and bytes."""

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.cost.coded import MOST_RANKS, CodecCosts, coded_item_bytes, coded_s, sent_and_coding
from meshwright.cost.collective import Group, Network
from meshwright.cost.setup import Setup
from meshwright.cost.work import CodedElements
from meshwright.ir.cluster import NETWORK
from meshwright.ir.codec import Codec, codec_of
from meshwright.ir.program import CollectiveKind
from meshwright.schedules.collectives import hierarchy
from meshwright.schedules.collectives.choice import NATIVE
from meshwright.schedules.collectives.operations import DENSE_GATHER

HALVES = ("star", "ring", "halving")
ALGORITHMS: dict[CollectiveKind, tuple[str, ...]] = {
    "all_reduce": ("shares", "ring", "rabenseifner"),
    "reduce_scatter": HALVES,
    "all_gather": HALVES,
}
"""Algorithms that can carry any codec (decision 0047), because no two ranks encode the same sum."""
ACROSS: dict[CollectiveKind, tuple[str, ...]] = {"all_reduce": ("ring", "rabenseifner"), "reduce_scatter": HALVES}


def algorithms(codec: Codec, operation: CollectiveKind, num_ranks: int, fan_outs: Sequence[int] = ()) -> Iterator[str]:
    """Yield the algorithms that may carry coded elements between ranks. ``fan_outs``: the numbers of units that each
    level joins."""
    if codec.exchange == "sums":
        yield NATIVE
        return
    names = [*ALGORITHMS[operation]]
    if len(fan_outs) > 1:
        boxes = hierarchy.equal_boxes(fan_outs)
        names += [hierarchy.written("star", across, boxes) for across in ACROSS.get(operation, ())]
    if codec.exchange == "merges" and operation == "all_reduce":
        # In a butterfly, several ranks hold the same sum. They may send it only if the codec loses nothing.
        names += [DENSE_GATHER, *["butterfly"] * (codec.values is None)]
    powers = num_ranks & (num_ranks - 1) == 0
    yield from (name for name in names if powers or name not in ("rabenseifner", "halving", "butterfly"))


def elements_of(text: str, algorithm: str, num_bytes: float, item_bytes: int) -> CodedElements:
    """The coded elements of a single vector of ``num_bytes`` whose shape is unknown."""
    codec = codec_of(text)
    summed = codec.summed_lengths([(round(num_bytes / item_bytes),)]) if codec.exchange == "sums" else ()
    return CodedElements(text, algorithm, item_bytes, summed)


def fastest(
    network: Network, text: str, operation: CollectiveKind, num_bytes: float, group: Group, item_bytes: int
) -> CodedElements:
    """The coded elements of a collective, with the algorithm that is fastest for them."""
    candidates = [
        elements_of(text, name, num_bytes, item_bytes)
        for name in algorithms(codec_of(text), operation, group.size, network.fan_outs(group))
    ]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda elements: coded_s(network, operation, num_bytes, group, elements))


class GradientExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of gradients between data-parallel ranks: the codec (empty: none), the algorithm, the seconds of the
    exchange, the bytes that a rank sends (None: there are too many ranks to count them), and the seconds of encoding
    and decoding."""

    codec: str
    algorithm: str
    seconds: float
    num_bytes: float | None
    coding_s: float


def exchange_s(setup: Setup, network: Network, num_bytes: float) -> float:
    """The seconds in which data-parallel ranks sum gradients of ``num_bytes``, without the gather of parameters
    (ZeRO)."""
    operation, group, elements = _exchanged(setup, network, num_bytes)
    if elements is None:
        return network.collective_s(operation, num_bytes, group)
    return coded_s(network, operation, num_bytes, group, elements)


def gradient_exchange(setup: Setup, network: Network, num_bytes: float) -> GradientExchange:
    """The exchange of gradients of ``num_bytes`` that ``exchange_s`` times."""
    operation, group, elements = _exchanged(setup, network, num_bytes)
    seconds, times = exchange_s(setup, network, num_bytes), 2 if operation == "all_reduce" else 1
    if elements is None:
        sent = times * (group.size - 1) / group.size * num_bytes
        return GradientExchange(codec="", algorithm=NATIVE, seconds=seconds, num_bytes=sent, coding_s=0.0)
    codec, item = codec_of(elements.codec), coded_item_bytes(elements.item_bytes)
    length, rates = round(num_bytes / elements.item_bytes), CodecCosts(network.cluster).seconds_per_byte(codec)
    if codec.exchange == "sums":
        sent = times * (group.size - 1) / group.size * sum(elements.summed) * item
        counted: tuple[float | None, float] = sent, length * item * sum(rates)
    elif group.size <= MOST_RANKS:
        counted = sent_and_coding(codec, operation, elements.algorithm, group.size, length, item, rates)
    else:
        counted = None, length * item * sum(rates)
    return GradientExchange(
        codec=elements.codec, algorithm=elements.algorithm, seconds=seconds, num_bytes=counted[0], coding_s=counted[1]
    )


def shares_memory(network: Network, group: Group) -> bool:
    """Whether the ranks of a group are CPU ranks of one box, between which codecs are not used."""
    levels = network.cluster.levels
    if network.cluster.device.kind != "cpu" or not levels or levels[0].name == NETWORK:
        return False
    return len(levels) == 1 or group.size * group.stride <= levels[0].fan_out


def data_group(setup: Setup) -> Group:
    """The ranks that hold equal parameters, or equal parts of them: the ranks of dp and cp, without the depth of a
    grid."""
    return Group(setup.dp * setup.cp // setup.depth, setup.data_stride * setup.depth)


def _exchanged(setup: Setup, network: Network, num_bytes: float) -> tuple[CollectiveKind, Group, CodedElements | None]:
    operation: CollectiveKind = "reduce_scatter" if setup.zero else "all_reduce"
    group = data_group(setup)
    if not setup.codec or group.size < 2 or not num_bytes:
        return operation, group, None
    return operation, group, fastest(network, setup.codec, operation, num_bytes, group, setup.element_bytes)
