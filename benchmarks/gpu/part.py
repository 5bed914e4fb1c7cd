"""Runs one part of ``make gpu`` in this process: ``python -m benchmarks.gpu.part NAME FOLDER DEADLINE``."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.parts import PARTS

STACK_S = 2.0
"""Seconds before a part is stopped, at which it prints where it is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the part. Each ``benchmarks/gpu/NAME.py``, or the module that ``WHERE`` names, has a function ``run``."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.part", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("deadline", type=float, help="when it is stopped, in seconds since 1970")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    left_s = options.deadline - time.time()
    faulthandler.dump_traceback_later(max(1.0, left_s - STACK_S))
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(max(1, min(16, torch.get_num_threads())))
    context = Context(options.name, options.scratch, left_s, rehearse=options.rehearse)
    function: Callable[[Context], None] = import_module(f"benchmarks.gpu.{WHERE.get(options.name, options.name)}").run
    try:
        function(context)
    except Exception as error:  # noqa: BLE001 - what was found before it is kept, and the next part runs
        context.notes.failed(f"{options.name}: to its end", error)
    faulthandler.cancel_dump_traceback_later()
    return 0


WHERE = {"gpt": "speed", "llama": "speed", "attention": "speed", "ranks": "several"}
"""Maps a part to its module, where the name is another."""

if __name__ == "__main__":
    sys.exit(main())
