"""The line of code at which a dry run finds something."""

import contextlib
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

from meshwright.comm.record import place


def running_line() -> str:
    """The innermost line of code outside of PyTorch and of a dry run's own, and the place in the schedule."""
    return _line(frame for frame, _ in traceback.walk_stack(None))


def failed_at(error: BaseException) -> str:
    """The innermost line of code outside of PyTorch and of a dry run's own from which an error came."""
    return _line(reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]))


def _line(frames: Iterable[FrameType]) -> str:
    own = (str(Path(__file__).with_name(name)) for name in ("rehears", "fake_operators.py", "unguarded.py"))
    outside = (str(Path(torch.__file__).parent), *own, contextlib.__file__)
    frame = next((frame for frame in frames if not frame.f_code.co_filename.startswith(outside)), None)
    text = ""
    if frame is not None:
        name, root = frame.f_code.co_filename, str(Path(__file__).parents[2])
        name = "lowered step" if name.startswith("<eval_with_key>") else name.removeprefix(root + os.sep)
        text = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
    here = place()
    return text + f" ({here})" * (here is not None)
