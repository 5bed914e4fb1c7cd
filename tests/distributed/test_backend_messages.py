"""Messages of the backend "meshwright" between two ends in one process: what threads see, and what failures leave."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.process_group.messages import Messages
from meshwright.comm.process_group.work import GroupError


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
