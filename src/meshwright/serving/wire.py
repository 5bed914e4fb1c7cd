"""Messages between stations over TCP: a header that is decoded by schema, then the bytes of a tensor.

A connection begins with the token of the run (``comm/sockets.py``).
"""

import queue
import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec

from meshwright.comm.sockets import admit, introduce, receive_exactly
from meshwright.errors import LostRankError

_SIZES = struct.Struct(">IQ")
MOST_HEADER_BYTES, MOST_PAYLOAD_BYTES = 65_536, 2**32
CONNECT_S = 30.0
"""Seconds in which another station must accept a connection."""
Address = tuple[str, int]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The result of ``source`` for an item, as a tensor of a dtype and a shape (an empty dtype: bytes that stand for
    one)."""

    item: int
    source: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


_DECODER = msgspec.msgpack.Decoder(Header)


def receive(connection: socket.socket) -> tuple[Header, bytearray] | None:
    """The next message; None: the sender has ended. Raises a LostRankError if it is no message."""
    try:
        header_bytes, payload_bytes = _SIZES.unpack(receive_exactly(connection, _SIZES.size))
        if header_bytes > MOST_HEADER_BYTES or payload_bytes > MOST_PAYLOAD_BYTES:
            raise _damaged(f"it claims {header_bytes + payload_bytes:,} bytes")
        header, payload = receive_exactly(connection, header_bytes), receive_exactly(connection, payload_bytes)
    except EOFError:
        return None
    try:
        return _DECODER.decode(bytes(header)), payload
    except msgspec.DecodeError as error:
        raise _damaged(str(error)) from None


def _damaged(problem: str) -> LostRankError:
    return LostRankError(
        f"a message is damaged: {problem}", where="serving", remedy="let nothing else connect to the stations"
    )


class Outbox:
    """Sends messages to one station, one after the other, without keeping the caller waiting. ``token``: that of the
    run."""

    def __init__(self, address: Address, token: str) -> None:
        self._address, self._token = address, token
        self._waiting: queue.SimpleQueue[tuple[Header, bytes] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._send_all, name="sends", daemon=True)
        self._thread.start()

    def send(self, header: Header, payload: bytes) -> None:
        """Send a message. Raises a LostRankError if the station is gone, or has another token."""
        self._check()
        self._waiting.put((header, payload))

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._waiting.put(None)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if isinstance(self._error, LostRankError):
            raise self._error
        if self._error is not None:
            host, port = self._address
            raise LostRankError(
                f"the station at {host}:{port} cannot be reached: {self._error}", where="serving",
                remedy="look at the error of that station",
            )  # fmt: skip

    def _send_all(self) -> None:
        try:
            with socket.create_connection(self._address, timeout=CONNECT_S) as connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                introduce(connection, self._token)
                while (message := self._waiting.get()) is not None:
                    header = msgspec.msgpack.encode(message[0])
                    connection.sendall(_SIZES.pack(len(header), len(message[1])) + header)
                    connection.sendall(message[1])
        except (OSError, EOFError, LostRankError) as error:
            self._error = error


class Inbox:
    """Listens for stations with the token of the run, and keeps what they send in one queue."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._socket = socket.create_server((host, 0))
        self.address: Address = host, self._socket.getsockname()[1]
        self._messages: queue.SimpleQueue[tuple[Header, bytearray, float] | LostRankError] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="accepts", daemon=True).start()

    def next(self, timeout_s: float) -> tuple[Header, bytearray, float]:
        """The next message, and the time at which it was complete. Raises ``queue.Empty`` if none comes in time, and a
        LostRankError if what came was no message."""
        message = self._messages.get(timeout=timeout_s)
        if isinstance(message, LostRankError):
            raise message
        return message

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._read, args=(connection,), name="reads", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):  # a sender that is gone shows in the messages that are missing
            if not admit(connection, self._token):
                return
            try:
                while (message := receive(connection)) is not None:
                    self._messages.put((*message, time.time()))
            except LostRankError as error:
                self._messages.put(error)
