"""Runs the steps of a coded collective round by round, for codecs whose message sizes ranks do not know in advance.

In each round, ranks first send the sizes of their coded messages, with 8 bytes for each piece, and then the contents.
All ranks order their messages as in ``comm/compiled.py``, so that the slowest rank can always continue.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.comm.coded_streams import AtomStreams
from meshwright.comm.collective_kind import AHEAD, SLOTS, Named
from meshwright.comm.collective_run import Wait
from meshwright.comm.compiled import EXPECT, KEEP, PUT, CompiledStep, in_turn
from meshwright.comm.exchange import CodedExchange, CodedRun
from meshwright.comm.transport.base import MESSAGE_BYTES, Lane
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives.coded import AtomPart, CodedMove, CodedSteps, chunks
from meshwright.schedules.collectives.operations import BALANCED


class PeerMoves(NamedTuple):
    """The moves of one round between this rank and a peer. ``is_coded``: whether the elements are coded."""

    lane: Lane
    moves: tuple[CodedMove, ...]
    is_coded: bool

    @property
    def parts(self) -> list[tuple[AtomPart, bool]]:
        """The parts of all moves. Each has a flag that says whether the receiver adds it."""
        return [(part, move.adds) for move in self.moves for part in move.parts]


class CodedRound(NamedTuple):
    """The messages that this rank puts and takes in a round."""

    puts: tuple[PeerMoves, ...]
    takes: tuple[PeerMoves, ...]


class AtomHolder(Protocol):
    """The state of a rank during a collective: each atom, and how it is coded."""

    def num_pieces(self, part: AtomPart, adds: bool) -> int:
        """The number of pieces of a coded part. Each piece has its own size."""

    def encode(self, part: AtomPart, adds: bool) -> Sequence[Tensor]:
        """The bytes of each piece of a part that this rank sends."""

    def decode(self, part: AtomPart, pieces: Sequence[Tensor], adds: bool) -> None:
        """Add a received part to this rank's part, or store it."""

    def elements(self, part: AtomPart) -> Tensor:
        """The elements of an atom, in memory, for a message that is not coded."""

    def finish(self) -> None:
        """Write all results to memory."""


class RoundsKind(Named):
    """The state that coded collectives of one kind share: this rank's messages, round by round. ``hold`` makes the
    state of a rank for one collective."""

    def __init__(
        self,
        rank: int,
        coded: CodedSteps,
        codec: Codec,
        hold: Callable[[CodedExchange], AtomHolder],
        dtype: torch.dtype,
        lanes: Mapping[int, Lane],
        text: str,
    ) -> None:
        super().__init__(text)
        self.rank, self.lanes, self.hold, self.dtype = rank, lanes, hold, dtype
        self.balances = codec.exchange == "merges" and coded.steps.algorithm == BALANCED
        self.rounds = tuple(part for moves in coded.rounds if (part := _round(rank, moves, lanes)))
        self.expects = any(lane.expects for lane in lanes.values())
        self.settles = tuple(lanes.values()) if self.expects else ()
        self.most_ahead = AHEAD if self.expects else SLOTS - 1

    def run(self, exchange: CodedExchange, number: int, label: str, wait: Wait) -> "RoundsRun":
        """Start a collective of this kind. ``wait`` finishes it, after all collectives that were started earlier."""
        return RoundsRun(self, exchange, number, label, wait)


def _round(rank: int, moves: Sequence[CodedMove], lanes: Mapping[int, Lane]) -> CodedRound | None:
    sides: tuple[dict[int, list[CodedMove]], ...] = ({}, {})
    for move in moves:
        if move.source == rank:
            sides[0].setdefault(move.target, []).append(move)
        elif move.target == rank:
            sides[1].setdefault(move.source, []).append(move)
    puts, takes = (
        tuple(PeerMoves(lanes[peer], tuple(each), each[0].parts[0].code is not None) for peer, each in side.items())
        for side in sides
    )
    return CodedRound(puts, takes) if puts or takes else None


