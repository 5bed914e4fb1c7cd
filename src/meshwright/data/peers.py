"""Samples from other ranks: each rank answers requests for the samples that it owns, over TCP.

    hello:   the token (``comm/sockets.py``)
    request: a length, then MessagePack of a ``Request``
    answer:  a length, the class that its owner got it from, and the sample's bytes; or -1 - length, 0, and an error;
             or 0 and ``NOT_HERE``: the rank that asks reads the sample itself

A process group cannot carry this: a request comes when a sample is needed, and its owner is in the middle of a step.
"""

import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from meshwright.comm.sockets import admit, introduce, receive_exactly
from meshwright.data.stores import Raw
from meshwright.errors import DataError

log = logging.getLogger("meshwright")

WAIT_S = 60.0
"""Seconds for which a rank waits for the answer of another."""
_HEAD = struct.Struct("<q")
_ANSWER = struct.Struct("<qB")
_MOST_REQUEST = 4096
NOT_HERE = 255
"""In place of a class: the rank cannot give samples yet."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank answers, and the token with which connections to it begin."""

    host: str
    port: int
    token: str


class Begin(NamedTuple):
    """What a placement depends on and a saved position or ``resize`` may change: its first epoch, and the batch size.
    Equal on all ranks; each request tells it, so that a rank that has not begun makes the placement of the others."""

    epoch: int
    batch_size: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a sample by its number."""

    sample: int
    begin: Begin


class SampleServer:
    """Answers requests of other ranks, in a thread for each connection.

    Args:
        host: the address of this machine for the other ranks.
        get: returns a sample's bytes and their class; or None: the other rank shall read it; or raises a DataError.
        most: upper limit on the samples that are read and sent at once.
        token: the job's token; empty: a random one of this server.
    """

    def __init__(
        self, host: str, get: Callable[[int, Begin], tuple[Raw, int] | None], most: int, token: str = ""
    ) -> None:
        self._get, self._turns = get, threading.BoundedSemaphore(most)
        self._socket = socket.create_server((host, 0), backlog=64)
        self.address = Address(host, self._socket.getsockname()[1], token or secrets.token_hex(16))
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="sample server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and stop answering."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            with self._lock:
                if self._closed:
                    connection.close()
                    break
                self._connections.add(connection)
            thread = threading.Thread(target=self._answer, args=(connection,), name="sample server", daemon=True)
            thread.start()
            threads = [each for each in threads if each.is_alive()] + [thread]
        for thread in threads:
            thread.join(WAIT_S)

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not admit(connection, self.address.token):
                return
            while True:
                request = msgspec.msgpack.decode(_receive_request(connection), type=Request)
                with self._turns:
                    self._send(connection, request)
        except (OSError, EOFError, msgspec.MsgspecError):
            return  # the other rank has left, or is not one of ours
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _send(self, connection: socket.socket, request: Request) -> None:
        try:
            raw, kind = self._get(request.sample, request.begin) or (bytearray(), NOT_HERE)
            sign = len(raw)
        except (DataError, IndexError) as error:
            raw, kind = bytearray(msgspec.msgpack.encode(_texts(error))), 0
            sign = -1 - len(raw)
        connection.sendall(_ANSWER.pack(sign, kind))
        connection.sendall(raw)


class SamplePeer:
    """Another rank, of which samples are requested. Each thread that requests has a connection of its own.

    ``gone`` is set when the rank does not answer: its samples then come from the file system, and the log says so.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self._rank, self._address = rank, address
        self._idle: list[socket.socket] | None = []
        self._lock = threading.Lock()
        self.gone = False

    def get(self, sample: int, begin: Begin) -> tuple[Raw, int] | None:
        """A sample's bytes, and the class that the rank got them from; None if the rank is gone, or gives none yet.

        Raises:
            DataError: the rank could not read the sample.
            LostRankError: the rank belongs to another job.
        """
        if self.gone:
            return None
        try:
            connection = self._connection()
            try:
                _send(connection, msgspec.msgpack.encode(Request(sample, begin)))
                sign, kind = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size))
                raw = receive_exactly(connection, sign if sign >= 0 else -1 - sign)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError) as error:
            with self._lock:
                first, self.gone = not self.gone, True
            if first:
                log.warning("rank %d gives no samples any more (%s): they are read from the file system", self._rank,
                            error or type(error).__name__)  # fmt: skip
            self.close()
            return None
        with self._lock:
            if self._idle is not None:
                self._idle.append(connection)
            else:
                connection.close()
        if sign < 0:
            problem, where, remedy = msgspec.msgpack.decode(raw, type=tuple[str, str, str])
            raise DataError(problem, where=where, remedy=remedy)
        return (raw, kind) if kind != NOT_HERE else None

    def close(self) -> None:
        """Close the connections: now those that nobody uses, the others after their answer."""
        with self._lock:
            idle, self._idle = self._idle, None
        for connection in idle or ():
            connection.close()

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = socket.create_connection((self._address.host, self._address.port), timeout=WAIT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(connection, self._address.token)
        except BaseException:
            connection.close()
            raise
        return connection


def _texts(error: DataError | IndexError) -> tuple[str, str, str]:
    if isinstance(error, DataError):
        return error.problem, error.where, error.remedy
    return str(error), "", "the ranks' data differ: give all ranks the same data"


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_HEAD.pack(len(content)) + content)


def _receive_request(connection: socket.socket) -> bytearray:
    size = _HEAD.unpack(receive_exactly(connection, _HEAD.size))[0]
    if not 0 <= size <= _MOST_REQUEST:
        raise EOFError
    return receive_exactly(connection, size)
