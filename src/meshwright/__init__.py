"""Meshwright: plans, predicts and runs the parallel training of unmodified PyTorch models."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Plan

if TYPE_CHECKING:
    from meshwright.api import (
        auto_parallelize,
        calibrate,
        capture,
        dry_run,
        grid_product,
        joint,
        load,
        matmul,
        opaque,
        parallelize,
        plan,
        simulate,
        verify,
    )
    from meshwright.jobs import JobBuilder, JobGraph
    from meshwright.runtime.products import ShardedMatrix
    from meshwright.runtime.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Cluster", "Graph", "JobBuilder", "JobGraph", "Layout", "Mesh", "MeshwrightError", "Plan", "ShardedMatrix",
    "Trainer", "auto_parallelize", "calibrate", "capture", "dry_run", "grid_product", "joint", "load", "matmul",
    "opaque", "parallelize", "plan", "simulate", "verify",
]  # fmt: skip

_JOBS = ("JobBuilder", "JobGraph")
_TORCH_SIDE = {
    "auto_parallelize": "meshwright.api",
    "calibrate": "meshwright.api",
    "capture": "meshwright.api",
    "dry_run": "meshwright.api",
    "grid_product": "meshwright.api",
    "joint": "meshwright.api",
    "load": "meshwright.api",
    "matmul": "meshwright.api",
    "opaque": "meshwright.api",
    "parallelize": "meshwright.api",
    "plan": "meshwright.api",
    "simulate": "meshwright.api",
    "verify": "meshwright.api",
    "ShardedMatrix": "meshwright.runtime.products",
    "Trainer": "meshwright.runtime.trainer",
}


def __getattr__(name: str) -> Any:
    """Import names that need torch, or that few programs use, on first use: ``import meshwright`` is quick."""
    if name in _JOBS:
        from importlib import import_module

        return getattr(import_module("meshwright.jobs"), name)
    if name in _TORCH_SIDE:
        from importlib import import_module

        torch = import_module("torch")  # the planning side imports this file and must work without torch
        with torch.device("cpu"):  # modules make tables, and the first use may be under ``torch.device("meta")``
            return getattr(import_module(_TORCH_SIDE[name]), name)
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps ``meshwright.capture`` bound to the function, although a subpackage has the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _TORCH_SIDE or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
