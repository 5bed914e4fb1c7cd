"""Sends tensors of any size over a lane of shared memory. Sending never blocks: parts without room wait in a queue.

Queued parts are put into the lane as soon as it has room, and expected parts are taken as soon as they have come,
whenever the rank uses the stream or waits for anything (``progress.py``). So no deadlock occurs if each rank receives
in the order in which the other rank sends.
"""

from collections import deque
from functools import partial

from torch import Tensor

from meshwright.comm.transport.base import MESSAGE_BYTES, Arrival, UnderWay, Work
from meshwright.comm.transport.channel_record import ChannelRecord
from meshwright.comm.transport.progress import RankStreams
from meshwright.comm.transport.shared_memory import SharedMemory

SLOTS = 128
"""The number of slots of a stream's lane, each for one message: 64 MiB may be under way."""


class LaneChannel:
    """A channel over a lane of shared memory to a rank. ``rank`` is this rank. ``progress`` moves its messages while
    the rank waits for anything."""

    def __init__(self, lane: SharedMemory, progress: RankStreams, rank: int) -> None:
        self._lane, self._progress = lane, progress
        self._messages = ChannelRecord(progress, rank, lane.peer)
        lane.while_waiting = progress.move
        progress.add(self)
        self._queue: deque[Tensor] = deque()
        self._num_sent = 0  # messages that were put into the lane, or are in the queue
        self._num_put = 0
        self._expected: deque[tuple[Tensor, str]] = deque()  # the target of a message, and its name in errors
        self._num_done = 0

    def send(self, tensor: Tensor) -> Work:
        """Send a tensor: put its parts as far as the lane has room, and queue the rest."""
        event = self._messages.sent(tensor)
        for part in _parts(tensor):
            self._queue.append(part)
            self._num_sent += 1
        self._flush()
        return UnderWay(partial(self._depart, self._num_sent, event))

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        """Expect the messages that fill ``into``; waiting for the returned arrival takes them."""
        event = self._messages.expected(into, label)
        self._expected.extend((part, label) for part in _parts(into))
        number = self._num_done + len(self._expected)
        return Arrival(
            partial(self._complete, number, event), come=partial(self._has_come, number), check=self._check,
            awaited=self._messages.awaited(event),
        )  # fmt: skip

    @property
    def is_under_way(self) -> bool:
        """Whether parts wait for room, or are expected."""
        return bool(self._queue or self._expected)

    def move(self) -> bool:
        """Put parts that find room, and take at most one message, to be brief. Returns whether anything moved."""
        received = bool(self._expected) and self._lane.has_come()
        if received:
            self._take()
        return self._flush() or received

    def _depart(self, number: int, event: int) -> None:
        """Wait until ``number`` messages of the stream have been put."""
        self._flush()
        if self._num_put < number:
            with self._messages.waiting(event):
                while self._num_put < number:
                    self._lane.wait_for_room()
                    self._flush()
        self._messages.end(event)

    def _flush(self) -> bool:
        """Put queued parts while the lane has room. Returns whether any was put."""
        before = self._num_put
        while self._queue and self._lane.put_at_once(self._queue[0], 0):
            self._queue.popleft()
            self._num_put += 1
        return self._num_put > before

    def _complete(self, number: int, event: int) -> None:
        """Take the peer's messages in order, and wait for each, until ``number`` messages of the stream have been
        taken."""
        self._flush()
        if self._num_done < number:
            with self._messages.waiting(event):
                while self._num_done < number:
                    if self._lane.has_come():
                        self._take()
                    else:
                        self._lane.wait_for_message(self._label())
        self._messages.end(event)

    def _has_come(self, number: int) -> bool:
        """Take all messages of the peer that have arrived. Return whether ``number`` messages of the stream have been
        taken."""
        self._progress.move()
        while self._num_done < number and self._lane.has_come():
            self._take()
        return self._num_done >= number

    def _check(self, waited_s: float) -> None:
        self._lane.check_message(self._label(), waited_s)

    def _take(self) -> None:
        """Take the next expected message, which has arrived."""
        part, _ = self._expected[0]
        part.copy_(self._lane.take(part.numel(), part.dtype, 0, self._label()))
        self._lane.release()
        self._expected.popleft()
        self._num_done += 1

    def _label(self) -> str:
        return self._expected[0][1] or f"message {self._num_done + 1}"


def _parts(tensor: Tensor) -> list[Tensor]:
    flat = tensor.view(-1)
    step = MESSAGE_BYTES // tensor.element_size()
    return [flat[begin : begin + step] for begin in range(0, flat.numel(), step)]
