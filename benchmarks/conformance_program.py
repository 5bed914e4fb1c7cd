"""A program for gloo on another backend, unchanged: ``python -m benchmarks.conformance_program MODULE``.

Launchers start one such process a rank. Where the module asks for gloo, it gets the backend that ``BACKEND`` names.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshwright.comm.process_group.registration import register


def _in_place_of_gloo(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        replaced = {name: backend if value == "gloo" else value for name, value in kwargs.items()}
        return function(*(backend if value == "gloo" else value for value in args), **replaced)

    return call


if __name__ == "__main__":
    register()
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _in_place_of_gloo(getattr(dist, name), os.environ["BACKEND"]))
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
