"""What does a lost rank cost? ``python -m benchmarks.faults [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

takeover   The demo's GPT on 4 data-parallel ranks of this machine, without checkpoints on the disk. Several times, a
           random rank is killed after a random step. The other ranks are then stopped, and new ranks go on from the
           copies in memory. The lost time lies between the kill and the moment at which the next step can begin. The
           steps after the last copy are made again.
random     A small MLP in float64 under several layouts. Its ranks are killed at random moments of random steps, also
           while a copy is being made. The losses must be those of an undisturbed run, bit for bit.
hosts      Two launchers with a rank each, and a third as a spare, on a loopback address. The second launcher is killed,
           together with its copies in memory, and the spare replaces it. The spare is killed too, the first launcher
           goes on alone, and another launcher joins. The losses must be those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import report
from benchmarks.run_folders import losses_in
from meshwright import api, config
from meshwright.errors import RankError
from meshwright.ir import files
from meshwright.ir.result import Check, Duration, Finding, Series, Settings
from meshwright.ir.run import Run
from meshwright.ir.statistics import median
from meshwright.runtime import memory_copies
from meshwright.runtime.loop import Silent
from meshwright.runtime.meeting_point import free_port

COMMAND = "python -m benchmarks.faults"
RANKS, KILLS, LIMIT_S, SEED = 4, 8, 5.0, 0
WORDS = "a lost rank of 4 is replaced from memory"
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {"dp": 4}, "ZeRO": {"dp": 4, "zero": 2}, "tensor parallel": {"dp": 2, "tp": 2},
    "pipeline": {"dp": 1, "pp": 4, "microbatches": 4},
}  # fmt: skip
RANDOM_KILLS, TOLERANCE, PATIENCE_S, HOST_STEPS = 6, 1e-9, 300.0, 600


class Kills(Silent):
    """Progress of a run in which a rank is killed in each attempt. ``kills[attempt]``: the rank, the number of steps of
    the attempt, and the seconds after that step. Files record the times at which training begins and the rank dies."""

    def __init__(self, directory: Path, kills: Sequence[tuple[int, int, float]]) -> None:
        self.directory, self.steps, self.counts = directory, 0, False
        self.attempt = len(list((directory / "ranks").glob("failed-*")))
        self.rank, self.at, self.after_s = kills[self.attempt] if self.attempt < len(kills) else (-1, 0, 0.0)

    def begin(self, what: str, total: int = 0) -> None:
        self.counts = what == "training"
        if self.counts and self.steps == 0 and api.launched_rank() == 0:
            self.note("begun", {"time_s": time.time(), "left": total})

    def advance(self) -> None:
        self.steps += self.counts
        if self.counts and self.steps == self.at and api.launched_rank() == self.rank:
            if self.after_s:
                threading.Timer(self.after_s, self.die).start()
            else:
                self.die()

    def die(self) -> None:
        self.note("killed", {"time_s": time.time(), "steps": self.steps})
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, name: str, value: dict[str, float]) -> None:
        files.write_atomically(self.directory / f"{name}-{self.attempt}.json", json.dumps(value).encode())


def train(run: Run, kills: Sequence[tuple[int, int, float]], share: float) -> int:
    """Train on a rank that may be killed."""
    memory_copies.SHARE = share
    return api.train(run, Kills(Path(run.train.directory), kills)).steps


def killed(run: Run, kills: Sequence[tuple[int, int, float]], share: float = memory_copies.SHARE) -> None:
    """Train on ``RANKS`` ranks, which are started again after each kill."""

    def always(error: RankError, kept: Path) -> bool:
        return True

    environment = {"OMP_NUM_THREADS": "1"}
    api.run_ranks(
        train, run, kills, share, num_ranks=RANKS, directory=Path(run.train.directory), again=always,
        environment=environment,
    )  # fmt: skip


def losses(run: Run) -> dict[int, float]:
    """The loss of each step, by metrics.jsonl."""
    return losses_in(Path(run.train.directory), gaps=True)


def demo(directory: Path, steps: int) -> Run:
    """The demo's model on four data-parallel ranks, without checkpoints."""
    return config.make(
        {
            "model": {"name": "gpt", "layers": 4, "width": 256, "heads": 4, "sequence_length": 256},
            "data": {"kind": "text", "sequence_length": 256, "batch_size": 8, "max_bytes": 1_000_000, "held_out": 0.0},
            "layout": {"dp": RANKS},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"directory": str(directory), "steps": steps, "checkpoint_every": 0, "log_every": 100},
        },
        where=COMMAND,
    )  # fmt: skip


