"""Random calls of every operator that has a rule: what test_rules.py splits on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from meshwright.ops.loss import NONE, SUM

aten = torch.ops.aten
ours = torch.ops.meshwright

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SIZES = (2, 3, 4, 5, 6, 7)


class Draw:
    """Sizes, flags and tensors of one random call."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def flag(self) -> bool:
        return bool(self._draw(st.booleans()))

    def some(self, items: Sequence[Any], count: int) -> list[Any]:
        """Up to ``count`` of the items."""
        order = torch.randperm(len(items), generator=self.generator).tolist()
        return [items[index] for index in order[:count]]

    def size(self) -> int:
        return int(self.pick(*SIZES))

    def sizes(self, count: int) -> list[int]:
        return [self.size() for _ in range(count)]

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return self.sizes(self._draw(st.integers(least, most)))

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.9 + 0.05

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    def dim(self, rank: int) -> int:
        return int(self._draw(st.integers(-rank, rank - 1)))

    def dims(self, rank: int) -> list[int]:
        """Some of the dims, each counted from the front or from the back."""
        chosen = sorted(self._draw(st.sets(st.integers(0, rank - 1), min_size=1)))
        return [dim - rank if self.flag() else dim for dim in chosen]


def _broadcast(draw: Draw, shape: Sequence[int]) -> list[int]:
    """A shape that broadcasts to ``shape``: leading dims gone, others of size 1."""
    kept = list(shape[draw.pick(0, 0, 1) :])
    return [1 if draw.pick(False, False, True) else size for size in kept]


# --- matrix products --------------------------------------------------------------------------------------------------


def _mm(draw: Draw) -> Arguments:
    m, k, n = draw.sizes(3)
    return (draw.tensor(m, k), draw.tensor(k, n)), {}


def _bmm(draw: Draw) -> Arguments:
    b, m, k, n = draw.sizes(4)
    return (draw.tensor(b, m, k), draw.tensor(b, k, n)), {}


def _mv(draw: Draw) -> Arguments:
    m, k = draw.sizes(2)
    return (draw.tensor(m, k), draw.tensor(k)), {}


def _dot(draw: Draw) -> Arguments:
    k = draw.size()
    return (draw.tensor(k), draw.tensor(k)), {}


def _trilinear(draw: Draw) -> Arguments:
    n, o, i, j = draw.sizes(4)
    return (draw.tensor(n, i), draw.tensor(o, i, j), draw.tensor(n, j), [1, 3], [0], [1, 2], [2, 3]), {}


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(draw: Draw) -> Arguments:
    b, groups, s, t = draw.sizes(4)
    h = groups * draw.pick(1, 2)  # query heads may share keys
    d = draw.size()
    e = draw.pick(d, draw.size())  # another width takes the path without a fused kernel
    causal = draw.flag()
    window = [draw.pick(1, 2, 3)] if causal and draw.flag() else []
    mask = None
    if not causal and draw.flag():
        lead = [size if draw.flag() else 1 for size in (b, h)] if draw.flag() else []
        allowed = draw.bools(*lead, s if draw.flag() else 1, t)
        mask = (
            allowed if draw.flag() else torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)
        )
    query, key, value = draw.tensor(b, h, s, d), draw.tensor(b, groups, t, d), draw.tensor(b, groups, t, e)
    return (query, key, value, mask, 0.0, causal, 1.0 / math.sqrt(d), 0, 1, *window), {}


def _attention_backward(draw: Draw) -> Arguments:
    (query, key, value, mask, *rest), _ = _attention(draw)
    output, logsumexp = ours.attention(query, key, value, mask, *rest)
    return (draw.tensor(*output.shape), query, key, value, mask, output, logsumexp, *rest), {}


def _attention_packed(draw: Draw) -> Arguments:
    groups, d, lengths = draw.size(), draw.size(), draw.sizes(3)
    h, tokens = groups * draw.pick(1, 2), sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    causal = draw.flag()
    window = draw.pick(0, 1, 3) if causal else 0
    query, key, value = (draw.tensor(tokens, heads, d) for heads in (h, groups, groups))
    longest = max(lengths)
    return (query, key, value, bounds, bounds, longest, longest, causal, 0.5, window), {}


def _attention_packed_backward(draw: Draw) -> Arguments:
    (query, key, value, *rest), _ = _attention_packed(draw)
    output, logsumexp = ours.attention_packed(query, key, value, *rest)
    return (draw.tensor(*output.shape), query, key, value, output, logsumexp, *rest), {}


# --- experts ----------------------------------------------------------------------------------------------------------


def _experts(draw: Draw) -> Arguments:
    t, e, o = draw.sizes(3)
    k, f, a = draw.pick(2, 3), draw.size(), draw.pick(1, 2)
    index = torch.stack([torch.randperm(e, generator=draw.generator)[:a] for _ in range(t)])
    halves = draw.pick(1, 2)
    up, down = draw.tensor(e, halves * f, k), draw.tensor(e, o, f)
    activation = draw.pick("silu", "gelu", "gelu_tanh", "relu")
    return (draw.tensor(t, k), index, draw.positive(*index.shape), up, down, activation, 0), {}


def _experts_backward(draw: Draw) -> Arguments:
    (tokens, index, weights, up, down, *rest), _ = _experts(draw)
    return (draw.tensor(len(tokens), down.shape[1]), tokens, index, weights, up, down, *rest), {}


# --- convolution and pooling ------------------------------------------------------------------------------------------


