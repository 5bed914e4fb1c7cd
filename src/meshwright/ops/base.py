"""The parts of an operator's rule: a pattern, a count of FLOPs, and a local rewrite that emits one rank's calls."""

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
    """One call of an operator, with fake tensors in place of real ones."""

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
    """Return all arguments of a call of an ATen operator by name, defaults of omitted arguments included."""
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip([arg.name for arg in schema], call.args, strict=False))
    return {arg.name: arg.default_value for arg in schema if arg.has_default_value()} | given | dict(call.kwargs)


Value = Any
"""A value in a local rewrite: a node of the per-rank graph."""


class Local(Protocol):
    """One operator on one rank: its arguments, and the methods with which a local rewrite emits calls for the rank."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    algorithm: str
    """The text of the algorithm that the plan names for the operator (``ir/operator_algorithm.py``), or empty."""

    def shape(self, output: int = 0) -> list[int]:
        """The shape of an output on this rank."""

    def input_shape(self, position: int) -> list[int]:
        """The shape of a tensor input on this rank."""

    def dtype(self, output: int = 0) -> torch.dtype:
        """The dtype of an output."""

    def is_split(self, factor: str) -> bool:
        """Whether any mesh axis splits the factor."""

    def coordinate(self, factor: str) -> tuple[int, int]:
        """Return this rank's index among the parts of a factor, and the number of parts: (0, 1) if it is not split."""

    def size(self, factor: str) -> int:
        """The size of a factor over all ranks, in one micro-batch. If the number of parts does not divide the size,
        some parts are one unit larger than others."""

    def length(self, factor: str) -> int:
        """The size of a factor on this rank."""

    def bounds(self, factor: str, of: str = "") -> tuple[int, ...]:
        """Return the first index of each part of a factor, in order, and then the end of the last part. Each part must
        be one range of indices. For a joint factor, ``of`` names the member letter whose indices are meant."""

    def times(self, factor: str) -> int:
        """The number of micro-batches into which the factor is divided."""

    def key(self, name: str = "") -> tuple[Value, int]:
        """Return the micro-batch's random key (a value) and the operator's salt, a number that differs between ranks
        with different parts. Operators draw equal numbers if they pass the same ``name``, and their own without it."""

    def draw(
        self, name: str = "", factors: Sequence[str] = ()
    ) -> tuple[Value, int, list[int], list[int], list[int], int, int]:
        """Return the last arguments of an operator that draws random numbers (``ops/philox.py``): the micro-batch's
        random key, the operator's salt, and the place of this rank's part of the first output, or of a tensor with
        these ``factors``, a dim each. So an element has the same number under every layout. Operators draw equal
        numbers if they pass the same ``name``, and their own without it."""

    def group(self, factor: str) -> tuple[str, int]:
        """The name and size of the group of ranks that hold the parts of a factor. One axis must split the factor."""

    def outside(self, factor: str, other: str) -> bool:
        """Whether the one axis that splits ``factor`` comes before the one axis that splits ``other`` in the mesh."""

    def all_reduce(self, value: Value, factor: str, op: str = "sum") -> Value:
        """All-reduce ``value`` over all axes that split the factor. The call may overwrite ``value``."""

    def all_gather(self, value: Value, factor: str) -> Value:
        """Gather all parts on new leading dims: one dim for each axis that splits the factor, the outermost first."""

    def reduce_scatter(self, value: Value, factor: str) -> Value:
        """Sum ``value`` over the one axis that splits the factor. Its first dim has an index for each rank of the axis:
        return that of this rank, without the dim."""

    def halo(
        self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows], fill: float = 0.0
    ) -> Value:
        """Return the rows of ``dim`` (counted from the back) that this rank reads, fetched from the ranks that own
        them. ``edges`` are the bounds of all parts. ``ranges`` has the range of rows that each part reads. Rows that no
        rank owns have the value ``fill``."""

    def interior_first(self, factor: str) -> bool:
        """Whether the plan first computes the rows that do not need the factor's halo, while the halo travels. The plan
        never does so if several axes split the factor."""

    def halo_begin(self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> Any:
        """Start the exchange of :meth:`halo` and return its state for :meth:`halo_end`. Return None if no rows travel,
        if this rank does not read all of its own rows, or if several axes split the factor."""

    def halo_end(self, begun: Any) -> tuple[Value | None, Value | None]:
        """Wait for a started exchange. Return the rows before and after this rank's part, None for an empty side."""

    def halo_return(
        self, strips: Sequence[Value], factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]
    ) -> Value:
        """Start to send ``strips``, this rank's terms of sums over the rows before and after its part, to the ranks
        that own the rows. All parts must have equal sizes and equal halos. The result must be waited for. It has the
        neighbours' terms for this rank's first rows, then for its last rows."""

    def halo_sum(self, value: Value, factor: str, dim: int, edges: Sequence[int], ranges: Sequence[Rows]) -> Value:
        """Send ``value``, this rank's terms of sums over the rows that it reads, to the owners of the rows, which add
        up all ranks' terms. This is the adjoint of :meth:`halo`."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """Emit a call of an operator into the per-rank graph."""


HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and squares: float32 in place of half precision, otherwise ``dtype`` itself."""
    return torch.float32 if dtype in HALVES else dtype


def widened(local: Local, value: Value) -> Value:
    """Cast ``value`` to float32 if the operator works in half precision, because statistics and sums need float32."""
    return local.call(aten._to_copy.default, value, dtype=torch.float32) if local.dtype() in HALVES else value


def narrowed(local: Local, value: Value, output: int = 0) -> Value:
    """Cast a value that was computed from ``widened`` values to the dtype of the output."""
    return local.call(aten._to_copy.default, value, dtype=local.dtype(output)) if local.dtype() in HALVES else value


def emit_unchanged(local: Local) -> Any:
    """The default local rewrite: the same operator on this rank's parts."""
    return local.call(local.target, *local.args, **local.kwargs)


@dataclass(frozen=True)
class Unsplit:
    """The reason why a call has no rule. The call runs replicated, and the plan says so."""

    reason: str


@dataclass(frozen=True)
class OperatorRule:
    """The rule of an operator.

    ``rule`` returns the rule of one call. ``local`` emits the call for one rank's part. ``flops`` counts the FLOPs of
    the whole call. ``contiguous`` names the letters whose parts must each be one range of indices (a vocabulary).
    ``random`` says that ``local`` draws random numbers. Operators that PyTorch tags as random do not need the flag."""

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
    """Return the rule of a call: the pattern, with the sizes of its letters from the shapes of the call's tensors.

    ``sizes`` gives the sizes of letters that the shapes do not determine, because a dim has several unknown factors.

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
            known_product = prod(
                factor.size if factor.size is not None else known.get(factor.name, 1) for factor in dim
            )
            if len(unknown) == 1 and known_product and size % known_product == 0:
                known[unknown[0].name] = size // known_product
            elif unknown or known_product != size:
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
    """Count two operations (multiply, add) for each combination of indices of all factors."""
    return 2.0 * prod(rule.sizes.values()) if rule is not None else 0.0


def elementwise_flops(call: Call, rule: Rule | None) -> float:
    """Count one operation for each element of the first output."""
    return float(sum(output.numel() for output in call.outputs[:1]))


def with_gradients(names: Sequence[str], forward: OperatorRule, backward: OperatorRule) -> dict[Target, OperatorRule]:
    """Return the rules of the ATen operators called ``names`` and of their gradients, called ``NAME_backward``."""
    pair = (("", forward), ("_backward", backward))
    return {getattr(aten, name + suffix).default: rule for name in names for suffix, rule in pair}
