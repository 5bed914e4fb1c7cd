"""Algorithms of convolutions: the numbers of PyTorch's own in float64, and the workspace that their formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.ir.convolution import algorithms_of, native_kernel, piece_work, work_of
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.operator_algorithm import CONVOLUTIONS, NATIVE
from meshwright.lower.counts import Counter
from meshwright.ops.base import Call
from meshwright.ops.convolution_algorithms import INPUT, WEIGHT
from tests.tries import tries

aten, ours = torch.ops.aten, torch.ops.meshwright
TOLERANCE = 1e-11
"""The largest error, relative to the largest element: Winograd's F(4x4, 3x3) loses some digits."""
DIRECTIONS = ("forward", "input", "weight")


def sizes_of(
    direction: str, samples: int, channels: int, filters: int, image: tuple[int, ...], kernel: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int = 1,
) -> ConvolutionSizes:  # fmt: skip
    output = tuple(
        (size + 2 * pad - far * (window - 1) - 1) // step + 1
        for size, window, step, pad, far in zip(image, kernel, stride, padding, dilation, strict=True)
    )
    return ConvolutionSizes(
        direction, samples, channels, filters, image, output, kernel, stride, padding, dilation, groups, False,
        "float64",
    )  # fmt: skip


def operands(sizes: ConvolutionSizes) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    images = torch.randn(sizes.samples, sizes.channels, *sizes.image, dtype=torch.float64)
    weight = torch.randn(sizes.filters, sizes.channels // sizes.groups, *sizes.kernel, dtype=torch.float64)
    grad = torch.randn(sizes.samples, sizes.filters, *sizes.output, dtype=torch.float64)
    rest = (
        list(sizes.stride), list(sizes.padding), list(sizes.dilation), False, [0] * len(sizes.kernel), sizes.groups,
    )  # fmt: skip
    return images, weight, grad, rest


def computed(sizes: ConvolutionSizes, given: tuple[Tensor, Tensor, Tensor, tuple[Any, ...]], text: str) -> Tensor:
    images, weight, grad, rest = given
    if sizes.direction == "forward":
        return ours.convolution(images, weight, *rest, text)
    operator = ours.convolution_input if sizes.direction == "input" else ours.convolution_weight
    return operator(grad, images, weight, *rest, text)


def wanted(sizes: ConvolutionSizes, given: tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]) -> Tensor:
    images, weight, grad, rest = given
    if sizes.direction == "forward":
        return aten.convolution(images, weight, None, *rest)
    mask = INPUT if sizes.direction == "input" else WEIGHT
    return aten.convolution_backward(grad, images, weight, None, *rest, mask)[mask.index(True)]


def error(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    return float((result - expected).abs().max() / max(1.0, float(expected.abs().max())))


@st.composite
def shapes(draw: st.DrawFn) -> ConvolutionSizes:
    space = draw(st.sampled_from((1, 2, 2, 2, 3)))
    usual = draw(st.booleans())  # the settings that Winograd serves
    kernel = tuple(3 if usual else draw(st.integers(1, 5)) for _ in range(space))
    dilation = tuple(1 if usual else draw(st.integers(1, 2)) for _ in range(space))
    stride = tuple(1 if usual else draw(st.integers(1, 3)) for _ in range(space))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(space))
    least = [max(1, far * (size - 1) + 1 - 2 * pad) for far, size, pad in zip(dilation, kernel, padding, strict=True)]
    image = tuple(draw(st.integers(size, size + 9)) for size in least)
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    channels, filters = (groups * draw(st.integers(1, 3)) for _ in range(2))
    samples = draw(st.integers(1, 5))
    direction = draw(st.sampled_from(DIRECTIONS))
    return sizes_of(direction, samples, channels, filters, image, kernel, stride, padding, dilation, groups)


