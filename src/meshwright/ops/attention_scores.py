"""Attention by its scores: masks and bands as terms of the scores, and the algorithm that keeps all scores in memory.

Queries [b, g r, s, d] share keys [b, g, t, d] in groups of r heads. The rows of the r heads then lie one after the
other in one product, so that keys are not repeated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.attention import Band
from meshwright.ops import philox

Results = tuple[Tensor, ...]
Ranges = tuple[tuple[int, int], ...]
"""Ranges of positions in the sequence, one after the other: the first position and the number of positions of each."""


@dataclass(frozen=True)
class Dropout:
    """The dropout of a call: its probability, and where its scores lie among those of all ranks and micro-batches.

    ``random_key``, ``salt`` and ``time`` are those of ``ops/philox.py``. ``sizes`` are the sizes of all scores [b, h,
    ..., s, t]; ``begins`` and ``lengths`` say which batches and heads the call has. ``rows`` and ``columns`` are the
    positions of its queries and keys.
    """

    probability: float
    random_key: Any
    salt: int
    sizes: Sequence[int]
    begins: Sequence[int]
    lengths: Sequence[int]
    time: int
    rows: Ranges
    columns: Ranges

    def part(self, rows: slice, columns: slice) -> "Dropout":
        """The dropout of some of the queries and keys."""
        return replace(self, rows=_cut(self.rows, rows), columns=_cut(self.columns, columns))

    def keep(self, scores: Tensor) -> Tensor:
        """The factor of each weight: 0 if it is dropped, else what keeps the mean. ``scores`` are like the weights."""
        if len(self.rows) == len(self.columns) == 1:
            kept = self._draw(scores, self.rows[0], self.columns[0])
        else:
            kept, row = torch.empty_like(scores), 0
            for rows in self.rows:
                column = 0
                for columns in self.columns:
                    part = kept[..., row : row + rows[1], column : column + columns[1]]
                    part.copy_(self._draw(part, rows, columns))
                    column += columns[1]
                row += rows[1]
        return kept.div_(1.0 - self.probability if self.probability < 1.0 else 1.0)

    def _draw(self, like: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        begins, lengths = [*self.begins, rows[0], columns[0]], [*self.lengths, rows[1], columns[1]]
        place = self.sizes, begins, lengths, 1, self.time
        kept: Tensor = philox.bernoulli(like, 1.0 - self.probability, self.random_key, self.salt, *place)
        return kept


def _cut(ranges: Ranges, part: slice) -> Ranges:
    """The positions of a part of the queries or keys that have these positions."""
    parts, passed = [], 0
    for first, length in ranges:
        low, high = max(part.start - passed, 0), min(part.stop - passed, length)
        if low < high:
            parts.append((first + low, high - low))
        passed += length
    return tuple(parts)


@dataclass(frozen=True)
class ScoreSettings:
    """The arguments of a call that are not tensors. ``band`` says which keys the queries see."""

    band: Band
    scale: float
    dropout: Dropout | None = None


def allowed(like: Tensor, band: Band) -> Tensor:
    """The mask [queries, keys] of a band: true where a query sees a key."""
    seen = torch.ones(band.queries, band.keys, dtype=torch.bool, device=like.device)
    if band.causal:
        seen.tril_(band.first)
    if band.window:
        seen.triu_(band.first - band.window + 1)
    return seen


def additive(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as terms of the scores: ``-inf`` where no key is seen."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)


def with_band(mask: Tensor | None, query: Tensor, band: Band) -> Tensor | None:
    """The terms of the scores for a mask and a band together."""
    given = None if mask is None else additive(mask, query)
    if not band.causal:
        return given
    seen = additive(allowed(query, band), query)
    return seen if given is None else given + seen


def causal_or_terms(mask: Tensor | None, query: Tensor, band: Band) -> tuple[bool, Tensor | None]:
    """Whether a kernel's causal flag says which keys the queries see, and otherwise the terms of the scores."""
    causal = band.is_triangle and mask is None
    return causal, None if causal else with_band(mask, query, band)


