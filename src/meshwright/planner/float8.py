"""Choose the matrix products that run in float8, if the layout allows it (``Layout.float8``).

A product is chosen if it is faster in float8, including the time for rounding its operands and for reducing the scales.

As in torchao's and Transformer Engine's recipes, the last product of a model, which makes its output, stays in the
wider dtype. Values of the forward pass have the format e4m3; gradients have e5m2 under tensorwise scaling (Transformer
Engine's ``HYBRID``), and e4m3 under rowwise scaling.
"""

from collections.abc import Callable, Mapping

from meshwright.cost.kernels import Rates
from meshwright.errors import LayoutError
from meshwright.ir import units
from meshwright.ir.device import Device
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kernel import Kernel, in_float8
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.operator_algorithm import FLOAT8_MULTIPLE, Float8
from meshwright.ir.placement import is_linear
from meshwright.ir.plan import Strategy
from meshwright.ir.program import OperatorProgram
from meshwright.planner.intra_op.costs import CostModel

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of products that may run in float8."""
LEAST_GAIN = 0.05
"""Products in float8 must be faster by this fraction of their time."""
_PRODUCT = "aten.mm."


def choose_float8(
    graph: Graph, strategies: Mapping[str, Strategy], program: Callable[[Operator], OperatorProgram], rates: Rates,
    links: CostModel, layout: Layout,
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Maps matrix products to the text of their float8 algorithm and the reason for it. ``program`` returns an
    operator's program on a rank. Nothing is chosen on CPUs, which would only compute the same numbers more slowly.

    Raises:
        LayoutError: the layout allows float8, and the cluster's GPUs have no products in float8.
    """
    chosen: dict[str, tuple[str, str]] = {}
    check_float8(layout, rates.device)
    if not layout.float8 or rates.device.kind == "cpu":
        return chosen
    products = [operator for operator in graph.operators if operator.target.startswith(_PRODUCT)]
    last = next((operator.module for operator in reversed(products) if not operator.backward), "")
    makers = graph.producers()
    for operator in products:
        strategy = strategies[operator.name]
        kernel = next((kernel for node in program(operator).nodes for kernel in node.kernels), None)
        if operator.module == last or kernel is None or not _fits(kernel, strategy):
            continue
        gradients = [name in makers and makers[name].backward for name in operator.inputs]
        formats = ["e5m2" if of_gradient and layout.float8 == "tensorwise" else "e4m3" for of_gradient in gradients]
        form = Float8(layout.float8, *formats)  # type: ignore[arg-type]
        plain_s, fast_s = rates.cost(kernel).seconds, _float8_s(kernel, operator, strategy, form, rates, links)
        if formats.count("e5m2") < 2 and fast_s < (1 - LEAST_GAIN) * plain_s:
            chosen[operator.name] = f"{form}", f"{units.seconds(fast_s)}; in {kernel.dtype} {units.seconds(plain_s)}"
    return chosen


def check_float8(layout: Layout, device: Device) -> None:
    """Raise a LayoutError if the layout allows float8, and the device is a GPU without products in float8."""
    if layout.float8 and device.kind != "cpu" and "float8" not in device.peak_flops_per_s:
        raise LayoutError(
            f"float8={layout.float8!r}, and {device.name} has no products in float8", where="layout",
            remedy="leave it out, or plan for GPUs of compute capability 8.9 or later, such as h100",
        )  # fmt: skip


def _fits(kernel: Kernel, strategy: Strategy) -> bool:
    if kernel.product is None or kernel.dtype not in DTYPES or any(map(is_linear, strategy.values())):
        return False
    return not (kernel.product.n % FLOAT8_MULTIPLE or kernel.product.k % FLOAT8_MULTIPLE)


def _float8_s(
    kernel: Kernel, operator: Operator, strategy: Strategy, form: Float8, rates: Rates, links: CostModel
) -> float:
    """Seconds of a product in float8: the maxima of both operands, their reductions over the ranks that share a scale,
    the rounding of both operands, and the product."""
    assert kernel.product is not None, "it is a matrix product"
    m, n, k, _ = kernel.product
    item_bytes = {"float32": 4}.get(kernel.dtype, 2)
    seconds = rates.cost(in_float8(kernel)).seconds
    for position, (elements, rows) in enumerate(((m * k, m), (k * n, n))):
        seconds += rates.memory_bound("reduction", item_bytes * elements).seconds
        seconds += rates.memory_bound("pointwise", (item_bytes + 1) * elements).seconds
        for axis in _reducing(operator, strategy, position, rowwise=form.rowwise):
            seconds += links.collective_s("all_reduce", 4 * (rows if form.rowwise else 1), axis)
    return seconds


def _reducing(operator: Operator, strategy: Strategy, position: int, *, rowwise: bool) -> list[str]:
    """The axes over which the maxima of the operand at ``position`` are reduced: those that split the values of a
    scale."""
    assert operator.rule is not None, "products have rules"
    factors = operator.rule.parsed.inputs[position].dims
    split = {factor.name for index, dim in enumerate(factors) if not rowwise or index == 1 - position for factor in dim}
    return [axis for axis, letter in strategy.items() if axis != TIME and letter in split]
