"""Emulated networks: boxes are network namespaces, joined through a switch by links of given rates (Linux, root).

    box 0   eth0 ──tbf──▶ ┐          ┌ ◀──tbf── eth0   box 1
            10.77.0.1   ◀──tbf── port0  switch  port1 ──tbf──▶

Every rank is a real process. Only the boxes and the rates of the links, in both directions, are emulated. Namespaces
have no names: the kernel removes them and their links when their last process has ended, even after a crash.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from meshwright.errors import LaunchError
from meshwright.runtime import launch
from meshwright.runtime.ranks import run_ranks

T = TypeVar("T")

LINK = "eth0"
MTU = 9000
"""Bytes of a packet, as in data centres. Headers are 0.7 % of them."""
BURST_BYTES, QUEUE_S = 262_144, 0.05
"""The number of bytes that a link may send at once, and the seconds that a packet may wait for the link before it is
dropped."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class NetworkBox(msgspec.Struct, frozen=True):
    """A box that ranks can enter: the process and its thread (task) that keep the box's namespace open."""

    process: int
    task: int


def why_not() -> str:
    """The reason why this machine cannot emulate networks; empty if it can."""
    if sys.platform != "linux":
        return "emulated networks need Linux"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"emulated networks need {' and '.join(missing)} (iproute2)"
    if os.geteuid() != 0:
        return "emulated networks need root: they make network namespaces"
    try:
        with EmulatedNetwork((1e9,)):
            return ""
    except LaunchError as error:
        return str(error)


class EmulatedNetwork:
    """A context in which boxes and the links between them exist: one box for each of ``rates_bits_per_s``. Entering the
    context raises a LaunchError, and leaves nothing behind, if this machine does not permit emulation."""

    def __init__(self, rates_bits_per_s: Sequence[float]) -> None:
        self.rates_bits_per_s = tuple(rates_bits_per_s)

    def __enter__(self) -> Self:
        with ExitStack() as threads:
            switch, *boxes = [_Holder(threads) for _ in range(1 + len(self.rates_bits_per_s))]
            self.switch = NetworkBox(os.getpid(), switch.task)
            switch.run("ip link add switch type bridge", "ip link set switch up")
            for index, (box, rate) in enumerate(zip(boxes, self.rates_bits_per_s, strict=True)):
                port = f"port{index}"
                switch.run(
                    f"ip link add {port} mtu {MTU} type veth peer name {LINK} mtu {MTU} netns {box.task}",
                    f"ip link set {port} master switch up", limit(port, rate),
                )  # fmt: skip
                box.run(
                    "ip link set lo up", f"ip address add {address_of(index)}/24 dev {LINK}", f"ip link set {LINK} up",
                    limit(LINK, rate),
                )  # fmt: skip
            self.places = tuple(NetworkBox(os.getpid(), box.task) for box in boxes)
            self._threads = threads.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()


def limit(link: str, rate_bits_per_s: float) -> str:
    """The command that limits the outgoing rate of a link; it is run in the link's namespace."""
    return (
        f"tc qdisc replace dev {link} root tbf rate {round(rate_bits_per_s)}bit burst {BURST_BYTES} "
        f"latency {round(1000 * QUEUE_S)}ms"
    )


def run_in_boxes(
    function: Callable[..., T], *args: object, boxes: Sequence[int], rates_bits_per_s: Sequence[float], directory: Path,
    worlds: bool = False,
) -> T:  # fmt: skip
    """Call ``run_ranks`` in emulated boxes, with rank i in box ``boxes[i]`` and torch.distributed (gloo) over the
    links. With ``worlds``, torch.distributed is left to ``parallelize``, which starts it separately for each replica;
    rank 0 keeps the store of all ranks. Raise the errors of ``run_ranks``, and a LaunchError if boxes and rates do not
    match or this machine cannot emulate networks (``why_not``).
    """
    if set(boxes) != set(range(len(rates_bits_per_s))):
        raise LaunchError(
            f"ranks in the boxes {sorted(set(boxes))}, and {len(rates_bits_per_s)} rates",
            where="boxes",
            remedy="give every box a rank and a rate",
        )
    with EmulatedNetwork(rates_bits_per_s) as network, tempfile.TemporaryDirectory(prefix="meshwright-") as meeting:
        places = tuple(network.places[box] for box in boxes)
        result: T = run_ranks(
            _in_box, places, "" if worlds else str(Path(meeting, "store")), address_of(boxes[0]), function, args,
            num_ranks=len(boxes), directory=directory,
        )  # fmt: skip
        return result


def address_of(box: int) -> str:
    """The address of a box of an emulated network."""
    return f"10.77.0.{box + 1}"


def _in_box(
    places: Sequence[NetworkBox], store: str, first: str, function: Callable[..., T], args: tuple[object, ...]
) -> T:
    """``store``: the file of the store. If it is empty, rank 0 keeps the store at the address ``first``."""
    enter(places[launch.launched_rank()])
    if store:
        launch.join_by_file(store, LINK)
    else:
        launch.meet_at(first, LINK)
    return function(*args)


def enter(place: NetworkBox) -> None:
    """Move this process into a box; its existing threads stay outside."""
    with Path(f"/proc/{place.process}/task/{place.task}/ns/net").open() as namespace:
        _called("setns", namespace.fileno(), _NEW_NETWORK)


class _Holder:
    """A thread that has its own network namespace and runs commands in it. Closing ``threads`` ends both."""

    def __init__(self, threads: ExitStack) -> None:
        self._thread = threads.enter_context(ThreadPoolExecutor(1, "holds a network"))
        self._thread.submit(_called, "unshare", _NEW_NETWORK).result()
        self.task = self._thread.submit(threading.get_native_id).result()

    def run(self, *commands: str) -> None:
        """Run commands, one after the other."""
        for command in commands:
            self._thread.submit(_run, command).result()


def _run(command: str) -> None:
    try:
        ended = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"it cannot be run: {error.strerror}", where=command, remedy="install iproute2") from None
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or [f"it ended with {ended.returncode}"]
        raise LaunchError(lines[0], where=command, remedy="emulated networks need root, veth and tbf in the kernel")


def _called(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise LaunchError(
            f"the system refuses: {os.strerror(ctypes.get_errno())}",
            where=name,
            remedy="emulated networks need root: they make network namespaces",
        )
