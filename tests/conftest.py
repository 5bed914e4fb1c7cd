"""What every test may use: the pool of ranks, and hypothesis settings for machines that are slow or busy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.distributed.pool import Ranks

settings.register_profile("meshwright", settings(), deadline=None)
settings.load_profile("meshwright")


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine's user has calibrated is not what tests plan for; in ranks neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def ranks(cache_of_its_own: None) -> Iterator[Ranks]:
    """`ranks(n, fn, *args, timeout=120)` runs a top-level function on n ranks and returns the results by rank."""
    from tests.distributed.pool import Ranks  # here, so that the pure tests start without importing torch

    with Ranks() as pool:
        yield pool
