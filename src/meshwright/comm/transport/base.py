"""What carries bytes between two ranks."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

Finish = Callable[[Tensor, int], object]
"""Does what is left to do with a part of what the peer sent: the part, flat, and where in the whole it begins."""


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any: ...


class Exchange(Protocol):
    """Two ranks swap equally large tensors: one round, each byte once each way."""

    def start(self, mine: Tensor, finish: Finish) -> Work:
        """Send ``mine`` (contiguous) without waiting; waiting calls ``finish`` on all that the peer has sent, in parts.

        ``mine`` may be overwritten once ``finish`` is called. Both ranks start the same exchanges in the same order.
        """
        ...


class Channel(Protocol):
    """Messages to and from one other rank, in the order in which they were sent."""

    def send(self, tensor: Tensor) -> Work:
        """Send a contiguous tensor, without waiting for the peer; after ``wait`` it may be overwritten."""
        ...

    def receive(self, into: Tensor, label: str = "") -> Work:
        """Receive into a contiguous tensor, which ``wait`` waits for; ``label`` names it in errors."""
        ...


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for each other."""
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]
    return timeout
