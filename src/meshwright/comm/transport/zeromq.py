"""Sockets of ZeroMQ for letters between replicas, and the messages that they carry.

Each participant listens on one socket (ROUTER), and has one socket (DEALER) to each other participant. Letters go from
DEALER to ROUTER; the receiver's replies go back over the same connection.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.comm.transport.shared_blocks import Handle
from meshwright.errors import LaunchError

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message as recv_monitor_message
except ImportError as error:
    raise LaunchError(
        f"replicas send each other letters by ZeroMQ, and pyzmq cannot be loaded: {error}",
        where="consistency",
        remedy="pip install 'meshwright[replicas]'",
    ) from None

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
        "uint8", "uint16", "uint32", "uint64", "bool",
    )
}  # fmt: skip
"""The dtypes of tensors in letters, by name."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PINGS = 5
"""The number of times that a participant in another box is asked for a sign of life before it counts as dead."""
REFUSED = -1
"""The number of taken letters in the reply to a wrong token."""
BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Socket events that mean that the connection has ended."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Opens a connection. ``secret`` is the receiver's secret, so that a connection to a wrong port is noticed, and
    ``token`` that of the job.
    ``process`` and ``probe`` let the receiver try whether it can open the sender's memory (None: the sender is in
    another box)."""

    sender: str
    joined: int
    secret: str
    process: int
    probe: Handle | None
    token: str


class Head(msgspec.Struct, frozen=True, array_like=True, tag="letter"):
    """A letter without its tensors. ``number`` counts the letters of this connection. The tensors lie in ``block``, or
    follow as frames of the same message."""

    number: int
    kind: str
    numbers: tuple[int, ...]
    text: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    block: Handle | None


class ReceiverReply(msgspec.Struct, frozen=True, array_like=True):
    """A receiver's reply: the number of letters of this connection that it has taken so far (``REFUSED``: it takes
    none), and whether it can open the sender's memory."""

    taken: int
    opens: bool


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Hello | Head).decode
decode_reply = msgspec.msgpack.Decoder(ReceiverReply).decode


def listener(context: Any, host: str, secret: str) -> tuple[Any, str, str]:
    """A socket that receives letters, and its addresses for processes of this box and of others.

    Raises:
        LaunchError: ``host`` is not an address of this machine.
    """
    socket = context.socket(zmq.ROUTER)
    _unbounded(socket)
    near = f"ipc://@meshwright-{secret}"  # an address without a file, in this box's network
    try:
        port = socket.bind_to_random_port(f"tcp://{host}")
        socket.bind(near)
    except zmq.ZMQError as error:
        socket.close()
        raise LaunchError(
            f"no port can be opened: {error}", where=host, remedy="give the address of an interface of this machine"
        ) from None
    return socket, near, f"tcp://{host}:{port}"


def connection(context: Any, address: str, silence_s: float, *, watched: bool) -> tuple[Any, Any]:
    """A socket that sends letters to an address. If ``watched``, also a socket that reports its events (``BROKEN``).
    Another thread may use it. Keep it open until it has reported that the first socket is closed.

    A broken connection is not made again, because letters may have been lost. A watched connection breaks when the
    other end shows no sign of life for ``silence_s`` seconds. ZeroMQ's threads check this, independently of Python.
    """
    socket = context.socket(zmq.DEALER)
    _unbounded(socket)
    silence_ms = round(1000 * silence_s)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if watched:
        socket.setsockopt(zmq.HEARTBEAT_IVL, silence_ms // PINGS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms - silence_ms // PINGS)
        socket.setsockopt(zmq.TCP_MAXRT, silence_ms)  # no pings are sent while a large letter is under way
        socket.setsockopt(zmq.CONNECT_TIMEOUT, silence_ms)
    events = socket.get_monitor_socket(BROKEN | zmq.EVENT_MONITOR_STOPPED) if watched else None
    socket.connect(address)
    return socket, events


def _unbounded(socket: Any) -> None:
    """Let ZeroMQ keep any number of messages, because mailboxes limit the messages under way themselves."""
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)


def post(socket: Any, frames: Sequence[Any]) -> None:
    """Send a message. If the connection is broken, the message is lost: the receiver is dead, or will be declared
    dead."""
    with suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK)


def raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a one-dimensional tensor, without a copy if it is contiguous."""
    flat: np.ndarray[Any, Any] = tensor.detach().contiguous().view(torch.uint8).numpy()
    return flat


def tensor_of(part: Any, dtype: torch.dtype, size: int) -> Tensor | None:
    """A new tensor from bytes; None if the number of bytes does not match ``size`` elements."""
    source = np.frombuffer(part, np.uint8) if len(part) else np.empty(0, np.uint8)
    if source.nbytes != size * dtype.itemsize:
        return None
    with torch.inference_mode(False):
        tensor = torch.empty(size, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = source
    return tensor
