"""PyTorch's own distributed tests, as its wheel has them, for one backend: ``python -m benchmarks.conformance_case``.

    BACKEND=meshwright WORLD_SIZE=2 python -m benchmarks.conformance_case TEST...

``MESHWRIGHT_FOR_GLOO=1`` with ``BACKEND=gloo``: the tests get Meshwright's backend under the name gloo. So tests that
are only for gloo run too, and check profiler events, ``monitored_barrier`` and timeouts of our backend.

It prints one line of JSON for each test: its name, outcome, reason, and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="conformance-"))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_distributed import DistTestCases

from meshwright.comm.process_group.group import MeshwrightGroup
from meshwright.comm.process_group.identity import NAME
from meshwright.comm.process_group.registration import register

FOR_GLOO = bool(os.environ.get("MESHWRIGHT_FOR_GLOO"))


class InPlaceOfGloo(MeshwrightGroup):
    """Our group under gloo's name. PyTorch 2.15 passes settings that earlier versions do not have."""

    profiled_as = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_later: Any) -> None:
        super().__init__(store, rank, tuple(range(size)), timeout.total_seconds(), "gloo's")
        self.options = SimpleNamespace()


register()
for feature in ("ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add(NAME)
if FOR_GLOO:
    distributed_c10d.ProcessGroupGloo = InPlaceOfGloo  # type: ignore[misc]

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402 - it reads the names of backends
    DistributedTest,
    TestDistBackend,
)


class Conformance(TestDistBackend, DistributedTest._DistTestBase):
    """The tests; each runs in ranks that are forks of this process, which saves their imports."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def names() -> list[str]:
    """All tests."""
    return list(unittest.TestLoader().getTestCaseNames(Conformance))


def run(name: str) -> dict[str, Any]:
    """Run a test, and return its outcome."""
    begun, result = time.monotonic(), unittest.TestResult()
    Conformance(name).run(result)
    outcome, why = "passed", ""
    if result.skipped:
        outcome, why = "skipped", result.skipped[0][1]
    elif result.failures or result.errors:
        outcome, why = "failed", (result.failures + result.errors)[0][1]
    return {"name": name, "outcome": outcome, "why": why, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert dist.is_available()
    for test in sys.argv[1:] or names():
        print("RESULT " + json.dumps(run(test)), flush=True)
