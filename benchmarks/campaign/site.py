"""A place for one fault: a run in a folder of its own, its commands, the moment of the fault, and the verdict."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from benchmarks.campaign import checks
from benchmarks.campaign.checks import Problem
from benchmarks.campaign.warm import Request, Starter
from benchmarks.run_folders import difference, losses_in, ranks_of
from meshwright import config
from meshwright.emulation.network import EmulatedNetwork, NetworkBox
from meshwright.errors import PreemptedError
from meshwright.runtime import manifest
from meshwright.runtime.failures import Status

COMMAND = "python -m benchmarks.campaign"
STEPS, EVERY, KEEP = 150, 10, 3
"""Steps of a run, steps between checkpoints, and checkpoints that are kept."""
TIMEOUT_S, SHORT_TIMEOUT_S = 20.0, 4.0
"""Seconds that ranks wait for each other. The second number is for faults that last longer than this wait."""
SLACK_S = 60.0
"""Seconds that a command may need beyond the timeout, on a machine with other work."""
LEFT_S = 20.0
"""Seconds after the end of a command within which all of its processes must have ended."""
LOOK_S = 0.002
"""Seconds between two looks at a run, while its moment is awaited."""
MOST_COMMANDS = 6
"""The number of times that the same command is given until the run is complete."""
LATER = PreemptedError.CODE
WELL = (0, LATER)
MISTAKE = (2,)
"""Exit codes: a run that can go on later; runs without a mistake; a command that is refused."""

T = TypeVar("T")


class Configuration(NamedTuple):
    """A run whose losses are known.

    ``tolerance``: how far losses may be from the reference: 0 where the order of all sums is fixed. ``data``: files of
    samples that the run reads: ``tensors`` or ``images``; empty: random numbers."""

    layout: dict[str, Any]
    ranks: int
    tolerance: float = 0.0
    data: str = ""


NEAR = 1e-9
"""How far losses in float64 may be from each other where sums have another order."""
CONFIGURATIONS = {
    "dp2": Configuration({"dp": 2}, 2),
    "tp2": Configuration({"dp": 1, "tp": 2}, 2),
    "pp2": Configuration({"dp": 1, "pp": 2, "microbatches": 2}, 2),
    "zero2": Configuration({"dp": 2, "zero": 2}, 2),
    "one": Configuration({"dp": 1}, 1),
    "free": Configuration({"dp": -1}, 2, NEAR),
    "tensors": Configuration({"dp": 2}, 2, data="tensors"),
    "images": Configuration({"dp": 2}, 2, data="images"),
    "local": Configuration({"replicas": 2, "consistency": "local(2)"}, 2, float("inf")),
    "server": Configuration({"replicas": 3, "consistency": "server(async, servers=2, copies=2)"}, 3, float("inf")),
}
"""``free`` uses as many ranks as there are. After the loss of a replica, the result of replicas under a rule depends on
the moment: each step must then have one loss, which is finite."""


class LateError(Exception):
    """The run ended before the moment of the fault, which is then tried again."""


class HungError(Exception):
    """A command that did not end, or did not reach a moment, within its time limit."""


class Command:
    """A command that was started."""

    def __init__(self, starter: Starter, request: Request) -> None:
        self._starter, self.request = starter, request
        self.output_file = Path(request.output)
        self.process, self.code = starter.start(request), None
        self.begun_s = time.monotonic()

    code: int | None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.code is None:
            self.code = self._starter.code(self.process)
        return self.code

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.output_file.read_text(errors="replace") if self.output_file.exists() else ""

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return ranks_of(self.process)

    def signal(self, number: int, everybody: bool = False) -> None:
        """Send a signal to the launcher, or to all processes of its session."""
        with suppress(ProcessLookupError):
            (os.killpg if everybody else os.kill)(self.process, number)


class Site:
    """A folder, boxes in which commands run, and a run of one of ``CONFIGURATIONS``.

    Args:
        starter: starts the commands.
        folder: is made, and belongs to this fault alone.
        expected: the losses of the uninterrupted run, by step.
        num_boxes: the boxes of an emulated network; 0: commands run beside everything else, where nobody is root.
    """

    def __init__(
        self, starter: Starter, folder: Path, name: str, expected: Mapping[int, float], draw: random.Random,
        num_boxes: int = 1,
    ) -> None:  # fmt: skip
        self.starter, self.folder, self.name, self.draw = starter, folder, name, draw
        self.configuration, self.expected = CONFIGURATIONS[name], expected
        self.tolerance = self.configuration.tolerance
        self.run, self.tmp, self.shm = folder / "run", folder / "tmp", folder / "shm"
        for path in (folder, self.tmp, self.shm):
            path.mkdir(parents=True)
            path.chmod(0o777)
        self.num_boxes = num_boxes
        self.timeout_s = TIMEOUT_S
        self.commands: list[Command] = []
        self.problems: list[Problem] = []
        self.notes: dict[str, Any] = {}
        self.promised, self.damaged = -1, set[int]()
        self._printed: dict[int, int] = {}
        self.killed: set[int] = set()
        self.steps = STEPS
        write_samples(self.configuration.data, folder)
        self.network: EmulatedNetwork | None = None
        self._is_judged = self.nobody_was_left = False

    # --- the run -----------------------------------------------------------------------------------------------------

    def raw(self, **changes: Mapping[str, Any]) -> dict[str, Any]:
        """The contents of the run file. ``changes`` maps a table to the keys that differ."""
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": "mlp", "sizes": [8, *[16] * 7, 4]},  # so deep that both stages of pp2 have parameters
            "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": 12, "held_out": 0.0},
            "layout": dict(self.configuration.layout),
            "schedule": {"warmup_steps": 5},
            "train": {
                "directory": str(self.run), "steps": self.steps, "checkpoint_every": EVERY, "keep": KEEP,
                "log_every": 10, "dtype": "float64", "max_grad_norm": 1.0, "grace_s": 5.0,
                "ranks": self.configuration.ranks,
            },
        }  # fmt: skip
        tables |= _with_data(self.configuration.data, self.folder)
        for table, keys in changes.items():
            tables[table] = {**({} if keys.get("kind") or keys.get("factory") else tables.get(table, {})), **keys}
        return tables

    def write(self, name: str = "RUN.toml", **changes: Mapping[str, Any]) -> Path:
        """Write the run file."""
        path = self.folder / name
        config.save(config.make(self.raw(**changes), where=COMMAND), path)
        return path

    @cached_property
    def file(self) -> Path:
        """The run file as it is."""
        return self.write()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.run / "checkpoints"

    def start(
        self, *options: str, verb: Sequence[str] = ("train",), file: Path | None = None, box: int = 0,
        environment: Mapping[str, str] = {}, **request: Any,
    ) -> Command:  # fmt: skip
        """Give the command ``meshwright train RUN.toml``, or another ``verb``, in a box."""
        variables = {
            "OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp), "XDG_CACHE_HOME": str(self.folder.parent / "cache"),
            "MESHWRIGHT_TIMEOUT_S": f"{self.timeout_s:g}",
        }  # fmt: skip
        place = self.boxes[box] if self.boxes else None
        command = Command(
            self.starter,
            Request(
                arguments=(*verb, str(file or self.file), *options, "--trust"),
                output=str(self.folder / f"output-{len(self.commands)}.txt"),
                environment=variables | dict(environment),
                box=(place.process, place.task) if place else (),
                shm=str(self.shm) if os.geteuid() == 0 else "",
                **request,
            ),
        )
        self.commands.append(command)
        return command

    @property
    def boxes(self) -> Sequence[NetworkBox]:
        """The boxes; none without an emulated network."""
        return self.network.places if self.network is not None else ()

    # --- the moment --------------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], T | None], command: Command | None = None, what: str = "") -> T:
        """Call ``look`` until its result is true, and return this result.

        Raises:
            LateError: the command ended first.
            HungError: the time limit of a command is over.
        """
        command = command or self.commands[-1]
        deadline = time.monotonic() + self.timeout_s + SLACK_S
        while not (result := look()):
            if command.poll() is not None:
                raise LateError(f"the command ended ({command.code}) before {what or 'the moment'}")
            if time.monotonic() > deadline:
                raise HungError(f"{what or 'the moment'} does not come: {self.last_words()}")
            time.sleep(LOOK_S)
        return result

    def last_words(self) -> str:
        """The ends of the outputs."""
        return " | ".join(line for command in self.commands for line in command.output.splitlines()[-3:])

    def doing(self, rank: int = 0) -> str:
        """What a rank is doing."""
        with suppress(OSError):
            return Status.read(self.run, rank)
        return ""

    def step(self, rank: int = 0) -> int:
        """The step that a rank is at; -1 if it is at none."""
        match = re.search(r"\bstep (\d+)$", self.doing(rank))
        return int(match[1]) if match else -1

    def fresh_ranks(self, command: Command | None = None) -> list[int]:
        """The processes of ranks that no fault has killed, when all are there."""
        command = command or self.commands[-1]

        def look() -> list[int] | None:
            fresh = [process for process in command.ranks() if process not in self.killed]
            return fresh if len(fresh) == self.configuration.ranks // max(1, len(self.hosts)) else None

        return self.until(look, command, "all ranks begin")

    hosts: Sequence[Command] = ()
    """The launchers of several hosts, if there are several."""

    def await_step(self, low: int = 2, high: int = STEPS // 2, saved: bool = True) -> int:
        """Wait for a step that is drawn. With ``saved``, also for a checkpoint. Return the step that was seen."""
        aim = self.draw.randint(low, high)
        at = self.until(lambda: step if (step := self.step()) >= aim else None, what=f"step {aim}")
        if saved:
            self.until(lambda: manifest.latest_step(self.checkpoints) + 1, what="a checkpoint")
        self.notes["step"] = at
        return at

    def await_doing(self, words: str, rank: int = 0) -> None:
        """Wait until a rank does something."""
        self.until(lambda: words in self.doing(rank) or None, what=words)

    def promise(self, *, flushed: bool = False) -> int:
        """Note the latest complete checkpoint: from now on, it must not be lost. ``flushed``: count only checkpoints
        that the run has reported as saved. Other checkpoints may be visible before they are flushed to the disk."""
        saved = re.findall(r"^step (\d+) is saved in ", self.commands[-1].output, re.MULTILINE) if flushed else []
        latest = max(map(int, saved), default=-1) if flushed else manifest.latest_step(self.checkpoints)
        if latest > self.promised:
            self.promised = latest
            self._printed = {command.process: len(command.output) for command in self.commands}
        self.notes["promised"] = self.promised
        return self.promised

    def problem(self, category: checks.Category, text: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(category, text))

    def kill(self, *processes: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to processes (default: kill them)."""
        self.promise()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)
            if number == signal.SIGKILL:
                self.killed.add(process)

    def kill_session(self, command: Command | None = None, *, flushed: bool = False) -> None:
        """Kill a launcher with all of its processes at once. Then no process is left that could remove its shared
        memory and temporary files, so these may stay. Processes and ports must be gone."""
        self.promise(flushed=flushed)
        self.nobody_was_left = True
        (command or self.commands[-1]).signal(signal.SIGKILL, everybody=True)

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, command: Command | None = None, more_s: float = 0.0) -> int:
        """Wait for the end of a command, and return its code.

        Raises:
            HungError: it does not end within the timeout and some slack.
        """
        command = command or self.commands[-1]
        deadline = time.monotonic() + self.timeout_s + SLACK_S + more_s
        while command.poll() is None:
            if time.monotonic() > deadline:
                raise HungError(f"the command does not end: {self.last_words()}")
            time.sleep(0.01)
        assert command.code is not None
        return command.code

    def judge(self, codes: Collection[int], words: str = "", command: Command | None = None) -> int:
        """Wait for the end of a command. Its exit code must be one of ``codes``, and its output must explain the end
        (see ``checks.unexplained``). Return the code."""
        command = command or self.commands[-1]
        code = self.end(command)
        self.problems += checks.unexplained(command.output, code, codes, words)
        self.problems += checks.lost_steps(command.output[self._printed.get(command.process, 0) :], self.promised)
        return code

    def settle(self) -> None:
        """Check, after a command has ended, that all processes end soon and that no checkpoint is lost."""
        deadline = time.monotonic() + LEFT_S
        while (living := self._own_living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if living:
            self.problems += checks.left_processes(living)
            for process in living:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.problems += checks.lost_checkpoints(self.checkpoints, self.promised, self.damaged)

    def _own_living(self) -> list[int]:
        running = {command.process for command in self.commands if command.poll() is None}
        return self.starter.living() if not running else []

    def finish(self, *options: str, codes: Collection[int] = WELL, words: str = "", **request: Any) -> None:
        """Wait for the end of the running command, and give the same command again until the run is complete. ``codes``
        and ``words``: what the first of these commands may end with, as in ``judge``."""
        for _ in range(MOST_COMMANDS):
            if not self.commands or self.commands[-1].code is not None:
                self.start(*options, **request)
            code = self.judge(codes, words)
            self.settle()
            if code == 0:
                return
            codes, words = WELL, ""
        self.problems.append(Problem("hung", f"not complete after {MOST_COMMANDS} commands: {self.last_words()}"))

    def attempt(
        self, words: str, *options: str, codes: Collection[int] = MISTAKE, heal: Callable[[], object] = lambda: None,
        **request: Any,
    ) -> None:  # fmt: skip
        """Give the command under a fault: it must end with one of ``codes`` and a message that matches ``words``. Then
        ``heal`` the fault: the run must go on to its end. ``options`` and ``request`` belong to the fault."""
        self.start(*options, **request)
        self.judge(codes, words)
        self.settle()
        heal()
        self.finish()

    def finish_or_refused(self, words: str) -> None:
        """Wait for the end of the running command (or give it now). It must complete the run, or be refused with a
        message that matches ``words``."""
        if not self.commands or self.commands[-1].code is not None:
            self.start()
        if self.end() != 0:
            self.judge({0, 2}, words)
        self.settle()

    def until_nothing_lives(self) -> None:
        """Wait until all processes of commands have ended."""
        deadline = time.monotonic() + LEFT_S
        while self.starter.living() and time.monotonic() < deadline:
            time.sleep(0.02)

    def judge_run(self) -> None:
        """Check the folder of the complete run: losses, checkpoints and leftovers."""
        self._is_judged = True
        self.problems += checks.wrong_losses(
            self.run, {step: self.expected[step] for step in range(1, self.steps + 1)}, self.tolerance
        )
        self.problems += checks.lost_checkpoints(self.checkpoints, self.steps, self.damaged - {self.steps})
        self.problems += checks.left_in_run(self.run)

    def verdict(self) -> list[Problem]:
        """Check the complete run, and return all problems."""
        if not self._is_judged:
            self.judge_run()
        if not self.nobody_was_left:
            self.problems += checks.left_files({"temporary file": self.tmp, "shared memory": self.shm})
        for place in self.boxes:
            self.problems += checks.left_ports(Path(f"/proc/{place.process}/task/{place.task}/net/tcp").read_text())
        self.problems += checks.left_mounts(self.folder, Path("/proc/self/mountinfo").read_text())
        return self.problems

    @contextmanager
    def inhabited(self) -> Iterator[None]:
        """A context in which the boxes exist. At its end, all processes of commands are killed."""
        if self.num_boxes:
            self.network = EmulatedNetwork((1e9,) * self.num_boxes)
            self.network.__enter__()
        try:
            yield
        finally:
            for process in self.starter.living():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            while self.starter.living():
                time.sleep(0.01)
            if self.network is not None:
                self.network.__exit__(None, None, None)

    def in_box(self, box: int, *commands: str) -> None:
        """Run commands in the network namespace of a box; -1: in the namespace of the switch."""
        assert self.network is not None
        place = self.network.switch if box < 0 else self.network.places[box]
        for command in commands:
            inside = ["nsenter", f"--net=/proc/{place.process}/task/{place.task}/ns/net", *command.split()]
            subprocess.run(inside, check=True, capture_output=True)

    def listen(self, port: int) -> socket.socket:
        """A socket that occupies a port in the first box."""
        if not self.boxes:
            return socket.create_server(("127.0.0.1", port))
        place = self.boxes[0]
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        with Path(f"/proc/{place.process}/task/{place.task}/ns/net").open() as there:
            _enter(there.fileno())
            try:
                return socket.create_server(("127.0.0.1", port))
            finally:
                _enter(own)
                os.close(own)


def _enter(descriptor: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


def references(starter: Starter, folder: Path, kept: Path, names: Collection[str]) -> dict[str, dict[int, float]]:
    """Map the names of configurations to the losses of their uninterrupted runs.

    Each run is made once, in ``folder``, and its losses are kept in the file ``kept``.

    Raises:
        RuntimeError: a run fails, or its losses differ from those of one process by more than ``NEAR``.
    """
    known: dict[str, dict[int, float]] = {}
    if kept.exists():
        known = msgspec.json.decode(kept.read_bytes(), type=dict[str, dict[int, float]])
    for name in sorted({"one", *names} - known.keys()):
        site = Site(starter, folder / f"reference-{name}", name, {}, random.Random(0), num_boxes=0)
        with site.inhabited():
            site.start()
            if site.end() != 0:
                raise RuntimeError(f"the uninterrupted run {name} fails: {site.last_words()}")
        known[name] = losses_in(site.run)
        kept.write_bytes(msgspec.json.encode(known))
    for name in names:
        if CONFIGURATIONS[name].tolerance <= NEAR and not CONFIGURATIONS[name].data:
            worst = difference(known[name], known["one"])
            if worst > NEAR:
                raise RuntimeError(f"the uninterrupted run {name} has other losses than one process, by {worst:.1e}")
    return known


# --- samples ---------------------------------------------------------------------------------------------------------

SUBJECT = {"factory": "benchmarks.campaign.subject:Subject", "loss": "benchmarks.campaign.subject:loss"}
NUM_SAMPLES, SIDE = 48, 8


def write_samples(kind: str, folder: Path) -> None:
    """Write the files with samples. Their contents are always the same."""
    draw = np.random.default_rng(0)
    if kind == "tensors":
        np.savez(folder / "data.npz", inputs=draw.normal(size=(NUM_SAMPLES, 8)), label=np.arange(NUM_SAMPLES) % 4)
    if kind == "images":
        from PIL import Image

        for number in range(NUM_SAMPLES):
            path = folder / "images" / f"class-{number % 4}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(path)


def _with_data(kind: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The tables of a run that reads files of samples. Images exceed the run's memory limit, so that they are read from
    the disk in every epoch."""
    if not kind:
        return {}
    data: dict[str, Any] = {"kind": kind, "batch_size": 12, "held_out": 0.0}
    data |= {"path": str(folder / "data.npz")} if kind == "tensors" else {"path": str(folder / "images")}
    if kind == "images":
        data["memory_bytes"] = 6 * 12 * SIDE * SIDE * 3 * 8
    return {"model": dict(SUBJECT), "data": data}
