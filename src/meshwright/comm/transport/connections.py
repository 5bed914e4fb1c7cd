"""The TCP connections of this process, whoever has opened them: whether data moves, waits, or is lost (Linux)."""

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_INFO = struct.Struct("=8B24I4Q3I")  # the first fields of struct tcp_info in linux/tcp.h
_ESTABLISHED, _CLOSE_WAIT = 1, 8
_DESCRIPTORS = Path("/proc/self/fd")


class TcpConnection(NamedTuple):
    """A connection, and its state as the kernel counts it. ``unacknowledged``: packets that the other end has not
    confirmed, or bytes that could not be sent; the kernel has tried again ``tries`` times in vain. ``silent_s``: the
    time since data has last come."""

    peer: str
    is_closed: bool
    unacknowledged: int
    tries: int
    silent_s: float
    sent_bytes: int
    received_bytes: int


def connections() -> dict[str, TcpConnection]:
    """All TCP connections of this process that are open or were closed by the other end, by their two ends."""
    by_ends: dict[str, TcpConnection] = {}
    with suppress(OSError):  # no /proc here
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError, ValueError, AttributeError):  # closed meanwhile, or another system
                for key, connection in _connection(int(name)):
                    by_ends[key] = connection
    return by_ends


def _connection(descriptor: int) -> Iterator[tuple[str, TcpConnection]]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return
        data = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(data) < _INFO.size or data[0] not in (_ESTABLISHED, _CLOSE_WAIT):
            return
        fields = _INFO.unpack(data)
        (host, port, *_), (_, own_port, *_) = own.getpeername(), own.getsockname()
        words = fields[8:32]
        yield (
            f"{own_port} {host}:{port}",
            TcpConnection(
                f"{host}:{port}",
                data[0] == _CLOSE_WAIT,
                words[4] or fields[38],
                max(fields[2:5]),
                words[11] / 1e3,
                fields[34],
                fields[35],
            ),
        )


def described(before: Mapping[str, TcpConnection], now: Mapping[str, TcpConnection], seconds: float) -> tuple[str, ...]:
    """The connections that are closed, lose packets, or move data, in words. ``before`` is ``seconds`` old."""
    lines = []
    for key, each in sorted(now.items()):
        old = before.get(key, each)
        moved = each.received_bytes - old.received_bytes + each.sent_bytes - old.sent_bytes
        if each.is_closed:
            lines.append(f"the connection to {each.peer} was closed by its other end")
        elif each.unacknowledged and each.tries:
            lines.append(
                f"the connection to {each.peer} is cut or loses packets: what was sent {1 + each.tries} times was not "
                f"confirmed; no data has come for {each.silent_s:.1f} s"
            )
        elif moved and seconds > 0:
            lines.append(f"the connection to {each.peer} moves {moved / seconds / 1e6:.3g} MB/s: it is slow, not dead")
    return tuple(lines)
