"""Messages of the backend "meshwright" between two ends in one process: what threads see, and what failures leave."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.process_group.messages import Messages
from meshwright.comm.process_group.work import GroupError, LostInGroupError
from meshwright.comm.transport.base import MESSAGE_BYTES

IN_TIME = r"not complete in time|has sent nothing for 0\.\d+ s"


def ends(timeout_s: float = 30.0) -> list[Messages]:
    """Both ends of a group of two ranks."""
    store = dist.HashStore()
    links: list[Any] = [
        SimpleNamespace(store=store, rank=rank, ranks=(0, 1), size=2, timeout_s=timeout_s, gloo=None) for rank in (0, 1)
    ]
    return [Messages(each, lambda what: None, "group test", "test") for each in links]


def test_a_receive_is_complete_when_its_tensor_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends()
    written, copy = [], Tensor.copy_
    strided = torch.zeros(3, 4).t()
    begun: Any = receiver.receive(strided, 0, 1)

    def seen(into: Tensor, *args: Any) -> Tensor:
        if into.shape == strided.shape:
            written.append(begun.done)
        return copy(into, *args)

    monkeypatch.setattr(Tensor, "copy_", seen)
    sender.send(torch.arange(12.0).view(4, 3), 1, 1).wait()
    begun.wait()
    assert written == [False]
    assert torch.equal(strided, torch.arange(12.0).view(4, 3))


def test_a_refused_receive_leaves_nothing_behind() -> None:
    messages, _ = ends()
    with pytest.raises(GroupError, match="rank 5 of 2 is this rank or no rank"):
        messages.receive(torch.empty(1), 5, 0)
    assert not messages._posted


@pytest.mark.parametrize("limit_s", [0, 20])  # the thread that waits notices the timeout, or the background thread
def test_a_message_cut_off_halfway_is_not_continued_with_the_next(limit_s: float) -> None:
    sender, receiver = ends(0.6)
    receiver._connect(0)
    cut = sender.send(torch.ones(6, MESSAGE_BYTES, dtype=torch.uint8), 1, 1)  # a lane holds four such rows
    with pytest.raises(LostInGroupError, match=IN_TIME):
        cut.wait(timedelta(seconds=limit_s))
    begun = receiver.receive(torch.empty(6, MESSAGE_BYTES, dtype=torch.uint8), 0, 1)
    with pytest.raises(LostInGroupError):
        sender.send(torch.zeros(2, MESSAGE_BYTES, dtype=torch.uint8), 1, 2).wait()
    with pytest.raises(LostInGroupError, match=IN_TIME):
        begun.wait(timedelta(seconds=limit_s))
    with pytest.raises(LostInGroupError):
        receiver.receive(torch.empty(1), 0, 2).wait()


def test_a_receive_that_is_late_leaves_the_next_as_they_are() -> None:
    sender, receiver = ends(0.6)
    receiver._connect(0)
    sender._connect(1)
    with pytest.raises(LostInGroupError, match="not complete in time"):
        receiver.receive(torch.empty(1), 0, 1).wait(timedelta(seconds=20))
    into = torch.zeros(1)
    begun = receiver.receive(into, 0, 2)
    sender.send(torch.ones(1), 1, 2).wait()
    begun.wait()
    assert into.item() == 1


def test_a_failure_of_the_background_thread_ends_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, _ = ends()
    monkeypatch.setattr(messages._links, "store", SimpleNamespace(check=fail))
    work = messages.receive(torch.empty(1), None, 1)
    with pytest.raises(GroupError, match="no store"):
        work.wait(timedelta(seconds=20))
    assert messages._thread is not None
    assert messages._thread.is_alive()


def test_closing_ends_messages_and_the_threads_that_wait_for_them() -> None:
    sender, receiver = ends()
    before = set(threading.enumerate())
    receiver._connect(0)
    stuck = sender.send(torch.ones(6, MESSAGE_BYTES, dtype=torch.uint8), 1, 1)  # a lane holds four such rows
    from_any = sender.receive(torch.empty(1), None, 1)
    done = sender.receive(torch.empty(1), 1, 2)
    receiver.send(torch.ones(1), 0, 2).wait()
    future, errors = from_any.get_future(), []  # type: Any, list[BaseException]

    def wait() -> None:
        with pytest.raises(GroupError) as caught:
            stuck.wait()
        errors.append(caught.value)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    begun = time.monotonic()
    sender.close("the group was aborted")
    assert time.monotonic() - begun < 5
    waiter.join(20)
    assert "the group was aborted" in str(errors[0])
    with pytest.raises(RuntimeError, match="the group was aborted"):
        future.wait()
    assert done.wait()  # what had come is taken
    receiver.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def fail(*_: Any) -> Any:
    raise ValueError("no store")
