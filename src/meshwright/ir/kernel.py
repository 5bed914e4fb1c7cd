"""Kernels as data: their kind, dtype, FLOPs and bytes, and the sizes of matrix products and attention."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec

from meshwright.ir.attention import AttentionForm, Band, algorithms_of
from meshwright.ir.graph import ITEM_BYTES

PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm")
"""The ATen operators that are matrix products, without overload names."""


class Operand(NamedTuple):
    """The shape and dtype of a tensor on one rank."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensor's elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Product(NamedTuple):
    """The sizes of ``batch`` matrix products of (m x k) by (k x n)."""

    m: float
    n: float
    k: float
    batch: float = 1


class RingSizes(NamedTuple):
    """The ring of ranks in which attention runs (``ops/ring.py``).

    ``size``: its ranks. ``steps``: the steps in which it moves keys and computes. ``balanced``: each rank swaps halves
    of the sequence, so that all ranks have equal work. ``moving_bytes``: the rank's keys, values, and mask if it moves
    with them. ``copied_bytes``: those of ``moving_bytes`` that are copied to be sent, because they are not contiguous.
    """

    size: int = 1
    steps: int = 1
    balanced: bool = False
    moving_bytes: int = 0
    copied_bytes: int = 0


ALONE = RingSizes()
"""Attention that does not run in a ring."""


class AttentionSizes(NamedTuple):
    """The sizes of attention on one rank.

    ``batch`` is samples times query heads. ``queries`` and ``keys`` are numbers of positions. ``width`` is the head
    size of queries and keys. ``values`` is the head size of values. ``held`` is the number of keys that the rank holds
    at a time. In ring attention, it is less than ``keys``.

    ``pairs`` is the number of pairs of a query and a key that it sees (0: all). ``key_batch`` is samples times key
    heads (0: as many as ``batch``). ``shifted``: as in ``ir.attention.Form``. ``mask_elements`` counts the elements of
    a mask that must be converted to terms of the scores at a time. ``algorithm`` is the plan's choice (empty: the usual
    one)."""

    batch: int
    queries: int
    keys: int
    width: int
    values: int
    held: int
    dropout: bool = False
    causal: bool = False
    masked: bool = False
    pairs: int = 0
    key_batch: int = 0
    shifted: bool = False
    mask_elements: int = 0
    algorithm: str = ""
    ring: RingSizes = ALONE

    def served(self, dtype: str, on_cpu: bool) -> tuple[str, ...]:
        """The algorithms that support the call on a device, the usual one first."""
        parts = 2 if self.ring.size > 1 else 1  # a ring may work on halves
        lengths = self.queries // parts, self.held // parts
        form = AttentionForm(dtype, self.width, self.values, *lengths, self.dropout, self.masked, self.shifted)
        return algorithms_of(form, on_cpu)

    def taken(self, dtype: str, on_cpu: bool) -> str:
        """The algorithm that computes the call on a device."""
        return self.algorithm or self.served(dtype, on_cpu)[0]


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution on one rank, or of one of its gradients.

    ``direction`` is ``forward``, ``input`` (the gradient of the input) or ``weight`` (the gradient of the weight). All
    directions have the sizes of forward: ``channels`` and ``image`` of the input, ``filters`` and ``output`` of the
    result. The settings have one number for each spatial dim."""

    direction: str
    samples: int
    channels: int
    filters: int
    image: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    dtype: str


ALIGNED_ROWS, BLOCK_ROWS, COPIED_BYTES = 8, 64, 2**28
"""Of experts on devices that run behind the host: rows of 16-bit numbers after which memory is aligned as grouped
products ask for; rows of a block that is multiplied alone in other dtypes; and the most bytes of the matrices that are
copied for such blocks at once."""


def drawing_bytes(shape: Sequence[int]) -> int:
    """Bytes of temporary tensors while a GPU draws random numbers of a shape with Triton, beside the numbers
    themselves: a number for each row (``ops/philox.py``)."""
    return 8 * prod(shape[:-1])


class ExpertSizes(NamedTuple):
    """The sizes of experts on one rank, or of their backward pass.

    ``slots`` is tokens times the experts of each. ``width`` is the size of a token, ``hidden`` that of the result of an
    expert's first product (both halves if it is gated), ``inner`` that of its second product's input, ``result`` that
    of its result."""

    tokens: int
    slots: int
    experts: int
    width: int
    hidden: int
    inner: int
    result: int
    backward: bool


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``calls`` launches of a kernel of one kind (``ir.kind``).

    ``flops`` and ``bytes`` (read and written) are totals of all calls. ``product`` has the sizes of a matrix product,
    or of a convolution seen as a matrix product. ``attention`` has the sizes of attention, ``experts`` those of
    experts, ``convolution`` those of a convolution that PyTorch's own kernel computes. ``workspace_bytes`` are bytes of
    temporary tensors while the kernel runs. ``measured_s``: the measured seconds of an opaque region (0: not
    measured)."""

    kind: str
    dtype: str = ""
    flops: float = 0.0
    bytes: int = 0
    calls: int = 1
    product: Product | None = None
    attention: AttentionSizes | None = None
    convolution: ConvolutionSizes | None = None
    experts: ExpertSizes | None = None
    workspace_bytes: int = 0
    measured_s: float = 0.0


