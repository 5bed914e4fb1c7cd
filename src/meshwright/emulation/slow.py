"""Emulated slow devices: ranks really compute and then sleep, so that each takes a given multiple of its time."""

import time
from collections.abc import Callable
from typing import Any, Literal

from meshwright.ir.stages import FINISH, PROLOGUE, REDUCE
from meshwright.runtime.executor import Executor

Phase = Callable[[list[Any]], list[Any]]


def slow_down(executor: Executor, factor: float) -> None:
    """Make every function of the executor's stages take ``factor`` times as long as its thread computes.

    A rank with ``factor`` 4 takes at most a quarter of a core, so that several ranks run on one core without slowing
    each other down. Waiting for other ranks does not count as computing. The functions must compute in the thread that
    calls them: set one thread for each rank.
    """
    for stage in executor.stages.values():
        stage.functions = {name: _slowed(function, factor) for name, function in stage.functions.items()}


def _slowed(function: Phase, factor: float) -> Phase:
    def slowed(values: list[Any]) -> list[Any]:
        begun = time.thread_time()
        results = function(values)
        time.sleep((factor - 1) * (time.thread_time() - begun))
        return results

    return slowed


def stretch(executor: Executor, until_s: Callable[[float], float], where: Literal["reduce", "finish"]) -> None:
    """Extend every step, as if the rank had its own device. ``until_s`` maps the seconds since the step began to the
    seconds that the step should take at least. It is called once a step.

    The rank sleeps before the phase ``reduce`` or after ``finish``. Before ``reduce``, gradients that accumulate over
    micro-batches are late for other ranks; after ``finish``, everything after the step is late. In this way ranks can
    share cores, as long as they compute for a small part of their steps.
    """
    begun = time.perf_counter()

    def begins(function: Phase) -> Phase:
        def beginning(values: list[Any]) -> list[Any]:
            nonlocal begun
            begun = time.perf_counter()
            return function(values)

        return beginning

    def ends(function: Phase) -> Phase:
        def ending(values: list[Any]) -> list[Any]:
            results = function(values) if where == FINISH else []
            past_s = time.perf_counter() - begun
            time.sleep(max(0.0, until_s(past_s) - past_s))
            return results if where == FINISH else function(values)

        return ending

    assert where in (REDUCE, FINISH)
    (stage,) = executor.stages.values()
    stage.functions[PROLOGUE] = begins(stage.functions[PROLOGUE])
    stage.functions[where] = ends(stage.functions[where])
