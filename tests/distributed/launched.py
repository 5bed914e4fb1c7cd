"""The environment of torchrun on a rank of the pool, for libraries that read it; afterwards it is as before."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def launched_by_torchrun() -> Iterator[None]:
    before, joined = dict(os.environ), dist.is_initialized()
    rank, size = (str(dist.get_rank()), str(dist.get_world_size())) if dist.is_initialized() else ("0", "1")
    if size != "1":
        os.environ.update(
            {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
        )  # fmt: skip
    _forget()
    try:
        yield
    finally:
        _forget()
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _forget() -> None:
    """accelerate keeps where it is launched for the life of a process."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def example(name: str, *arguments: str) -> str:
    """Return what an example prints, on this rank as torchrun would start it."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [name, *arguments]
    try:
        with launched_by_torchrun(), contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def lines_of(name: str) -> int:
    """The length of an example."""
    return len((EXAMPLES / name).read_text().splitlines())