def takeover_findings(rounds: int) -> list[Finding]:
    """The time and the steps that a lost rank costs."""
    draw = random.Random(SEED)
    kills = [(draw.randrange(RANKS), draw.randint(8, 14), 0.0) for _ in range(max(rounds, KILLS))]
    with tempfile.TemporaryDirectory() as scratch:
        whole, run = demo(Path(scratch) / "whole", 40), demo(Path(scratch) / "run", 40 + 6 * len(kills))
        killed(run, kills)
        killed(whole, [])
        lost_s, again = [], []
        for attempt in range(len(kills)):
            at = [
                json.loads((Path(run.train.directory) / f"{name}-{number}.json").read_bytes())
                for name, number in (("killed", attempt), ("begun", attempt + 1), ("begun", attempt))
            ]
            lost_s.append(at[1]["time_s"] - at[0]["time_s"])
            again.append(at[0]["steps"] - (at[2]["left"] - at[1]["left"]))
        actual, expected = losses(run), losses(whole)
    estimate = median(lost_s)
    less = [steps < kill[1] for steps, kill in zip(again, kills, strict=True)]
    same = sum(actual.get(step) == loss for step, loss in expected.items())
    return [
        Duration(
            target=f"{WORDS}: the time from the kill to the next step, at most {LIMIT_S:g} s", limit_s=LIMIT_S,
            verdict=report.at_most(estimate, LIMIT_S), measured=f"{estimate} s in {len(lost_s)} kills",
            series=Series.of(lost_s, settings="demo", run=report.new_run()),
        ),
        Check(
            target=f"{WORDS}, and nothing is read from the disk", verdict="pass" if all(less) else "fail",
            measured=f"{min(again):.0f} to {max(again):.0f} steps are made again, of 8 to 14 since the last kill",
            passed=sum(less), total=len(kills),
        ),
        report.share(
            f"{WORDS}: the losses are those of a run without kills, bit for bit", same, len(expected),
            f"{same} of {len(expected)} losses",
        ),
    ]  # fmt: skip


def small(directory: Path, layout: dict[str, Any], steps: int) -> Run:
    """A model whose steps take no time, in float64."""
    return config.make(
        {
            "model": {"name": "mlp", "sizes": [8, 16, 16, 16, 4]},
            "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": 8, "held_out": 0.0},
            "layout": layout,
            "train": {"directory": str(directory), "steps": steps, "checkpoint_every": 0, "log_every": 7,
                      "dtype": "float64", "max_grad_norm": 1.0},
        },
        where=COMMAND,
    )  # fmt: skip


def random_findings(rounds: int) -> list[Finding]:
    """Losses after kills at random moments, under several layouts."""
    rows: list[Finding] = []
    draw = random.Random(SEED + 1)
    for name, layout in LAYOUTS.items():
        kills = [
            (draw.randrange(RANKS), draw.randint(1, 20), draw.choice([0.0, draw.random() * 0.01]))
            for _ in range(RANDOM_KILLS)
        ]
        with tempfile.TemporaryDirectory() as scratch:
            run, whole = (small(Path(scratch) / each, layout, 80) for each in ("run", "whole"))
            killed(run, kills, share=1e9)
            killed(whole, [])
            actual, expected = losses(run), losses(whole)
        same = sum(actual.get(step) == loss for step, loss in expected.items())
        rows.append(report.share(
            f"kills at random moments, {name}: the losses are those of a run without kills, bit for bit", same,
            len(expected), f"{same} of {len(expected)} losses after {len(kills)} kills",
        ))  # fmt: skip
    return rows


# --- hosts -----------------------------------------------------------------------------------------------------------

LAUNCHER = """
import sys
from pathlib import Path
from benchmarks import faults
faults.launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "first")
"""


