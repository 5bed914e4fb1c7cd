"""A rank that ends while others communicate ends them within seconds, with an error that names it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOON_S = 15.0
"""In which a rank hears that another is gone, on a busy machine; ranks wait for each other for longer."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "MESHWRIGHT_TIMEOUT_S": "90", "OMP_NUM_THREADS": "1", **more}


Ends = Callable[[str, str], list[tuple[int, str]]]
"""Runs COMMUNICATION and HOW: by rank, the exit code, and what it said."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.end_to_end.leaving"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def ends(server: subprocess.Popen[str], tmp_path: Path) -> Ends:
    def run(communication: str, how: str) -> list[tuple[int, str]]:
        assert server.stdin is not None
        assert server.stdout is not None
        print(communication, how, tmp_path, free_port(), sep=", ", file=server.stdin, flush=True)
        codes = json.loads(server.stdout.readline())
        return [(code, (tmp_path / f"{rank}").read_text()) for rank, code in enumerate(codes)]

    return run


def time_of(what: str, output: str) -> float:
    result = re.search(rf"{what} at ([\d.]+)", output)
    assert result is not None, output
    return float(result[1])


@pytest.mark.parametrize(
    ("communication", "how"),
    [
        ("shared memory", "1"), ("gloo", "raise"), ("messages", "_exit"), ("messages by gloo", "0"),
        *(
            pytest.param(*case, marks=pytest.mark.product)
            for case in [("shared memory", "0"), ("gloo", "1"), ("gloo", "_exit"), ("messages", "1")]
        ),
    ],
)  # fmt: skip
def test_others_end_soon_and_name_the_rank_that_is_gone(ends: Ends, communication: str, how: str) -> None:
    first, left, last = ends(communication, how)
    assert left[0] == {"1": 1, "0": 0, "_exit": 7, "raise": 1}[how]
    why = "it has failed with KeyError: 'what the rank itself says'" if how == "raise" else "it has (left|ended)"
    for code, output in (first, last):
        assert code == 1, output
        assert time_of("hears", output) - time_of("leaves", left[1]) < SOON_S, output
        lines = re.findall(r"^(?:\[rank.\]: )?meshwright\.errors\.LostRankError: (.*)", output, re.MULTILINE)
        assert re.match(rf"rank 1: ({why}|rank [02] has given up because of it)", lines[-1]), output


def test_a_rank_may_end_otherwise_when_all_is_done(ends: Ends) -> None:
    each = ends("gloo", "at the end")
    assert [code for code, _ in each] == [0, 3, 0], each


@pytest.mark.product
def test_torchrun_ends_soon_when_a_rank_leaves() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}",
            "-m", "tests.end_to_end.leaving", "shared memory", "0",
        ],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert time_of("hears", done.stdout) - time_of("leaves", done.stderr) < SOON_S
    assert re.search(r"LostRankError: rank 1: (it has left|rank [02] has given up because of it)", done.stderr)
