"""Job graphs on Ray: how near the makespan is to the simulated one, and what is lost when processes are killed.

Run as ``python -m benchmarks.jobs``. Vertices of random graphs sleep, so that two cores can run many of them.

Makespans: 50 random graphs of 12 vertices, each of which takes 1 or 2 of the 4 cores of a node and sleeps for 1 to 3 s,
on a local Ray cluster. The simulated makespan is known before the run; the measured one counts from the start of the
first vertex to the journal's line for the end of the last, in seconds that all overheads belong to. The simulated one
is compared with the critical path too.

Kills: random graphs run until there were 100 kills: of the Ray worker that runs a vertex, of any Ray worker, and of the
scheduler, after which the same command is given again. A vertex may be started again only if its own worker died, or if
it ran when the scheduler was killed; a vertex that had finished must not. In the end all
outputs must equal, bit for bit, those of a serial run in this process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from meshwright.ir import files
from meshwright.ir.job_run import JobRecord
from meshwright.ir.result import Check, Finding, Settings
from meshwright.jobs.journal import Failed, Finished, Opened, Started
from meshwright.jobs.run import RECORD
from tests.job_graphs import events_in, hashes_in, kill_vertex, random_graph, running_in, save, serial_hashes

COMMAND = "python -m benchmarks.jobs"
GRAPHS, SIZE, CORES, LEAST_S, MOST_S = 50, 12, 4, 1.0, 3.0
"""Random graphs; their vertices; the cores of the node; and the seconds that a vertex sleeps."""
LIMIT = 0.05
"""The makespan's largest distance from the simulated one."""
KILLS, KILLS_OF_A_GRAPH, KILL_SIZE, KILL_S = 100, 5, 10, (0.3, 1.0)
"""Kills; the most kills in a graph; its vertices; and the seconds that they sleep."""
PATIENCE_S = 120.0
WORKERS = ("ray::IDLE", "ray::execute")
"""The names of Ray's workers; without its other processes, a local cluster is gone as a whole."""
SETTINGS = "sleeping vertices"


# --- makespans --------------------------------------------------------------------------------------------------------


