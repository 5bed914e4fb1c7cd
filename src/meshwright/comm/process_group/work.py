"""Operations that a program has started in a group, as torch.distributed's ``Work``."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import LostRankError, MeshwrightError, RankError
from meshwright.torch_private import is_profiling, record_begin, record_end

UNTIL_DONE = timedelta(0)
"""The timeout of a wait without a limit of its own."""

LATE = "look at what that rank does; the timeout of the group or of the call sets how long ranks wait"


class GroupError(RankError, RuntimeError):
    """An operation that failed in a group of the backend. It is a RuntimeError, too, as torch.distributed's own are."""


class LostInGroupError(LostRankError, RuntimeError):
    """A rank of a group of the backend that ended or no longer answers, as another rank noticed."""


def as_runtime_error(error: BaseException, what: str) -> BaseException:
    """The same error as a kind that programs for torch.distributed expect."""
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    if isinstance(error, MeshwrightError):
        kind = LostInGroupError if isinstance(error, LostRankError) else GroupError
        remedy = LATE if "MESHWRIGHT_TIMEOUT_S" in error.remedy else error.remedy
        return kind(error.problem, where=error.where, remedy=remedy)
    return GroupError(f"{type(error).__name__}: {error}", where=what)


class GroupWork(dist.Work):
    """An operation that has been started. ``value`` is the value of its future: usually its tensors.

    The thread that has run the operation calls ``mark``, and then, without holding locks, ``announce``: this completes
    the future, if a program has asked for it, and runs the functions that wait for the future.
    """

    def __init__(self, what: str, value: Any = None) -> None:
        super().__init__()
        self.what, self.value = what, value
        self.done, self.error = False, None  # type: bool, BaseException | None
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._future: Any = None
        self._root: Any = None
        self._announced = False
        self._event_handle: Any = None

    def profile(self, name: str, tensors: Sequence[Tensor]) -> None:
        """If a profiler runs, show it an event of this name, which ends when the operation is complete."""
        if is_profiling():
            self._event_handle = record_begin(name, *tensors)

    # --- by the thread that runs the operation -----------------------------------------------------------------------

    def mark(self, error: BaseException | None = None) -> None:
        """Mark the operation as complete, or as failed with ``error``."""
        self.error = None if error is None else as_runtime_error(error, self.what)
        self.done = True

    def announce(self) -> None:
        """Wake whoever waits for the operation."""
        with self._lock:
            self._announced = True
            event, root = self._event, self._root
        if self._event_handle is not None:  # an event that ends where it began would not count as asynchronous
            end = threading.Thread(target=record_end, args=(self._event_handle,))
            end.start()
            end.join()
        if event is not None:
            event.set()
        if root is not None:
            root.set_result(None)

    # --- what torch.distributed calls --------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = UNTIL_DONE) -> bool:
        """Wait until the operation is complete.

        Raises:
            GroupError: the operation failed; LostInGroupError if the reason is another rank, or if the operation is not
                complete after ``timeout``. It may still complete later.
        """
        if not self.done:
            seconds = timeout.total_seconds()
            if seconds <= 0:
                self._run()
            else:
                self._hand_over()
                if not self._event_of().wait(seconds):
                    raise LostInGroupError(
                        f"it is not complete after {seconds:g} s", where=self.what, remedy="wait longer"
                    )
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Wait until the operation is complete."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until the operation is complete: a CPU has no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is complete, or has failed."""
        return self.done

    def is_success(self) -> bool:
        """Whether the operation is complete, and has not failed."""
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        """The error of an operation that has failed."""
        return self.error

    def result(self) -> Any:
        """The tensors of the operation."""
        return self.value

    def get_future(self) -> Any:
        """A future that completes with the operation. Its value is a list of the operation's tensors."""
        root: Any = torch.futures.Future()
        # An error that a callback raises is an error also for C++, which reads an error set in Python as a value.
        future = root.then(lambda _: self._value())
        with self._lock:
            if self._future is not None:
                return self._future
            self._root, self._future, announced = root, future, self._announced
        if announced:
            root.set_result(None)
        else:
            self._hand_over()
        return future

    def get_future_result(self) -> Any:
        """As ``get_future``."""
        return self.get_future()

    def _value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def _event_of(self) -> threading.Event:
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self._announced:
                    self._event.set()
            return self._event

    # --- what kinds of operations do ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Return when the operation is complete; run it in this thread if possible."""
        self._hand_over()
        self._event_of().wait()

    def _hand_over(self) -> None:
        """See to it that the operation completes without a wait."""