def product_of(target: str, kind: str, inputs: Sequence[Operand], result: Operand, flops: float) -> Product | None:
    """The sizes of a matrix product, from one rank's tensors; None if the call is no product and no convolution.

    A forward convolution counts as a product with a row for each output position and a column for each filter
    (Chellapilla et al. 2006). Its gradients count as products of the same three sizes in another order."""
    if target.startswith(tuple(f"{name}." for name in PRODUCTS)):
        (*batch, m, k), (*_, n) = inputs[-2].shape, inputs[-1].shape
        return Product(m, n, k, prod(batch))
    if not kind.startswith("convolution") or len(inputs) < 2:
        return None
    output, images, weight = (result, *inputs[:2]) if kind == "convolution" else inputs[:3]
    filters = output.shape[1]
    groups = max(1, images.shape[1] // weight.shape[1]) if weight.shape[0] == filters else 1
    rows, columns = prod(output.shape) / filters, filters / groups
    depth = max(1.0, flops / (2 * rows * filters))
    sizes = {"convolution": (rows, columns, depth), "convolution_input": (rows, depth, columns)}
    return Product(*sizes.get(kind, (depth, columns, rows)), groups)


def in_float8(kernel: Kernel) -> Kernel:
    """A matrix product whose operands are in float8. Its result keeps its dtype."""
    assert kernel.product is not None, "it is a matrix product"
    m, n, k, batch = kernel.product
    num_bytes = round(batch * (m * k + k * n + ITEM_BYTES[kernel.dtype] * m * n))
    return msgspec.structs.replace(kernel, dtype="float8", bytes=num_bytes)


class AttentionSettings(NamedTuple):
    """The arguments of a call of attention on which its cost depends."""

    dropout: bool = False
    causal: bool = False
    window: int = 0
    first: int = 0
    algorithm: str = ""
    ring: RingSizes = ALONE


def attention_of(backward: bool, inputs: Sequence[Operand], settings: AttentionSettings) -> AttentionSizes:
    """The sizes of attention or of its backward pass.

    ``inputs`` are the inputs on one rank, in the order of ``ops/attention_kernels.py``. In a ring, the queries see the
    keys of all ranks, but the rank's own inputs have only its own keys."""
    query, key, value = (operand.shape for operand in inputs[backward : backward + 3])
    ring = settings.ring
    held, keys = key[2], key[2] * ring.size
    masked = len(inputs) > (6 if backward else 3)
    mask = inputs[backward + 3] if masked else None
    converted = prod(mask.shape) if mask is not None and mask.dtype == "bool" else 0
    if mask is not None and mask.shape[-1] != held:  # each step of a ring uses the columns of the keys that it has
        converted //= ring.size
    queries, causal, window = query[2], settings.causal, settings.window
    # if ranks have parts of the queries, the rank with the last part has the most to compute
    pairs = Band(queries, keys, causal, window, max(settings.first, keys - queries)).pairs
    if ring.balanced:
        pairs = Band(keys, keys, causal).pairs // ring.size
    shifted = causal and not ring.balanced and bool(window or settings.first or queries != keys)
    return AttentionSizes(
        prod(query[:2]), queries, keys, query[3], value[3], held, settings.dropout, causal, masked, pairs,
        prod(key[:2]), shifted, converted, settings.algorithm, ring,
    )  # fmt: skip
