"""Measured times of operator algorithms on one machine, in seconds, for each number of samples."""

from functools import cached_property
from typing import ClassVar

import msgspec

from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.operator_algorithm import NATIVE


class AlgorithmTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The median time ``seconds`` of an algorithm on ``sizes.samples`` samples. Its standard deviation is stored as a
    fraction of the median. ``workspace_bytes`` is the size of temporary memory. ``piece`` says that the samples are a
    piece of a larger call: PyTorch's own algorithm then also copies its result, while other algorithms write to the
    result of the call."""

    sizes: ConvolutionSizes
    algorithm: str
    seconds: float
    deviation: float
    workspace_bytes: int
    piece: bool = False


class AlgorithmTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The timings of one machine, with the number of threads that were used.

    ``machine`` is the name of its processor. ``time_s`` is the end of the measurement, in seconds since 1970."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    machine: str
    torch: str
    threads: int
    time_s: int
    timings: tuple[AlgorithmTiming, ...] = ()

    @cached_property
    def _by_shape(self) -> dict[ConvolutionSizes, list[AlgorithmTiming]]:
        by_shape: dict[ConvolutionSizes, list[AlgorithmTiming]] = {}
        for timing in self.timings:
            by_shape.setdefault(timing.sizes._replace(samples=0), []).append(timing)
        return by_shape

    def of(self, sizes: ConvolutionSizes) -> tuple[AlgorithmTiming, ...]:
        """The timings of a convolution for all numbers of samples up to ``sizes.samples``. Empty if PyTorch's own
        algorithm was not measured on all of its samples."""
        timings = [
            timing for timing in self._by_shape.get(sizes._replace(samples=0), ())
            if timing.sizes.samples <= sizes.samples
            and (timing.algorithm != NATIVE or timing.piece == (timing.sizes.samples < sizes.samples))
        ]  # fmt: skip
        whole = any(timing.algorithm == NATIVE and timing.sizes.samples == sizes.samples for timing in timings)
        return tuple(timings) if whole else ()

    def joined(self, others: "AlgorithmTimes") -> "AlgorithmTimes":
        """These timings, with the timings of ``others``. If both have timings of the same call, the timings of
        ``others`` are used."""
        by_call = {
            (timing.sizes, timing.algorithm, timing.piece): timing for timing in (*self.timings, *others.timings)
        }
        return msgspec.structs.replace(others, timings=tuple(by_call.values()))
