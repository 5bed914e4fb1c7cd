"""The state of a rank during an exchange of selections: streams of indices and values, or dense elements."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from meshwright.comm.exchange import CodedExchange
from meshwright.compress.coder import Coder, draw_of
from meshwright.compress.select import largest
from meshwright.compress.stream import Stream, merge, read_coded, recode, select_with_feedback
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives.coded import AtomPart, CodedSteps, chunks
from meshwright.schedules.collectives.coded_bytes import CHUNK, MOST_KEPT, SAMPLES
from meshwright.schedules.collectives.operations import BALANCED, DENSE_GATHER
from meshwright.schedules.collectives.steps import Span


class AtomStreams:
    """The atoms of one rank. Each is a stream, or dense elements in memory.

    A rank chooses its elements before they are coded for the first time: from the whole vector at once, or from each
    atom that is sent between boxes. Elements that are not chosen stay in its residual.
    """

    def __init__(
        self,
        rank: int,
        coded: CodedSteps,
        codec: Codec,
        coder: Coder | None,
        again: frozenset[int],
        whole: bool,
        exchange: CodedExchange,
    ) -> None:
        self._rank, self._codec, self._coder, self._again, self._exchange = rank, codec, coder, again, exchange
        self._algorithm = coded.steps.algorithm
        self._atoms: list[Span] = list(coded.atoms)
        self._held: list[Stream | None] = [None for _ in coded.atoms]
        self._kept: dict[int, Sequence[Tensor]] = {}
        self._chunk = coder.chunk if coder is not None else CHUNK
        self._most = 0  # the number of elements that a rank keeps of its sum; 0: all
        self._chosen: Stream | None = None
        self._feedback = msgspec.structs.replace(codec, feedback=True, momentum=0.0, warmup=0)
        if not whole:
            exchange.begin()  # the box's sum, from which elements are chosen, includes the residuals
        if self._algorithm == BALANCED:
            self._chosen = exchange.chosen or self._choose((0, exchange.memory.numel()))
        elif whole:
            begin, end = exchange.own
            chosen = exchange.chosen or self._choose((begin, end))
            for atom, span in enumerate(coded.atoms):
                if begin <= span[0] and span[1] <= end:
                    self._held[atom] = chosen.cut(span[0] - begin, span[1] - begin)

    # --- balanced parts ----------------------------------------------------------------------------------------------

    def sample(self, num_ranks: int) -> Tensor:
        """The number of elements that this rank has chosen, then positions that divide them evenly."""
        chosen, num = self._chosen, SAMPLES * num_ranks
        assert chosen is not None, "chosen at the beginning"
        count = len(chosen.values)
        at = (2 * torch.arange(num) + 1) * count // (2 * num) if count else torch.zeros(num, dtype=torch.int64)
        positions = at if chosen.indices is None or not count else chosen.indices[at].long()
        return torch.cat((torch.tensor([count]), positions))

    def balance(self, samples: Sequence[Tensor]) -> None:
        """Cut the vector so that the parts of all ranks contain about equal numbers of chosen elements, according to
        the samples of all ranks. Later, a rank keeps at most twice its share of the largest number of elements that any
        rank has chosen."""
        chosen, num_ranks = self._chosen, len(samples)
        assert chosen is not None, "chosen at the beginning"
        positions = torch.cat([each[1:] for each in samples])
        weights = torch.cat([each[:1].expand(len(each) - 1) for each in samples])
        order = positions.argsort(stable=True)
        sums = weights[order].cumsum(0)
        targets = torch.arange(1, num_ranks) * int(sums[-1]) // num_ranks
        first = torch.searchsorted(sums, targets, right=True).clamp_(max=len(order) - 1)
        borders = [0, *positions[order][first].tolist(), self._exchange.memory.numel()]
        self._atoms = list(pairwise(borders))
        self._held = [chosen.cut(*span) for span in self._atoms]
        self._most = -(-MOST_KEPT * max(int(each[0]) for each in samples) // num_ranks)

    # --- messages ----------------------------------------------------------------------------------------------------

    def num_pieces(self, part: AtomPart, adds: bool) -> int:
        """The number of pieces: 1, or the number of chunks of dense elements."""
        return len(self._chunks(part.atom)) if self._goes_dense(adds) else 1

    def encode(self, part: AtomPart, adds: bool) -> Sequence[Tensor]:
        """The bytes of a stream, or of all elements of a sum."""
        code = part.code
        assert code is not None, "a part of a coded message"
        if code not in self._kept:
            stream, draw = self._stream(part.atom), draw_of(self._exchange.draw, self._rank, code)
            if self._goes_dense(adds):
                pieces = self._dense(part.atom, stream, draw)
            else:
                pieces = [self._sparse(part.atom, stream, adds, draw)]
            if code not in self._again:
                return pieces
            self._kept[code] = pieces
        return self._kept[code]

    def decode(self, part: AtomPart, pieces: Sequence[Tensor], adds: bool) -> None:
        """Merge a received stream with this rank's stream, or store it."""
        begin, end = self._atoms[part.atom]
        if self._goes_dense(adds):
            for (first, last), piece in zip(self._chunks(part.atom), pieces, strict=True):
                self._read(piece, self._exchange.memory[first:last])
            self._held[part.atom] = None
        else:
            received = read_coded(pieces[0], self._codec, end - begin, self._exchange.memory.dtype)
            self._held[part.atom] = merge(self._stream(part.atom), received) if adds else received
        if part.code in self._again and not adds:
            assert part.code is not None
            self._kept[part.code] = pieces

    def elements(self, part: AtomPart) -> Tensor:
        """The elements of an atom, in memory."""
        begin, end = self._atoms[part.atom]
        elements, stream = self._exchange.memory[begin:end], self._held[part.atom]
        if stream is not None:
            _write(stream, elements)
            self._held[part.atom] = None
        return elements

    def finish(self) -> None:
        """Write all streams to memory."""
        for (begin, end), stream in zip(self._atoms, self._held, strict=True):
            if stream is not None:
                _write(stream, self._exchange.memory[begin:end])

    # --- parts of these ----------------------------------------------------------------------------------------------

    def _goes_dense(self, adds: bool) -> bool:
        return self._algorithm == DENSE_GATHER and not adds

    def _chunks(self, atom: int) -> list[Span]:
        return list(chunks(self._atoms[atom], self._chunk))

    def _stream(self, atom: int) -> Stream:
        """The stream of an atom. If the atom is still dense, its elements are chosen now."""
        stream = self._held[atom]
        if stream is None:
            stream = self._held[atom] = self._choose(self._atoms[atom])
        return stream

    def _choose(self, span: Span) -> Stream:
        """Choose elements from the sum of elements and residual. The others stay in the residual."""
        elements, residual = self._exchange.memory[slice(*span)], self._exchange.residual_of(span)
        before = self._exchange.before_of(span)
        if residual is None or before is None:
            return Stream.select(elements, self._codec)
        stream = select_with_feedback(elements, {"residual": residual}, self._feedback, 0, before={"residual": before})
        if not bool(stream.values.isfinite().all()):
            residual.nan_to_num_(0, 0, 0)  # there may be more such elements than are chosen
        return stream

    def _sparse(self, atom: int, stream: Stream, adds: bool, draw: int) -> Tensor:
        """The bytes of a stream. The difference goes to the residual, and the stream is replaced by its decoded
        form."""
        if self._most and not adds and len(stream.values) > self._most:
            stream = self._largest(atom, stream, self._most)
        item_bytes, length = stream.values.itemsize, stream.length
        sparse_bytes = self._codec.sparse_bytes(len(stream.values), item_bytes)
        if stream.indices is not None and self._codec.value_bytes(length, item_bytes) < sparse_bytes:
            stream = Stream(length, None, stream.dense())  # quantized elements take fewer bytes than their indices
        decoded, message = recode(stream, self._codec, draw)
        if decoded is not stream:
            self._add_error(atom, Stream(stream.length, stream.indices, stream.values - decoded.values))
        self._held[atom] = decoded
        return message

    def _largest(self, atom: int, stream: Stream, count: int) -> Stream:
        """The entries of largest magnitude of a stream; the others go to the residual."""
        indices = stream.indices
        if indices is None:
            indices = torch.arange(stream.length, dtype=torch.int32)
        kept = largest(stream.values, count).long()
        dropped = torch.ones(len(indices), dtype=torch.bool).index_fill_(0, kept, False)
        self._add_error(atom, Stream(stream.length, indices[dropped], stream.values[dropped]))
        return Stream(stream.length, indices[kept], stream.values[kept])

    def _dense(self, atom: int, stream: Stream, draw: int) -> Sequence[Tensor]:
        """The bytes of all elements of a stream, in chunks. The elements in memory are replaced by their decoded
        form."""
        memory, pieces = self._exchange.memory, []
        _write(stream, memory[slice(*self._atoms[atom])])
        self._held[atom] = None
        for begin, end in self._chunks(atom):
            elements = memory[begin:end]
            if self._coder is None:
                pieces.append(elements.view(torch.uint8))
                continue
            message = torch.empty(self._coder.num_bytes(end - begin), dtype=torch.uint8)
            message = message[: self._coder.encode(elements, message, draw_of(draw, begin))]
            decoded = torch.empty_like(elements)
            self._coder.decode(message, decoded, add=False)
            self._exchange.add_error(begin, elements.sub_(decoded))
            elements.copy_(decoded)
            pieces.append(message)
        return pieces

    def _read(self, piece: Tensor, elements: Tensor) -> None:
        if self._coder is not None:
            self._coder.decode(piece, elements, add=False)
        else:
            elements.view(torch.uint8).copy_(piece)

    def _add_error(self, atom: int, error: Stream) -> None:
        self._exchange.add_errors(self._atoms[atom][0], error)


def _write(stream: Stream, elements: Tensor) -> None:
    """Copy a stream to the elements, chunk by chunk, so that each chunk is written while it is in the cache."""
    if stream.indices is None:
        elements.copy_(stream.values)
        return
    spans, indices = list(chunks((0, stream.length), CHUNK)), stream.indices.long()
    ends = torch.searchsorted(indices, torch.tensor([end for _, end in spans])).tolist()
    for (begin, end), first, last in zip(spans, [0, *ends], ends, strict=False):
        elements[begin:end].zero_()
        elements.scatter_(0, indices[first:last], stream.values[first:last])
