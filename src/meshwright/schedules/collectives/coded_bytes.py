"""The sizes of coded messages, and the bytes that each rank sends in a coded collective."""

from itertools import permutations
from typing import NamedTuple

import msgspec

from meshwright.errors import PlanError
from meshwright.ir.codec import HEADER_BYTES, Codec
from meshwright.schedules.collectives.coded import CodedSteps
from meshwright.schedules.collectives.operations import BALANCED, DENSE_GATHER
from meshwright.schedules.collectives.steps import Move, Rounds, Steps

SAMPLES = 32
"""Before the vector is cut into balanced parts, each rank sends positions of chosen elements to every other rank: this
number times the number of ranks."""
POSITION_BYTES = 8
MOST_KEPT = 2
"""The owner of a balanced part keeps at most this number times the elements that a rank chooses in a part on
average."""
SIZE_BYTES = 8
"""Bytes of the size of a piece. It is sent before pieces whose sizes the receiver does not know."""
CHUNK = 2**19
"""The largest number of elements in a chunk. With smaller chunks, PyTorch's calls take longer than its kernels."""
CHUNK_BYTES = 2**19
"""The largest number of bytes in a coded chunk."""


def chunk_of(codec: Codec, item_bytes: int) -> int:
    """The number of elements in a chunk: as many whole buckets as fit. For a selection, it is the number of elements in
    a chunk of the dense sum.

    Raises:
        PlanError: a bucket is larger than a chunk.
    """
    chunk, bucket = CHUNK, getattr(codec.values, "bucket", 1)
    elements = dense_codec(codec)
    while elements is not None and elements.message_bytes(chunk, item_bytes) > CHUNK_BYTES:
        chunk //= 2
    if bucket > chunk:
        raise PlanError(f"bucket={bucket}", where=f"codec {codec}", remedy=f"a bucket has at most {chunk} elements")
    return chunk - chunk % bucket


def dense_codec(codec: Codec) -> Codec | None:
    """The codec for elements that are sent dense. For a selection, this is the codec of its sum. None: they are not
    encoded."""
    if codec.exchange != "merges":
        return codec
    return Codec(parts=(codec.values,)) if codec.values is not None else None


class MessageSizes(NamedTuple):
    """Sizes of the messages of an algorithm, for elements of ``item_bytes`` bytes that are encoded in chunks of
    ``chunk`` elements.

    For a selection, sizes are expected values: each rank is assumed to choose elements independently and uniformly. For
    messages that are compressed without loss, sizes are upper limits."""

    codec: Codec
    algorithm: str
    item_bytes: int
    chunk: int

    def content(self, length: int, terms: int, adds: bool) -> int:
        """Bytes of an atom of ``length`` elements that is a sum over ``terms`` ranks. ``adds``: the receiver adds it,
        otherwise it stores it."""
        codec, item_bytes = self.codec, self.item_bytes
        if codec.exchange == "merges" and not self._goes_dense(adds):
            content = codec.message_bytes(length, item_bytes, terms) if length else 0
            if self.algorithm == BALANCED and not adds and codec.select is not None:
                kept = codec.sparse_bytes(MOST_KEPT * codec.select.count(length), item_bytes)
                content = min(content, HEADER_BYTES + kept)
            return content
        elements = dense_codec(codec)
        coded = codec.value_bytes if elements is None else elements.message_bytes
        whole, rest = divmod(length, self.chunk)
        return whole * coded(self.chunk, item_bytes) + (coded(rest, item_bytes) if rest else 0)

    def announced(self, length: int, adds: bool) -> int:
        """Bytes of the sizes that are sent before the content; 0 if the receiver knows them."""
        if self.codec.is_fixed or not length:
            return 0
        selects = self.codec.exchange == "merges" and not self._goes_dense(adds)
        return SIZE_BYTES * (1 if selects else -(-length // self.chunk))

    def total(self, length: int, terms: int, adds: bool) -> int:
        """Bytes of content and sizes together."""
        return self.content(length, terms, adds) + self.announced(length, adds)

    def sample(self, num_ranks: int) -> int:
        """Bytes that a rank sends to each other rank before all ranks can cut the vector into balanced parts."""
        balances = self.algorithm == BALANCED and self.codec.exchange == "merges"
        return POSITION_BYTES * (1 + SAMPLES * num_ranks) if balances else 0

    def _goes_dense(self, adds: bool) -> bool:
        return self.algorithm == DENSE_GATHER and not adds


def in_bytes(coded: CodedSteps, codec: Codec, item_bytes: int, chunk: int) -> Steps:
    """The messages of a coded collective as steps. The lengths of moves are bytes, and all positions are 0. If ranks do
    not know the sizes, a round becomes two rounds: sizes, then contents."""
    num_ranks = coded.steps.num_ranks
    sizes = MessageSizes(codec, coded.steps.algorithm, item_bytes, chunk)
    rounds: Rounds = []
    if sample := sizes.sample(num_ranks):
        rounds.append([Move(source, target, 0, 0, sample) for source, target in permutations(range(num_ranks), 2)])
    for moves in coded.rounds:
        announced: list[Move] = []
        contents: list[Move] = []
        for move in moves:
            content = of_sizes = 0
            for part in move.parts:
                length = coded.atoms[part.atom][1] - coded.atoms[part.atom][0]
                if part.code is None:
                    content += length * item_bytes
                else:
                    content += sizes.content(length, part.terms, move.adds)
                    of_sizes += sizes.announced(length, move.adds)
            contents.append(Move(move.source, move.target, 0, 0, content, move.adds))
            if of_sizes:
                announced.append(Move(move.source, move.target, 0, 0, of_sizes))
        rounds += [announced, contents] if announced else [contents]
    return msgspec.structs.replace(coded.steps, rounds=tuple(tuple(moves) for moves in rounds if moves))


def sent_bytes(coded: CodedSteps, codec: Codec, item_bytes: int, chunk: int) -> tuple[int, ...]:
    """The bytes that each rank sends, counted from its messages (``in_bytes``)."""
    sent = [0] * coded.steps.num_ranks
    for move in (move for moves in in_bytes(coded, codec, item_bytes, chunk).rounds for move in moves):
        sent[move.source] += move.length
    return tuple(sent)
