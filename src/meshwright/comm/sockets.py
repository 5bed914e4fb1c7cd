"""TCP connections between processes of a job: each begins with the job's token, and is refused if that is wrong.

who connects                       who listens
introduce ── MAGIC, length, token ──▶ admit     compares in constant time
          ◀── one byte: yes or no ──
"""

import hmac
import logging
import socket
import struct

from meshwright.errors import LostRankError

log = logging.getLogger("meshwright")

HELLO_S = 30.0
"""Seconds in which the two ends of a new connection must have exchanged token and answer."""
_MAGIC, _YES, _NO = b"meshwright 1\n", b"+", b"-"
_LENGTH = struct.Struct("<H")
_MOST_TOKEN = 1024
WRONG_TOKEN = "it refuses the connection: its job has another token"
TOKEN_REMEDY = "start all processes of the job together, or set MESHWRIGHT_TOKEN to the same text everywhere"


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes. Raise an EOFError if the connection ends before."""
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the connection has ended")
        filled += count
    return buffer


def same_token(received: str, token: str) -> bool:
    """Whether two tokens are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(received.encode(errors="surrogatepass"), token.encode(errors="surrogatepass"))


def introduce(connection: socket.socket, token: str) -> None:
    """Open a connection to a process of the same job.

    Raises:
        LostRankError: the process has another token.
        EOFError: the connection has ended.
        OSError: the connection is broken, or no answer came in time.
    """
    before, content = connection.gettimeout(), token.encode()
    connection.settimeout(HELLO_S)
    connection.sendall(_MAGIC + _LENGTH.pack(len(content)) + content)
    if receive_exactly(connection, 1) != _YES:
        host, port = connection.getpeername()[:2]
        raise LostRankError(WRONG_TOKEN, where=f"{host}:{port}", remedy=TOKEN_REMEDY)
    connection.settimeout(before)


def admit(connection: socket.socket, token: str) -> bool:
    """Whether the process that has connected gives the job's token. Tell it, and log a refusal."""
    before = connection.gettimeout()
    connection.settimeout(HELLO_S)
    try:
        is_ours = _given_token(connection, token)
        connection.sendall(_YES if is_ours else _NO)
        connection.settimeout(before)
    except (OSError, EOFError):
        is_ours = False
    if not is_ours:
        log.warning("a connection from %s is refused: it does not have the token of this job", _who(connection))
    return is_ours


def _given_token(connection: socket.socket, token: str) -> bool:
    if bytes(receive_exactly(connection, len(_MAGIC))) != _MAGIC:
        return False
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
    if length > _MOST_TOKEN:
        return False
    return hmac.compare_digest(bytes(receive_exactly(connection, length)), token.encode())


def _who(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "an address that has left"
