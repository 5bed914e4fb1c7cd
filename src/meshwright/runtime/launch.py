"""Starts torch.distributed on a rank: under plain python, torchrun, mpirun, srun, or Meshwright's own launcher."""

import atexit
import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm import pytorch_flight
from meshwright.comm.attendance import Attendance
from meshwright.comm.groups import meet
from meshwright.comm.member import attend, close_all
from meshwright.errors import LaunchError
from meshwright.ir.flight import EVENTS
from meshwright.runtime import launchers, meeting_point
from meshwright.runtime.device import num_cuda_devices, own_device, use
from meshwright.runtime.device_check import available, check_gpu
from meshwright.runtime.kept_memory import VARIABLE
from meshwright.runtime.launchers import Meeting
from meshwright.runtime.memory import keep_memory

HOST = "127.0.0.1"
FLIGHTS = "MESHWRIGHT_FLIGHTS"
"""The environment variable that names the directory of the ranks' flight recorders."""
BOX_PORT = 29511
"""The port of the store in an emulated box, where no other program uses ports."""
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl"}
"""The backends of torch.distributed for ranks with accelerators: tensors of the host, such as those of objects that
ranks tell each other, go by gloo, so that the device is not waited for."""
TOGETHER_S = 0.3
"""If all ranks end within this many seconds, they count as ending together."""
HEAR_S = 3.0
"""Seconds that a rank stays reachable if it ends before the others, so that they can detect and report its end."""
_SET_BY_AGENT = re.compile(r"(\w+_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|TORCH_NCCL_ASYNC)_\w+")


class Launched(NamedTuple):
    """The settings that a launcher has made in the environment of this process: its rank and the number of ranks. If
    the launcher started a replica separately, also the replica's number and the address at which replicas meet
    (otherwise -1 and an empty text)."""

    rank: int
    size: int
    replica: int
    meet: str


class Within(NamedTuple):
    """A subset of the launched ranks that forms its own process group: their store, and this process's rank among
    ``size`` ranks."""

    store: dist.Store
    rank: int
    size: int


def start(device: torch.device | str | None = None, within: Within | None = None) -> torch.device:
    """Start torch.distributed if a launcher has set its environment variables and it is not started yet. ``within``:
    start it only for this subset of the launched ranks.

    It is shut down at the end of the program. Ranks wait at most ``MESHWRIGHT_TIMEOUT_S`` seconds (default: 600) for
    each other. ``MESHWRIGHT_FLIGHTS`` names the directory that keeps their flight recorders.

    Returns:
        The device of this rank.

    Raises:
        LaunchError: the environment is incomplete, the port is taken, ranks are missing, or the device does not exist.
    """
    _take_over()
    own = own_device(_number("LOCAL_RANK", "0"))
    device = available(own if device is None else device, chosen=device is not None)
    device = own if device == torch.device(own.type) else device  # ``cuda`` without a number
    num_ranks = within.size if within is not None else _number("WORLD_SIZE", "1")
    check_gpu(device, num_ranks)
    use(device)
    if device.type == "cpu":
        keep_memory()
    if not dist.is_initialized() and num_ranks > 1:
        backend = BACKENDS.get(device.type, "gloo")
        os.environ.setdefault(pytorch_flight.BUFFER, f"{EVENTS}")
        if within is None:
            _join(backend)
        else:
            _use_loopback()
            dist.init_process_group(
                backend, store=within.store, rank=within.rank, world_size=within.size, timeout=timeout()
            )
        atexit.register(_finish_at_exit, attend(_flights()), keeps_store())
    attend(_flights())
    return device


@contextlib.contextmanager
def keeping_flights(folder: Path) -> Iterator[None]:
    """Let ranks that are started within this context keep their flight recorders in ``folder``."""
    before = os.environ.get(FLIGHTS)
    os.environ[FLIGHTS] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(FLIGHTS)
        os.environ.update({FLIGHTS: before} if before is not None else {})


def _flights() -> Path | None:
    folder = os.environ.get(FLIGHTS, "")
    return Path(folder) if folder else None


def what_is_launched() -> Launched:
    """The launcher's settings for this process and the others. Without a launcher, there is one rank."""
    _take_over()
    rank = launched_rank() if launched() else 0
    return Launched(rank, _number("WORLD_SIZE", "1"), launched_replica(), os.environ.get("MESHWRIGHT_MEET", ""))


def launched_replica() -> int:
    """The number of the replica, if a launcher has started this replica separately; -1 if it started all ranks
    together."""
    return _number("MESHWRIGHT_REPLICA", "0") if os.environ.get("MESHWRIGHT_MEET") else -1


