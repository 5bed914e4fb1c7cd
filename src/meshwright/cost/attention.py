"""The kernels of attention that is not fused and writes its scores to memory, as in ``ops/library.py``."""

from collections.abc import Iterator

from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.kernel import AttentionSizes, Kernel, Product

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


def score_kernels(kernel: Kernel) -> Iterator[Kernel]:
    """The kernels of unfused attention, or of its backward pass."""
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
    """Bytes of attention's scores while the kernel runs; 0 if attention is fused, and for other kernels."""
    sizes, backward = kernel.attention, kernel.kind == "attention_backward"
    if sizes is None or sizes.fused(on_cpu, kernel.dtype):
        return 0
    return (_HELD[backward] + sizes.dropout) * _scores_bytes(sizes, kernel.dtype, sizes.held)


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
