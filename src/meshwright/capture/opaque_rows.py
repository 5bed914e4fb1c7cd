"""Checks whether an opaque region computes each sample by itself, by runs on the whole batch and on parts of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.capture.opaque import RegionCall, gradients
from meshwright.errors import CaptureError
from meshwright.ir.opaque import OpaqueCall

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 3e-2
"""The tolerance for 16-bit numbers."""
Shapes = Sequence[Sequence[int]]


def rows_of(small: Shapes, large: Shapes, sizes: tuple[int, int], dim: int) -> tuple[tuple[int, ...], str]:
    """The rows of a sample that each tensor has in dim ``dim``, from its shapes at two batch sizes; 0 for a tensor that
    does not depend on the batch. The second value says which tensor depends on it in another way."""
    rows: list[int] = []
    for index, (a, b) in enumerate(zip(small, large, strict=True)):
        differing = [at for at, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]]
        if not differing:
            rows.append(0)
        elif differing != [dim] or a[dim] % sizes[0] or b[dim] * sizes[0] != a[dim] * sizes[1]:
            return (), f"{index} has shape {list(a)} for {sizes[0]} samples and {list(b)} for {sizes[1]}"
        else:
            rows.append(a[dim] // sizes[0])
    return tuple(rows), ""


def misfit(
    region: RegionCall, inputs: Sequence[Tensor], rows: Sequence[int], result_rows: Sequence[int],
    given: tuple[int, ...], dim: int, samples: int, random: bool,
) -> str:  # fmt: skip
    """Say how the results or gradients of parts of the batch differ from those of the whole batch; empty if they are
    equal up to rounding. A region that draws random numbers is compared in evaluation mode."""
    state = {**dict(region.module.named_parameters()), **dict(region.module.named_buffers())}
    tensors = [*inputs, *(state[name] for name in region.names)]
    all_rows = (*rows, *(0 for _ in region.names))
    needs = tuple(
        index for index, value in enumerate(tensors)
        if value.is_floating_point() and (index < len(inputs) or value.requires_grad)
    ) if given else ()  # fmt: skip
    call = OpaqueCall(region=region.path, number=0, results=(), needs=needs, given=given)
    generator = torch.Generator().manual_seed(0)
    draws: dict[int, Tensor] = {}

    def run(begin: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
        def part(value: Tensor, each: int) -> Tensor:
            return value.narrow(dim, begin * each, (end - begin) * each) if each else value

        leaves = [
            part(value, each).detach().clone().requires_grad_(index in needs)
            for index, (value, each) in enumerate(zip(tensors, all_rows, strict=True))
        ]

        def values_and_gradients(results: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            for index in given:
                if index not in draws:
                    draws[index] = torch.randn(results[index].shape, generator=generator, dtype=torch.float64)
            grads = [part(draws[index], result_rows[index]).to(results[index]) for index in given]
            return [value.detach() for value in results], gradients(results, leaves, call, grads) if needs else []

        return region.run(leaves, values_and_gradients, trains=not random)

    try:
        whole, whole_grads = run(0, samples)
    except Exception as error:
        if not random:
            raise
        return f"it draws random numbers, and fails in evaluation mode, in which it would be compared ({_line(error)})"
    for middle in dict.fromkeys((samples // 2, 1)):
        where = f"samples 0 to {middle - 1} and {middle} to {samples - 1}"
        try:
            (first, grads), (second, others) = run(0, middle), run(middle, samples)
        except CaptureError:
            return f"its results have another structure for {where} than for the whole batch"
        except Exception as error:  # noqa: BLE001 - the user's module may raise anything: it cannot be split then
            return f"it fails on a part of the batch: {_line(error)}"
        for index, (value, a, b) in enumerate(zip(whole, first, second, strict=True)):
            if not _equal(torch.cat([a, b], dim), value):
                return f"result {index} of {where} is not that of the whole batch"
        for index, value, a, b in zip(needs, whole_grads, grads, others, strict=True):
            together = torch.cat([a, b], dim) if all_rows[index] else a + b
            if not _equal(together, value):
                name = region.names[index - len(inputs)] if index >= len(inputs) else f"argument {index}"
                return f"the gradient of {name} of {where} is not that of the whole batch"
    return ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return bool(torch.equal(actual, expected))
    most = float(expected.abs().max().clamp(min=1)) if expected.numel() else 1.0
    same = actual == expected  # infinite values
    close = (actual - expected).abs() <= _TOLERANCE.get(expected.dtype, _COARSE) * most
    both = actual.isnan() & expected.isnan()
    return bool((same | close | both).all())
