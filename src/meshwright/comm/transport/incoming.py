"""Letters from other participants to one mailbox."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from meshwright.comm.mailbox import Letter
from meshwright.comm.sockets import same_token
from meshwright.comm.transport.shared_blocks import OpenedBlocks, offsets
from meshwright.comm.transport.zeromq import (
    DTYPES,
    REFUSED,
    Head,
    Hello,
    ReceiverReply,
    decode_message,
    encode,
    listener,
    tensor_of,
    zmq,
)  # fmt: skip

log = logging.getLogger(__name__)


class _Source:
    """A participant that sends over one connection. ``cut``: a letter could not be read, so all later letters are
    ignored."""

    def __init__(self, sender: str, joined: int, opened: OpenedBlocks | None) -> None:
        self.sender, self.joined, self.opened = sender, joined, opened
        self.num_taken, self.cut = 0, False


class Incoming:
    """Takes letters from all connections.

    Attributes:
        socket: it is readable when ``take`` may have something to do.
        near, far: its addresses for participants inside and outside of this box.
        letters: the received letters in the order of arrival, each with the epoch in which its sender joined.
    """

    def __init__(self, context: Any, host: str, secret: str, token: str) -> None:
        self.socket, self.near, self.far = listener(context, host, secret)
        self.letters: deque[tuple[int, Letter]] = deque()
        self._secret, self._token = secret, token
        self._sources: dict[bytes, _Source] = {}

    def take(self) -> bool:
        """Take a message, if there is one: add its letter to ``letters``, and reply to its sender."""
        try:
            identity, head, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            message = decode_message(head.buffer)
        except msgspec.MsgspecError:
            return True  # the sender is unknown
        if isinstance(message, Hello):
            self._take_hello(identity.bytes, message)
        elif (source := self._sources.get(identity.bytes)) is not None and not source.cut:
            tensors = _tensors(source.opened, message, frames)
            if tensors is None or message.number != source.num_taken + 1:
                source.cut = True
                return True
            source.num_taken += 1
            letter = Letter(source.sender, message.kind, message.numbers, tensors, message.text)
            self.letters.append((source.joined, letter))
            self._reply(identity.bytes, source)
        return True

    def _take_hello(self, identity: bytes, hello: Hello) -> None:
        if not same_token(hello.token, self._token):
            log.warning("letters of %r are refused: they do not have the token of this job", hello.sender)
            self.socket.send_multipart([identity, encode(ReceiverReply(REFUSED, False))])
            return
        if not same_token(hello.secret, self._secret):
            return
        for key, known in list(self._sources.items()):
            if known.sender == hello.sender:
                if known.joined >= hello.joined:
                    return  # a late message from an earlier life
                del self._sources[key]  # later letters of the earlier life are then lost
        opened = None
        if hello.probe is not None:
            opened = OpenedBlocks(hello.process)
            if opened.find(hello.probe) is None:
                log.info("the memory of %s cannot be opened: its letters carry their tensors", hello.sender)
                opened = None
        self._sources[identity] = _Source(hello.sender, hello.joined, opened)
        self._reply(identity, self._sources[identity])

    def _reply(self, identity: bytes, source: _Source) -> None:
        self.socket.send_multipart([identity, encode(ReceiverReply(source.num_taken, source.opened is not None))])


def _tensors(opened: OpenedBlocks | None, head: Head, frames: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Copies of a letter's tensors; None if they cannot be read."""
    if len(head.dtypes) != len(head.sizes) or not DTYPES.keys() >= set(head.dtypes) or min(head.sizes, default=0) < 0:
        return None
    dtypes = [DTYPES[name] for name in head.dtypes]
    if head.block is not None:
        sizes = [size * dtype.itemsize for size, dtype in zip(head.sizes, dtypes, strict=True)]
        begins, num_bytes = offsets(sizes)
        memory = None if opened is None else opened.find(head.block)
        if memory is None or num_bytes > len(memory):
            return None
        parts: list[Any] = [memory[begin : begin + size].numpy() for begin, size in zip(begins, sizes, strict=True)]
    else:
        parts = [frame.buffer for frame in frames]
    if len(parts) != len(dtypes):
        return None
    views = [tensor_of(part, dtype, size) for part, dtype, size in zip(parts, dtypes, head.sizes, strict=True)]
    tensors = tuple(tensor for tensor in views if tensor is not None)
    return tensors if len(tensors) == len(views) else None