@tries(60)
@given(shapes(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_algorithm_computes_the_same_numbers_whole_and_in_pieces(
    sizes: ConvolutionSizes, piece: int, random: Any
) -> None:
    given = operands(sizes)
    expected = wanted(sizes, given)
    for name in algorithms_of(sizes):
        other = random.choice(algorithms_of(sizes))
        for text in (name, f"1x{piece} {name} + 2x1 {other}"):
            result = computed(sizes, given, text)
            assert error(result, expected) < TOLERANCE, (text, sizes)
            assert result.is_contiguous()


def test_all_algorithms_are_offered_for_a_usual_convolution_and_tried_above() -> None:
    for direction in DIRECTIONS:
        assert algorithms_of(sizes_of(direction, 1, 2, 2, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1))) == CONVOLUTIONS


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({"stride": (2, 2)}, (NATIVE, "gemm", "implicit", "fft")),
        ({"dilation": (2, 2)}, (NATIVE, "gemm", "implicit", "fft")),
        ({"groups": 2}, (NATIVE, "gemm")),
        ({"transposed": True}, (NATIVE,)),
        ({"dtype": "bfloat16"}, (NATIVE,)),
        ({"padding": (3, 1), "direction": "input"}, (NATIVE, "gemm", "implicit", "fft")),
        ({"padding": (3, 1)}, CONVOLUTIONS),
    ],
)
def test_algorithms_serve_some_settings(change: dict[str, Any], served: tuple[str, ...]) -> None:
    usual = sizes_of("forward", 1, 2, 2, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1))
    assert algorithms_of(usual._replace(**change)) == served


def peak_bytes(call: Any) -> int:
    """The peak of live bytes of PyTorch's allocator during a call, with its result."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del result
    return peak


WORKSPACES = [
    sizes_of("forward", 3, 8, 12, (17, 18), (3, 3), (1, 1), (1, 1), (1, 1)),
    sizes_of("forward", 4, 8, 6, (16, 16), (3, 3), (1, 1), (0, 0), (1, 1)),
    sizes_of("forward", 2, 6, 20, (18, 18), (3, 3), (1, 1), (0, 0), (1, 1)),
    sizes_of("forward", 3, 8, 12, (21, 23), (5, 5), (2, 2), (2, 2), (1, 1)),
    sizes_of("forward", 3, 8, 12, (16, 16), (1, 1), (1, 1), (0, 0), (1, 1)),
    sizes_of("forward", 3, 8, 12, (16, 15), (1, 1), (2, 2), (0, 0), (1, 1)),
    sizes_of("forward", 3, 4, 4, (16, 15), (3, 1), (1, 1), (1, 0), (2, 1)),
    sizes_of("forward", 3, 8, 12, (40,), (5,), (1,), (2,), (1,)),
    sizes_of("forward", 3, 8, 12, (16, 15), (3, 3), (1, 1), (1, 1), (1, 1), 4),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sizes", WORKSPACES, ids=lambda sizes: f"{sizes.image}-{sizes.kernel}-{sizes.stride}")
def test_the_workspace_is_what_the_formula_says(direction: str, sizes: ConvolutionSizes) -> None:
    sizes = sizes._replace(direction=direction)
    given = operands(sizes)
    result = wanted(sizes, given).nbytes
    for name in algorithms_of(sizes):
        if name == NATIVE:
            continue
        computed(sizes, given, name)  # makes constants that stay
        measured_bytes = peak_bytes(lambda name=name: computed(sizes, given, name)) - result
        formula = work_of(sizes, name).workspace_bytes
        assert formula == pytest.approx(measured_bytes, rel=0.01, abs=4096), (name, measured_bytes / max(1, formula))


def test_pieces_need_the_workspace_of_the_largest() -> None:
    sizes = sizes_of("forward", 6, 8, 12, (17, 18), (3, 3), (1, 1), (1, 1), (1, 1))
    given = operands(sizes)
    text = "1x4 winograd(2) + 1x2 gemm"
    measured_bytes = peak_bytes(lambda: computed(sizes, given, text)) - wanted(sizes, given).nbytes
    parts = [piece_work(sizes._replace(samples=4), "winograd(2)"), piece_work(sizes._replace(samples=2), "gemm")]
    assert work_of(sizes, text).workspace_bytes == max(part.workspace_bytes for part in parts)
    assert measured_bytes == pytest.approx(max(part.workspace_bytes for part in parts), rel=0.01, abs=4096)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_piece_of_pytorchs_own_counts_as_the_operator_itself(direction: str, groups: int) -> None:
    sizes = sizes_of(direction, 3, 8, 12, (17, 18), (3, 3), (2, 2), (1, 1), (1, 1), groups)
    images, weight, grad, rest = operands(sizes)
    if direction == "forward":
        call = Call(aten.convolution.default, (images, weight, None, *rest), {}, (grad,))
    else:
        mask, output = (INPUT, images) if direction == "input" else (WEIGHT, weight)
        call = Call(aten.convolution_backward.default, (grad, images, weight, None, *rest, mask), {}, (output,))
    assert Counter({}).kernels(call) == (native_kernel(sizes),)