class Slow(Silent):
    """Progress that slows steps down, so that hosts can come and go. A file records the ranks and steps of each
    attempt."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.counts = directory, False

    def begin(self, what: str, total: int = 0) -> None:
        self.counts = what == "training"
        if self.counts and api.launched_rank() == 0:
            with (self.directory / "attempts").open("a") as file:
                file.write(f"{os.environ['WORLD_SIZE']} {total}\n")

    def advance(self) -> None:
        time.sleep(0.05 if self.counts else 0.0)


def train_slowly(run: Run) -> int:
    """Train on a rank of a host."""
    memory_copies.SHARE = 1e9
    return api.train(run, Slow(Path(run.train.directory))).steps


def launch(directory: Path, port: int, first: bool) -> None:
    """A launcher with one rank."""
    run = small(directory, {"dp": -1}, HOST_STEPS)
    meeting = api.Meeting(2, first, "127.0.0.1", port, "faults")
    again = api.Restarts(directory / "checkpoints", print)
    (directory / f"launcher-{os.getpid()}").touch()  # all is imported
    api.run_ranks(
        train_slowly, run, num_ranks=1, directory=directory, meeting=meeting, again=again,
        fits=lambda num_ranks: api.can_use(run, num_ranks),
    )  # fmt: skip


def host_findings(rounds: int) -> list[Finding]:
    """Losses and ranks of a run whose hosts are lost and replaced."""
    with tempfile.TemporaryDirectory() as scratch:
        directory, port = Path(scratch) / "run", free_port()
        directory.mkdir()

        def come(first: bool = False) -> subprocess.Popen[bytes]:
            words = [sys.executable, "-c", LAUNCHER, str(directory), str(port), "first" if first else "other"]
            return subprocess.Popen(words, cwd=Path(__file__).parents[1])

        hosts = [come(first=True), come()]
        try:
            _await(directory, lambda sizes: sizes == [2], hosts[0])
            hosts.append(come())  # a spare: batches of 8 do not divide over three ranks
            _await_file(directory / f"launcher-{hosts[2].pid}", hosts[0])
            time.sleep(2.0)
            hosts[1].kill()
            _await(directory, lambda sizes: sizes == [2, 2], hosts[0])
            time.sleep(2.0)
            hosts[2].kill()
            _await(directory, lambda sizes: sizes == [2, 2, 1], hosts[0])
            hosts.append(come())
            _await(directory, lambda sizes: sizes == [2, 2, 1, 2], hosts[0])
            code = hosts[0].wait(PATIENCE_S)
        finally:
            for host in hosts:
                host.kill()
        sizes = _sizes(directory)
        actual = losses(small(directory, {"dp": -1}, HOST_STEPS))
        whole = small(Path(scratch) / "whole", {"dp": 1}, HOST_STEPS)
        api.train(whole)
        expected = losses(whole)
    worst = max((abs(actual.get(step, np.inf) - loss) for step, loss in expected.items()), default=np.inf)
    near = sum(abs(actual.get(step, np.inf) - loss) <= TOLERANCE for step, loss in expected.items())
    return [
        report.share(
            "hosts are lost and come again: the run goes on with those that are left, and with those that come",
            int(sizes == [2, 2, 1, 2] and code == 0), 1, f"ranks of the attempts: {sizes}; exit code {code}",
        ),
        report.share(
            f"hosts are lost and come again: the losses are those of one process within {TOLERANCE:g}", near,
            len(expected), f"{near} of {len(expected)} losses, the largest difference is {worst:.1e}",
        ),
    ]  # fmt: skip


def _sizes(directory: Path) -> list[int]:
    path = directory / "attempts"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def _await_file(path: Path, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _await(directory: Path, holds: Callable[[list[int]], bool], launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(_sizes(directory)) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "takeover": takeover_findings, "random": random_findings, "hosts": host_findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only")
    parser.add_argument("--kills", type=int, default=KILLS, help="kills of the part takeover, at least 5")
    options = parser.parse_args(arguments)
    findings: list[Finding] = []
    for part in options.only or PARTS:
        rows = PARTS[part](options.kills)
        findings += rows
        for row in rows:
            report.show(row)
    if not options.only:
        run = demo(Path("run"), 40)
        sizes: dict[str, str | int | float | bool] = {
            f"{name}.{key}": str(value)
            for name, section in (("model", run.model), ("data", run.data))
            for key, value in msgspec.to_builtins(section).items()
        }
        settings = {"demo": Settings(dtype="float32", ranks=RANKS, threads=1, sizes=sizes)}
        text = (__doc__ or "").partition("is missed.")[2].strip()
        timed = "From the kill of a rank to the moment at which the ranks that take over begin their first step."
        report.write("faults", "Lost ranks and hosts", COMMAND, timed, settings, findings, text)
    return int(any(row.verdict == "fail" for row in findings))


if __name__ == "__main__":
    sys.exit(main())
