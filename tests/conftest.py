"""What every test may use: the pool of ranks, and hypothesis settings for machines that are slow or busy."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.distributed.pool import Ranks

# As many threads as a rank has, before anybody imports torch: small models would only wait for threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("meshwright", settings(), deadline=None)
settings.load_profile("meshwright")
LONG_S, SLOWEST_FILES = 300.0, 40


def pytest_collection_finish() -> None:
    """Exclude all that is imported from garbage collections, which would walk through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the time of a long run went: the seconds of the slowest files."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    total = sum(seconds.values())
    if total >= LONG_S:
        terminalreporter.section(f"seconds by file, {total:.0f} in all")
        for file, duration in sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST_FILES]:
            terminalreporter.write_line(f"{duration:7.1f}  {file}")


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's user, or an earlier test, has calibrated is not what a test plans for; in ranks neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process prices layouts ahead of a search: some of that work is not needed, and the other core has tests
    to run. Workers are tested in ``test_layer_prices.py``, and other searches have them."""
    monkeypatch.setattr("meshwright.planner.inter_op.layer_work.num_workers", lambda: 0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(n, fn, *args, timeout=120)` runs a top-level function on n ranks and returns the results by rank."""
    from tests.distributed.pool import Ranks  # here, so that the pure tests start without importing torch

    with Ranks() as pool:
        yield pool


@pytest.fixture(scope="session")
def networks() -> None:
    """Emulated networks; where this machine cannot have them, the test is skipped, and says why."""
    from meshwright.emulation.network import why_not

    if missing := why_not():
        pytest.skip(missing)
