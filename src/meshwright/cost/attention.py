"""The kernels that attention takes by each of its algorithms, and their temporary memory (``ops/attention_fused.py``,
``ops/attention_scores.py``)."""

from collections.abc import Iterator

import msgspec

from meshwright.ir.attention import CUDNN, EFFICIENT, FLASH, PLAIN, backward_bytes, computed_fraction
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.kernel import AttentionSizes, Kernel, Product, drawing_bytes

_PASSES = {False: {"pointwise": 6, "activation": 4, "reduction": 2}, True: {"pointwise": 9, "activation": 2}}
"""The number of times that the kernels between the two products read or write the scores, by kind, in forward (False)
and backward (True)."""
_KERNELS = {False: 9, True: 12}
"""The number of kernels between the two products, in forward (False) and backward (True)."""
_CAST = {False: 3, True: 6}
"""Additional passes over the scores in 16-bit attention, whose softmax is computed in float32."""
_DROPOUT = {False: 5, True: 8}
"""Additional passes over the scores if attention has dropout."""
_HELD = {False: 2, True: 4}
"""The number of tensors of scores that are in memory at the same time, in forward (False) and backward (True)."""


SPEED = {FLASH: 1.0, EFFICIENT: 0.55}
"""The speed of algorithms on GPUs relative to FlashAttention 2, which is 1.5 to 2 times as fast as CUTLASS's
memory-efficient attention (Dao, "FlashAttention-2", 2023, figures 4 to 6). cuDNN's is a constant of the device."""


def emitted_kernels(kernel: Kernel, on_cpu: bool, cudnn_speed: float) -> Iterator[Kernel]:
    """The kernels that compute a call of attention, or its backward pass, on a device. The FLOPs of a fused kernel are
    those that it computes (it skips blocks of keys that no query sees), divided by its relative speed."""
    sizes, dtype = kernel.attention, kernel.dtype
    assert sizes is not None
    algorithm = sizes.taken(dtype, on_cpu)
    if algorithm == PLAIN:
        yield from _score_kernels(kernel)
        return
    terms, repeated = _terms_bytes(sizes, dtype, algorithm, on_cpu), _repeated_bytes(sizes, dtype, algorithm)
    if terms:
        yield Kernel("pointwise", dtype, 0.0, 2 * terms * sizes.ring.steps, 2 * sizes.ring.steps)
    if repeated:  # copies of keys and values, and in backward the sums of their gradients
        backward = kernel.kind == "attention_backward"
        yield Kernel("copy", dtype, 0.0, 2 * repeated * (1 + backward), 2 * (1 + backward))
    all_pairs = sizes.queries * sizes.keys
    fraction = computed_fraction(sizes.pairs or all_pairs, sizes.queries, sizes.keys, on_cpu)
    speed = 1.0 if on_cpu else cudnn_speed if algorithm == CUDNN else SPEED[algorithm]
    yield msgspec.structs.replace(kernel, flops=kernel.flops * fraction / speed, attention=None)


def _score_kernels(kernel: Kernel) -> Iterator[Kernel]:
    """The kernels of attention with its scores in memory, or of its backward pass."""
    sizes, dtype, backward = kernel.attention, kernel.dtype, kernel.kind == "attention_backward"
    assert sizes is not None
    for product in _products(sizes, backward):
        moved = (
            ITEM_BYTES[dtype] * product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
        )
        yield Kernel(
            "matmul", dtype, 2 * product.batch * product.m * product.n * product.k, round(moved), product=product
        )
    passes = dict(_PASSES[backward])
    passes["pointwise"] += 2 * sizes.causal + 2 * sizes.masked + _CAST[backward] * (ITEM_BYTES[dtype] == 2)
    if sizes.dropout:
        passes["pointwise"] += _DROPOUT[backward]
        passes["random"] = 1
    for kind, times in passes.items():
        calls = 1 + (_KERNELS[backward] - len(passes)) * (kind == "pointwise")
        yield Kernel(kind, dtype, 0.0, times * _scores_bytes(sizes, dtype, sizes.keys), calls)
    rows = sizes.batch * sizes.queries * (sizes.width + sizes.values) * ITEM_BYTES[dtype]
    yield Kernel("copy", dtype, 0.0, 2 * (1 + backward) * rows)


