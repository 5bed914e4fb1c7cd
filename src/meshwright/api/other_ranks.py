"""Runs on another number of ranks than they have begun on, and runs whose ranks have too little memory to begin."""

import logging
from pathlib import Path

import torch

from meshwright import build
from meshwright.capture.batch import take_apart
from meshwright.errors import FailedRankError
from meshwright.ir.run import Run
from meshwright.runtime import launch, manifest
from meshwright.runtime.device import num_cuda_devices
from meshwright.runtime.memory import memory_bytes

log = logging.getLogger("meshwright")


def fitting(run: Run, directory: Path) -> Run:
    """The run, or, if it has begun on other ranks than there are now, the run with a layout for these. Called on a
    rank."""
    num_ranks = launch.what_is_launched().size
    begun = launch.has_begun_before() or has_begun(directory)
    if not begun or run.layout.searched or run.layout.replicas > 1 or run.num_ranks(num_ranks) == num_ranks:
        return run
    fewer = run.within(num_ranks)
    fitted = fewer if fewer.num_ranks(num_ranks) == num_ranks else run.searched()
    if fitted.layout != run.layout and launch.launched_rank() == 0:
        how = "the planner searches for another" if fitted.layout.searched else "it has other data-parallel ranks"
        needed = run.num_ranks(num_ranks)
        log.warning("the layout takes %d ranks, and there are %d: %s", needed, num_ranks, how)
    return fitted


def has_begun(directory: Path) -> bool:
    """Whether a run has saved a checkpoint in its directory."""
    return bool(manifest.steps_in(directory / "checkpoints"))


def ranks_here(run: Run) -> int:
    """The number of ranks to start on this machine. A run that has begun goes on with fewer accelerators than its
    layout takes."""
    num_devices = launch.num_devices()
    if num_cuda_devices() and has_begun(Path(run.train.directory)):
        run = run.within(num_devices)
    return run.num_ranks(num_devices)


def can_use(run: Run, num_ranks: int) -> bool:
    """Whether a run that has begun can go on with exactly so many ranks."""
    return run.within(num_ranks).num_ranks(num_ranks) == num_ranks


def too_large(run: Run, error: FailedRankError, num_ranks: int) -> FailedRankError:
    """The error of ranks that the kernel has killed for want of memory before they made a step: it says what takes how
    much. ``num_ranks``: the ranks on this machine."""
    try:
        with torch.device("meta"):
            model = build.model(run)
        held = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
        batch = sum(value.nbytes for value in take_apart(build.example_batch(run)).tensors.values())
    except Exception:  # noqa: BLE001 - whatever keeps it from being built, it is not to hide the first error
        return error
    each = f"each of {num_ranks} ranks builds the whole model before it keeps its part: {_size(held)}"
    together = f"{_size(held * num_ranks)} on this machine, which has {_size(memory_bytes())}"
    problem = f"{error.problem}: the kernel had no memory left. {each}, {together}; the global batch is {_size(batch)}"
    remedy = "make the model or the batch smaller, or start fewer ranks here (train.ranks, or more hosts)"
    if run.layout.searched:
        remedy += "; a search of layouts takes memory, too: give sizes instead of plan = auto"
    explained = FailedRankError(problem, where=error.where, remedy=remedy)
    explained.doing = error.doing
    return explained


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
