"""Starts ``meshwright`` commands without delay: as forks of a process that has imported all modules of a launcher.

    campaign ──requests──▶ starter ──fork──▶ launcher ──fork──▶ its server of forks ──fork──▶ ranks

An import of PyTorch takes seconds, about as long as a whole fault. A launcher is a process of its own, with its own
session, output and exit code, and does the same as the console script. Its server of forks is a fork too, instead of a
new interpreter (``_forked``). Everything else is as in a user's run. The starter adopts processes whose parents have
died. So a process that lives after its launcher is a child of the starter, and is found.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

import msgspec

from benchmarks.run_folders import parents

IMPORTED = (
    "meshwright.api", "meshwright.cli", "meshwright.engines.torchrun", "meshwright.emulation.network",
    "meshwright.runtime.rendezvous", "meshwright.runtime.launch_replicas", "meshwright.planner.search", "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes", "torch.distributed.elastic.multiprocessing",
    "torch.distributed.launcher.api", "torch.distributed.checkpoint", "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
)  # fmt: skip
_ADOPT, _NEW_MOUNTS, _NEW_TIME = 36, 0x00020000, 0x00000080  # PR_SET_CHILD_SUBREAPER, CLONE_NEWNS, CLONE_NEWTIME
_BIND, _PRIVATE, _RECURSIVE, _DETACH = 4096, 1 << 18, 16384, 2


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command to start.

    Attributes:
        arguments: those of ``meshwright``.
        output: the file that gets standard output and error.
        environment: more environment variables.
        box: the process and the thread (task) that hold the network namespace of the command; empty: the namespace of
            the starter.
        shm: the directory that is its /dev/shm, in a mount namespace of its own; empty: the /dev/shm of the starter.
        later_s: seconds by which its clock since the start of the machine is ahead; 0: it has no time namespace.
        plain: whether permissions of files hold for it even if it is root.
        limits: maps the name of a resource (``RLIMIT_NOFILE``) to the limit of the command and of its children.
        main: the function that it runs, as ``module:function``.
    """

    arguments: tuple[str, ...]
    output: str
    environment: dict[str, str] = {}
    box: tuple[int, ...] = ()
    shm: str = ""
    later_s: int = 0
    plain: bool = False
    limits: dict[str, int] = {}
    main: str = "meshwright.cli:main"


class Starter:
    """The starter as the campaign sees it: a context in which commands can be started.

    ``environment``: variables of the starter and of all its commands. ``process``: the number of its process."""

    def __init__(self, environment: Mapping[str, str] = {}) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.campaign.warm"], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | self._environment,
        )  # fmt: skip
        self.process = self._process.pid
        self._ask({"living": True})  # wait until all modules are imported
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it kills the processes that are left, and ends
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def start(self, request: Request) -> int:
        """Start a command, and return its process."""
        return int(self._ask({"start": msgspec.to_builtins(request)}))

    def code(self, process: int) -> int | None:
        """The exit code of a command, negative for a signal; None while it runs."""
        code = self._ask({"code": process})
        return None if code is None else int(code)

    def living(self) -> list[int]:
        """The living processes of commands and their descendants."""
        self._ask({"living": True})  # the starter reaps the processes that have ended
        known = parents(dead=True)
        own, before = {self._process.pid}, 0
        while len(own) > before:
            before = len(own)
            own |= {process for process, parent in known.items() if parent in own}
        return sorted((own - {self._process.pid}) & parents().keys())

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the starter of commands has ended with {self._process.wait()}")
        return json.loads(answer)


# --- in the starter --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until the input ends. Then kill the processes that are left."""
    for name in IMPORTED:
        import_module(name)
    for number in (signal.SIGINT, signal.SIGTERM):  # these signals are for the campaign
        signal.signal(number, signal.SIG_IGN)
    _call("prctl", _ADOPT, 1, 0, 0, 0)
    codes: dict[int, int] = {}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        _reap(codes)
        answer: Any = None
        if "start" in asked:
            answer = _start(msgspec.convert(asked["start"], Request))
            codes.pop(answer, None)  # an earlier process had this number
        elif "code" in asked:
            answer = codes.get(asked["code"])
        answers.write(json.dumps(answer) + "\n")
    while _reap(codes):
        for process, parent in parents().items():
            if parent == os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _reap(codes: dict[int, int]) -> bool:
    """Add the codes of children that have ended to ``codes``. False if there are no children."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def _start(request: Request) -> int:
    """Fork a command, and return its process. A new time namespace holds for children only: the command is then a fork
    of the fork, which the starter adopts."""
    own, others = os.pipe()
    if not (process := os.fork()):
        os.close(own)
        try:
            if request.later_s:
                _call("unshare", _NEW_TIME)
                offsets = f"monotonic {request.later_s} 0\nboottime {request.later_s} 0\n"
                Path("/proc/self/timens_offsets").write_text(offsets)
                if os.fork():
                    os._exit(0)
            os.write(others, b"%d" % os.getpid())
            os.close(others)
            _become(request)
        finally:
            os._exit(1)
    os.close(others)
    with os.fdopen(own, "rb") as answer:
        return int(answer.read() or process)


def _become(request: Request) -> NoReturn:
    """Turn this process into the command."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(request.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(output, number)
    _close_all_but({0, 1, 2})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if request.shm:
        _call("unshare", _NEW_MOUNTS)
        _mount("none", "/", _PRIVATE | _RECURSIVE)
        _mount(request.shm, "/dev/shm", _BIND)
        _leave_disks_of_others(Path(request.output).parent)
    if request.box:
        from meshwright.emulation.network import NetworkBox, enter

        enter(NetworkBox(*request.box))
    for name, limit in request.limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if request.plain:
        _obey_permissions()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # the starter's may differ
    setattr(import_module("multiprocessing.util"), "spawnv_passfds", _forked)  # noqa: B010
    sys.argv = ["meshwright", *request.arguments]
    sys.modules["__main__"] = ModuleType("__main__")  # ranks are not to import this module
    module, _, function = request.main.partition(":")
    code = 1
    try:
        getattr(import_module(module), function)()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _obey_permissions() -> None:
    """Give up the capabilities with which root reads and writes every file: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(head, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for place in range(3):  # effective, permitted, inheritable
        sets[place] &= ~0b110
    if libc.capset(head, sets):
        raise OSError(ctypes.get_errno(), "capset")


def _forked(path: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Replaces ``multiprocessing.util.spawnv_passfds``: runs the program ``-c PROGRAM`` in a fork instead of a new
    interpreter, with the same open files and signal handlers."""
    if process := os.fork():
        return process
    try:
        _close_all_but({0, 1, 2, *kept})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        server, tracker = import_module("multiprocessing.forkserver"), import_module("multiprocessing.resource_tracker")
        server._forkserver._lock = threading.Lock()
        tracker._resource_tracker._lock = threading.RLock()
        threading.current_thread()  # a fork of a thread becomes the main thread
        exec(arguments[-1], {"__name__": "server"})
    except SystemExit:
        pass
    finally:
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number not in kept:
            with suppress(OSError):
                os.close(number)


def _leave_disks_of_others(folder: Path) -> None:
    """In this process's namespace, unmount what is mounted beside ``folder``: disks of other faults, which could not be
    unmounted there as long as this process lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = Path(line.split()[4])
        if folder.parent in place.parents and folder not in place.parents and libc.umount2(bytes(place), _DETACH):
            raise OSError(ctypes.get_errno(), f"unmount {place}")


def _mount(source: str, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def _call(name: str, *values: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*values):
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    serve()