def _convolution(draw: Draw) -> Arguments:
    space, groups, transposed = draw.pick(2, 1, 2, 3), draw.pick(1, 1, 1, 2), draw.flag()
    n, c, f = draw.pick(1, 2), draw.pick(2, 4), draw.pick(2, 4)
    weight = [c, f // groups] if transposed else [f, c // groups]
    image, kernel, stride, padding, dilation, more = zip(
        *(_window(draw, transposed, draw.pick(4, 6, 8, 12)) for _ in range(space)), strict=True
    )
    settings = (list(stride), list(padding), list(dilation), transposed, list(more), groups)
    return (draw.tensor(n, c, *image), draw.tensor(*weight, *kernel), None, *settings), {}


def _window(draw: Draw, transposed: bool, rows: int) -> tuple[int, int, int, int, int, int]:
    """(rows of the input, kernel, stride, padding, dilation, output padding) of one dim; ``rows`` are of the larger
    side, and windows may be larger than a part, or leave it alone."""
    kernel, stride, dilation = draw.pick(3, 1, 2, 5), draw.pick(1, 1, 2, 3), draw.pick(1, 1, 2)
    reach = dilation * (kernel - 1)
    padding = draw.pick(reach // 2, 0, 1, reach)
    output_rows = (rows + 2 * padding - reach - 1) // stride + 1
    if output_rows < 1:
        return _window(draw, transposed, rows + 4)
    if not transposed:
        return rows, kernel, stride, padding, dilation, 0
    output_padding = draw.pick(0, min(stride, dilation * kernel) - 1) if stride > 1 else 0
    small = rows // stride
    fits = (small - 1) * stride - 2 * padding + reach + output_padding + 1 > 0
    return small, kernel, stride, padding if fits else 0, dilation, output_padding


def _convolution_backward(draw: Draw) -> Arguments:
    (source, weight, _, *settings), _ = _convolution(draw)
    output = aten.convolution.default(source, weight, None, *settings)
    mask = draw.pick([True, False, False], [False, True, False])
    return (draw.tensor(*output.shape), source, weight, None, *settings, mask), {}


def _image(draw: Draw, space: int, sides: Sequence[int], batched: bool | None = None) -> Tensor:
    """Samples and channels of an image, or channels alone, with sides of any of these lengths."""
    lead = draw.sizes(2) if (draw.pick(True, True, False) if batched is None else batched) else draw.sizes(1)
    return draw.tensor(*lead, *[draw.pick(*sides) for _ in range(space)])


_SIDES = (4, 6, 8, 5)


def _max_pool(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        kernel, stride, padding = _pool_windows(draw, space)
        source = _image(draw, space, _SIDES)
        if draw.pick(False, False, True):  # a corner in which no window finds anything
            source[..., :3, :] = -math.inf
        return (source, kernel, stride, padding, [1] * space, draw.flag()), {}

    return build


def _pool_windows(draw: Draw, space: int) -> tuple[list[int], list[int], list[int]]:
    kernel = [draw.pick(3, 2, 4) for _ in range(space)]
    padding = [draw.pick(size // 2, 0, 1) for size in kernel]
    return kernel, [draw.pick(2, 1, 2, 3) for _ in range(space)], padding


def _max_pool_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, *settings), _ = _max_pool(space)(draw)
        forward = aten.max_pool2d_with_indices if space == 2 else aten.max_pool3d_with_indices
        output, indices = forward(source, *settings)
        return (draw.tensor(*output.shape), source, *settings, indices), {}

    return build


def _avg_pool(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        windows, divisor = _pool_windows(draw, space), draw.pick(None, None, 5)
        return (_image(draw, space, _SIDES), *windows, draw.flag(), draw.flag(), divisor), {}

    return build


def _avg_pool_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, *settings), _ = _avg_pool(space)(draw)
        output = (aten.avg_pool2d if space == 2 else aten.avg_pool3d)(source, *settings)
        return (draw.tensor(*output.shape), source, *settings), {}

    return build


def _adaptive(space: int) -> Callable[[Draw], Arguments]:
    return lambda draw: ((_image(draw, space, _SIDES), [draw.pick(1, 2, 4, 6) for _ in range(space)]), {})


def _adaptive_avg_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, size), _ = _adaptive(space)(draw)
        return (draw.tensor(*source.shape[:-space], *size), source), {}

    return build


def _adaptive_max_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, size), _ = _adaptive(space)(draw)
        output, indices = (aten.adaptive_max_pool2d if space == 2 else aten.adaptive_max_pool3d)(source, size)
        return (draw.tensor(*output.shape), source, indices), {}

    return build


def _pad(space: int) -> Callable[[Draw], Arguments]:
    """Padding that leaves sizes which can be split, and other padding; parts may be thinner than it."""
    return lambda draw: ((_image(draw, space, (4, 6, 8)), _flat([_margins(draw) for _ in range(space)])), {})


def _margins(draw: Draw) -> tuple[int, int]:
    return draw.pick((1, 1), (2, 2), (3, 1), (0, 2), (0, 0), (3, 3), (1, 2))


def _flat(pairs: Sequence[tuple[int, int]]) -> list[int]:
    return [number for pair in pairs for number in pair]


def _pad_backward(space: int, forward: Any) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, padding), _ = _pad(space)(draw)
        return (draw.tensor(*forward(source, padding).shape), source, padding), {}

    return build


def _resize(draw: Draw, space: int) -> tuple[Tensor, list[int], list[float | None]]:
    source = _image(draw, space, (2, 4, 6), batched=True)
    ratios = [draw.pick(2.0, 1.0, 3.0, 0.5, 1.5) for _ in range(space)]
    size = [int(side * ratio) for side, ratio in zip(source.shape[2:], ratios, strict=True)]
    return source, size, ratios if draw.flag() else [None] * space


def _nearest(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        source, size, scales = _resize(draw, space)
        return (source, size, *scales), {}

    return build


def _nearest_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        source, size, scales = _resize(draw, space)
        return (draw.tensor(*source.shape[:2], *size), size, list(source.shape), *scales), {}

    return build


def _linear(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        source, size, scales = _resize(draw, space)
        return (source, size, draw.pick(False, False, True), *scales), {}

    return build


def _linear_backward(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        source, size, scales = _resize(draw, space)
        corners = draw.pick(False, False, True)
        return (draw.tensor(*source.shape[:2], *size), size, list(source.shape), corners, *scales), {}

    return build


def _im2col(draw: Draw) -> Arguments:
    rows, kernel, stride, padding, dilation, _ = zip(
        *(_window(draw, False, draw.pick(4, 6, 8, 12)) for _ in range(2)), strict=True
    )
    lead = draw.sizes(2) if draw.flag() else draw.sizes(1)
    return (draw.tensor(*lead, *rows), list(kernel), list(dilation), list(padding), list(stride)), {}


def _col2im(draw: Draw) -> Arguments:
    (source, *settings), _ = _im2col(draw)
    columns = aten.im2col.default(source, *settings)
    return (draw.tensor(*columns.shape), list(source.shape[-2:]), *settings), {}


# --- matrices ---------------------------------------------------------------------------------------------------------


def _square(draw: Draw) -> Tensor:
    """A batch of matrices that are far from singular."""
    n = draw.size()
    return draw.tensor(*draw.shape(0, 2), n, n) + 2 * n * torch.eye(n, dtype=torch.float64)


def _definite(draw: Draw) -> Tensor:
    source = _square(draw)
    return (source + source.mT) / 2


def _squares(*settings: Any, definite: bool = False) -> Callable[[Draw], Arguments]:
    return lambda draw: ((_definite(draw) if definite else _square(draw), *settings), {})


def _right_side(draw: Draw, matrix: Tensor) -> Tensor:
    return draw.tensor(*matrix.shape[:-1], draw.size())


def _solve(draw: Draw) -> Arguments:
    matrix = _square(draw)
    return (matrix, _right_side(draw, matrix) if draw.flag() else draw.tensor(*matrix.shape[:-1])), {}


def _factored_solve(factor: Any, definite: bool = False) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        matrix = _definite(draw) if definite else _square(draw)
        factors, pivots, _ = factor(matrix)
        return (factors, pivots, _right_side(draw, matrix)), {}

    return build


def _triangular(draw: Draw) -> Arguments:
    matrix = _square(draw).triu()
    return (matrix, _right_side(draw, matrix)), {"upper": True}


def _cholesky_solve(draw: Draw) -> Arguments:
    lower = torch.linalg.cholesky(_definite(draw))
    return (_right_side(draw, lower), lower), {}


def _reflections(draw: Draw) -> Arguments:
    return tuple(aten.geqrf(_square(draw))), {}


def _reflected(draw: Draw) -> Arguments:
    (factors, tau), _ = _reflections(draw)
    return (factors, tau, _right_side(draw, factors)), {}


# --- distances and samples --------------------------------------------------------------------------------------------


def _distances(draw: Draw) -> Arguments:
    batch, (m, r, k) = draw.shape(0, 2), draw.sizes(3)
    return (draw.tensor(*batch, m, k), draw.tensor(*batch, r, k), draw.pick(2.0, 1.0, 3.0, math.inf, 0.0), None), {}


def _distances_backward(draw: Draw) -> Arguments:
    (first, second, p, _), _ = _distances(draw)
    distances = aten._cdist_forward(first, second, p, None)
    return (draw.tensor(*distances.shape), first, second, p, distances), {}


def _cross(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    shape[dim] = 3
    other = [1 if size != 3 and draw.flag() else size for size in shape]
    return (draw.tensor(*shape), draw.tensor(*other)), {"dim": dim}


def _renorm(draw: Draw) -> Arguments:
    shape = draw.shape(2, 3)
    return (draw.tensor(*shape), draw.pick(1, 2), draw.dim(len(shape)), 1.5), {}


def _grid_sample(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        n, c, *rest = draw.sizes(2 + 2 * space)
        grid = draw.tensor(n, *rest[space:], space)
        return (draw.tensor(n, c, *rest[:space]), grid, draw.pick(0, 1), draw.pick(0, 1, 2), draw.flag()), {}

    return build


def _grid_sample_backward(space: int) -> Callable[[Draw], Arguments]:
    forward = aten.grid_sampler_2d if space == 2 else aten.grid_sampler_3d

    def build(draw: Draw) -> Arguments:
        (image, grid, *settings), _ = _grid_sample(space)(draw)
        mask = [draw.pick(True, True, False), True]
        return (draw.tensor(*forward(image, grid, *settings).shape), image, grid, *settings, mask), {}

    return build


def _affine_grid(draw: Draw) -> Arguments:
    n, *space = draw.sizes(draw.pick(3, 4))
    return (draw.tensor(n, len(space), len(space) + 1), [n, 2, *space], draw.flag()), {}


def _affine_grid_backward(draw: Draw) -> Arguments:
    (maps, size, corners), _ = _affine_grid(draw)
    return (draw.tensor(*aten.affine_grid_generator(maps, size, corners).shape), size, corners), {}


def _unpool(space: int) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        source = _image(draw, space, (4, 6), batched=True)
        forward = F.max_pool2d if space == 2 else F.max_pool3d
        pooled, indices = forward(source, 2, return_indices=True)
        more = ([2] * space, [0] * space) if space == 3 else ()
        return (draw.tensor(*pooled.shape), indices, list(source.shape[-space:]), *more), {}

    return build


# --- creation ---------------------------------------------------------------------------------------------------------


def _full(draw: Draw) -> Arguments:
    return (draw.shape(0, 3), 1.5), {"dtype": torch.float64}


def _shape_alone(draw: Draw) -> Arguments:
    return (draw.shape(0, 3),), {"dtype": torch.float64}


# --- tables -----------------------------------------------------------------------------------------------------------


def _embedding(draw: Draw) -> Arguments:
    v, k = draw.sizes(2)
    return (draw.tensor(v, k), draw.integers(v, *draw.shape(0, 2)), draw.pick(-1, 0, v - 1), False, False), {}


def _embedding_backward(draw: Draw) -> Arguments:
    v, k = draw.sizes(2)
    shape = draw.shape(0, 2)
    indices, padding = draw.integers(v, *shape), draw.pick(-1, 0, v - 1)
    return (draw.tensor(*shape, k), indices, v, padding, draw.pick(False, False, True)), {}


# --- indexing ---------------------------------------------------------------------------------------------------------


def _gather(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    index = list(shape)
    index[dim] = draw.size()
    if draw.pick(False, False, True):
        index[0] = min(index[0], 2)
    return (draw.tensor(*shape), dim, draw.integers(shape[dim], *index)), {}


def _permutation_index(draw: Draw, shape: Sequence[int], dim: int, count: int) -> Tensor:
    """Indices without duplicates, so that a scatter has one result."""
    moved = [size for position, size in enumerate(shape) if position != dim % len(shape)]
    order = torch.rand(*moved, shape[dim], generator=draw.generator).argsort(-1)[..., :count]
    return order.movedim(-1, dim % len(shape))


def _scatter(draw: Draw) -> tuple[Tensor, int, Tensor]:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return draw.tensor(*shape), dim, _permutation_index(draw, shape, dim, draw.pick(1, shape[dim]))


def _scatter_src(draw: Draw) -> Arguments:
    source, dim, index = _scatter(draw)
    return (source, dim, index, draw.tensor(*index.shape)), {}


def _scatter_value(draw: Draw) -> Arguments:
    return (*_scatter(draw), draw.pick(0, 2.5)), {}


def _scatter_add(draw: Draw) -> Arguments:
    (source, dim, index), _ = _gather(draw)
    return (source, dim, index, draw.tensor(*index.shape)), {}


def _indices(draw: Draw) -> tuple[list[int], list[Tensor | None]]:
    shape = draw.shape(2, 3)
    first = draw.pick(*range(len(shape)))
    count = draw.pick(1, len(shape) - first)
    wide = draw.shape(1, 2)
    indices: list[Tensor | None] = [None] * first
    for position in range(first, first + count):
        indices.append(draw.integers(shape[position], *_broadcast(draw, wide) if position > first else wide))
    return shape, indices


def _index(draw: Draw) -> Arguments:
    shape, indices = _indices(draw)
    return (draw.tensor(*shape), indices), {}


def _index_put(draw: Draw) -> Arguments:
    shape, indices = _indices(draw)
    source = draw.tensor(*shape)
    values = draw.tensor(*aten.index(source, indices).shape)
    if draw.flag():
        return (source, indices, values, True), {}
    # without adding, the last of equal indices would win in no certain order
    first = next(position for position, index in enumerate(indices) if index is not None)
    rows = torch.randperm(shape[first], generator=draw.generator)[:2]
    alone = [*[None] * first, rows]
    return (source, alone, draw.tensor(*aten.index(source, alone).shape[draw.pick(0, 1) :])), {}


def _index_select(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    index = draw.integers(shape[dim], *draw.pick([draw.size()], [draw.size()], []))
    return (draw.tensor(*shape), dim, index), {}


def _scatter_reduce(draw: Draw) -> Arguments:
    (source, dim, index), _ = _gather(draw)
    kind, whole = draw.pick("sum", "mean", "amax", "prod"), draw.flag()
    return (source, dim, index, draw.tensor(*index.shape), kind), {"include_self": whole}


def _index_fill(draw: Draw) -> Arguments:
    (source, dim, index), _ = _index_select(draw)
    return (source, dim, index, draw.pick(0, 2.5)), {}


def _index_copy(draw: Draw) -> Arguments:
    (source, dim, index), _ = _index_select(draw)
    index = torch.randperm(source.shape[dim], generator=draw.generator)[
        : index.numel()
    ]  # equal indices win in any order
    written = list(source.shape)
    written[dim] = len(index)
    return (source, dim, index, draw.tensor(*written)), {}


def _index_reduce(draw: Draw) -> Arguments:
    (source, dim, index, values), _ = _index_copy(draw)
    return (source, dim, index, values, draw.pick("mean", "amax", "prod")), {"include_self": draw.flag()}


def _take(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.integers(math.prod(shape), *draw.shape(1, 2))), {}


def _searched(draw: Draw) -> Arguments:
    lead, k, values = draw.shape(1, 2), draw.size(), draw.size()
    rows = draw.tensor(*lead, k) if draw.flag() else draw.tensor(k)
    order = {"sorter": rows.argsort(-1)} if draw.flag() else {}
    return (rows if order else rows.sort(-1).values, draw.tensor(*lead, values)), {**order, "right": draw.flag()}


def _bucketize(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape()), draw.tensor(draw.size()).sort().values), {}


def _member(draw: Draw) -> Arguments:
    return (draw.integers(9, *draw.shape()), draw.integers(9, *draw.shape(1, 2))), {"invert": draw.flag()}


def _index_add(draw: Draw) -> Arguments:
    (source, dim, index), _ = _index_select(draw)
    added = list(source.shape)
    added[dim] = index.numel()
    return (source, dim, index, draw.tensor(*added)), {"alpha": 2.0} if draw.flag() else {}


# --- losses -----------------------------------------------------------------------------------------------------------


def _likelihood(draw: Draw, space: bool) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    v = draw.pick(2, 4, 6)
    shape = [draw.size(), v, *draw.sizes(2)] if space else draw.pick([draw.size(), v], [v])
    rows = [size for position, size in enumerate(shape) if position != (1 if len(shape) > 1 else 0)]
    logarithms = F.log_softmax(draw.tensor(*shape), 1 if len(shape) > 1 else 0)
    ignore = draw.pick(-100, 0, v - 1)
    target = draw.integers(v, *rows)
    if rows and draw.flag():
        target = target.masked_fill(draw.bools(*rows), ignore)
    weight = draw.positive(v) if draw.flag() else None
    return logarithms, target, weight, draw.pick(NONE, SUM), ignore


def _nll(space: bool) -> Callable[[Draw], Arguments]:
    return lambda draw: (_likelihood(draw, space), {})


def _nll_backward(space: bool) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        logarithms, target, weight, reduction, ignore = _likelihood(draw, space)
        forward = aten.nll_loss2d_forward if space else aten.nll_loss_forward
        output, total = forward(logarithms, target, weight, reduction, ignore)
        total = draw.pick(total, draw.tensor(1))  # a sum does not read it
        return (draw.tensor(*output.shape), logarithms, target, weight, reduction, ignore, total), {}

    return build


def _cross_entropy_backward(draw: Draw) -> Arguments:
    logarithms, target, _, _, ignore = _likelihood(draw, space=False)
    return (draw.tensor(), logarithms, target, ignore), {}


def _margin(draw: Draw) -> Arguments:
    n, c = draw.sizes(2)
    rows = [n] if draw.flag() else []
    weight = draw.positive(c) if draw.flag() else None
    return (draw.tensor(*rows, c), draw.integers(c, *rows), draw.pick(1, 2), 0.7, weight, draw.pick(NONE, SUM)), {}


def _margin_backward(draw: Draw) -> Arguments:
    (source, target, *settings), _ = _margin(draw)
    loss = aten.multi_margin_loss(source, target, *settings)
    return (draw.tensor(*loss.shape), source, target, *settings), {}


def _multilabel(draw: Draw) -> Arguments:
    n, c = draw.sizes(2)
    rows = [n] if draw.flag() else []
    labels = draw.integers(c, *rows, c, low=-1)
    return (draw.tensor(*rows, c), labels, draw.pick(NONE, SUM)), {}


def _multilabel_backward(draw: Draw) -> Arguments:
    (source, target, reduction), _ = _multilabel(draw)
    loss, hits = aten.multilabel_margin_loss_forward(source, target, reduction)
    return (draw.tensor(*loss.shape), source, target, reduction, hits), {}


# --- norms ------------------------------------------------------------------------------------------------------------


def _layer_norm(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    normalized = shape[-draw.pick(1, 1, min(2, len(shape))) :]
    weight = draw.tensor(*normalized) if draw.flag() else None
    bias = draw.tensor(*normalized) if draw.flag() else None
    return (draw.tensor(*shape), normalized, weight, bias, 1e-5), {}


def _layer_norm_backward(draw: Draw) -> Arguments:
    (source, shape, weight, bias, _), _ = _layer_norm(draw)
    _, mean, scale = aten.native_layer_norm(source, shape, weight, bias, 1e-5)
    mask = [draw.pick(True, True, False), weight is not None and draw.flag(), bias is not None and draw.flag()]
    if not any(mask):
        mask[0] = True
    return (draw.tensor(*source.shape), source, shape, mean, scale, weight, bias, mask), {}


def _group_norm(draw: Draw) -> Arguments:
    n, groups, inner = draw.size(), draw.pick(1, 2, 4, 6), draw.pick(1, 2, 3)
    space = draw.sizes(draw.pick(2, 1))
    channels = groups * inner
    affine = draw.flag()
    weight, bias = (draw.tensor(channels) if affine else None for _ in range(2))
    return (draw.tensor(n, channels, *space), weight, bias, n, channels, math.prod(space), groups, 1e-5), {}


def _group_norm_backward(draw: Draw) -> Arguments:
    (source, weight, bias, *sizes, eps), _ = _group_norm(draw)
    _, mean, scale = aten.native_group_norm(source, weight, bias, *sizes, eps)
    mask = [draw.flag(), weight is not None and draw.flag(), weight is not None and draw.flag()]
    if not any(mask):
        mask[0] = True
    return (draw.tensor(*source.shape), source, mean, scale, weight, *sizes, mask), {}


def _batch_source(draw: Draw) -> tuple[Tensor, Tensor | None, Tensor | None]:
    n, c = draw.pick(2, 4, 6), draw.size()
    source = draw.tensor(n, c, *draw.sizes(draw.pick(2, 1, 0)))
    affine = draw.flag()
    return source, draw.tensor(c) if affine else None, draw.tensor(c) if affine else None


def _running(draw: Draw, source: Tensor) -> tuple[Tensor, Tensor]:
    return draw.tensor(source.shape[1]), draw.positive(source.shape[1])


def _batch_norm(draw: Draw) -> Arguments:
    source, weight, bias = _batch_source(draw)
    return (source, weight, bias, *_running(draw, source), True, 0.1, 1e-5), {}


def _batch_norm_no_stats(draw: Draw) -> Arguments:
    return (*_batch_source(draw), True, 0.1, 1e-5), {}


def _batch_norm_eval(draw: Draw) -> Arguments:
    source, weight, bias = _batch_source(draw)
    return (source, weight, bias, *_running(draw, source), 0.1, 1e-5), {}


def _batch_norm_backward(draw: Draw) -> Arguments:
    source, weight, bias = _batch_source(draw)
    grad, running = draw.tensor(*source.shape), _running(draw, source)
    mask = [draw.pick(True, True, False), weight is not None, weight is not None]
    if not any(mask):
        mask[0] = True
    if draw.flag():
        _, mean, scale = aten._native_batch_norm_legit.no_stats(source, weight, bias, True, 0.1, 1e-5)
        statistics = running if draw.flag() else (None, None)
        return (grad, source, weight, *statistics, mean, scale, True, 1e-5, mask), {}
    empty = torch.empty(0, dtype=torch.float64)
    return (grad, source, weight, *running, empty, empty, False, 1e-5, mask), {}


# --- reductions -------------------------------------------------------------------------------------------------------


def _whole(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape(0, 3)),), {}


def _over_dims(draw: Draw, least: int = 1) -> Arguments:
    shape = draw.shape(least, 3)
    return (draw.tensor(*shape), draw.dims(len(shape))[: max(1, len(shape) - least + 1)], draw.flag()), {}


def _sum(draw: Draw) -> Arguments:
    (source, dims, keep), _ = _over_dims(draw)
    return (draw.pick(source, (source > 0), (source * 4).long()), dims, keep), {}


def _over_dim(draw: Draw) -> Arguments:
    shape = draw.shape(2, 3)
    return (draw.tensor(*shape), draw.dim(len(shape)), draw.flag()), {}


def _over_any_dim(draw: Draw) -> Arguments:
    (source, dim, keep), _ = _over_dim(draw)
    return (source, draw.pick(dim, dim, None), keep), {}


def _some_not_a_number(draw: Draw) -> Arguments:
    (source, *rest), _ = _over_dims(draw)
    return (source.masked_fill(draw.bools(*source.shape), math.nan), *rest), {}


def _some_zeros(build: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    def zeros(draw: Draw) -> Arguments:
        (source, *rest), _ = build(draw)
        return (source.masked_fill(source > 0, 0.0), *rest[:1]), {}

    return zeros


def _extrema(draw: Draw) -> Arguments:
    (source, dim, keep), _ = _over_dim(draw)
    return (source,), draw.pick({"dim": dim, "keepdim": keep}, {})


def _truth(build: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    def truths(draw: Draw) -> Arguments:
        (source, *rest), kwargs = build(draw)
        return (source > -0.5, *rest), kwargs

    return truths


def _scan(draw: Draw) -> Arguments:
    (source, dim, _), _ = _over_dim(draw)
    return (source, dim), {}


def _counted(draw: Draw) -> Arguments:
    (source, dim, _), _ = _over_dim(draw)
    return (source, draw.pick(1, source.shape[dim]), dim), {}


def _logsumexp(draw: Draw) -> Arguments:
    (source, dims, keep), _ = _over_dims(draw)
    if draw.flag():
        source = source.masked_fill(draw.bools(*source.shape), -math.inf)
    return (source, dims[:1] if draw.flag() else dims, keep), {}


def _softmax(draw: Draw) -> Arguments:
    (source, dim, _), _ = _over_dim(draw)
    source = source * 30
    if draw.flag():  # values that are masked, a whole shard of them or everything too
        source = source.masked_fill(draw.bools(*source.shape), -math.inf)
    return (source, dim, False), {}


def _softmax_backward(forward: Any) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        (source, dim, _), _ = _over_dim(draw)
        return (draw.tensor(*source.shape), forward(source, dim, False), dim, torch.float64), {}

    return build


# --- Fourier transforms -----------------------------------------------------------------------------------------------


def _complex(draw: Draw, *shape: int) -> Tensor:
    return torch.complex(draw.tensor(*shape), draw.tensor(*shape))


def _fourier(draw: Draw) -> Arguments:
    shape = draw.shape(2, 3)
    dims = sorted({dim % len(shape) for dim in draw.dims(len(shape))})
    return (_complex(draw, *shape), dims, draw.pick(0, 1, 2), draw.flag()), {}


def _fourier_of_real(draw: Draw) -> Arguments:
    (source, *settings), _ = _fourier(draw)
    return (source.real.contiguous(), *settings), {}


def _fourier_to_real(draw: Draw) -> Arguments:
    (source, dims, scale, _), _ = _fourier(draw)
    return (source, dims, scale, 2 * source.shape[dims[-1]] - draw.pick(1, 2)), {}


# --- views ------------------------------------------------------------------------------------------------------------


def _view(draw: Draw) -> Arguments:
    """A shape and another with the same number of elements: dims that are split, joined, and made anew."""
    shape = draw.pick([4, 6], [2, 3, 4], [6, 4, 2], [24], [1, 6, 4], [8, 1, 3], [2, 12, 1], [3, 4, 2, 2], [1, 1])
    number = math.prod(shape)
    targets = [[2, 2, 6], [4, 3, 2], [12, 2], [8, 3], [2, 3, 2, 2], [24, 1], [3, 8], [6, 1, 4], [24]]
    fits = [target for target in targets if math.prod(target) == number]
    return (draw.tensor(*shape), draw.pick(*fits) if fits else [number]), {}


def _transpose(draw: Draw) -> Arguments:
    shape = draw.shape(2, 3)
    return (draw.tensor(*shape), draw.dim(len(shape)), draw.dim(len(shape))), {}


def _permute(draw: Draw) -> Arguments:
    shape = draw.shape()
    order = torch.randperm(len(shape), generator=draw.generator).tolist()
    return (draw.tensor(*shape), [dim - len(shape) if draw.flag() else dim for dim in order]), {}


def _matrix(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape(1, 2)),), {}


def _unsqueeze(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return (draw.tensor(*shape), draw.dim(len(shape) + 1)), {}


def _with_ones(draw: Draw) -> Tensor:
    return draw.tensor(*[1 if draw.flag() else size for size in draw.shape()])


def _squeeze(draw: Draw) -> Arguments:
    return (_with_ones(draw),), {}


def _squeeze_dim(draw: Draw) -> Arguments:
    source = _with_ones(draw)
    return (source, draw.dim(source.dim())), {}


def _squeeze_dims(draw: Draw) -> Arguments:
    source = _with_ones(draw)
    return (source, draw.dims(source.dim())), {}


def _expand(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*_broadcast(draw, shape)), shape), {}


def _span(draw: Draw, size: int) -> tuple[int, int, int]:
    """(start, end, step) of a slice that is not empty."""
    start = draw.pick(0, 0, 1, -1)
    return start, draw.pick(size, 2**62), draw.pick(1, 1, 2)


def _slice(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return (draw.tensor(*shape), dim, *_span(draw, shape[dim])), {}


def _select(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return (draw.tensor(*shape), dim, draw.pick(0, -1, shape[dim] - 1)), {}


def _slice_backward(draw: Draw) -> Arguments:
    (source, dim, *span), _ = _slice(draw)
    return (draw.tensor(*aten.slice(source, dim, *span).shape), list(source.shape), dim, *span), {}


def _select_backward(draw: Draw) -> Arguments:
    (source, dim, index), _ = _select(draw)
    return (draw.tensor(*aten.select(source, dim, index).shape), list(source.shape), dim, index), {}


def _slice_scatter(draw: Draw) -> Arguments:
    (source, dim, *span), _ = _slice(draw)
    return (source, draw.tensor(*aten.slice(source, dim, *span).shape), dim, *span), {}


def _select_scatter(draw: Draw) -> Arguments:
    (source, dim, index), _ = _select(draw)
    return (source, draw.tensor(*aten.select(source, dim, index).shape), dim, index), {}


def _split(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    part = draw.pick(1, 2, 3)
    shape[dim] = part * draw.pick(1, 2, 3) + draw.pick(0, 0, 1)
    return (draw.tensor(*shape), part, dim), {}


def _split_with_sizes(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    parts = draw.pick([2, 2, 2], [1, 3], [4], [6, 6])
    shape[dim] = sum(parts)
    return (draw.tensor(*shape), parts, dim), {}


def _cat(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    widths = draw.pick([2, 2, 2], [1, 3], [4], [6, 6])
    parts = []
    for width in widths:
        shape[dim] = width
        parts.append(draw.tensor(*shape))
    return (parts, dim), {}


def _diagonal(draw: Draw) -> Arguments:
    shape = draw.shape(2, 3)
    first, second = draw.some(range(len(shape)), 2)
    return (draw.tensor(*shape), draw.pick(0, 1, -1), first, second - len(shape)), {}


def _diagonal_backward(draw: Draw) -> Arguments:
    (source, *settings), _ = _diagonal(draw)
    return (draw.tensor(*aten.diagonal(source, *settings).shape), list(source.shape), *settings), {}


def _diagonal_scatter(draw: Draw) -> Arguments:
    (source, *settings), _ = _diagonal(draw)
    return (source, draw.tensor(*aten.diagonal(source, *settings).shape), *settings), {}


def _diag_embed(draw: Draw) -> Arguments:
    shape = draw.shape(1, 2)
    first, second = draw.some(range(len(shape) + 1), 2)
    return (draw.tensor(*shape), draw.pick(0, 1, -1), first, second - len(shape) - 1), {}


def _window_of(draw: Draw) -> Arguments:
    shape = draw.shape()
    dim, size = draw.dim(len(shape)), draw.pick(2, 3)
    step = draw.pick(size, 1, 2)
    shape[dim] = size * draw.pick(2, 3) + draw.pick(0, 0, 1)
    return (draw.tensor(*shape), dim, size, step), {}


def _window_backward(draw: Draw) -> Arguments:
    (source, *settings), _ = _window_of(draw)
    return (draw.tensor(*aten.unfold(source, *settings).shape), list(source.shape), *settings), {}


def _constant_pad(draw: Draw) -> Arguments:
    shape = draw.shape()
    padding = [draw.pick(1, 0, 2) for _ in range(2 * draw.pick(1, len(shape)))]
    return (draw.tensor(*shape), padding, draw.pick(0, 1.5)), {}


def _repeat(draw: Draw) -> Arguments:
    shape = draw.shape(0, 2)
    times = [draw.pick(1, 1, 2, 3) for _ in range(len(shape) + draw.pick(0, 1))]
    return (draw.tensor(*shape), times), {}


def _triangle(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape(2, 3)), draw.pick(-1, 0, 1)), {}


def _flip(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.dims(len(shape))), {}


def _roll(draw: Draw) -> Arguments:
    shape = draw.shape()
    dims = draw.dims(len(shape))
    return draw.pick(((draw.tensor(*shape), [1] * len(dims), dims), {}), ((draw.tensor(*shape), [2]), {}))


CASES: Mapping[Any, Callable[[Draw], Arguments]] = {
    ours.attention.default: _attention,
    ours.attention_backward.default: _attention_backward,
    ours.attention_packed.default: _attention_packed,
    ours.attention_packed_backward.default: _attention_packed_backward,
    ours.experts.default: _experts,
    ours.experts_backward.default: _experts_backward,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
    aten.dot.default: _dot,
    aten._trilinear.default: _trilinear,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.adaptive_max_pool2d.default: _adaptive(2),
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_backward(2),
    aten.adaptive_max_pool3d.default: _adaptive(3),
    aten.adaptive_max_pool3d_backward.default: _adaptive_max_backward(3),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: _adaptive(2),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_backward(2),
    aten._adaptive_avg_pool3d.default: _adaptive(3),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_backward(3),
    aten.reflection_pad1d.default: _pad(1),
    aten.reflection_pad1d_backward.default: _pad_backward(1, aten.reflection_pad1d),
    aten.reflection_pad2d.default: _pad(2),
    aten.reflection_pad2d_backward.default: _pad_backward(2, aten.reflection_pad2d),
    aten.reflection_pad3d.default: _pad(3),
    aten.reflection_pad3d_backward.default: _pad_backward(3, aten.reflection_pad3d),
    aten.replication_pad1d.default: _pad(1),
    aten.replication_pad1d_backward.default: _pad_backward(1, aten.replication_pad1d),
    aten.replication_pad2d.default: _pad(2),
    aten.replication_pad2d_backward.default: _pad_backward(2, aten.replication_pad2d),
    aten.replication_pad3d.default: _pad(3),
    aten.replication_pad3d_backward.default: _pad_backward(3, aten.replication_pad3d),
    aten.upsample_nearest1d.default: _nearest(1),
    aten.upsample_nearest1d_backward.default: _nearest_backward(1),
    aten.upsample_nearest2d.default: _nearest(2),
    aten.upsample_nearest2d_backward.default: _nearest_backward(2),
    aten.upsample_nearest3d.default: _nearest(3),
    aten.upsample_nearest3d_backward.default: _nearest_backward(3),
    aten.upsample_linear1d.default: _linear(1),
    aten.upsample_linear1d_backward.default: _linear_backward(1),
    aten.upsample_bilinear2d.default: _linear(2),
    aten.upsample_bilinear2d_backward.default: _linear_backward(2),
    aten.upsample_bicubic2d.default: _linear(2),
    aten.upsample_bicubic2d_backward.default: _linear_backward(2),
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
    aten.upsample_trilinear3d.default: _linear(3),
    aten.upsample_trilinear3d_backward.default: _linear_backward(3),
    aten.full.default: _full,
    aten.zeros.default: _shape_alone,
    aten.ones.default: _shape_alone,
    aten.scalar_tensor.default: lambda draw: ((1.5,), {"dtype": torch.float64}),
    aten.arange.default: lambda draw: ((draw.size(),), {}),
    aten.arange.start: lambda draw: ((1, 1 + draw.size()), {}),
    aten.arange.start_step: lambda draw: ((1, 9, 2), {}),
    aten.linspace.default: lambda draw: ((0.0, 1.0, draw.size()), {"dtype": torch.float64}),
    aten.eye.default: lambda draw: ((draw.size(),), {"dtype": torch.float64}),
    aten.eye.m: lambda draw: ((draw.size(), draw.size()), {"dtype": torch.float64}),
    aten.tril_indices.default: lambda draw: ((3, 4), {}),
    aten.triu_indices.default: lambda draw: ((3, 4), {}),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter_src,
    aten.scatter.value: _scatter_value,
    aten.scatter_add.default: _scatter_add,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_add,
    aten.nll_loss_forward.default: _nll(space=False),
    aten.nll_loss_backward.default: _nll_backward(space=False),
    aten.nll_loss2d_forward.default: _nll(space=True),
    aten.nll_loss2d_backward.default: _nll_backward(space=True),
    ours.cross_entropy_backward.default: _cross_entropy_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_eval,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.sum.default: _whole,
    aten.max.default: _whole,
    aten.min.default: _whole,
    aten.prod.default: _whole,
    aten.any.default: _truth(_whole),
    aten.all.default: _truth(_whole),
    aten.sum.dim_IntList: _sum,
    aten.amax.default: _over_dims,
    aten.amin.default: _over_dims,
    aten.any.dims: _truth(lambda draw: _over_dims(draw, least=2)),
    aten.all.dims: _truth(lambda draw: _over_dims(draw, least=2)),
    aten.any.dim: _truth(_over_dim),
    aten.all.dim: _truth(_over_dim),
    aten.max.dim: _over_dim,
    aten.min.dim: _over_dim,
    aten.prod.dim_int: _over_dim,
    aten.median.dim: _over_dim,
    aten.argmax.default: _over_any_dim,
    aten.argmin.default: _over_any_dim,
    aten.logsumexp.default: _logsumexp,
    aten._conj.default: lambda draw: ((_complex(draw, *draw.shape()),), {}),
    aten._fft_c2c.default: _fourier,
    aten._fft_c2r.default: _fourier_to_real,
    aten._fft_r2c.default: _fourier_of_real,
    aten.view_as_complex.default: lambda draw: ((draw.tensor(*draw.shape(), 2),), {}),
    aten.view_as_real.default: lambda draw: ((_complex(draw, *draw.shape()),), {}),
    aten.cummax.default: _scan,
    aten.cumprod.default: _scan,
    aten.cumsum.default: _scan,
    aten.logcumsumexp.default: _scan,
    aten.sort.default: _scan,
    aten.sort.stable: lambda draw: ((draw.tensor(*draw.sizes(2)),), {"stable": True, "dim": draw.dim(2)}),
    aten.kthvalue.default: _counted,
    aten.topk.default: _counted,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward(aten._softmax),
    aten._log_softmax_backward_data.default: _softmax_backward(aten._log_softmax),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.t.default: _matrix,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze_dim,
    aten.squeeze.dims: _squeeze_dims,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _scan,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _constant_pad,
    aten.repeat.default: _repeat,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.diagonal.default: _diagonal,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.diag_embed.default: _diag_embed,
    aten.unfold.default: _window_of,
    aten.unfold_backward.default: _window_backward,
    aten._linalg_det.default: _squares(),
    aten._linalg_eigh.default: _squares(definite=True),
    aten._linalg_slogdet.default: _squares(),
    aten._linalg_solve_ex.default: _solve,
    aten._linalg_svd.default: _squares(),
    aten.cholesky_inverse.default: _squares(),
    aten.cholesky_solve.default: _cholesky_solve,
    aten.geqrf.default: _squares(),
    aten.linalg_cholesky_ex.default: _squares(definite=True),
    aten.linalg_eig.default: _squares(),
    aten.linalg_householder_product.default: _reflections,
    aten.linalg_inv_ex.default: _squares(),
    aten.linalg_ldl_factor_ex.default: _squares(definite=True),
    aten.linalg_ldl_solve.default: _factored_solve(aten.linalg_ldl_factor_ex, definite=True),
    aten.linalg_lu.default: _squares(),
    aten.linalg_lu_factor_ex.default: _squares(),
    aten.linalg_lu_solve.default: _factored_solve(aten.linalg_lu_factor_ex),
    aten.linalg_matrix_exp.default: lambda draw: ((_square(draw) * 0.1,), {}),
    aten.linalg_pinv.atol_rtol_tensor: lambda draw: ((_square(draw),), {"rtol": draw.positive() * 0.01}),
    aten.linalg_qr.default: _squares("reduced"),
    aten.linalg_solve_triangular.default: _triangular,
    aten.lu_unpack.default: lambda draw: (tuple(aten.linalg_lu_factor_ex(_square(draw))[:2]), {}),
    aten.ormqr.default: _reflected,
    aten.triangular_solve.default: lambda draw: (_triangular(draw)[0][::-1], {}),
    aten.trace.default: lambda draw: ((draw.tensor(*draw.sizes(2)),), {}),
    aten._cdist_forward.default: _distances,
    aten._cdist_backward.default: _distances_backward,
    aten.linalg_cross.default: _cross,
    aten.renorm.default: _renorm,
    aten.grid_sampler_2d.default: _grid_sample(2),
    aten.grid_sampler_2d_backward.default: _grid_sample_backward(2),
    aten.grid_sampler_3d.default: _grid_sample(3),
    aten.grid_sampler_3d_backward.default: _grid_sample_backward(3),
    aten.affine_grid_generator.default: _affine_grid,
    aten.affine_grid_generator_backward.default: _affine_grid_backward,
    aten.max_unpool2d.default: _unpool(2),
    aten.max_unpool3d.default: _unpool(3),
    aten._upsample_nearest_exact1d.default: _nearest(1),
    aten._upsample_nearest_exact1d_backward.default: _nearest_backward(1),
    aten._upsample_nearest_exact2d.default: _nearest(2),
    aten._upsample_nearest_exact2d_backward.default: _nearest_backward(2),
    aten._upsample_nearest_exact3d.default: _nearest(3),
    aten._upsample_nearest_exact3d_backward.default: _nearest_backward(3),
    aten._upsample_bilinear2d_aa.default: _linear(2),
    aten._upsample_bilinear2d_aa_backward.default: _linear_backward(2),
    aten._upsample_bicubic2d_aa.default: _linear(2),
    aten._upsample_bicubic2d_aa_backward.default: _linear_backward(2),
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: lambda draw: ((*_index_fill(draw)[0][:3], draw.tensor()), {}),
    aten.index_copy.default: _index_copy,
    aten.index_reduce.default: _index_reduce,
    aten.take.default: _take,
    aten.searchsorted.Tensor: _searched,
    aten.bucketize.Tensor: _bucketize,
    aten.isin.Tensor_Tensor: _member,
    aten.isin.Tensor_Scalar: lambda draw: ((draw.integers(9, *draw.shape()), 3), {}),
    aten.multi_margin_loss.default: _margin,
    aten.multi_margin_loss_backward.default: _margin_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel,
    aten.multilabel_margin_loss_backward.default: _multilabel_backward,
    aten.nansum.default: _some_not_a_number,
    aten.count_nonzero.default: _some_zeros(_whole),
    aten.count_nonzero.dim_IntList: _some_zeros(_over_dims),
    aten.aminmax.default: _extrema,
    aten.median.default: _whole,
    aten.nanmedian.default: _whole,
    aten.nanmedian.dim: _over_dim,
    aten.mode.default: _over_dim,
    aten.cummin.default: _scan,
}
"""How to call every operator of ``ops.table.RULES`` that draws no random numbers and leaves no value unset."""


# --- element by element -----------------------------------------------------------------------------------------------


def _unary(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape(0, 3)),), {}


def _binary(draw: Draw) -> Arguments:
    shape = draw.shape()
    pair = draw.tensor(*shape), draw.positive(*_broadcast(draw, shape))
    return pair if draw.flag() else pair[::-1], {}


def _compared(draw: Draw) -> Arguments:
    (first, other), _ = _binary(draw)
    return (first > 0, other > 0.5), {}


def _scalar(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape()), 2.5), {}


def _gradient(*settings: Any, positive: bool = False, **keywords: Any) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape()
        value = draw.positive(*shape) if positive else draw.tensor(*shape)
        return (draw.tensor(*shape), value, *settings), keywords

    return build


def _loss(*settings: Any, backward: bool = False, positive: bool = False) -> Callable[[Draw], Arguments]:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape()
        make = draw.positive if positive else draw.tensor
        pair = make(*shape), make(*shape)
        if not backward:
            return (*pair, *settings), {}
        reduction = draw.pick(NONE, SUM)
        grad = draw.tensor(*shape) if reduction == NONE else draw.tensor()
        chosen = [reduction if item is SUM else item for item in settings]
        return (grad, *pair, *chosen), {}

    return build


def _where(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.bools(*_broadcast(draw, shape)), draw.tensor(*shape), draw.tensor(*_broadcast(draw, shape))), {}


def _masked_fill(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.bools(*_broadcast(draw, shape)), draw.pick(0.0, -math.inf, 2.0)), {}


def _prelu(draw: Draw) -> Arguments:
    n, c = draw.sizes(2)
    return (draw.tensor(n, c, 2), draw.tensor(1, c, 1)), {}


def _prelu_backward(draw: Draw) -> Arguments:
    (source, weight), _ = _prelu(draw)
    return (draw.tensor(*source.shape), source, weight.expand_as(source).contiguous()), {}


def _three(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.tensor(*_broadcast(draw, shape)), draw.positive(*shape)), {}


def _dropout_backward(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.bools(*shape), 2.0), {}


def _elu_backward(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), 1.0, 1, 1, False, draw.tensor(*shape)), {}


def _noisy(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.tensor(*shape), draw.positive(*shape), 0.1, 0.3, True, False), {}


POINTWISE: Mapping[Any, Callable[[Draw], Arguments]] = {
    aten.add.Tensor: lambda draw: (_binary(draw)[0], {"alpha": draw.pick(1, 2)}),
    aten.sub.Tensor: _binary,
    aten.mul.Tensor: _binary,
    aten.div.Tensor: _binary,
    aten.maximum.default: _binary,
    aten.pow.Tensor_Scalar: lambda draw: ((draw.tensor(*draw.shape()), 3), {}),
    aten.mul.Scalar: _scalar,
    aten.div.Scalar: _scalar,
    aten.rsub.Scalar: _scalar,
    aten.neg.default: _unary,
    aten.exp.default: _unary,
    aten.tanh.default: _unary,
    aten.relu.default: _unary,
    aten.gelu.default: _unary,
    aten.silu.default: _unary,
    aten.hardswish.default: _unary,
    aten.clone.default: _unary,
    aten.zeros_like.default: _unary,
    aten.zero.default: _unary,
    aten.fill.Scalar: _scalar,
    aten.clamp.default: lambda draw: ((draw.tensor(*draw.shape()), -0.5, 0.5), {}),
    aten.copy.default: lambda draw: (_three(draw)[0][:2], {}),
    aten._to_copy.default: lambda draw: (_unary(draw)[0], {"dtype": draw.pick(torch.float64, torch.int64, torch.bool)}),
    aten.floor_divide.default: _binary,
    aten.logical_and.default: _compared,
    aten.le.Tensor: _binary,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.addcmul.default: _three,
    aten.addcdiv.default: _three,
    aten.complex.default: lambda draw: (_three(draw)[0][:2], {}),
    aten.lerp.Scalar: lambda draw: ((*_three(draw)[0][:2], 0.3), {}),
    aten.deg2rad.default: _unary,
    aten.polar.default: lambda draw: (_three(draw)[0][:2], {}),
    aten.rsub.Tensor: _binary,
    aten.ldexp.Tensor: lambda draw: (_three(draw)[0][:2], {}),
    aten.rrelu_with_noise_backward.default: _noisy,
    aten.rad2deg.default: _unary,
    aten.conj_physical.default: lambda draw: ((_complex(draw, *draw.shape()),), {}),
    aten._conj_physical.default: lambda draw: ((_complex(draw, *draw.shape()),), {}),
    aten.lerp.Tensor: _three,
    aten._prelu_kernel.default: _prelu,
    aten._prelu_kernel_backward.default: _prelu_backward,
    aten.elu_backward.default: _elu_backward,
    aten.gelu_backward.default: _gradient(approximate="tanh"),
    aten.hardshrink_backward.default: _gradient(0.5),
    aten.hardsigmoid_backward.default: _gradient(),
    aten.hardswish_backward.default: _gradient(),
    aten.hardtanh_backward.default: _gradient(-0.5, 0.5),
    aten.leaky_relu_backward.default: _gradient(0.1, False),
    aten.logit_backward.default: _gradient(0.01, positive=True),
    aten.mish_backward.default: _gradient(),
    aten.native_dropout_backward.default: _dropout_backward,
    aten.sigmoid_backward.default: _gradient(),
    aten.silu_backward.default: _gradient(),
    aten.softplus_backward.default: _gradient(1, 20),
    aten.softshrink_backward.default: _gradient(0.5),
    aten.tanh_backward.default: _gradient(),
    aten.threshold_backward.default: _gradient(0),
    aten.binary_cross_entropy.default: _loss(None, NONE, positive=True),
    aten.binary_cross_entropy_backward.default: _loss(None, SUM, backward=True, positive=True),
    aten.huber_loss.default: _loss(NONE, 0.5),
    aten.huber_loss_backward.default: _loss(SUM, 0.5, backward=True),
    aten.mse_loss.default: _loss(NONE),
    aten.mse_loss_backward.default: _loss(SUM, backward=True),
    aten.smooth_l1_loss.default: _loss(NONE, 0.5),
    aten.smooth_l1_loss_backward.default: _loss(SUM, 0.5, backward=True),
    aten.soft_margin_loss.default: _loss(NONE),
    aten.soft_margin_loss_backward.default: _loss(SUM, backward=True),
}
"""Element by element operators: those with carets, and some of each shape of arguments."""
