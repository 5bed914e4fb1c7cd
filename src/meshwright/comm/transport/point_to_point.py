"""A channel and a lane between any two ranks, by torch.distributed's send and receive."""

import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.arrival import Watched
from meshwright.comm.transport.base import (
    MESSAGE_BYTES,
    Arrival,
    Lane,
    Trouble,
    UnderWay,
    Work,
    check_message,
    first_line,
    late,
)
from meshwright.comm.transport.channel_record import ChannelRecord
from meshwright.comm.transport.progress import RankStreams

T = TypeVar("T")

_HEADER = struct.Struct("=QQ")
"""The header of each message: the number of bytes of the message, and its tag."""
_TAG = 1
"""The torch.distributed tag of a lane's messages; all other messages of the group have other tags."""
_CLOSE_TAG = 2
"""The tag of the receives in ``close``."""


class PointToPoint:
    """A channel to the rank ``peer`` of a group. While the channel waits, it keeps the streams of ``progress`` moving.
    ``culprit`` finds the rank that caused a lost connection, and why."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        progress: RankStreams,
        culprit: Callable[[], Trouble | None] = lambda: None,
    ) -> None:
        self._group, self._peer, self._progress, self._culprit = group, peer, progress, culprit
        self._name = dist.get_global_rank(group, peer)
        self._messages = ChannelRecord(progress, dist.get_global_rank(group, group.rank()), self._name)

    def send(self, tensor: Tensor) -> Work:
        """Start to send a tensor."""
        event = self._messages.sent(tensor)
        work = self._group.send([tensor], self._peer, 0)
        return UnderWay(partial(self.wait, work, "it takes nothing", "a message to it", event), tensor)

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        """Start to receive into a tensor."""
        event = self._messages.expected(into, label)
        work = Watched(self._group.recv([into], self._peer, 0).wait)
        wait = partial(self.wait, work, "it has sent nothing", label or "a message", event)
        return Arrival(
            wait, into, come=work.has_come, check=lambda waited_s: None, awaited=self._messages.awaited(event)
        )

    def wait(self, work: "Work | Watched", otherwise: str, what: str, event: int = 0) -> None:
        """Wait for ``work``. Errors say that ``what`` is due; if the peer is only late, they also say ``otherwise``.
        ``event`` is the record of the message.

        Raises:
            LostRankError: the peer is late or gone, or has given up because another rank is gone.
        """
        with self._messages.waiting(event):
            try:
                self._progress.during(work.wait)
            except RuntimeError as error:
                trouble = self._culprit() if self._progress.verdict is None else None
                if trouble is not None:
                    raise trouble.error(f"{what} is due") from error
                raise late(self._name, f"{otherwise}, and {what} is due: {first_line(error)}") from error
        self._messages.end(event)


class TorchLane(Lane):
    """A lane to the rank ``peer`` of a group, by torch.distributed's send and receive, with the group's timeout. While
    the lane waits, it keeps the streams of ``progress`` moving.

    Every receive has room for the largest message, so a message of an unexpected size still arrives and can be
    reported. A rank does not report the collectives that it begins and finishes: that would take as long as a
    collective. A rank that gives up leaves a note in the group's store and closes its connections, so that other ranks
    stop waiting.

    ``group`` may also be a bare gloo backend. ``name`` is then the peer's rank in the world, and ``store`` is the
    store for notes.
    """

    AHEAD = 16
    """Upper limit on sent messages under way; each is a copy in memory of its own."""
    expects = True

    def __init__(
        self,
        group: Any,
        peer: int,
        progress: RankStreams,
        name: int | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self._group, self._peer, self._progress = group, peer, progress
        self._name = dist.get_global_rank(group, peer) if name is None else name
        self._store = group.get_group_store() if store is None else store
        self._leaving: deque[tuple[_Room, Work, int]] = deque()
        self._coming: deque[tuple[_Room, Work]] = deque()
        self._free: list[_Room] = []
        self._num_taken = 0

    def put(self, part: Tensor, tag: int) -> None:
        """Send a copy of the tensor."""
        if len(self._leaving) >= self.AHEAD:
            self._depart()
        room, num_bytes = self._room(), part.nbytes
        _HEADER.pack_into(room.memory, 0, num_bytes, tag)
        if num_bytes:
            room.message(part.numel(), part.dtype).copy_(part)
        out = [room.whole[: _HEADER.size + num_bytes]]
        work = self._tried(lambda: self._group.send(out, self._peer, _TAG), "it takes nothing")
        self._leaving.append((room, work, tag))

    def put_at_once(self, part: Tensor, tag: int) -> bool:
        """Send a copy unless ``AHEAD`` messages are under way."""
        if len(self._leaving) >= self.AHEAD:
            return False
        self.put(part, tag)
        return True

    def expect(self, num: int, like: Tensor) -> None:
        """Start to receive the next message: a message that arrives before its receive has started takes a slower
        path."""
        room = self._room()
        work = self._tried(lambda: self._group.recv([room.whole], self._peer, _TAG), "it sends nothing")
        self._coming.append((room, work))

    def take(self, num: int, dtype: torch.dtype, tag: int) -> Tensor:
        """Wait for the oldest receive that ``expect`` started; return a view of its memory."""
        room, work = self._coming[0]
        self._tried(lambda: self._progress.during(work.wait), "it has sent nothing")
        received, wanted = _HEADER.unpack_from(room.memory), (num * dtype.itemsize, tag)
        check_message(self._name, received, wanted, f"message {self._num_taken + 1}")
        return room.message(num, dtype)

    def release(self) -> None:
        """Reuse the memory of the message for a later message."""
        self._num_taken += 1
        self._free.append(self._coming.popleft()[0])

    def settle(self, tag: int) -> None:
        """Wait until all messages up to those with this tag have left: a message does not arrive if its sender ends
        first."""
        last = max((at for at, message in enumerate(self._leaving, 1) if message[2] == tag), default=0)
        for _ in range(last):
            self._depart()

    def _depart(self) -> None:
        room, work, _ = self._leaving.popleft()
        self._tried(lambda: self._progress.during(work.wait), "it takes nothing")
        self._free.append(room)

    def _room(self) -> "_Room":
        return self._free.pop() if self._free else _Room()

    # --- what ranks report of themselves -----------------------------------------------------------------------------

    def give_up(self, number: int, words: bytes, because_of: str) -> None:
        """Leave a note in the group's store, and close the connection to the peer."""
        with suppress(RuntimeError):  # the rank that has ended may have kept the store
            self._store.set(self._note(self._group.rank()), f"{because_of}\n#{number} {words.decode(errors='replace')}")
        close(self._group, self._peer)

    def trouble(self, number: int) -> Trouble | None:
        """The trouble if the peer has given up, else None. Only sending or receiving shows that the peer has ended."""
        note = self._read()
        return Trouble(note[0], f"rank {self._name} has given up because of it") if note else None

    def last_report(self) -> str:
        """The collective that the peer was in, if the peer has given up; else empty."""
        note = self._read()
        return f"rank {self._name} was in {note[1]}" if note else ""

    def _note(self, rank: int) -> str:
        return f"meshwright/given up/{rank}"

    def _read(self) -> tuple[str, str] | None:
        store, key = self._store, self._note(self._peer)
        with suppress(RuntimeError):
            if store.check([key]):
                because_of, _, words = store.get(key).decode().partition("\n")
                return because_of, words
        return None

    def _tried(self, call: Callable[[], T], otherwise: str) -> T:
        try:
            return call()
        except RuntimeError as error:
            if self._progress.verdict is not None:
                raise self._progress.verdict from error
            if (trouble := self.trouble(0)) is not None:
                raise trouble.error() from error
            raise late(self._name, f"{otherwise}: {first_line(error)}") from error


class _Room:
    """The memory of a message and its header while they are under way."""

    def __init__(self) -> None:
        self.memory = bytearray(_HEADER.size + MESSAGE_BYTES)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
            self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)

    def message(self, num: int, dtype: torch.dtype) -> Tensor:
        """The message as a tensor of ``num`` elements."""
        return self.whole[_HEADER.size : _HEADER.size + num * dtype.itemsize].view(dtype)


def close(group: Any, *peers: int) -> None:
    """Close this rank's gloo connections to ``peers`` of a group (default: all), so that peers stop waiting for it.
    ``group`` is a process group, or a bare gloo backend."""
    is_gloo = not isinstance(group, dist.ProcessGroup) or "gloo" in dist.get_backend(group)
    for peer in (peers or range(group.size())) if is_gloo else ():
        if peer != group.rank():
            with suppress(RuntimeError):  # a receive that times out closes the connection
                group.recv([torch.empty(1)], peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))
