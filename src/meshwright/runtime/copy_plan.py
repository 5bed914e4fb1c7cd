"""Which rank keeps which part of the state in memory: every part once on each of two hosts, or once on a single host.

    host 0   rank 0   keeps a   and, for rank 2, d         a tensor that ranks of two hosts hold anyway is not sent
             rank 1   keeps b
    host 1   rank 2   keeps d   and, for rank 0, a
             rank 3   keeps c, b                           (b: data-parallel ranks 1 and 3 both hold it)

A host is a launcher and its ranks: what dies together. All functions are pure, and every rank computes the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from meshwright.ir.copies import HOSTS
from meshwright.ir.graph import ITEM_BYTES

ALIGNED = 64
"""Pieces begin at multiples of this number of bytes."""
SLACK_BYTES = 2**16
"""Bytes by which a rank's plain state may grow between two plans."""


class TensorPiece(msgspec.Struct, frozen=True):
    """A block of a whole tensor; or, with a dtype of ``bytes``, the plain state of a rank."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the piece."""
        num_bytes = 1 if self.dtype == "bytes" else ITEM_BYTES[self.dtype]
        for size in self.sizes:
            num_bytes *= size
        return num_bytes


class SlotEntry(msgspec.Struct, frozen=True):
    """A piece, and the byte at which it begins in a slot."""

    piece: TensorPiece
    begin: int


class SlotRange(msgspec.Struct, frozen=True):
    """The bytes of a slot that another rank sends, or that are sent to another rank, as one message."""

    rank: int
    begin: int
    end: int


class KeptCopies(msgspec.Struct, frozen=True):
    """What a rank keeps. ``entries``: all pieces in its slot; the first ``num_own`` of them it writes itself. ``sent``:
    the bytes that it sends to its partner on the next host, and ``received``: those that others send to it."""

    entries: tuple[SlotEntry, ...]
    num_own: int
    num_bytes: int
    sent: SlotRange | None = None
    received: tuple[SlotRange, ...] = ()


def plan_copies(offers: Sequence[Sequence[TensorPiece]], hosts: Sequence[int]) -> list[KeptCopies]:
    """What each rank keeps. ``offers``: the pieces that each rank holds; ``hosts``: the number of each rank's host."""
    has_other_hosts = len(set(hosts)) > 1
    own: list[list[TensorPiece]] = [[] for _ in offers]
    alone: list[list[TensorPiece]] = [[] for _ in offers]
    loads = [0] * len(offers)
    for piece, ranks in _holders(offers).items():
        by_host: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_host[hosts[rank]].append(rank)
        chosen = sorted((min(each, key=lambda rank: (loads[rank], rank)) for each in by_host.values()),
                        key=lambda rank: (loads[rank], rank))[:HOSTS]  # fmt: skip
        for rank in chosen:
            loads[rank] += piece.num_bytes
            (alone if has_other_hosts and len(chosen) == 1 else own)[rank].append(piece)
    partners = [_partner(rank, hosts) for rank in range(len(offers))] if has_other_hosts else []
    return [_kept(rank, own[rank], alone, partners) for rank in range(len(offers))]


def _holders(offers: Sequence[Sequence[TensorPiece]]) -> dict[TensorPiece, list[int]]:
    holders: dict[TensorPiece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(offers):
        for piece in pieces:
            holders[piece].append(rank)
    return holders


def _partner(rank: int, hosts: Sequence[int]) -> int:
    """The rank on the next host that keeps a second copy of what only this rank's host holds."""
    order = sorted(set(hosts))
    following = order[(order.index(hosts[rank]) + 1) % len(order)]
    own_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    next_host = [other for other, host in enumerate(hosts) if host == following]
    return next_host[own_host.index(rank) % len(next_host)]


def _kept(rank: int, own: list[TensorPiece], alone: list[list[TensorPiece]], partners: list[int]) -> KeptCopies:
    entries, end = _laid_out(own, 0)
    alone_here, sent_end = _laid_out(alone[rank], end)
    sent = SlotRange(partners[rank], end, sent_end) if alone_here else None
    entries, end, received = [*entries, *alone_here], sent_end, []
    num_own = len(entries)
    for other, partner in enumerate(partners):
        if partner == rank and alone[other]:
            theirs, begin = _laid_out(alone[other], end), end
            entries, end = [*entries, *theirs[0]], theirs[1]
            received.append(SlotRange(other, begin, end))
    return KeptCopies(tuple(entries), num_own, end, sent, tuple(received))


def _laid_out(pieces: Iterable[TensorPiece], begin: int) -> tuple[list[SlotEntry], int]:
    """The pieces one after the other from byte ``begin`` on, and the end of the last."""
    entries = []
    for piece in pieces:
        entries.append(SlotEntry(piece, begin))
        begin += -(-piece.num_bytes // ALIGNED) * ALIGNED
    return entries, begin


# --- reading ---------------------------------------------------------------------------------------------------------


class Copy(msgspec.Struct, frozen=True):
    """A complete slot: the plan that it belongs to (``generation``), the number of distinct pieces of that plan, the
    step, and the entries. ``host`` and ``slot`` say where it lies."""

    generation: str
    num_pieces: int
    step: int
    entries: tuple[SlotEntry, ...]
    host: int = 0
    rank: int = 0
    slot: int = 0


class CopyPlace(msgspec.Struct, frozen=True):
    """Where a piece lies: the host, the slot there, and the byte in it."""

    host: int
    rank: int
    slot: int
    begin: int


def newest_complete(copies: Iterable[Copy]) -> tuple[int, dict[TensorPiece, list[CopyPlace]]] | None:
    """The latest step of which every piece is in memory on some host, and the places of each piece; None without such a
    step."""
    sets: Mapping[tuple[int, str, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        sets[copy.step, copy.generation, copy.num_pieces].append(copy)
    for (step, _, num_pieces), same in sorted(sets.items(), reverse=True):
        places: dict[TensorPiece, list[CopyPlace]] = defaultdict(list)
        for copy in same:
            for entry in copy.entries:
                places[entry.piece].append(CopyPlace(copy.host, copy.rank, copy.slot, entry.begin))
        if len(places) == num_pieces:
            return step, dict(places)
    return None
