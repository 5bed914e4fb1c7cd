"""Reads from a TCP connection."""

import socket


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
