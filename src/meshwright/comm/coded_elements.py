"""The state of a rank during an exchange of elements whose coded size is not known in advance."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.exchange import CodedExchange
from meshwright.compress.coder import Coder, draw_of
from meshwright.schedules.collectives.coded import AtomPart, CodedSteps, chunks


class Elements:
    """Elements in memory, coded in chunks whose size is not known in advance. ``again``: the encodings whose bytes this
    rank sends again later."""

    def __init__(
        self, rank: int, coded: CodedSteps, coder: Coder, again: frozenset[int], exchange: CodedExchange
    ) -> None:
        self._rank, self._coded, self._coder, self._exchange, self._again = rank, coded, coder, exchange, again
        self._loses = coder.codec.is_lossy
        self._kept: dict[int, Sequence[Tensor]] = {}
        exchange.begin()

    def num_pieces(self, part: AtomPart, adds: bool) -> int:
        """The number of chunks."""
        return len(self._chunks(part))

    def encode(self, part: AtomPart, adds: bool) -> Sequence[Tensor]:
        """Encode each chunk, or return the bytes that were received."""
        assert part.code is not None
        if part.code in self._kept:
            return self._kept[part.code]
        pieces, in_use = [], self._coded.encodings[part.code].in_use
        for begin, end in self._chunks(part):
            elements = self._exchange.memory[begin:end]
            message = torch.empty(self._coder.num_bytes(end - begin), dtype=torch.uint8)
            draw = draw_of(self._exchange.draw, self._rank, part.code, begin)
            message = message[: self._coder.encode(elements, message, draw)]
            pieces.append(message)
            if self._loses and (self._exchange.residual is not None or in_use):
                decoded = torch.empty_like(elements)
                self._coder.decode(message, decoded, add=False)
                self._exchange.add_error(begin, elements.sub_(decoded))
                elements.copy_(decoded)
        if part.code in self._again:
            self._kept[part.code] = pieces
        return pieces

    def decode(self, part: AtomPart, pieces: Sequence[Tensor], adds: bool) -> None:
        """Decode each chunk."""
        for (begin, end), message in zip(self._chunks(part), pieces, strict=True):
            self._coder.decode(message, self._exchange.memory[begin:end], add=adds)
        if part.code in self._again and not adds:
            assert part.code is not None
            self._kept[part.code] = pieces

    def elements(self, part: AtomPart) -> Tensor:
        """The elements."""
        begin, end = self._coded.atoms[part.atom]
        return self._exchange.memory[begin:end]

    def finish(self) -> None:
        """All results are in memory."""

    def _chunks(self, part: AtomPart) -> list[tuple[int, int]]:
        return list(chunks(self._coded.atoms[part.atom], self._coder.chunk))


def sent_again(rank: int, coded: CodedSteps) -> frozenset[int]:
    """The encodings whose bytes a rank sends once more, after it has sent or received them."""
    known: set[int] = set()
    again: set[int] = set()
    for moves in coded.rounds:
        for move in moves:
            codes = {part.code for part in move.parts if part.code is not None}
            if move.source == rank:
                again |= codes & known
                known |= codes
        for move in moves:
            if move.target == rank and not move.adds:
                known |= {part.code for part in move.parts if part.code is not None}
    return frozenset(again)
