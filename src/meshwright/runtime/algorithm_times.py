"""Measures the algorithms of convolutions on this machine, for pieces of 1, 2, 4, ... samples and for all samples.

As in a calibration, a rank measures in laps. In each lap it makes every call once, so that the same call never runs
twice in a row.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from meshwright.ir.algorithm_times import AlgorithmTimes, AlgorithmTiming
from meshwright.ir.convolution import algorithms_of, piece_work, workspace_bytes
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.operator_algorithm import NATIVE, piece_sizes
from meshwright.ops import convolution_algorithms
from meshwright.runtime.machine import machine_name

LAPS = 5
TOO_SLOW = 4.0
"""Factor for slow algorithms: an algorithm is measured only twice if its second call is slower than PyTorch's own by
this factor, and it needs no less workspace."""
LEAST_S = 2e-3
"""Short calls are repeated until together they take this long."""

_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "forward": convolution_algorithms.convolution,
    "input": convolution_algorithms.convolution_input,
    "weight": convolution_algorithms.convolution_weight,
}


class _Timed(NamedTuple):
    sizes: ConvolutionSizes
    name: str
    piece: bool
    call: Callable[[], object]
    times: int
    taken: list[float]


def measure(
    calls: Iterable[ConvolutionSizes], advance: Callable[[str], None] = lambda what: None, laps: int = LAPS
) -> AlgorithmTimes:
    """The times of all algorithms that support the convolutions, with the present number of PyTorch's threads. Every
    call is timed ``laps`` times. ``advance`` is called with a text before each convolution. Convolutions that only
    PyTorch's own algorithm supports are left out."""
    timings: list[AlgorithmTiming] = []
    for sizes in calls:
        if len(algorithms_of(sizes)) > 1 and sizes.samples:
            advance(text_of_sizes(sizes))
            timings += _measured(sizes, laps)
    return AlgorithmTimes(
        machine=machine_name(), torch=str(torch.__version__), threads=torch.get_num_threads(),
        time_s=round(time.time()), timings=tuple(timings),
    )  # fmt: skip


def text_of_sizes(sizes: ConvolutionSizes) -> str:
    """A convolution as text: ``forward 32 x 64 x 56x56 -> 64, 3x3``."""
    image, kernel = ("x".join(map(str, numbers)) for numbers in (sizes.image, sizes.kernel))
    stride = f", stride {max(sizes.stride)}" if max(sizes.stride) > 1 else ""
    return f"{sizes.direction} {sizes.samples} x {sizes.channels} x {image} -> {sizes.filters}, {kernel}{stride}"


@torch.no_grad()
def _measured(sizes: ConvolutionSizes, laps: int) -> list[AlgorithmTiming]:
    dtype = getattr(torch, sizes.dtype)
    generator = torch.Generator().manual_seed(0)
    images, weight, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for shape in (
            (sizes.samples, sizes.channels, *sizes.image),
            (sizes.filters, sizes.channels // sizes.groups, *sizes.kernel),
            (sizes.samples, sizes.filters, *sizes.output),
        )
    )
    rest = (
        list(sizes.stride), list(sizes.padding), list(sizes.dilation), sizes.transposed, [0] * len(sizes.kernel),
        sizes.groups,
    )  # fmt: skip
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run, timed = _CALLS[sizes.direction], list[_Timed]()
    for samples in reversed(piece_sizes(sizes.samples)):
        of_native, of_piece = 0.0, 0
        for name in algorithms_of(sizes):  # the first is PyTorch's own
            for piece in (False, True) if name == NATIVE else (False,):
                text = f"1x{samples} {name}" if piece else name
                given = [*([] if sizes.direction == "forward" else [grad[:samples]]), images[:samples], weight]

                def call(given: Sequence[torch.Tensor] = given, text: str = text) -> object:
                    return run(*given, *rest, text)

                call()
                begin = clock()
                call()
                second = max(clock() - begin, 1e-7)
                of_native = of_native or second
                needs = _workspace(sizes._replace(samples=samples), name, piece)
                of_piece = needs if piece else of_piece
                if name == NATIVE or second <= TOO_SLOW * of_native or needs < of_piece:
                    times = max(1, round(LEAST_S / second))
                    timed.append(_Timed(sizes._replace(samples=samples), name, piece, call, times, []))
    for _ in range(laps):
        for entry in timed:
            begin = clock()
            for _ in range(entry.times):
                entry.call()
            entry.taken.append((clock() - begin) / entry.times)
    return [_timing(entry) for entry in timed]


def _workspace(sizes: ConvolutionSizes, name: str, piece: bool) -> int:
    return max(workspace_bytes(kernel, True) for kernel in piece_work(sizes, name, not piece).kernels)


def _timing(entry: _Timed) -> AlgorithmTiming:
    seconds = statistics.median(entry.taken)
    workspace = _workspace(entry.sizes, entry.name, entry.piece)
    return AlgorithmTiming(
        entry.sizes, entry.name, seconds, statistics.stdev(entry.taken) / seconds, workspace, entry.piece
    )
