"""A Python environment with the trainers that exports are for. It uses the torch of the project's own environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-export"
TARGETS = ("torchtitan==0.3.0", "megatron-core==0.16.1", "deepspeed==0.19.8")
"""The packages, without their dependencies: those on torch would replace it."""
NEEDS = (
    "wheel", "tyro", "docstring_parser", "typeguard", "shtab", "py-cpuinfo", "hjson", "msgpack", "einops", "ninja",
    "torchdata", "spmd_types==0.2.3", "torch_checkpointing", "datasets>=3.6.0,<4.8.0", "tensorboard", "wandb",
    "multiprocess", "dill", "xxhash", "pyarrow", "pandas", "python-dateutil", "pytz", "tzdata", "six", "absl-py",
    "grpcio", "markdown", "tensorboard-data-server", "werkzeug", "platformdirs", "gitpython", "gitdb", "smmap",
    "sentry-sdk", "httpx<1", "httpcore", "h11", "anyio", "sniffio", "certifi", "idna", "requests", "urllib3",
    "charset-normalizer", "triton",
)  # fmt: skip
"""Packages that the trainers import. torchtitan's attention imports triton, whose kernels no CPU runs."""
QUIET = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
    "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
}  # fmt: skip
"""DeepSpeed compiles its collectives for CPUs when it starts. It does so in a folder of its own, because a killed run
leaves a lock there."""


def environment() -> Path:
    """The Python of the environment, which is made if it is missing.

    Raises:
        RuntimeError: the environment cannot be made, or has another torch than the project.
    """
    python = FOLDER / "bin" / "python"
    done = FOLDER / ".installed"
    wanted = "\n".join((*NEEDS, *TARGETS))
    if not done.exists() or done.read_text() != wanted:
        _run([sys.executable, "-m", "venv", str(FOLDER)])
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        names = FOLDER / "lib" / version / "site-packages" / "zz_project.pth"
        names.write_text(f"{sysconfig.get_path('purelib')}\n")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, *NEEDS])
        _run([*pip, "--no-build-isolation", *TARGETS])
        done.write_text(wanted)
    here, there = (_run([p, "-c", "import torch; print(torch.__version__)"]) for p in (sys.executable, str(python)))
    if here != there:
        raise RuntimeError(f"torch is {there.strip()} in {FOLDER}, and {here.strip()} here: remove the folder")
    return python


def run_there(words: Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float = 900.0) -> str:
    """Run a program in the environment, with the project's packages and modules. Return its output.

    Raises:
        RuntimeError: the program failed, or did not end in time.
    """
    return _run([str(environment()), "-W", "ignore", *words], variables, timeout_s)


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float = 3600.0) -> str:
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    try:
        process = subprocess.run(
            command, env={**os.environ, **QUIET, **paths, **(variables or {})}, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[:6])} did not end in {timeout_s:g} s") from error
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ended with {process.returncode}:\n{process.stderr[-3000:]}")
    return process.stdout
