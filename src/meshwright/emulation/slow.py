"""Emulated slow devices: real ranks compute, and then sleep, so that each takes a given multiple of its time."""

import time
from collections.abc import Callable
from typing import Any

from meshwright.runtime.executor import Executor


def slow_down(executor: Executor, factor: float) -> None:
    """Make every function of the executor's stages take ``factor`` times as long as its thread computes.

    A rank with ``factor`` 4 takes at most a quarter of a core, so that several ranks run on one core without slowing
    each other down. Waiting for other ranks does not count as computing. The functions must compute in the thread that
    calls them: set one thread for each rank.
    """
    for stage in executor.stages.values():
        stage.functions = {name: _slowed(function, factor) for name, function in stage.functions.items()}


def _slowed(function: Callable[[list[Any]], list[Any]], factor: float) -> Callable[[list[Any]], list[Any]]:
    def slowed(values: list[Any]) -> list[Any]:
        begun = time.thread_time()
        results = function(values)
        time.sleep((factor - 1) * (time.thread_time() - begun))
        return results

    return slowed
