"""Copies of a trainer's state in memory, every few steps, from which the ranks go on after the loss of others.

    step       1   2   3   4   5   6            ranks 0 to 3 copy their parts after steps 2 and 4: into memory that
    rank 0..3  ━━━━━━│━━━━━━━│━━━╳              outlives them (kept_memory.py), and to another host, if there is one
                   copy    copy  rank 1 is lost
    heirs                     ┗━━━━━━━━         all ranks go on after step 4, under the same layout or another, without
                                                a look at the disk

The number of steps between copies follows from their cost: they take at most ``SHARE`` of the time. ``copy_plan.py``
decides which rank keeps which part. A rank has two slots, which it fills in turn. When it makes the copy after the copy
of step s, it has completed a later step, which it cannot do without all other ranks. So all ranks have copied step s,
and the slot of the copy before step s is free. Before a rank makes a copy, it waits until its last copy has arrived on
the other host.
"""

import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.comm.hand_over import Partners, hand_over
from meshwright.comm.transport.process import box
from meshwright.consistency.packing import from_bytes, to_bytes
from meshwright.errors import LostRankError, RankError
from meshwright.ir.amendment import base_of
from meshwright.ir.plan import Plan
from meshwright.runtime import codec_memory, optimizer_state
from meshwright.runtime.agree import everywhere
from meshwright.runtime.checkpoint import Stateful, check_state
from meshwright.runtime.copied_pieces import (
    WHERE,
    fill,
    overlapping,
    read_sized,
    tensor_within,
    within,
    write_sized,
)
from meshwright.runtime.copy_plan import (
    SLACK_BYTES,
    Copy,
    CopyPlace,
    KeptCopies,
    TensorPiece,
    newest_complete,
    plan_copies,
)
from meshwright.runtime.kept_memory import slots_of
from meshwright.runtime.memory import available_bytes
from meshwright.runtime.shards import StoredPart
from meshwright.runtime.trainer import Trainer

log = logging.getLogger("meshwright")

SHARE = 0.01
"""Copies take at most this share of the time of steps."""
TRIED = (2, 4, 6)
"""The steps of an attempt after which copies are made before their cost is known. The first two touch new memory, and
are slower than those that follow."""
MEMORY_SHARE = 0.5
"""Copies may take this share of the memory that is available on a host. If they need more, there are no copies."""
_PLAIN = "plain state of rank "