def makespan_findings(options: argparse.Namespace) -> list[Finding]:
    """Run random graphs, one after the other, each by the command line."""
    errors, against_path, equal = list[float](), list[float](), 0
    for seed in range(options.graphs):
        with tempfile.TemporaryDirectory(prefix="meshwright-jobs-") as name:
            folder = Path(name)
            graph = random_graph(seed, folder, size=SIZE, cores=CORES, least_s=LEAST_S, most_s=MOST_S)
            save(graph, folder / "g.toml")
            subprocess.run(_command("g.toml"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
            record = files.load(folder / "runs" / "g" / RECORD, JobRecord)
            equal += hashes_in(folder / "runs" / "g") == serial_hashes(graph)
        assert record.predicted_s is not None
        assert record.measured_s is not None
        errors.append(record.measured_s / record.predicted_s - 1)
        against_path.append(record.measured_s / record.critical_s)
        print(f"random graph {seed}: {errors[-1]:+.2%}: simulated {record.predicted_s:.3f} s, measured "
              f"{record.measured_s:.3f} s; critical path {record.critical_s:.3f} s", flush=True)  # fmt: skip
    within = sum(abs(error) <= LIMIT for error in errors)
    total, graphs = len(errors), f"{len(errors)} random graphs of {SIZE} sleeping vertices on Ray"
    text = (
        f"{within} of {total}; median {statistics.median(errors):+.2%}, worst {max(errors, key=abs):+.2%}; the median "
    )
    text += f"is {statistics.median(against_path):.2f} x the critical path, because there are {CORES} cores"
    notes = {"errors": [round(error, 4) for error in errors]}
    return [
        Check(
            target=f"{graphs}: makespan within {LIMIT:.0%} of the simulated one", measured=text, notes=notes,
            verdict="pass" if within == total else "fail", passed=within, total=total,
        ),
        Check(
            target=f"{graphs}: outputs equal a serial run bit for bit", measured=f"{equal} of {total}",
            verdict="pass" if equal == total else "fail", passed=equal, total=total,
        ),
    ]  # fmt: skip


def _command(file: str) -> list[str]:
    return [sys.executable, "-m", "meshwright.cli", "jobs", file, "--json"]


# --- kills ------------------------------------------------------------------------------------------------------------


class Killing(NamedTuple):
    """The kills in a graph, by kind; how often each vertex may have been started again; and what went wrong."""

    kills: Counter[str]
    problems: list[str]
    starts_again: int


def kill_findings(options: argparse.Namespace) -> list[Finding]:
    """Kill until there were enough."""
    draw, kills, problems, again, graphs, equal = random.Random(options.seed), Counter[str](), list[str](), 0, 0, 0
    while kills.total() < options.kills and graphs < options.kills:
        with tempfile.TemporaryDirectory(prefix="meshwright-jobs-") as name:
            folder = Path(name)
            graph = random_graph(
                1000 + graphs, folder, size=KILL_SIZE, cores=CORES, least_s=KILL_S[0], most_s=KILL_S[1]
            )
            save(graph, folder / "g.toml")
            killed = _killed(folder, draw, min(KILLS_OF_A_GRAPH, options.kills - kills.total()))
            graphs += 1
            kills += killed.kills
            again += killed.starts_again
            problems += [f"graph {graphs}: {problem}" for problem in killed.problems]
            same = hashes_in(folder / "runs" / "g") == serial_hashes(graph)
            equal += same
            print(f"graph {graphs}: {dict(killed.kills)}, {killed.starts_again} started again, "
                  f"{'equal' if same else 'NOT EQUAL'}; {'; '.join(killed.problems)}", flush=True)  # fmt: skip
    counted = ", ".join(f"{count} of {kind}" for kind, count in sorted(kills.items()))
    passed = kills.total() >= options.kills and not problems
    return [
        Check(
            target=f"{options.kills} kills of vertices, workers and the scheduler: only lost vertices run again",
            verdict="pass" if passed else "fail", passed=kills.total() if passed else 0, total=options.kills,
            measured=f"{counted}; {again} vertices were running, and were started again"
            + "".join(f"; {problem}" for problem in problems[:3]),
        ),
        Check(
            target=f"{options.kills} kills: outputs equal a serial run bit for bit",
            verdict="pass" if equal == graphs else "fail", passed=equal, total=graphs, measured=f"{equal} of {graphs}",
        ),
    ]  # fmt: skip


def _killed(folder: Path, draw: random.Random, most: int) -> Killing:
    """Run the graph in a folder, and kill at random moments, at most ``most`` times, until it is complete."""
    directory, kills, problems = folder / "runs" / "g", Counter[str](), list[str]()

    def started() -> subprocess.Popen[bytes]:
        with (folder / "told").open("wb") as file:
            return subprocess.Popen(_command("g.toml"), cwd=folder, stdout=subprocess.DEVNULL, stderr=file)

    process = started()
    begun, seen = time.monotonic(), 0
    while process.poll() is None:
        if (now := len(events_in(directory))) != seen:
            begun, seen = time.monotonic(), now
        if time.monotonic() - begun > PATIENCE_S:
            problems.append(f"nothing happened for {PATIENCE_S:g} s while {', '.join(running_in(directory))} ran")
            process.kill()
            break
        time.sleep(draw.uniform(0.1, 0.5))
        running = running_in(directory)
        if not running or kills.total() >= most:
            continue
        kind = draw.choices(["a vertex", "a worker", "the scheduler"], [6, 2, 2])[0]
        if kind == "the scheduler" and kills["the scheduler"] < 2:
            process.kill()
            process.wait()
            kills[kind] += 1
            process = started()
            begun = time.monotonic()
        elif kind == "a vertex":
            vertex = draw.choice(sorted(running))
            kills[kind] += kill_vertex(directory, vertex, running[vertex])
        elif kind == "a worker" and (workers := ray_workers(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(workers), signal.SIGKILL)
                kills[kind] += 1
    if process.returncode:
        problems.append(f"exit code {process.returncode}: {(folder / 'told').read_text()[-500:]}")
    again, wrong = started_again(directory)
    lost = sum(isinstance(event, Failed) for event in events_in(directory))
    if lost > kills["a vertex"] + kills["a worker"]:
        wrong.append(f"{lost} vertices were lost by fewer kills")
    return Killing(kills, problems + wrong, again)


def ray_workers(scheduler: int) -> list[int]:
    """The Ray workers, busy or idle, below a scheduler's process."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            pid = int(path.name)
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (path / "cmdline").read_bytes()[:100].decode(errors="replace")

    def below(pid: int) -> bool:
        while pid in parents and pid != scheduler:
            pid = parents[pid]
        return pid == scheduler

    return sorted(pid for pid, name in names.items() if name.startswith(WORKERS) and below(pid))


def started_again(directory: Path) -> tuple[int, list[str]]:
    """How many starts followed a loss, and which were not to be: of a vertex that had finished, or had not ended."""
    state: dict[str, str] = {}
    again, wrong = 0, []
    for event in events_in(directory):
        if isinstance(event, Opened):  # what ran under a scheduler that was killed is lost
            state = {name: "lost" if was == "running" else was for name, was in state.items()}
        elif isinstance(event, Started):
            before = state.get(event.unit, "new")
            if before not in ("new", "lost"):
                wrong.append(f"{event.unit} was started again although it was {before}")
            again += before == "lost"
            state[event.unit] = "running"
        elif isinstance(event, Finished):
            state[event.vertex] = "finished"
        elif isinstance(event, Failed):
            if not event.lost:
                wrong.append(f"{event.unit} failed: {event.problem}")
            state[event.unit] = "lost"
    return again, wrong


# ----------------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], list[Finding]]] = {
    "makespans": makespan_findings, "kills": kill_findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only")
    parser.add_argument("--graphs", type=int, default=GRAPHS, help=f"random graphs ({GRAPHS})")
    parser.add_argument("--kills", type=int, default=KILLS, help=f"kills ({KILLS})")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    options = parser.parse_args(arguments)
    results = [finding for part in options.only or PARTS for finding in PARTS[part](options)]
    if not options.only and (options.graphs, options.kills) == (GRAPHS, KILLS):
        timed = "From the start of a graph's first vertex until the journal has the end of its last."
        sizes: dict[str, str | int | float | bool] = {"vertices": SIZE, "cores of the node": CORES}
        settings = {SETTINGS: Settings(dtype="none", ranks=1, threads=1, sizes=sizes)}
        text = (__doc__ or "").partition("many of them.")[2].strip()
        report.write("jobs", "Job graphs", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