def keeps_store() -> bool:
    """Whether the store of all launched ranks runs in this process. With torchrun, the store runs in the agent; under
    srun, in the first process of the first node; otherwise in rank 0."""
    if os.environ.get(launchers.KEEPS_STORE):
        return True
    return launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def store_of_all() -> dist.Store:
    """The store at which all launched ranks meet."""
    _check_environment()
    if keeps_store() and os.environ.get(launchers.KEEPS_STORE) != "begun":
        place = HOST if os.environ["MASTER_ADDR"] in (HOST, "localhost") else ""  # of several hosts, any may ask
        atexit.register(_kept, meeting_point.kept_store(place, _number("MASTER_PORT", ""), timeout(), "MASTER_PORT"))
        os.environ |= {launchers.KEEPS_STORE: "begun", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout())))
    store.set_timeout(timeout())
    return store


def _kept(server: dist.Store) -> None:
    """Keep a store until the end of the program."""


def own_address() -> str:
    """The address of this machine for other boxes, in the network through which the store is reached."""
    host = os.environ.get("MESHWRIGHT_MEET", "").rpartition(":")[0] or os.environ.get("MASTER_ADDR", HOST)
    return meeting_point.address_towards(host)


def store_at(meet: str) -> dist.Store:
    """The store at an address, ``host:port``, at which replicas meet.

    Raises:
        LaunchError: no store answers there.
    """
    host, _, port = meet.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timeout())
    except (ValueError, dist.DistError) as error:
        raise LaunchError(
            f"no store answers at {meet!r} ({str(error).splitlines()[0]})",
            where="environment variable MESHWRIGHT_MEET",
            remedy="start the replicas with meshwright train, which keeps the store",
        ) from error


def join_by_file(path: str, interface: str) -> None:
    """Start torch.distributed for ranks that meet through a file, and that communicate over the network interface
    ``interface``."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=launched_rank(), world_size=_number("WORLD_SIZE", "1"),
        timeout=timeout(),
    )  # fmt: skip
    atexit.register(_finish_at_exit, attend(_flights()), False)


def meet_at(address: str, interface: str) -> None:
    """Let the launched ranks meet at the store of rank 0, at ``address``, instead of the launcher's store. They
    communicate over the network interface ``interface``. ``start`` and ``store_of_all`` use these settings."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": f"{BOX_PORT}", "TORCHELASTIC_USE_AGENT_STORE": "False"}


def timeout() -> timedelta:
    """The time that ranks wait for each other."""
    return timedelta(seconds=float(os.environ.get("MESHWRIGHT_TIMEOUT_S", "600")))


def finish() -> None:
    """Shut down torch.distributed once all ranks have met: no rank leaves while another rank still needs it."""
    if dist.is_initialized():
        meet()
        dist.destroy_process_group()


def launched() -> bool:
    """Whether this process is a rank that a launcher (torchrun, mpirun, srun, Meshwright's own) has started."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or launchers.is_rank(os.environ)


def launched_rank() -> int:
    """This process's rank, 0 without a launcher."""
    names = ["RANK", *launchers.RANKS] if launched() else ["RANK"]
    return _number(next((name for name in names if name in os.environ), "RANK"), "0")


def is_first_here() -> bool:
    """Whether this is the first of the ranks that its launcher has started on this machine."""
    return _number("LOCAL_RANK", "0") == 0


def memory_of_launcher() -> tuple[str, int]:
    """The memory in which our launcher keeps copies of the state (``kept_memory``; empty under another launcher), and
    this rank's number among those of its launcher."""
    return os.environ.get(VARIABLE, ""), _number("LOCAL_RANK", "0")


def has_begun_before() -> bool:
    """Whether our launcher has started the ranks before, and lost some."""
    return _number(launchers.ATTEMPT, "1") > 1


def meeting() -> Meeting | None:
    """Where the launchers of several hosts meet, as Kubernetes says (``PET_*``); None on one host."""
    return launchers.meeting_of(os.environ, timeout().total_seconds())


def num_ranks_here() -> int:
    """The number of ranks that the launcher has started on this machine; 0 if that is not known."""
    return _number("LOCAL_WORLD_SIZE", "0") if launched() else 0


def num_cores() -> int:
    """The number of cores that this process may use, by its affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def cache_directory() -> Path:
    """Meshwright's cache directory, in ``XDG_CACHE_HOME`` or else in ``~/.cache``. All of its files can be made
    again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


def num_devices() -> int:
    """The number of ranks that suits this machine: one for each CUDA device, or one for each core if there is none."""
    return num_cuda_devices() or num_cores()


def environment() -> dict[str, str]:
    """The environment of this process."""
    return dict(os.environ)


