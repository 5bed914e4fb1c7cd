"""Temporary memory of mixtures of experts on devices that run behind the host (``ops/grouped_experts.py``)."""

from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.kernel import ALIGNED_ROWS, BLOCK_ROWS, COPIED_BYTES, ExpertSizes, Kernel


def scratch_bytes(kernel: Kernel, on_cpu: bool) -> int:
    """The bytes of the groups of rows, and of the matrices that are copied for blocks, beyond the results. On a CPU,
    experts run one after the other, in memory that is not counted."""
    sizes = kernel.experts
    if sizes is None or on_cpu:
        return 0
    return max(0, (_backward if sizes.backward else _forward)(sizes, kernel.dtype))


def _room(sizes: ExpertSizes, dtype: str) -> tuple[int, int]:
    """The rows of the groups, and the number of matrices that are copied for blocks; that is 0 in a grouped product."""
    block = ALIGNED_ROWS if dtype == "bfloat16" else BLOCK_ROWS
    room = (sizes.slots + sizes.experts * (block - 1)) // block * block
    return room, room // block if block == BLOCK_ROWS else 0


def _copied(blocks: int, elements: int, item: int) -> int:
    """The bytes of the matrices that are copied together, for at most ``blocks`` blocks."""
    return min(blocks * elements * item, max(COPIED_BYTES, elements * item) if blocks else 0)


def _halves(sizes: ExpertSizes) -> int:
    """The columns of gate and up, which are computed apart if experts are gated."""
    return 2 * sizes.inner if sizes.hidden > sizes.inner else 0


def _forward(sizes: ExpertSizes, dtype: str) -> int:
    item = ITEM_BYTES[dtype]
    room, blocks = _room(sizes, dtype)
    up = room * (sizes.width + sizes.hidden) * item + _copied(blocks, sizes.hidden * sizes.width, item)
    down = room * (sizes.hidden + sizes.inner + sizes.result) * item
    copied = _copied(blocks, sizes.inner * sizes.result, item)
    result = sizes.tokens * sizes.result * item
    summed = room * (sizes.hidden + sizes.inner) * item + 2 * sizes.slots * sizes.result * item + result
    of_slots = down + sizes.slots * sizes.result * item
    gate = room * (sizes.hidden + sizes.inner + _halves(sizes) // 2) * item
    return max(up, gate, down + copied, of_slots, summed) - result


def _backward(sizes: ExpertSizes, dtype: str) -> int:
    item = ITEM_BYTES[dtype]
    room, blocks = _room(sizes, dtype)
    up, down = sizes.experts * sizes.hidden * sizes.width, sizes.experts * sizes.inner * sizes.result
    kept = room * (sizes.width + sizes.result + sizes.hidden + 2 * sizes.inner)  # both groups, hidden, inner and back
    of_down = kept + room * sizes.result + down + _copied(blocks, sizes.inner * sizes.result, item) // item
    inside = kept + room * (sizes.inner + _halves(sizes) + sizes.hidden) + down
    kept += room * sizes.hidden + down
    copied = _copied(blocks, sizes.hidden * sizes.width, item) // item
    slots, tokens = sizes.slots * sizes.width, sizes.tokens * sizes.width
    of_tokens = kept + max(room * sizes.width + max(copied, slots), slots + tokens)
    of_up = kept + tokens + up + copied
    return (max(of_down, inside, of_tokens, of_up) - down - up - tokens) * item
