"""Turns cyclic garbage collection off while a step is captured or lowered, or a search lowers many plans."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Turn off Python's cyclic garbage collection. Until the capture ends, none of its objects can be freed. Each
    collection would still visit all of them: a sixth of the time in which a large model is captured."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect_young() -> None:
    """Collect the young objects if cyclic garbage collection is off. A lowered graph becomes cyclic garbage once its
    program is made. A search that lowers hundreds of plans frees these graphs here, without visiting older objects."""
    if not gc.isenabled():
        gc.collect(0)
