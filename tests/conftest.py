"""What every test may use: the pool of ranks, how much hypothesis tries, and what files of tests take."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.cpu_time import OPTION, CpuTimes
from tests.tries import PROFILE

if TYPE_CHECKING:
    from tests.distributed.pool import Ranks

# As many threads as a rank has, before anybody imports torch: small models would only wait for threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch asks the resolver for the name of each peer; a resolver that loses a question would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "attempts:1 timeout:1")
# Inductor would compile a program for each set of vector instructions of this CPU, to see whether it can use them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Else each of hundreds of programs that tests start would compile all modules of Meshwright, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
COLLECT_AFTER = 50_000, 20, 20
"""Thresholds of garbage collections. By default Python looks for garbage each time that 700 objects are new: captures
and plans make millions, nearly all of which live on, and looking takes a tenth of their time."""
gc.set_threshold(*COLLECT_AFTER)
CHANNEL_SLOTS = 16
"""Slots of a channel between ranks of the pool. Small models send little; what has no room waits in a queue."""
settings.load_profile(PROFILE)  # pytest --hypothesis-profile loads another, later


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="PAGE", default="", help="write the table of files that take long into this page")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes(config))


def pytest_collection_finish() -> None:
    """Exclude all that is imported from garbage collections, which would walk through it again and again. Let the ranks
    that Meshwright starts find imported what ranks of the pool find: a process has one fork server for both."""
    if (launcher := sys.modules.get("meshwright.runtime.ranks")) is not None:
        from tests.distributed.pool import PRELOAD

        launcher.PRELOADED[:] = PRELOAD
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths that do not exist yet. ``mktemp`` would list all directories of earlier tests to find a free name."""
    base = tmp_path_factory.mktemp("caches")
    return (base / f"{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def cache_of_its_own(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's user, or an earlier test, has calibrated is not what a test plans for; in ranks neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(caches)))


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process prices layouts ahead of a search: some of that work is not needed, and the other core has tests
    to run. Workers are tested in ``test_layer_prices.py``, and other searches have them."""
    monkeypatch.setattr("meshwright.planner.inter_op.layer_work.num_workers", lambda: 0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(n, fn, *args, timeout=120)` runs a top-level function on n ranks and returns the results by rank."""
    from tests.distributed.pool import Ranks  # here, so that the pure tests start without importing torch

    with Ranks(CHANNEL_SLOTS) as pool:
        yield pool


@pytest.fixture(scope="session")
def networks() -> None:
    """Emulated networks; where this machine cannot have them, the test is skipped, and says why."""
    from meshwright.emulation.network import why_not

    if missing := why_not():
        pytest.skip(missing)
