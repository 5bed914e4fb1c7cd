"""The times of collectives whose elements are encoded for sending (``ir/codec.py``)."""

from collections.abc import Iterable, Mapping

from meshwright.cost.alpha_beta import Carried
from meshwright.cost.collective import Group, Network
from meshwright.cost.work import CodedElements
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import Cast, Codec, LowRank, OneBit, Quantize, Select, codec_of
from meshwright.ir.placement import Flat
from meshwright.ir.plan import Bucket, Plan
from meshwright.ir.program import CollectiveKind
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import chunk_of, sent_bytes
from meshwright.schedules.collectives.operations import DENSE_GATHER, FOR_SELECTIONS, build

PASSES = {Cast: (1.5, 1.5), Quantize: (4.0, 2.0), OneBit: (4.0, 2.0), Select: (6.0, 1.0), LowRank: (2.0, 2.0)}
"""The number of times that encoding and decoding read or write all elements, counted from the operators of each kernel.
A calibration measures the times instead (``Cluster.codecs``)."""
LOSSLESS_S_PER_BYTE = (1 / 500e6, 1 / 1500e6)
"""Seconds per byte to compress and to decompress on one core, for zstandard at level 1 (its authors' benchmark)."""
LOSSLESS_BYTES = 0.83
"""Compressed bytes per byte of float32 gradients. The 8 bits of an exponent of Gaussian numbers have 2.54 bits of
information, so at best 26.5 of 32 bits remain."""


ITEM = 4
"""Bytes per element in coded form: gradients with fewer bytes are coded as float32."""
MOST_RANKS = 64


class CodecCosts:
    """The costs of codecs on a rank of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._bandwidth = cluster.device.memory_bandwidth_bytes_per_s
        self._measured = {codec_of(row.codec).parts: row for row in cluster.codecs}

    def assumed(self, texts: Iterable[str]) -> str:
        """The rates that are assumed for codecs that were not measured, for encoding and decoding. Empty if all codecs
        were measured."""
        unknown = [text for text in texts if codec_of(text).parts not in self._measured]
        rates = ((text, *self.seconds_per_byte(codec_of(text))) for text in unknown)
        return ", ".join(f"{text} {1e-9 / encode:.3g} and {1e-9 / decode:.3g} GB/s" for text, encode, decode in rates)

    def seconds_per_byte(self, codec: Codec) -> tuple[float, float]:
        """The seconds per byte of elements, to encode and to decode."""
        row = self._measured.get(codec.parts)
        if row is not None:
            return row.encode_s_per_byte, row.decode_s_per_byte
        passes = [PASSES[type(part)] for part in codec.parts if type(part) in PASSES]
        encode, decode = (sum(each[side] for each in passes) / self._bandwidth for side in (0, 1))
        if codec.lossless:
            encode, decode = encode + LOSSLESS_S_PER_BYTE[0], decode + LOSSLESS_S_PER_BYTE[1]
        return encode, decode


def coded_item_bytes(item_bytes: int) -> int:
    """The bytes per element for codecs. Elements with fewer bits than float32 are coded as float32."""
    return max(ITEM, item_bytes)


def coded_s(
    network: Network, operation: CollectiveKind, num_bytes: float, group: Group, coding: CodedElements
) -> float:
    """Seconds of a coded collective of a group, while all groups of its axis run the same collective."""
    codec, costs = codec_of(coding.codec), CodecCosts(network.cluster)
    item_bytes = coded_item_bytes(coding.item_bytes)
    encode, decode = costs.seconds_per_byte(codec)
    if codec.exchange == "sums":
        sums = (network.collective_s("all_reduce", length * item_bytes, group) for length in coding.summed)
        return sum(sums) + num_bytes * (encode + decode)
    length = max(1, round(num_bytes / coding.item_bytes))

    def carried(terms: int, adds: bool) -> Carried:
        if codec.exchange == "merges" and coding.algorithm == DENSE_GATHER and not adds:
            return Carried(codec.value_bytes(length, item_bytes) / num_bytes, 0.0, decode)
        coded = codec.message_bytes(length, item_bytes, terms)
        if codec.lossless:
            coded = round(coded * LOSSLESS_BYTES)
        share = coded / num_bytes
        if codec.exchange == "merges":  # all elements are read only once, to choose some
            return Carried(share, 0.0, decode * share)
        return Carried(share, encode, decode)

    chosen_s = num_bytes * encode if codec.exchange == "merges" else 0.0
    algorithm = "shares" if coding.algorithm in FOR_SELECTIONS else coding.algorithm
    # If the receiver does not know the sizes of messages, they are sent in an additional round.
    rounds = 1 if codec.is_fixed else 2
    return chosen_s + network.coded_steps_s(operation, algorithm, num_bytes, group, carried, rounds)


def foretold(plan: Plan, cluster: Cluster, stored_bytes: Mapping[str, int]) -> dict[tuple[str, str], tuple[int, float]]:
    """For each coded collective of a plan, by axis and label: the bytes that rank 0 sends, and its seconds of encoding
    and decoding. Collectives over more than ``MOST_RANKS`` ranks, which have many steps, are left out. ``stored_bytes``
    maps each parameter to its bytes per element."""
    result: dict[tuple[str, str], tuple[int, float]] = {}
    costs = CodecCosts(cluster)
    labeled = [(bucket, bucket.reduction) for bucket in plan.buckets] + [(each, each.label) for each in plan.gathers]
    for bucket, label in labeled:
        for coding in bucket.codings:
            codec, size = codec_of(coding.codec), plan.mesh.size(coding.axis)
            if codec.exchange not in ("hops", "merges") or not 1 < size <= MOST_RANKS:
                continue
            cut = coding.axis == bucket.axis and is_cut(plan, bucket)
            operation = "all_gather" if label == bucket.label else "reduce_scatter" if cut else "all_reduce"
            stored = stored_bytes[bucket.parameters[0]]
            item, length = coded_item_bytes(stored), bucket.num_bytes // stored
            if coding.axis in bucket.across and is_cut(plan, bucket):
                length //= plan.mesh.size(bucket.axis)
            rates = costs.seconds_per_byte(codec)
            result[coding.axis, label] = sent_and_coding(codec, operation, coding.algorithm, size, length, item, rates)
    return result


def sent_and_coding(
    codec: Codec, operation: str, algorithm: str, num_ranks: int, length: int, item_bytes: int,
    rates: tuple[float, float],
) -> tuple[int, float]:  # fmt: skip
    """The bytes that rank 0 sends in a coded collective of ``length`` elements, and its seconds of encoding and
    decoding. ``rates``: the seconds per byte of elements, to encode and to decode."""
    built = build(operation, algorithm, num_ranks, length)
    steps = coded(built, codec, everywhere=codec.chooses_first)
    sent = sent_bytes(steps, codec, item_bytes, chunk_of(codec, item_bytes))[0]
    spans = [end - begin for begin, end in steps.atoms]
    encoded = sum(spans[each.atom] for each in steps.encodings if each.rank == 0) * item_bytes
    taken = sum(
        spans[part.atom] * item_bytes
        for moves in steps.rounds for move in moves if move.target == 0
        for part in move.parts if part.code is not None
    )  # fmt: skip
    if codec.exchange == "merges":
        share = codec.message_bytes(length, item_bytes) / (length * item_bytes)
        encoded, taken = length * item_bytes, round(taken * min(1.0, share))
    return sent, encoded * rates[0] + taken * rates[1]


def is_cut(plan: Plan, bucket: Bucket) -> bool:
    """Whether the parameters of a bucket are stored Flat over its axis."""
    return isinstance(plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)