def scratch_bytes(kernel: Kernel, on_cpu: bool) -> int:
    """Bytes of temporary memory while attention runs, beside its results: its scores, or the mask, the copies of keys
    and the sums in float32 of a fused kernel; and what a ring holds around its steps. 0 for other kernels."""
    sizes, dtype, backward = kernel.attention, kernel.dtype, kernel.kind == "attention_backward"
    if sizes is None:
        return 0
    taken = _kernel_bytes(sizes, dtype, backward, on_cpu)
    if sizes.ring.size == 1:
        return taken
    return _ring_bytes(sizes, dtype, backward, taken, sizes.taken(dtype, on_cpu) in (CUDNN, PLAIN))


def _kernel_bytes(sizes: AttentionSizes, dtype: str, backward: bool, on_cpu: bool) -> int:
    """Bytes of temporary memory of one call of a kernel, beside its results."""
    algorithm = sizes.taken(dtype, on_cpu)
    if algorithm == PLAIN:
        scores = _HELD[backward] * _scores_bytes(sizes, dtype, sizes.held)
        return scores + (drawing_bytes((sizes.batch, sizes.queries, sizes.held)) if sizes.dropout and not on_cpu else 0)
    taken = _terms_bytes(sizes, dtype, algorithm, on_cpu) + (1 + backward) * _repeated_bytes(sizes, dtype, algorithm)
    if backward and not on_cpu:
        taken += backward_bytes(sizes.batch * sizes.queries, sizes.width)
        if algorithm == FLASH and 0 < sizes.key_batch < sizes.batch:  # gradients of keys for each query head
            taken += ITEM_BYTES[dtype] * sizes.batch * sizes.held * (sizes.width + sizes.values)
    return taken


def _ring_bytes(sizes: AttentionSizes, dtype: str, backward: bool, kernel: int, relaid: bool) -> int:
    """Bytes that a ring holds beside its results (``ops/ring.py``). ``kernel``: those of a step's kernel, likewise.
    ``relaid``: the kernel's gradients have the memory order of its inputs, and are copied if halves were swapped.

    Three moments have the most: the exchange of halves, where each tensor exists twice; a step, with the keys that
    move, the results of its kernel, and their merging into the sums over steps; and in backward the exchange back."""
    ring, item = sizes.ring, ITEM_BYTES[dtype]
    wide, rows = max(4, item), sizes.batch * sizes.queries
    query, output, statistics = item * rows * sizes.width, item * rows * sizes.values, wide * rows
    keys = item * (sizes.key_batch or sizes.batch) * sizes.held * (sizes.width + sizes.values)
    coming, later = ring.steps > 1, ring.steps > 2 and not ring.balanced  # a balanced ring's own keys are copies
    moving = max(coming * (ring.moving_bytes + ring.copied_bytes), 2 * later * ring.moving_bytes)
    if backward:
        results, swapped = query + keys, query + keys + 2 * output
        if not ring.balanced:  # beside the sums, which become the results
            return moving + results + kernel
        step = moving + results + max(kernel, results * relaid)
        return max(2 * swapped - results, swapped + statistics + max(step, 2 * results))
    results, total = output + statistics, wide * rows * sizes.values
    step = total + moving + max(results + kernel, output + total + 4 * statistics) - output
    return max(2 * (query + keys) - results, query + keys + step) if ring.balanced else step


def _terms_bytes(sizes: AttentionSizes, dtype: str, algorithm: str, on_cpu: bool) -> int:
    """Bytes of a mask as terms of the scores, if it must be made: of boolean masks, and of bands that kernels lack."""
    band = sizes.shifted and (on_cpu or algorithm == EFFICIENT)
    return ITEM_BYTES[dtype] * (sizes.mask_elements + band * sizes.queries * sizes.held)


def _repeated_bytes(sizes: AttentionSizes, dtype: str, algorithm: str) -> int:
    """Bytes of copies of keys and values, for each query head its own."""
    if algorithm != EFFICIENT or not 0 < sizes.key_batch < sizes.batch:
        return 0
    return ITEM_BYTES[dtype] * sizes.batch * sizes.held * (sizes.width + sizes.values)


def _products(sizes: AttentionSizes, backward: bool) -> tuple[Product, ...]:
    batch, rows, keys, width, values = sizes[:5]
    if not backward:
        return Product(rows, keys, width, batch), Product(rows, values, keys, batch)
    return (
        Product(rows, keys, width, batch), Product(rows, keys, values, batch), Product(keys, values, rows, batch),
        Product(rows, width, keys, batch), Product(keys, width, rows, batch),
    )  # fmt: skip


def _scores_bytes(sizes: AttentionSizes, dtype: str, keys: int) -> int:
    return sizes.batch * sizes.queries * keys * max(4, ITEM_BYTES[dtype])
