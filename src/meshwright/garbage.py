"""Turns cyclic garbage collection off while a step is captured or lowered, or a search lowers many plans."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Turn off Python's cyclic garbage collection. All objects of a capture stay alive, and each collection would visit
    all of them, which takes a sixth of the time of a large model's capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect_young() -> None:
    """Collect the young objects if cyclic garbage collection is off. Lowered graphs are cyclic garbage once a program
    was made of them; a search that lowers hundreds of plans frees each of them so, without visits of old objects."""
    if not gc.isenabled():
        gc.collect(0)
