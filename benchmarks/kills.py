"""Does a run survive ``kill -9`` anywhere? Its losses must be those of a run that nobody disturbed, bit for bit.

Run as ``python -m benchmarks.kills [--kills 50]``; the exit code is 1 if a loss differs. ``meshwright train`` trains a
tiny GPT in float64 on 2 ranks, with a checkpoint every 4 steps, and at random moments, one after the other,

    step       a rank is killed some steps after it has started again
    saving     a rank is killed while a checkpoint is being written
    starting   a rank is killed before its first step
    cut        a file of the latest checkpoint is cut off, and a rank is killed
    launcher   the launcher is killed; the same command is given again

until there were enough. So many kills within so few steps may look to the launcher as if the model were at fault: where
it has failed three times at one step with no checkpoint between them, it stops, and the same command is given again.
A second run is killed twice, and is taken over by tensor parallelism and by one rank.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.run_folders import RowsError, difference, losses_in, ranks_of
from meshwright import config
from meshwright.runtime import manifest
from meshwright.runtime.chunk_index import read_index
from meshwright.runtime.failures import Status

NUM_RANKS = 2
CHECKPOINT_EVERY = 4
KEEP = 3
MOST_STEPS = 12
"""How many steps a rank may live after it has started: farther than to the next checkpoint."""
STEPS_A_KILL = 8
"""More than a kill leaves on average, so that the run does not end before the last one."""
TAKEOVER_STEPS = 24
TOLERANCE = 1e-9
PATIENCE_S = 300.0
LOOK_EVERY_S = 0.001
KINDS = {"step": 5, "saving": 3, "starting": 1, "cut": 2, "launcher": 1}
"""How often each happens, relatively."""

T = TypeVar("T")
Losses = dict[int, float]


@dataclass(frozen=True)
class KillResult:
    """A run that was disturbed, beside one that was not. ``kills`` counts them by kind; ``gave_up``: how often the
    launcher did, so that the command had to be given again."""

    name: str
    kills: dict[str, int]
    steps: int
    error: float
    tolerance: float
    seconds_a_kill: float
    gave_up: int = 0
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.tolerance

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kills.items())
        outcome = self.failure or f"largest difference {self.error:.0e}, allowed {self.tolerance:.0e}"
        verdict = "pass" if self.passed else "FAIL"
        kills = f"{sum(self.kills.values())} kills ({kinds}; the launcher gave up {self.gave_up} times)"
        return f"{verdict}  {self.name}: {kills} in {self.steps} steps, {self.seconds_a_kill:.1f} s a kill; {outcome}"


class DisturbedError(Exception):
    """A run that did not survive."""


class Command:
    """``meshwright train`` of one run directory, as a process that may be started again."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory, self.steps = directory, steps
        self.checkpoints = directory / "run" / "checkpoints"
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "RUN.toml"
        run = config.make(
            {
                "model": {"name": "gpt", "layers": 1, "width": 32, "heads": 2},
                "data": {
                    "kind": "text", "sequence_length": 32, "batch_size": 8, "max_bytes": 100_000, "held_out": 0.0,
                },
                "schedule": {"warmup_steps": 5},
                "train": {
                    "steps": steps, "dtype": "float64", "max_grad_norm": 1.0, "log_every": 1,
                    "checkpoint_every": CHECKPOINT_EVERY, "keep": KEEP, "directory": str(directory / "run"),
                },
            },
            where="benchmarks.kills",
        )  # fmt: skip
        config.save(run, self._file)

    def start(self, dp: int = NUM_RANKS, tp: int = 1) -> subprocess.Popen[bytes]:
        """Give the command."""
        layout = [f"--layout.dp={dp}", f"--layout.tp={tp}", f"--train.ranks={dp * tp}"]
        with (self.directory / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "meshwright.cli", "train", str(self._file), *layout],
                env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def last_words(self) -> str:
        return " | ".join((self.directory / "output.txt").read_text().splitlines()[-3:])

    def losses(self) -> Losses:
        """By step; a step that is there twice, or missing, is an error."""
        try:
            return losses_in(self.directory / "run")
        except RowsError as error:
            raise DisturbedError(f"{error}") from None

    def tensors(self) -> list[str]:
        """Checksums of the tensors in the last checkpoint."""
        path = self.checkpoints / manifest.steps_in(self.checkpoints)[0]
        saved = manifest.read(path)
        return [f"{chunk.file} {chunk.checksum}" for chunk in read_index(path / saved.data, saved).chunks()]


# --- disturbing ------------------------------------------------------------------------------------------------------