def laid_out(value: Tensor) -> Tensor:
    """The tensor in the memory order of the fused kernels: (batch, length, heads, ...)."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def without_keys(mask: Tensor | None) -> Tensor | None:
    """The queries [..., s] for which a mask allows no key."""
    return None if mask is None else (mask == -math.inf).all(-1)


def finite(logsumexp: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp for backward, in which queries without keys get weights of 0."""
    return logsumexp if mask is None else logsumexp.masked_fill(logsumexp == -math.inf, 0.0)


def _by_group(value: Tensor, groups: int) -> Tensor:
    """[b, g r, s, d] as [b, g, r s, d]: the rows of the query heads that share a key head, one after the other."""
    batch, heads, rows, width = value.shape
    return value if heads == groups else value.reshape(batch, groups, heads // groups * rows, width)


def _by_head(value: Tensor, heads: int) -> Tensor:
    batch, groups, rows, width = value.shape
    return value if groups == heads else value.reshape(batch, heads, groups * rows // heads, width)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [b, g r, s, d] times the transpose of ``right`` [b, g, t, d], in float32 or wider. Float16 is cast
    before the product, because its sums could overflow."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == torch.float16:
        left, right = left.to(wide), right.to(wide)
    product = torch.matmul(_by_group(left, right.shape[1]), right.transpose(-2, -1))
    return _by_head(product.to(wide), left.shape[1])


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, band: Band, scale: float) -> Tensor:
    scores = _product(query * scale, key)
    if band.causal:
        scores = scores.masked_fill_(~allowed(query, band), -math.inf)
    return scores if mask is None else scores + mask


def unknown_queries(query: Tensor, key: Tensor, mask: Tensor | None, band: Band, scale: float) -> Tensor | None:
    """The queries with a NaN among their visible scores. The CPU's fused kernel returns 0 if all scores are NaN.

    None if no score can be NaN, because the product of the norms of ``query`` and ``key`` is finite. It is an
    upper limit of every product of a query and a key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    bound = torch.linalg.vector_norm(query, dtype=wide) * torch.linalg.vector_norm(key, dtype=wide)
    if bound.isfinite():
        return None
    if mask is not None:
        mask = additive(mask, query)
        mask = mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
    parts = []
    for start in range(0, query.shape[-2], 256):  # all scores at once may not fit into memory
        rows = slice(start, start + 256)
        some = query[..., rows, :]
        part = band._replace(queries=some.shape[-2], first=band.first + start)
        scores = _scores(some, key, None if mask is None else mask[..., rows, :], part, scale)
        parts.append(scores.isnan().any(-1, keepdim=True))
    return torch.cat(parts, -2)


def _weights(scores: Tensor, logsumexp: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax of the scores in place. The weights of a query without allowed keys are 0."""
    return scores.sub_(finite(logsumexp, mask).unsqueeze(-1)).exp_()


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: ScoreSettings) -> Results:
    """Attention by two products and a softmax between them."""
    mask = None if mask is None else additive(mask, query)
    scores = _scores(query, key, mask, settings.band, settings.scale)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp, mask)
    if settings.dropout:
        weights.mul_(settings.dropout.keep(weights))
    output = torch.matmul(_by_group(weights.to(value.dtype), value.shape[1]), value)
    return _by_head(output, query.shape[1]), logsumexp


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    settings: ScoreSettings,
) -> Results:  # fmt: skip
    """The gradients by five products; the scores are computed again."""
    mask, heads, groups = None if mask is None else additive(mask, query), query.shape[1], key.shape[1]
    weights = _weights(_scores(query, key, mask, settings.band, settings.scale), logsumexp, mask)
    grad_weights = _product(grad, value)
    dropped = weights
    if settings.dropout:
        keep = settings.dropout.keep(weights)
        dropped = weights * keep
        grad_weights.mul_(keep)
        del keep
    turned = _by_group(dropped, groups).transpose(-2, -1).to(grad.dtype)
    grad_value = torch.matmul(turned, _by_group(grad, groups))
    del dropped, turned
    delta = (grad.to(weights.dtype) * output).sum(-1, keepdim=True)
    grad_scores = _by_group((weights * (grad_weights - delta)).to(query.dtype), groups)
    grad_query = _by_head(torch.matmul(grad_scores, key), heads) * settings.scale
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), _by_group(query, groups)) * settings.scale
    return grad_query, grad_key, grad_value
