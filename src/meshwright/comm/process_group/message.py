"""A message between two ranks of a group, and what a rank keeps of each peer. ``messages.py`` moves the messages."""

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.comm.process_group.tensors import flat
from meshwright.comm.process_group.work import GroupError, GroupWork, LostInGroupError
from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.comm.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from meshwright.comm.process_group.messages import Messages
TAG_BITS = 32
"""The bits of a tag that travel with each part."""


class MessageWork(GroupWork):
    """A message that is sent or received. ``peer`` is None while a receive may come from any rank."""

    def __init__(
        self, what: str, tensor: Tensor, peer: int | None, tag: int, deadline: float, mail: "Messages"
    ) -> None:
        super().__init__(what, [tensor])
        self.tensor, self.peer, self.tag, self.deadline = tensor, peer, tag, deadline
        self.memory = flat(tensor).view(torch.uint8)
        self.offset, self.begun = 0, False
        self._mail = mail

    def source_rank(self) -> int:
        """The rank from which the message has come."""
        if self.peer is None:
            raise GroupError("no message has come yet", where=self.what, remedy="wait for it first")
        return self.peer

    _source_rank = source_rank

    def is_marked(self) -> bool:
        """``done``, read again: another thread may have changed it, which type checkers do not see."""
        return self.done

    def is_completed(self) -> bool:
        """Whether the message is complete, or has failed."""
        if not self.done:
            self._mail.move()
        return self.done

    def _run(self) -> None:
        self._mail.wait_for(self)

    def _hand_over(self) -> None:
        self._mail.hand_over()


class PeerLane:
    """The lane to another rank, and what is under way there. ``taken`` is the message whose parts are being taken."""

    def __init__(self) -> None:
        self.lane: SharedMemory | None = None
        self.connecting = self.has_waiter = False
        self.error: BaseException | None = None
        self.outgoing: deque[MessageWork] = deque()
        self.taken: MessageWork | None = None
        self.left = 0
        self.kept: list[tuple[int, Tensor]] = []  # messages that no receive wanted, with their tags


def closed(why: str, name: str) -> GroupError:
    """The error of messages of the group ``name`` that are left when it takes no more."""
    return GroupError(f"{why} before all its messages were complete", where=name, remedy="wait for messages first")


def refuse(why: str, name: str) -> None:
    """Raise the error ``closed``.

    Raises:
        GroupError: always.
    """
    raise closed(why, name)


def late(message: MessageWork) -> LostInGroupError:
    """The error of a message that is not complete in time."""
    return LostInGroupError("it is not complete in time", where=message.what)


def word_of(tag: int, num_bytes: int) -> int:
    """The tag and the number of parts of a message, as the tag of its parts."""
    return (tag & (2**TAG_BITS - 1)) << TAG_BITS | max(1, -(-num_bytes // MESSAGE_BYTES))