class Killer:
    """Kills what belongs to one command, at moments that it chooses by its seed."""

    def __init__(self, command: Command, seed: int) -> None:
        self.command = command
        self.layout: dict[str, int] = {}
        self.launcher = command.start()
        self.draw = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.gave_up = 0
        self._killed: list[int] = []

    def kill(self, kind: str) -> bool:
        """Wait for a moment of that kind, and kill; False if the run has ended before it came."""
        while (ranks := self._until(self._fresh, 0.02)) is None:
            if not self._start_again():
                return False
        rank = self.draw.randrange(NUM_RANKS)
        if kind == "starting":
            time.sleep(self.draw.random())
        else:
            first = self._until(lambda: self._step(rank))
            aim = (first or 0) + self.draw.randrange(1, MOST_STEPS)
            if first is None or self._until(lambda: (self._step(rank) or 0) >= aim) is None:
                return False
            if kind == "saving" and self._until(lambda: _unfinished(self.command.checkpoints)) is None:
                return False
            if kind == "cut":
                self._cut_off()
        target = self.launcher.pid if kind == "launcher" else ranks[rank]
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
            self.kills[kind] += 1
        self._killed += ranks
        if kind == "launcher":
            self.launcher.wait()
            self.launcher = self.command.start(**self.layout)
        return True

    def finish(self) -> None:
        """Let the run come to its end, which must be a good one."""
        while self.launcher.wait(PATIENCE_S) != 0:
            if not self._start_again():
                raise DisturbedError(f"exit code {self.launcher.returncode}: {self.command.last_words()}")

    def _start_again(self) -> bool:
        """Give the command again if the launcher has given up."""
        if self.launcher.poll() == 0 or "is not started again" not in self.command.last_words():
            return False
        self.gave_up += 1
        self.launcher = self.command.start(**self.layout)
        return True

    def _fresh(self) -> list[int] | None:
        """The processes of ranks that were not killed yet, by rank; None until all are there."""
        processes = [process for process in ranks_of(self.launcher.pid) if process not in self._killed]
        return processes if len(processes) == NUM_RANKS else None

    def _step(self, rank: int) -> int | None:
        """The step that a rank is at."""
        match = re.fullmatch(r"at step (\d+)", Status.read(self.command.directory / "run", rank))
        return int(match[1]) if match else None

    def _until(self, look: Callable[[], T | None], every_s: float = LOOK_EVERY_S) -> T | None:
        """What ``look`` finds; None if the run ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := look()):
            if self.launcher.poll() is not None:
                return None
            if time.monotonic() > deadline:
                raise DisturbedError(f"nothing happens: {self.command.last_words()}")
            time.sleep(every_s)
        return value

    def _cut_off(self) -> None:
        """Cut a file of the latest checkpoint, if another one is there."""
        whole = [path for path in self.command.checkpoints.glob("step-*") if (path / manifest.MANIFEST).is_file()]
        if len(whole) > 1:
            with suppress(FileNotFoundError):  # it may just be replaced
                file = self.draw.choice(sorted(part for part in max(whole).rglob("*") if part.is_file()))
                os.truncate(file, self.draw.randrange(file.stat().st_size))


def _unfinished(checkpoints: Path) -> bool:
    """Whether a save is under way."""
    return any(not (path.parent / manifest.MANIFEST).is_file() for path in checkpoints.glob("step-*/data-*"))


# --- the benchmark ---------------------------------------------------------------------------------------------------


def run(num_kills: int, seed: int = 0) -> list[KillResult]:
    """A run under ``num_kills`` kills, and one that other layouts take over."""
    with _directory() as directory:
        steps = max(TAKEOVER_STEPS, STEPS_A_KILL * num_kills)
        alone = Command(directory / "undisturbed", steps)
        if alone.start().wait(PATIENCE_S) != 0:
            raise DisturbedError(alone.last_words())
        return [_killed(alone, steps, num_kills, seed), _taken_over(alone, seed)]


def _killed(alone: Command, steps: int, num_kills: int, seed: int) -> KillResult:
    command = Command(alone.directory.parent / "killed", steps)

    def disturb(killer: Killer) -> str:
        while killer.kills.total() < num_kills:
            (kind,) = killer.draw.choices(list(KINDS), list(KINDS.values()))
            if not killer.kill(kind):
                return "the run ended before it was killed often enough"
        return ""

    row = _disturbed("killed at random", command, alone, disturb, seed, tolerance=0.0)
    if row.passed and command.tensors() != alone.tensors():
        return replace(row, failure="the last checkpoints differ")
    return row


def _taken_over(alone: Command, seed: int) -> KillResult:
    """Started as dp2, killed, gone on with as tp2, killed, gone on with as one rank."""
    command = Command(alone.directory.parent / "taken over", TAKEOVER_STEPS)

    def disturb(killer: Killer) -> str:
        for layout in ({"dp": 1, "tp": 2}, {"dp": 1, "tp": 1}):
            killer.layout = layout
            if not killer.kill("launcher"):
                return "the run ended before it was taken over"
        return ""

    return _disturbed("taken over by tp2, then by one rank", command, alone, disturb, seed, tolerance=TOLERANCE)


def _disturbed(
    name: str, command: Command, alone: Command, disturb: Callable[[Killer], str], seed: int, tolerance: float
) -> KillResult:
    killer = Killer(command, seed)
    start, seconds, failure, error = time.monotonic(), 0.0, "", float("inf")
    try:
        try:
            failure = disturb(killer)
        finally:
            seconds = time.monotonic() - start
        killer.finish()
        losses = command.losses()
        expected = alone.losses()
        error = difference(losses, {step: expected[step] for step in range(1, command.steps + 1)})
    except (DisturbedError, subprocess.TimeoutExpired) as problem:
        failure = f"{problem}"
    finally:
        killer.launcher.kill()
        killer.launcher.wait()
    seconds_a_kill = seconds / max(1, killer.kills.total())
    return KillResult(
        name, dict(killer.kills), command.steps, error, tolerance, seconds_a_kill, killer.gave_up, failure
    )


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="meshwright-kills-") as directory:
        yield Path(directory)


def main() -> int:
    """Print a line for each run; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of the first run (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = parser.parse_args()
    rows = run(options.kills, options.seed)
    for row in rows:
        print(row)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