def add_environment(environment: dict[str, str]) -> None:
    """Set these environment variables, as a launcher does."""
    os.environ.update(environment)


def take_environment(environment: dict[str, str]) -> None:
    """Replace this rank's environment variables with the launcher's, except for variables that torch's agent has set.
    Without this, the rank has the environment of the fork server, which may be older. Variables that PyTorch reads only
    at import keep the effect that they had in the server. ``OMP_NUM_THREADS`` is applied again."""
    agents = {name: value for name, value in os.environ.items() if _SET_BY_AGENT.fullmatch(name)}
    os.environ.clear()
    os.environ.update(environment | agents)
    threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))


def threads_of(num_ranks: int) -> int:
    """The number of threads that each of ``num_ranks`` ranks on this machine has: its share of the cores, or
    ``OMP_NUM_THREADS``."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else max(1, num_cores() // num_ranks)


def share_cores(num_ranks: int) -> int:
    """Give this rank its share of the cores, unless ``OMP_NUM_THREADS`` is set. Return its number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(num_ranks))
    return torch.get_num_threads()


def check_port(port: int) -> None:
    """Raise a LaunchError if another program uses the port on this machine."""
    meeting_point.check_port(HOST, port, "train.port" if not launched() else "MASTER_PORT")


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise LaunchError(f"{text!r} is not a number", where=f"environment variable {name}", remedy="use torchrun")
    return int(text)


def _take_over() -> None:
    """Under mpirun and srun, set the variables that torchrun would set."""
    if "RANK" in os.environ:
        return
    os.environ.update(launchers.translated(os.environ))
    if launchers.MPI_RANK in os.environ and "MASTER_ADDR" not in os.environ and _number("WORLD_SIZE", "1") > 1:
        _meet_by_mpi()


def _meet_by_mpi() -> None:
    """Broadcast rank 0's meeting address and port through MPI. Raise a LaunchError if mpi4py is not installed."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError(
            f"mpirun started {os.environ['WORLD_SIZE']} ranks, and mpi4py cannot be loaded: {error}",
            where="environment",
            remedy="pip install 'meshwright[mpi]', or set MASTER_ADDR and MASTER_PORT",
        ) from None
    address = HOST if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] else socket.gethostname()
    endpoint = bytearray(f"{address} {meeting_point.free_port()}".encode().ljust(512))  # bcast would pickle
    MPI.COMM_WORLD.Bcast(endpoint, root=0)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = endpoint.decode().split()


def _check_environment() -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {' and '.join(missing)} is not set",
            where="environment",
            remedy="start the ranks with torchrun or meshwright train, or unset WORLD_SIZE",
        )
    rank, world_size = _number("RANK", ""), _number("WORLD_SIZE", "")
    if rank >= world_size:
        raise LaunchError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}",
            where="environment",
            remedy=f"ranks are 0 to {world_size - 1}",
        )


def _use_loopback() -> None:
    """If all ranks are on this machine, gloo uses its loopback interface. Otherwise gloo looks up the address of this
    machine's host name; where that is a loopback address, it uses the interface towards the store."""
    if os.environ.get("MASTER_ADDR", HOST) in (HOST, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (name := meeting_point.interface_of(own_address())):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _join(backend: str) -> None:
    _check_environment()
    _use_loopback()
    rank, world_size, port = _number("RANK", ""), _number("WORLD_SIZE", ""), _number("MASTER_PORT", "")
    limit, address = timeout(), os.environ["MASTER_ADDR"]
    where = f"rank {rank}, {address}:{port}"
    try:
        store = dist.PrefixStore("default_pg", store_of_all())
        meeting_point.come(store, rank, own_address())
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if meeting_point.is_taken(error):
            raise meeting_point.port_taken(port, "another program uses it", "MASTER_PORT") from error
        raise meeting_point.no_store(address, port, limit, where, error) from error
    meeting_point.await_all(store, world_size, limit, where)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        raise meeting_point.not_connected(store, rank, world_size, where, error) from error


def _finish_at_exit(attendance: Attendance | None, keeps_store: bool) -> None:
    """Shut down torch.distributed if all ranks end now. Otherwise stay reachable for a while, so that ranks that wait
    for this rank notice its end. A rank may end by ``sys.exit(1)``, or may simply be finished before the others. This
    function cannot tell the difference."""
    if attendance is None or not dist.is_initialized():
        return
    error = getattr(sys, "last_value", None)
    attendance.leave(error)
    if not attendance.all_gone(TOGETHER_S):
        close_all()
        attendance.all_gone(attendance.timeout_s if keeps_store and error is None else HEAR_S)
    elif error is None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
