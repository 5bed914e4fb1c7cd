"""Records the messages between two ranks in this rank's flight recorder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import LostRankError


class ChannelRecord:
    """The messages from ``rank`` to ``peer`` and back. Both ranks count them, so their records can be compared.

    Methods return or take the number of an event; it is 0 if nothing is recorded.
    """

    def __init__(self, streams: RankStreams, rank: int, peer: int) -> None:
        self._streams, self._rank, self._peer = streams, rank, peer
        self._num_sent = self._num_expected = 0

    def sent(self, tensor: Tensor) -> int:
        """Record that a message is sent."""
        self._num_sent += 1
        return self._begin(self._rank, self._peer, self._num_sent, tensor, "")

    def expected(self, into: Tensor, label: str) -> int:
        """Record that a message is expected."""
        self._num_expected += 1
        return self._begin(self._peer, self._rank, self._num_expected, into, label)

    def wait(self, event: int) -> None:
        """Record that this rank waits for a message from now on."""
        if (recorder := self._streams.recorder) is not None and event:
            recorder.wait(event)

    def go_on(self, event: int) -> None:
        """Record that this rank goes on without the message."""
        if (recorder := self._streams.recorder) is not None and event:
            recorder.go_on(event)

    def end(self, event: int) -> None:
        """Record that a message is complete."""
        if (recorder := self._streams.recorder) is not None and event:
            recorder.end(event)

    def awaited(self, event: int) -> Callable[[bool], None]:
        """A function that records whether this rank waits for a message: True, or False if it goes on without it."""
        return lambda waits: self.wait(event) if waits else self.go_on(event)

    @contextmanager
    def waiting(self, event: int) -> Iterator[None]:
        """Record that this rank waits for a message within this context.

        Raises:
            RankError: the ranks wait in vain. If the message is only late, the error reports what all ranks do.
        """
        self.wait(event)
        try:
            yield
        except Exception as error:
            explained = self._streams.explained(error) if isinstance(error, LostRankError) else error
            if (recorder := self._streams.recorder) is not None and event:
                recorder.fail(event)
            if explained is error:
                raise
            raise explained from error

    def _begin(self, sender: int, receiver: int, number: int, tensor: Tensor, label: str) -> int:
        recorder = self._streams.recorder
        if recorder is None:
            return 0
        num_bytes, dtype = tensor.nbytes, str(tensor.dtype).removeprefix("torch.")
        text = f"message of {tensor.numel()} x {dtype} from rank {sender} to rank {receiver}"
        text += f" ({label})" * bool(label)
        group = recorder.group(f"{sender}>{receiver}", (sender, receiver))
        return recorder.begin(group, number, text.encode(), num_bytes, 1 + num_bytes % (2**32 - 1))
