"""Letters from one mailbox to one other participant, and the letters that are still under way."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.sockets import TOKEN_REMEDY, WRONG_TOKEN
from meshwright.comm.transport.shared_blocks import LEAST_BYTES, SharedBlock, SharedBlocks, offsets
from meshwright.comm.transport.zeromq import NAMES, REFUSED, Head, Hello, decode_reply, encode, post, raw, zmq
from meshwright.errors import LostRankError


class _UnderWay(NamedTuple):
    number: int
    num_bytes: int
    block: SharedBlock | None


class Outgoing:
    """Sends letters to the participant ``name`` that joined in epoch ``joined``, over one connection.

    Attributes:
        num_bytes: bytes of the tensors under way.
        opens: whether the receiver has reported that it can open this process's memory.
    """

    def __init__(self, name: str, joined: int, socket: Any, hello: Hello, blocks: SharedBlocks) -> None:
        self.name, self.joined, self.socket = name, joined, socket
        self.num_bytes, self.opens = 0, False
        self._blocks, self._num_sent = blocks, 0
        self._under_way: deque[_UnderWay] = deque()
        post(socket, [encode(hello)])

    @property
    def num_letters(self) -> int:
        """The letters under way."""
        return len(self._under_way)

    def send(self, kind: str, numbers: tuple[int, ...], tensors: Sequence[Tensor], text: str, num_bytes: int) -> None:
        """Send a letter. Its tensors have ``num_bytes`` in total, and may be overwritten afterwards.

        Raises:
            RankError: this machine has no memory left to share.
        """
        block = self._fill(tensors) if self.opens and num_bytes >= LEAST_BYTES else None
        self._num_sent += 1
        self._under_way.append(_UnderWay(self._num_sent, num_bytes, block))
        self.num_bytes += num_bytes
        dtypes, sizes = tuple(NAMES[tensor.dtype] for tensor in tensors), tuple(tensor.numel() for tensor in tensors)
        handle = None if block is None else block.handle
        head = encode(Head(self._num_sent, kind, numbers, text, dtypes, sizes, handle))
        post(self.socket, [head] if block is not None else [head, *map(raw, tensors)])

    def _fill(self, tensors: Sequence[Tensor]) -> SharedBlock:
        begins, num_bytes = offsets([tensor.nbytes for tensor in tensors])
        block = self._blocks.lend(num_bytes)
        with torch.no_grad():
            for tensor, begin in zip(tensors, begins, strict=True):
                block.memory[begin : begin + tensor.nbytes].view(tensor.dtype).copy_(tensor)
        return block

    def take_replies(self) -> bool:
        """Learn which letters were taken, and take back their blocks. Return whether any reply has come. Raise a
        LostRankError if the receiver refuses this participant's token."""
        come = False
        while True:
            try:
                reply = decode_reply(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return come
            if reply.taken == REFUSED:
                raise LostRankError(WRONG_TOKEN, where=self.name, remedy=TOKEN_REMEDY)
            come, self.opens = True, reply.opens
            while self._under_way and self._under_way[0].number <= reply.taken:
                _, num_bytes, block = self._under_way.popleft()
                self.num_bytes -= num_bytes
                if block is not None:
                    self._blocks.take_back(block)

    def close(self) -> None:
        """Close the connection. Blocks under way are not reused, because the receiver may still read them."""
        self.socket.disable_monitor()
        self.socket.close()
