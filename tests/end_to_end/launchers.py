"""Other launchers than Meshwright's: torchrun, and one that forks its ranks from a process that has imported torch."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import HOST, PRELOAD

ENDS_S = 200.0

Launcher = Callable[..., None]
"""``launch(num_ranks, directory, function, *args)`` calls a top-level function on ranks that another launcher starts,
and returns when all have ended with success."""


def by_fork(num_ranks: int, directory: Path, function: Callable[..., object], *args: Any) -> None:
    """The environment is all that a launcher gives to ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": HOST}
    ranks = [
        context.Process(
            target=_run,
            args=(environment | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "MASTER_PORT": f"{port}"}, function, args),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(ENDS_S)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * num_ranks


def _run(environment: dict[str, str], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()  # a fork does not, before Python 3.13


def by_torchrun(num_ranks: int, directory: Path, function: Callable[..., object], *args: Any) -> None:
    script = directory / "script.py"
    call = pickle.dumps((function, args))
    script.write_text(f"import pickle\nfunction, args = pickle.loads({call!r})\nfunction(*args)\n")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{num_ranks}"]
    done = subprocess.run(
        [*launcher, str(script)],
        capture_output=True, text=True, timeout=ENDS_S, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


LAUNCHERS = pytest.mark.parametrize("launch", [by_fork, pytest.param(by_torchrun, marks=pytest.mark.product)])
"""In ``test_errors.py``, `make test` has a program that torchrun starts."""
