"""Choose the algorithms of attention on the cluster's device: the fastest of those that support the call.

Operators with the usual algorithm of the device (``ir.attention.algorithms_of``) are left out of the plan.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from meshwright.cost.kernels import Rates
from meshwright.ir import units
from meshwright.ir.graph import Operator
from meshwright.ir.kernel import Kernel
from meshwright.ir.layout import TIME
from meshwright.ir.plan import Strategy
from meshwright.ir.program import OperatorProgram

TARGETS = ("meshwright.attention.", "meshwright.attention_backward.")
"""The beginnings of the names of operators that have these algorithms."""


def choose_attention(
    operators: Iterable[Operator], strategies: Mapping[str, Strategy], program: Callable[[Operator], OperatorProgram],
    rates: Rates,
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Maps attention operators, and their gradients, to the algorithm of each and the reason for it. ``program``
    returns an operator's program on a rank. CPUs have one fused kernel, so that nothing is chosen there."""
    chosen: dict[str, tuple[str, str]] = {}
    if rates.device.kind == "cpu":
        return chosen
    costs = cache(rates.algorithm_costs)
    for operator in operators:
        if not operator.target.startswith(TARGETS) or _splits_both(operator, strategies[operator.name]):
            continue
        kernel = _kernel_of(program(operator))
        if kernel is None:
            continue
        seconds = {name: cost.seconds for name, cost in costs(kernel).items()}
        best, usual = min(seconds, key=seconds.__getitem__), next(iter(seconds))
        if best != usual:
            fast, slow = units.seconds(seconds[best]), units.seconds(seconds[usual])
            chosen[operator.name] = best, f"{fast} by FLOPs and bytes; {usual} {slow}"
    return chosen


def _kernel_of(program: OperatorProgram) -> Kernel | None:
    kernels = [kernel for node in program.nodes for kernel in node.kernels if kernel.attention is not None]
    return kernels[0] if kernels else None


def _splits_both(operator: Operator, strategy: Strategy) -> bool:
    """Whether different axes split queries and keys. Then some ranks have equal parts at different positions, which the
    program of the first rank does not show."""
    rule = operator.rule
    if rule is None:
        return True
    backward = operator.target.startswith(TARGETS[1])
    query, key = rule.parsed.inputs[backward : backward + 2]
    queries, keys = ({factor.name for factor in operand.dims[2]} for operand in (query, key))
    split = {letter for axis, letter in strategy.items() if axis != TIME}
    return bool(split & queries) and bool(split & keys)
