"""Does an update get lost when replicas and servers are killed? A part of ``benchmarks/consistency.py``.

Each push has a gradient that is 1 at an element of its own, and 0 elsewhere, so that in the end the parameters tell how
often each was applied. A replica writes the number of a push into a file before the step and after it: the step after
it begins only when the push has its reply. So a push whose successor's step has ended must be applied once, and the
last ones of a life that was killed may be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks import report
from meshwright.errors import MeshwrightError
from meshwright.ir.result import Check, Finding
from meshwright.runtime import launch
from meshwright.runtime.launch_replicas import run_replicas

COMMAND = "python -m benchmarks.consistency_kills"
REPLICAS, KILLS, PUSHES = 4, 100, 20_000
"""Replicas; kills; and the most pushes of a replica."""
RULE = "server(async, servers=2, copies=3)"
TOGETHER = 2
"""So many replicas, and the servers beside them, may be killed at once: a copy of each range lives on."""
PATIENCE_S, LOOK_S, SEED, STEPS = 120.0, 0.02, 0, 3
"""Seconds without progress that count as a hang; between looks; and steps of each replica between two kills."""


class Marks(nn.Module):
    """One parameter for each push of each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(REPLICAS * PUSHES, dtype=torch.float64))

    def forward(self, chosen: Tensor) -> Tensor:
        return self.marks[chosen]


def sum_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the chosen parameters. Its gradient is 1 at the push of a replica that has one sample."""
    result: Tensor = model(batch["chosen"]).mean()
    return result


class Log(NamedTuple):
    """What a replica has written. ``life``: its newest process id, 0 if there is none; ``since``: the steps that it has
    ended in this life; ``begun``: the pushes of all steps that began; ``certain``: those that had their reply."""

    life: int
    since: int
    begun: list[int]
    certain: set[int]

    @classmethod
    def read(cls, path: Path) -> Log:
        """The whole lines of the file."""
        life, ended, begun, certain = 0, list[int](), list[int](), set[int]()
        for line in path.read_text().split("\n")[:-1] if path.exists() else []:
            word, number = line.split()
            if word == "life":
                life, ended = int(number), []
            elif word == "begin":
                begun.append(int(number))
            elif word == "end":
                certain.update(ended[-1:])  # this step began with the reply to the push before it
                ended.append(int(number))
            else:
                certain.add(int(number))
        return cls(life, len(ended), begun, certain)


def push(directory: Path) -> list[float]:
    """Push until the file ``stop`` is there. Return how often the servers have applied each push."""
    torch.set_num_threads(1)
    replica = launch.launched_replica()
    path = directory / f"{replica}.log"
    number = max(Log.read(path).begun, default=-1) + 1
    trainer = mw.parallelize(
        Marks(), sum_of, {"chosen": torch.zeros(REPLICAS, dtype=torch.long)}, device="cpu",
        plan=mw.Layout(replicas=REPLICAS, consistency=RULE),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float(REPLICAS)),
    )  # fmt: skip
    assert trainer.replica is not None
    with path.open("a", buffering=1) as file:
        file.write(f"life {os.getpid()}\n")
        while not (directory / "stop").exists():
            file.write(f"begin {number}\n")
            trainer.step({"chosen": torch.tensor([replica * PUSHES + number])}, local=True)
            file.write(f"end {number}\n")
            number += 1
            time.sleep(LOOK_S / 2)
        trainer.replica.begin()
        file.write(f"reply {number - 1}\n")
    (directory / f"{replica}.ready").touch()
    if replica:
        _wait((directory / "done").exists)
        return []
    _wait(lambda: all((directory / f"{each}.ready").exists() for each in range(REPLICAS)))
    trainer.step({"chosen": torch.tensor([PUSHES - 1])}, local=True)  # its reply has the pushes of all replicas
    trainer.replica.begin()
    marks: Tensor = trainer.full_state_dict()["marks"]
    (directory / "done").touch()
    return [-value for value in marks.tolist()]


def _wait(done: Callable[[], bool]) -> None:
    """Wait until ``done()``.

    Raises:
        TimeoutError: it is not for ``PATIENCE_S`` seconds.
    """
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > PATIENCE_S:
            raise TimeoutError
        time.sleep(LOOK_S)


def findings(kills: int = KILLS, seed: int = SEED) -> list[Finding]:
    """Kill, and count."""
    with tempfile.TemporaryDirectory(prefix="meshwright-kills-") as name:
        directory, draw, marks, hangs = Path(name), random.Random(seed), list[list[float]](), 0
        failures: list[BaseException] = []

        def train() -> None:
            try:
                marks.append(
                    run_replicas(
                        push,
                        directory,
                        num_replicas=REPLICAS,
                        num_ranks=1,
                        directory=directory / "ranks",
                        restarts=kills + 1,
                        tell=lambda line: None,
                    )
                )
            except MeshwrightError as error:
                failures.append(error)

        thread = threading.Thread(target=train, name="trains", daemon=True)
        thread.start()
        killed = 0
        logs = [directory / f"{replica}.log" for replica in range(REPLICAS)]
        dead: set[int] = set()

        def all_train() -> bool:
            known = [Log.read(path) for path in logs]
            return bool(failures) or all(log.life not in dead and log.since >= STEPS for log in known)

        try:
            while killed < kills and not failures:
                _wait(all_train)
                time.sleep(draw.random() * 0.1)
                for replica in draw.sample(range(REPLICAS), min(draw.randint(1, TOGETHER), kills - killed)):
                    dead.add(process := Log.read(logs[replica]).life)
                    os.kill(process, signal.SIGKILL)
                    killed += 1
            _wait(all_train)
        except TimeoutError:
            hangs = 1
        (directory / "stop").touch()
        thread.join(PATIENCE_S)
        hangs += thread.is_alive()
        if thread.is_alive():
            for path in logs:
                with suppress(ProcessLookupError):
                    os.kill(Log.read(path).life, signal.SIGKILL)
        known = [Log.read(path) for path in logs]
    target = f"{kills} kills of replicas with servers beside them, {RULE}: no update lost or doubled, no hang"
    if not marks or not marks[0]:
        text = f"{killed} kills, then {'a hang' if hangs else failures[0] if failures else 'nothing'}"
        return [Check(target=target, verdict="fail", measured=text, passed=killed, total=kills)]
    lost = doubled = open_pushes = 0
    for replica, log in enumerate(known):
        counts = marks[0][replica * PUSHES : (replica + 1) * PUSHES]
        lost += sum(counts[number] < 1 for number in log.certain)
        doubled += sum(count > 1 for count in counts)
        open_pushes += len(set(log.begun) - log.certain)
        stray = sum(count != 0 for number, count in enumerate(counts[:-1]) if number not in log.begun)
        doubled += stray
    pushes = sum(len(log.certain) for log in known)
    passed = not (lost or doubled or hangs) and killed == kills
    text = (
        f"{killed} kills, {hangs} hangs; of {pushes:,} pushes that had their reply {lost} are lost, {doubled} are "
        f"applied twice or were never made; {open_pushes} pushes had no reply yet when their replica was killed"
    )
    return [Check(target=target, verdict="pass" if passed else "fail", measured=text, passed=killed if passed else 0,
                  total=kills)]  # fmt: skip


def main() -> int:
    """Kill and print."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=KILLS, help=f"kills ({KILLS})")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments and the victims")
    options = parser.parse_args()
    return report.alone(findings(options.kills, options.seed))


if __name__ == "__main__":
    sys.exit(main())
