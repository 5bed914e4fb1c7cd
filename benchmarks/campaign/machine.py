"""Faults of the machine and of how a run is started: memory, files, ports, clocks, environment, a second run."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.campaign.processes import stopped
from benchmarks.campaign.site import LATER, MISTAKE, Site
from benchmarks.campaign.warm import Starter

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
HOUR_S = 3600
NO_MEMORY = r"memory"


# --- memory ----------------------------------------------------------------------------------------------------------


def rank_without_memory(site: Site) -> None:
    """From a step on, a rank gets no more address space. It fails, or needs none."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    rank = site.draw.choice(ranks)
    site.promise()
    used = int(Path(f"/proc/{rank}/statm").read_text().split()[0]) * resource.getpagesize()
    with suppress(ProcessLookupError):
        resource.prlimit(rank, resource.RLIMIT_AS, (used, used))
    site.finish(codes={0, 2})


def launcher_without_memory(site: Site) -> None:
    """The command may use little more address space than it begins with."""
    used = int(Path(f"/proc/{site.starter.process}/statm").read_text().split()[0]) * resource.getpagesize()
    site.attempt("", codes={0, 2}, limits={"RLIMIT_AS": used + site.draw.choice([4, 16, 64]) * 2**20})


def killed_for_memory_while_planning(site: Site) -> None:
    """The kernel kills a rank for lack of memory before its first step: ranks are not started again, and the error says
    what is too large."""
    with _memory_group(site, 2**20) as group:
        site.start()
        for rank in site.fresh_ranks():
            (group / "cgroup.procs").write_text(f"{rank}")
        site.judge({2}, NO_MEMORY)
        site.settle()
    site.finish()


def killed_for_memory(site: Site) -> None:
    """The kernel kills a rank for lack of memory, once, in the middle of the run."""
    with _memory_group(site, -1) as group:
        site.start()
        rank = site.draw.choice(site.fresh_ranks())
        (group / "cgroup.procs").write_text(f"{rank}")
        site.await_step()
        site.promise()
        used = int((group / "memory.usage_in_bytes").read_text())
        _limit(group, max(2**20, used // 2))
        site.judge({0, 2})
        site.settle()
    site.finish()


@contextmanager
def _memory_group(site: Site, num_bytes: int) -> Iterator[Path]:
    """A control group whose processes together may use ``num_bytes`` of memory; -1: no limit."""
    group = MEMORY_GROUPS / f"meshwright-{os.getpid()}-{site.folder.name}"
    group.mkdir()
    try:
        if num_bytes > 0:
            _limit(group, num_bytes)
        yield group
    finally:
        site.until_nothing_lives()
        group.rmdir()


def _limit(group: Path, num_bytes: int) -> None:
    with suppress(OSError):  # memory in use cannot be taken back: the next page exceeds the limit
        (group / "memory.limit_in_bytes").write_text(f"{num_bytes}")


# --- files, processes, ports -----------------------------------------------------------------------------------------


def few_open_files(site: Site) -> None:
    """The command may open few files."""
    site.attempt("", codes={0, 2}, limits={"RLIMIT_NOFILE": site.draw.choice([16, 32, 48])})


def small_files_only(site: Site) -> None:
    """Files may not grow beyond a size, as under a quota: checkpoints cannot be written. The size holds for the file of
    the command's output, too, which is smaller."""
    stopped(site)
    site.attempt("", codes={0, 2}, limits={"RLIMIT_FSIZE": 8192})


def no_folder_for_temporary_files(site: Site) -> None:
    """TMPDIR names a folder that does not exist."""
    site.attempt("", codes={0, 2}, environment={"TMPDIR": str(site.folder / "nowhere")})


def port_taken(site: Site) -> None:
    """Another program uses the port at which ranks are to meet."""
    port = site.draw.randint(20_000, 30_000)
    with site.listen(port):
        site.start("--train.port", f"{port}")
        site.judge(MISTAKE, rf"port {port} cannot be used")
        site.settle()
    site.finish("--train.port", f"{port}")


def two_runs(site: Site) -> None:
    """The command is given a second time while the run trains: it is refused, and the run is not disturbed. The run
    stands still meanwhile, so that it does not end before."""
    first = site.start()
    site.await_step(saved=False)
    first.signal(signal.SIGSTOP, everybody=True)
    second = site.start()
    site.judge(MISTAKE, r"another run is at work in this directory: process \d+ on ", command=second)
    first.signal(signal.SIGCONT, everybody=True)
    site.judge({0}, command=first)
    site.settle()
    site.finish()


# --- clocks ----------------------------------------------------------------------------------------------------------


class Clock:
    """The clock of commands, which can be set while they run, by a library between them and the kernel.

    A namespace of time changes only the clocks since the start of the machine. ``clock.c`` reads a number of seconds
    from a file and adds it to the others. ``environment``: the variables of a starter whose commands have this
    clock."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        if not library.exists():
            source = Path(__file__).with_name("clock.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CAMPAIGN_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock ``seconds`` ahead of the machine's."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))


def can_set_clocks() -> str:
    """Why clocks cannot be set; empty if they can."""
    return "" if shutil.which("cc") else "a C compiler (cc) makes the library that sets clocks"


def clock_jumps(site: Site) -> None:
    """The clock jumps while the run trains, twice: by an hour, a day or ten years, forwards or back."""
    clock = Clock(site.folder.parent)
    with Starter({"OMP_NUM_THREADS": "1"} | clock.environment) as starter, _started_by(site, starter):
        site.start()
        for low in (5, site.steps // 3):
            site.await_step(low, low + 20, saved=False)
            site.promise()
            jump = site.draw.choice([-1, 1]) * site.draw.choice([HOUR_S, 24 * HOUR_S, 87_600 * HOUR_S])
            site.notes.setdefault("jumps", []).append(jump)
            clock.set(jump)
        site.finish(codes={0})
        clock.set(0)
        site.until_nothing_lives()


@contextmanager
def _started_by(site: Site, starter: Starter) -> Iterator[None]:
    own, site.starter = site.starter, starter
    try:
        yield
    finally:
        site.starter = own


# --- environment -----------------------------------------------------------------------------------------------------


def launcher_without_variables(site: Site) -> None:
    """An environment variable of the launcher is missing."""
    given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    missing = site.draw.choice(["MASTER_ADDR", "MASTER_PORT"])
    given.pop(missing)
    site.attempt(rf"{missing} is not set", environment=given)


def too_many_ranks(site: Site) -> None:
    """The command asks for more ranks than one machine may have, or for a number that does not divide the batch."""
    ranks = site.draw.choice([300, 7])
    options = "--train.ranks", f"{ranks}", "--layout.dp", "-1", "--layout.tp", "1", "--layout.pp", "1"
    site.attempt(r"are more than 256|does not divide", *options)


def damaged_command(site: Site) -> None:
    """The run file of the command is damaged."""
    file = site.write("damaged.toml")
    text = file.read_text()
    place = site.draw.randrange(10, len(text))
    file.write_text(text[:place] + site.draw.choice(["\0", "[[", '"', "=", "\xff"]) + text[place + 1 :])
    site.start(file=file)
    code = site.judge({0, 2, LATER}, "")
    site.notes["code"] = code
    site.settle()
    if code == 0:  # the damage is in a comment, or makes another number
        shutil.rmtree(site.run)
    site.finish()