class MemoryCopies:
    """Makes copies of a trainer's state, and loads them. Every rank calls the same methods at the same steps.

    Args:
        memory: the value of ``kept_memory.VARIABLE``; empty: there are no copies.
        local_rank: this rank's number among those of its launcher.
    """

    def __init__(self, trainer: Trainer, loader: Stateful, memory: str, local_rank: int) -> None:
        self._trainer, self._loader = trainer, loader
        self._host_slots = slots_of(memory)
        hosts = from_every_rank(f"{box()} {memory}" if memory else "")
        self._hosts = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
        has_memory = all(hosts) and trainer.replica is None and local_rank < len(self._host_slots)
        self._is_on = all(from_every_rank(has_memory))
        self._local_rank, self._slot = local_rank, 0
        self._first = self._next = -1
        self._since = (0, 0.0)
        self.every = 0
        """The steps from one copy to the next; 0: not known yet."""
        self._plan: KeptCopies | None = None
        self._signature: tuple[Any, ...] = ()
        self._head = b""
        self._partners: Partners | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._opened: dict[tuple[int, int], Tensor] = {}
        self._described: tuple[Plan, dict[str, Any]] | None = None

    @property
    def num_hosts(self) -> int:
        """The number of hosts on which the ranks are."""
        return len(set(self._hosts))

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank's copies take now in the memory of its launcher."""
        return sum(slot.num_bytes for slot in self._host_slots[self._local_rank]) if self._is_on else 0

    # --- making ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether the state is to be copied after ``step``, which is done. Call it after every step."""
        if not self._is_on:
            return False
        if self._first < 0:
            self._first, self._next = step - 1, step - 1 + TRIED[0]
            self._since = step, time.perf_counter()
        return step >= self._next

    def make(self, step: int) -> None:
        """Copy the state after ``step``.

        Raises:
            LostRankError: the partner that keeps the copy before this one is gone.
        """
        begun = time.perf_counter()
        step_s = (begun - self._since[1]) / max(1, step - self._since[0])
        self._wait()
        self._copy(step)
        self._schedule(step, time.perf_counter() - begun, step_s)
        self._since = step, time.perf_counter()

    def _schedule(self, step: int, copy_s: float, step_s: float) -> None:
        """Decide when the next copy is due."""
        done = step - self._first
        if done < TRIED[-1]:
            self._next = self._first + next(each for each in TRIED if each > done)
            return
        if not self.every:
            spent = max(from_every_rank(copy_s / max(step_s, 1e-9)))
            self.every = max(1, math.ceil(spent / SHARE))
            if self._trainer.rank == 0 and self._plan is not None:
                log.debug("the state is copied to memory every %d steps", self.every)
        self._next = step + self.every

    def _copy(self, step: int) -> None:
        trainer = self._trainer
        parts, state = trainer.contents(self._loader, {})
        plain = to_bytes(state | self._plan_state())
        signature = tuple((name, part.value.dtype, tuple(part.chunks)) for name, part in parts.items())
        if self._plan is None or signature != self._signature:
            self._signature = signature
            self._make_plan(parts, len(plain))
        if not self._is_on or self._plan is None:
            return
        slot = self._host_slots[self._local_rank][self._slot]
        memory = slot.begin(self._plan.num_bytes, self._head)
        for entry in self._plan.entries[: self._plan.num_own]:
            if entry.piece.dtype == "bytes":
                write_sized(within(memory, entry), plain)
                continue
            part = parts[entry.piece.name]
            chunk = next(chunk for chunk in part.chunks if chunk.offsets == entry.piece.offsets)
            tensor_within(memory, entry).copy_(part.view(chunk))
        self._slot = 1 - self._slot
        if self._partners is None:
            slot.commit(step)
            return
        sent, received = self._plan.sent, self._plan.received
        outgoing = {sent.rank: memory[sent.begin : sent.end]} if sent is not None else {}
        incoming = {block.rank: memory[block.begin : block.end] for block in received}
        partners = self._partners

        def exchange() -> None:
            try:
                partners.exchange(outgoing, incoming)
                slot.commit(step)
            except BaseException as error:  # noqa: BLE001 - the next copy raises it
                self._error = error

        self._thread = threading.Thread(target=exchange, name="sends a copy of the state", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self.finish()
        if self._error is not None:
            if isinstance(self._error, LostRankError):
                raise self._error
            raise LostRankError(f"a copy of the state could not be sent: {self._error}", where=WHERE) from self._error

    def _make_plan(self, parts: Mapping[str, StoredPart], num_plain: int) -> None:
        """Agree with all ranks on the pieces that each rank keeps. If a host lacks the memory, there are no copies."""
        rank = self._trainer.rank
        pieces = [
            TensorPiece(name, str(part.value.dtype).removeprefix("torch."), chunk.offsets, chunk.sizes)
            for name, part in parts.items()
            for chunk in part.chunks
        ]
        pieces.append(TensorPiece(f"{_PLAIN}{rank}", "bytes", (0,), (num_plain + SLACK_BYTES,)))
        packed = from_every_rank(msgspec.json.encode(pieces))
        offers = [msgspec.json.decode(each, type=list[TensorPiece]) for each in packed]
        plans = plan_copies(offers, self._hosts)
        self._plan = plans[rank]
        generation = from_rank_0(lambda: secrets.token_hex(8))
        num_pieces = len({piece for offer in offers for piece in offer})
        self._head = msgspec.json.encode(Copy(generation, num_pieces, 0, self._plan.entries))
        needed = 2 * sum(
            plan.num_bytes for plan, host in zip(plans, self._hosts, strict=True) if host == self._hosts[rank]
        )
        short = (
            "" if needed <= MEMORY_SHARE * available_bytes() else f"copies of the state take {needed / 2**30:.2f} GiB"
        )
        if not short:
            try:
                for slot in self._host_slots[self._local_rank]:
                    if slot.read() is None:  # a copy of the attempt before stays until a new one is complete
                        slot.begin(self._plan.num_bytes, self._head)
            except RankError as error:
                short = error.problem
        if problem := next(filter(None, from_every_rank(short)), ""):
            self._is_on = False
            if rank == 0:
                log.warning(
                    "%s: too much for the memory that is free; after a loss the run goes on from the disk", problem
                )
        elif self.num_hosts > 1 and self._partners is None:
            self._partners = Partners()

    def _plan_state(self) -> dict[str, Any]:
        """The amendments of the plan, and a digest that shows whether another plan is the same."""
        if self._described is None or self._described[0] is not self._trainer.plan:
            plan = self._trainer.plan_as_data()
            self._described = self._trainer.plan, {"plan": _digest(plan), "amendments": plan.get("amendments", [])}
        return self._described[1]

    def finish(self) -> None:
        """Wait until the last copy has also arrived on the other host."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- loading -----------------------------------------------------------------------------------------------------

    def resume(self, saved: Callable[[], int]) -> bool:
        """Load the latest copy that is complete, unless the disk has a later checkpoint. Return whether a copy was
        loaded. ``saved``: returns the step of the checkpoint, -1 if there is none.

        Raises:
            CheckpointError: the copy does not fit the trainer, or could not be read.
        """
        if not self._is_on:
            return False
        newest = newest_complete(self._all_copies())
        if newest is None or newest[0] < from_rank_0(saved):
            return False
        step, places = newest
        used = {place.slot for each in places.values() for place in each}
        self._slot = 1 - min(used)  # the copy that is loaded stays until the next one is complete
        states = self._plain_states(places)
        state = states[0] | {
            "optimizer": optimizer_state.joined([each["optimizer"] for each in states])
            if states[0]["optimizer"] is not None
            else None,
            "codecs": codec_memory.joined(each["codecs"] for each in states),
        }
        saved_plan = {"amendments": state.pop("amendments")}
        if state.pop("plan") == _digest(self._trainer.plan_as_data()):
            saved_plan |= base_of(self._trainer.plan_as_data())
        trainer = self._trainer
        everywhere(WHERE, lambda: check_state(WHERE, trainer.parameters, trainer.optimizer, state, self._loader, {}))
        trainer.restore(
            state, lambda parts: self._fill(parts, places), saved_plan, where=WHERE, loader=self._loader, extra={}
        )
        self._opened.clear()
        if trainer.rank == 0:
            log.info("step %d is taken over from memory", step)
        return True

    def _all_copies(self) -> Iterator[Copy]:
        """The complete copies on all hosts. The first rank of each host reads the copies of its host."""
        rank, own = self._trainer.rank, list[Copy]()
        if self._hosts.index(self._hosts[rank]) == rank:
            for number, slots in enumerate(self._host_slots):
                for index, slot in enumerate(slots):
                    if (read := slot.read()) is not None:
                        copy = msgspec.json.decode(read[1], type=Copy)
                        place = {"step": read[0], "host": self._hosts[rank], "rank": number, "slot": index}
                        own.append(msgspec.structs.replace(copy, **place))
        for packed in from_every_rank(msgspec.json.encode(own)):
            yield from msgspec.json.decode(packed, type=list[Copy])

    def _plain_states(self, places: Mapping[TensorPiece, list[CopyPlace]]) -> list[dict[str, Any]]:
        """The plain states of all ranks that made the copy, in their order."""
        sent: dict[int, bytes] = {}
        for piece, each in places.items():
            if piece.dtype == "bytes" and self._sender(each) == self._trainer.rank:
                sent[int(piece.name.removeprefix(_PLAIN))] = read_sized(self._read(piece, each))
        packed = from_every_rank(msgspec.msgpack.encode(sent))
        states = [each for data in packed for each in msgspec.msgpack.decode(data, type=dict[int, bytes]).items()]
        return [from_bytes(data) for _, data in sorted(states)]

    def _fill(self, parts: Mapping[str, StoredPart], places: Mapping[TensorPiece, list[CopyPlace]]) -> None:
        """Fill the parts of all ranks from the copies. Pieces that are only on other hosts are sent."""
        rank, host = self._trainer.rank, self._hosts[self._trainer.rank]
        by_name: dict[str, list[TensorPiece]] = {}
        for piece in places:
            by_name.setdefault(piece.name, []).append(piece)

        def needed() -> list[TensorPiece]:
            return [piece for name, part in parts.items() for piece in overlapping(part, by_name.get(name, []), name)]

        wanted = everywhere(WHERE, needed)
        pieces = list(places)
        number = {piece: index for index, piece in enumerate(pieces)}
        away = {number[piece] for piece in wanted if all(place.host != host for place in places[piece])}
        requests = from_every_rank(sorted(away))
        for piece in wanted:
            if number[piece] not in away:
                fill(parts[piece.name], piece, self._read(piece, places[piece]))
        for index in sorted({index for each in requests for index in each}):
            piece = pieces[index]
            sender = self._sender(places[piece])
            receivers = [other for other, each in enumerate(requests) if index in each]
            if rank == sender:
                hand_over(self._read(piece, places[piece]), sender, receivers)
            elif rank in receivers:
                data = torch.empty(piece.num_bytes, dtype=torch.uint8)
                hand_over(data, sender, receivers)
                fill(parts[piece.name], piece, data)

    def _sender(self, places: list[CopyPlace]) -> int:
        """The rank that sends a piece to other hosts: the first rank of the first host that has the piece."""
        return self._hosts.index(min(place.host for place in places))

    def _read(self, piece: TensorPiece, places: list[CopyPlace]) -> Tensor:
        """The bytes of a piece that is on this host."""
        host = self._hosts[self._trainer.rank]
        place = next(place for place in places if place.host == host)
        key = place.rank, place.slot
        if key not in self._opened:
            read = self._host_slots[place.rank][place.slot].read()
            assert read is not None, "it was read before, and nobody writes"
            self._opened[key] = read[2]
        return self._opened[key][place.begin : place.begin + piece.num_bytes]


def _digest(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(base_of(plan), order="sorted")).hexdigest()