class _Outgoing(NamedTuple):
    """The messages that a rank sends in a round: the sizes of pieces, and the contents, each with its lane."""

    sizes: list[tuple[Lane, Tensor]]
    contents: list[tuple[Lane, Tensor]]


class RoundsRun(CodedRun):
    """A collective of this kind that has been started."""

    __slots__ = ("_early", "_first", "_holder")
    kind: RoundsKind

    def __init__(self, kind: RoundsKind, exchange: CodedExchange, number: int, label: str, wait: Wait) -> None:
        super().__init__(kind, exchange, number, label, wait)
        self._holder: AtomHolder | None = None
        self._first: _Outgoing | None = None
        self._early = 0

    @property
    def has_sent(self) -> bool:
        """Whether all messages of this collective are sent, so that the next collective may send messages."""
        return self.done or not self.kind.rounds

    def begin(self) -> None:
        """Send the first round's messages, as far as the lanes have room."""
        if self._is_idle(len(self.kind.rounds)):
            return
        self._prepared()
        if not self.kind.rounds or self.kind.balances:
            return
        self._first = outgoing = self._coded(self.kind.rounds[0])
        ahead: dict[Lane, int] = {}
        for lane, part in (*outgoing.sizes, *self._in_order(outgoing)):
            ahead[lane] = ahead.get(lane, 0) + 1
            if ahead[lane] > self.kind.most_ahead or not lane.put_at_once(part, self.tag):
                return
            self._early += 1

    def go_on(self) -> None:
        """Run all remaining steps."""
        if self._is_idle(len(self.kind.rounds)):
            return self._end()
        self._prepared()
        if self.kind.balances and self.kind.rounds:
            self._balance()
        for index, coded_round in enumerate(self.kind.rounds):
            outgoing = self._first if index == 0 and self._first is not None else self._coded(coded_round)
            early = self._early if index == 0 else 0
            self._first = None
            sizes = self._swap_sizes(coded_round, outgoing, early)
            self._swap(coded_round, outgoing, max(0, early - len(outgoing.sizes)), sizes)
        for lane in self.kind.settles:
            lane.settle(self.tag)
        begun = time.perf_counter()
        self._held().finish()
        self.coding_s += time.perf_counter() - begun
        self._end()
        self._holder = None

    def _balance(self) -> None:
        """Exchange samples of the chosen positions, which all ranks need before they can cut the vector."""
        holder, lanes, num_ranks = self._held(), self.kind.lanes, len(self.kind.lanes) + 1
        assert isinstance(holder, AtomStreams), "elements are not balanced"
        sample = holder.sample(num_ranks)
        for lane in lanes.values():
            if self.kind.expects:
                lane.expect(sample.numel(), sample)
        for lane in lanes.values():
            lane.put(sample, self.tag)
            self.sent_bytes += sample.nbytes
        samples = {self.kind.rank: sample}
        for peer, lane in lanes.items():
            samples[peer] = lane.take(sample.numel(), sample.dtype, self.tag).clone()
            lane.release()
        holder.balance([samples[rank] for rank in range(num_ranks)])

    def _prepare(self, exchange: CodedExchange) -> None:
        begun = time.perf_counter()
        self._holder = self.kind.hold(exchange)
        self.coding_s += time.perf_counter() - begun

    def _coded(self, coded_round: CodedRound) -> _Outgoing:
        """Encode the parts that this rank sends in a round."""
        outgoing, holder, begun = _Outgoing([], []), self._held(), time.perf_counter()
        for lane, moves, is_coded in coded_round.puts:
            if is_coded:
                pieces = [piece for move in moves for part in move.parts for piece in holder.encode(part, move.adds)]
                outgoing.sizes.append((lane, torch.tensor([piece.numel() for piece in pieces])))
                outgoing.contents.append((lane, pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
            else:
                for part in (part for move in moves for part in move.parts):
                    outgoing.contents.append((lane, holder.elements(part)))
        self.coding_s += time.perf_counter() - begun
        self.sent_bytes += sum(message.nbytes for side in outgoing for _, message in side)
        return outgoing

    def _held(self) -> AtomHolder:
        assert self._holder is not None, "made at the beginning"
        return self._holder

    def _in_order(self, outgoing: _Outgoing) -> list[tuple[Lane, Tensor]]:
        """The messages of the contents, in the order in which they are put."""
        steps = in_turn(_messages(PUT, outgoing.contents), [], expects=False)
        return [(outgoing.contents[at][0], outgoing.contents[at][1][begin:end]) for _, at, begin, end, *_ in steps]

    def _swap_sizes(self, coded_round: CodedRound, outgoing: _Outgoing, early: int) -> list[list[int]]:
        """Exchange the sizes of the round's coded messages. Returns the sizes of the pieces of each message that this
        rank takes."""
        coded = [message for message in coded_round.takes if message.is_coded]
        counts = [sum(self._held().num_pieces(part, adds) for part, adds in message.parts) for message in coded]
        like = torch.empty(0, dtype=torch.int64)
        for message, count in zip(coded, counts, strict=True):
            if self.kind.expects:
                message.lane.expect(count, like)
        for lane, sizes in outgoing.sizes[early:]:
            lane.put(sizes, self.tag)
        sizes_in = []
        for message, count in zip(coded, counts, strict=True):
            sizes_in.append(message.lane.take(count, torch.int64, self.tag).tolist())
            message.lane.release()
        return sizes_in

    def _swap(self, coded_round: CodedRound, outgoing: _Outgoing, early: int, sizes: list[list[int]]) -> None:
        """Exchange the contents. Elements that are not coded are read directly from the lane's memory."""
        holder, each = self._held(), iter(sizes)
        incoming: list[tuple[Lane, Tensor, bool]] = []
        coded: list[tuple[PeerMoves, list[int], Tensor]] = []
        for message in coded_round.takes:
            if message.is_coded:
                of_pieces = next(each)
                content = torch.empty(sum(of_pieces), dtype=torch.uint8)
                coded.append((message, of_pieces, content))
                incoming.append((message.lane, content, False))
            else:
                incoming += [(message.lane, holder.elements(part), adds) for part, adds in message.parts]
        taken = [(lane, content) for lane, content, _ in incoming]
        steps = in_turn(_messages(PUT, outgoing.contents), _messages(KEEP, taken), expects=self.kind.expects)
        for what, at, begin, end, *_ in steps:
            if what == PUT:
                early -= 1
                if early < 0:
                    lane, content = outgoing.contents[at]
                    lane.put(content[begin:end], self.tag)
                continue
            lane, content, adds = incoming[at]
            if what == EXPECT:
                lane.expect(end - begin, content)
            else:
                part = lane.take(end - begin, content.dtype, self.tag)
                if adds:
                    content[begin:end].add_(part)
                else:
                    content[begin:end].copy_(part)
                lane.release()
        begun = time.perf_counter()
        for message, of_pieces, content in coded:
            pieces = iter(content.split(of_pieces))
            for part, adds in message.parts:
                holder.decode(part, [next(pieces) for _ in range(holder.num_pieces(part, adds))], adds)
        self.coding_s += time.perf_counter() - begun


def _messages(kind: int, contents: Sequence[tuple[Lane, Tensor]]) -> list[list[CompiledStep]]:
    """The steps that send or receive contents, in messages of sizes that lanes can carry. There is a list for each
    lane. ``peer`` is the index of the content."""
    by_lane: dict[Lane, list[CompiledStep]] = {}
    for at, (lane, content) in enumerate(contents):
        most = MESSAGE_BYTES // content.element_size()
        steps = by_lane.setdefault(lane, [])
        steps += [CompiledStep(kind, at, *piece) for piece in chunks((0, content.numel()), most)]
    return list(by_lane.values())
