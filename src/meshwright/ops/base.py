"""What a rule of an operator is made of: its pattern, its FLOPs, and how it runs on one rank's part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from meshwright.errors import RuleError
from meshwright.ir.halo import Rows
from meshwright.ir.rule import DECOMPOSITIONS, OWN, Rule, parse_pattern

aten = torch.ops.aten
Target = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One call of an operator, with fake tensors in place of values."""

    target: Target
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor, ...]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensor inputs, in order of appearance."""
        return list(_tensors_in((self.args, self.kwargs)))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def arguments(call: "Call | Local") -> dict[str, Any]:
    """Every argument of a call of an ATen operator by its name; those that were not given have their default."""
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip([one.name for one in schema], call.args, strict=False))
    return {one.name: one.default_value for one in schema if one.has_default_value()} | given | dict(call.kwargs)


Value = Any
"""What a local rewrite computes with: a node of the per-rank graph."""


class Local(Protocol):
    """One operator on one rank: what a local rewrite may use."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    def shape(self, output: int = 0) -> list[int]:
        """This rank's shape of an output."""

    def input_shape(self, position: int) -> list[int]:
        """This rank's shape of a tensor input."""

    def dtype(self, output: int = 0) -> torch.dtype:
        """The dtype of an output."""

    def is_split(self, factor: str) -> bool:
        """Whether the factor is split over any axis."""

    def coordinate(self, factor: str) -> tuple[int, int]:
        """(this rank's index, number of parts) of a factor; (0, 1) where it is not split."""

    def size(self, factor: str) -> int:
        """The size of a factor over all ranks (of one micro-batch, where the factor is divided in time). Parts differ
        by one unit where it does not divide."""

    def length(self, factor: str) -> int:
        """The size of a factor on this rank."""

    def bounds(self, factor: str, of: str = "") -> tuple[int, ...]:
        """Where the parts of a factor begin, and where the last one ends, in the order of their coordinates; they are
        runs of indices: what is split is the outermost of the factor's letters. Of a joint factor, the parts ``of`` one
        of those that it joins."""

    def times(self, factor: str) -> int:
        """In how many micro-batches the factor is divided."""

    def key(self, name: str = "") -> tuple[Value, int]:
        """The step's random key (a value) and this operator's salt, a number that differs by split coordinates.
        Operators that give one ``name`` draw the same numbers; without a name, nobody else does."""

    def group(self, factor: str) -> tuple[str, int]:
        """The name and size of the group of ranks over which a factor is split (over one axis)."""

    def outside(self, factor: str, other: str) -> bool:
        """Whether a factor is split over an axis outside of that of another (each over one axis)."""

    def all_reduce(self, value: Value, factor: str, op: str = "sum") -> Value:
        """Reduce over the axes on which the factor is split; ``value`` itself may be overwritten."""

    def all_gather(self, value: Value, factor: str) -> Value:
        """All parts on new leading dims (one for each axis on which the factor is split), in the factor's order."""

    def halo(
        self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows], fill: float = 0.0
    ) -> Value:
        """Of a dim (counted from the back) in the parts of a factor, which have these ``edges``, the rows that
        ``ranges`` has for this rank's part, from whichever ranks they lie on; ``fill``, where they lie on none."""

    def interior_first(self, factor: str) -> bool:
        """Whether the plan computes rows that need no halo of the factor first, while that travels; never where the
        factor is split over several axes."""

    def halo_begin(self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> Any:
        """Start the exchange of :meth:`halo`, for :meth:`halo_end`; None where no rows travel, or not all of one's own
        are read."""

    def halo_end(self, begun: Any) -> tuple[Value | None, Value | None]:
        """The rows before and after, once they are there."""

    def halo_return(
        self, strips: Sequence[Value], factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]
    ) -> Value:
        """Start what :meth:`halo_sum` does with the rows before and after one's own, ``strips``, where parts and their
        ranges are alike. What is waited for are terms of one's first rows, then of one's last."""

    def halo_sum(self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> Value:
        """The adjoint of :meth:`halo`: rows of ``value``, those of ``ranges``, are added up at their owners."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """Run an operator (emit it into the per-rank graph)."""


HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and squares are computed in: they could leave the range, or the precision, of half a float."""
    return torch.float32 if dtype in HALVES else dtype


def widened(local: Local, value: Value) -> Value:
    """``value`` in float32 where the operator works in half precision: statistics and sums need it."""
    return local.call(aten._to_copy.default, value, dtype=torch.float32) if local.dtype() in HALVES else value


def narrowed(local: Local, value: Value, output: int = 0) -> Value:
    """A value that was computed from widened ones, in the dtype of the output."""
    return local.call(aten._to_copy.default, value, dtype=local.dtype(output)) if local.dtype() in HALVES else value


def emit_unchanged(local: Local) -> Any:
    """The default local rewrite: the same operator on this rank's parts."""
    return local.call(local.target, *local.args, **local.kwargs)


@dataclass(frozen=True)
class Unsplit:
    """Why a call has no rule: it runs replicated, and the plan says so."""

    reason: str


@dataclass(frozen=True)
class OperatorRule:
    """``rule`` gives a call's rule; ``local`` emits it on one rank's part; ``flops`` counts the whole call;
    ``contiguous`` names letters whose parts must be one run of indices (a vocabulary); ``random``: it draws random
    numbers (``local`` uses ``local.key``), as operators do that PyTorch tags so."""

    rule: Callable[[Call], Rule | Unsplit]
    local: Callable[[Local], Any] = emit_unchanged
    flops: Callable[[Call, Rule | None], float] = lambda call, rule: 0.0
    contiguous: frozenset[str] = frozenset()
    random: bool = False


def make_rule(
    call: Call,
    pattern: str,
    *,
    reduction: str = "sum",
    decompositions: Mapping[str, str] | None = None,
    joint: Mapping[str, tuple[str, ...]] | None = None,
    equal: Sequence[str] = (),
    **sizes: int,
) -> Rule:
    """A rule whose sizes are read from the call's shapes (``sizes`` helps where a dim has several unknown factors).

    Raises:
        RuleError: the pattern does not fit the call, or a decomposition is unknown.
    """
    parsed = parse_pattern(pattern)
    for factor, how in (decompositions or {}).items():
        if how not in DECOMPOSITIONS and str(how).split()[:1] != [OWN]:
            raise RuleError(
                f"decomposition of {factor}: {how!r}", where=str(call.target),
                remedy=f"use one word of {', '.join(DECOMPOSITIONS)}",
            )  # fmt: skip
    known = dict(sizes)
    operands = [*zip(parsed.inputs, call.tensors, strict=False), *zip(parsed.outputs, call.outputs, strict=False)]
    if len(parsed.inputs) != len(call.tensors) or len(parsed.outputs) != len(call.outputs):
        raise _misfit(call, pattern, f"{len(call.tensors)} inputs and {len(call.outputs)} outputs")
    for operand, tensor in operands:
        if len(operand.dims) != tensor.dim():
            raise _misfit(call, pattern, f"a tensor of shape {tuple(tensor.shape)}")
        for dim, size in zip(operand.dims, tensor.shape, strict=True):
            unknown = [factor for factor in dim if factor.size is None and factor.name not in known]
            rest = prod(factor.size if factor.size is not None else known.get(factor.name, 1) for factor in dim)
            if len(unknown) == 1 and rest and size % rest == 0:
                known[unknown[0].name] = size // rest
            elif unknown or rest != size:
                raise _misfit(call, pattern, f"dim of size {size} of shape {tuple(tensor.shape)}")
    order = parsed.factor_names()
    return Rule(
        pattern=pattern,
        sizes={name: known[name] for name in order},
        reduction=reduction,
        decompositions=dict(decompositions or {}),
        joint=dict(joint or {}),
        equal=tuple(equal),
    )


def _misfit(call: Call, pattern: str, what: str) -> RuleError:
    return RuleError(
        f"pattern {pattern!r} does not fit {what}", where=str(call.target), remedy="correct the rule of this operator"
    )


def contraction_flops(call: Call, rule: Rule | None) -> float:
    """Two operations (multiply, add) for each combination of the factors."""
    return 2.0 * prod(rule.sizes.values()) if rule is not None else 0.0


def elementwise_flops(call: Call, rule: Rule | None) -> float:
    """One operation for each output element."""
    return float(sum(output.numel() for output in call.outputs[:1]))


def with_gradients(names: Sequence[str], forward: OperatorRule, backward: OperatorRule) -> dict[Target, OperatorRule]:
    """The rules of the ATen operators of these names, and of their gradients, which are called ``NAME_backward``."""
    pair = (("", forward), ("_backward", backward))
    return {getattr(aten, name + suffix).default: rule for name in names for suffix, rule in pair}
