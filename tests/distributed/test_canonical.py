"""Canonical forms: they compute what the operator computes, out of operators that have rules, and divide by no count
that a shard would see."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.ops.loss import MEAN, NONE, SUM
from meshwright.ops.table import CANONICAL, operator_rule
from tests.distributed.lockstep import compare, present
from tests.distributed.rule_cases import CASES, Arguments, Draw
from tests.tries import tries

aten = torch.ops.aten
Build = Callable[[Draw], Arguments]
REDUCTIONS = (MEAN, MEAN, MEAN, MEAN, MEAN, MEAN, SUM, NONE)
"""Mostly the one that is rewritten."""


def _added(*shapes: Callable[..., list[int]]) -> Build:
    def build(draw: Draw) -> Arguments:
        sizes = draw.sizes(4)
        options = {"beta": draw.pick(0, 1, 2.0), "alpha": draw.pick(1, 0.5)} if draw.flag() else {}
        return tuple(draw.tensor(*shape(*sizes)) for shape in shapes), options

    return build


def _convolution(draw: Draw) -> Arguments:
    (source, weight, _, *settings), _ = CASES[aten.convolution.default](draw)
    filters = weight.shape[1] * settings[-1] if settings[3] else weight.shape[0]
    return (source, weight, draw.tensor(filters), *settings), {}


def _convolution_backward(draw: Draw) -> Arguments:
    (grad, source, weight, _, *settings, _), _ = CASES[aten.convolution_backward.default](draw)
    mask = draw.pick([True, True, True], [False, True, True], [True, True, False], [False, False, True])
    return (grad, source, weight, [grad.shape[1]], *settings, mask), {}


def _likelihood(forward: bool, space: bool) -> Build:
    name = aten.nll_loss2d_forward if space else aten.nll_loss_forward

    def build(draw: Draw) -> Arguments:
        (logarithms, labels, weight, _, ignore), _ = CASES[name.default](draw)
        reduction = draw.pick(*REDUCTIONS)
        if forward:
            return (logarithms, labels, weight, reduction, ignore), {}
        output, total = name(logarithms, labels, weight, reduction, ignore)
        return (draw.tensor(*output.shape), logarithms, labels, weight, reduction, ignore, total), {}

    return build


def _loss(*before: Any, after: tuple[Any, ...] = (), positive: bool = False) -> Build:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape()
        make = draw.positive if positive else draw.tensor
        pair = make(*shape), make(*shape)
        reduction = draw.pick(*REDUCTIONS)
        if reduction == MEAN and draw.flag():
            return pair, {}
        return (*pair, *before, reduction, *after), {}

    return build


def _loss_backward(*before: Any, after: tuple[Any, ...] = (), positive: bool = False) -> Build:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape()
        make = draw.positive if positive else draw.tensor
        reduction = draw.pick(*REDUCTIONS)
        grad = draw.tensor(*shape) if reduction == NONE else draw.tensor()
        return (grad, make(*shape), make(*shape), *before, reduction, *after), {}

    return build


def _mean(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.pick(draw.dims(len(shape)), None), draw.flag()), {}


def _spread(draw: Draw) -> Arguments:
    shape = draw.shape()
    dims = draw.pick(draw.dims(len(shape)), None)
    return (draw.tensor(*shape), dims), {"correction": draw.pick(None, 0, 1), "keepdim": draw.flag()}


def _norm(draw: Draw) -> Arguments:
    shape = draw.shape()
    order = draw.pick(0, 1, 2, 3, math.inf, -math.inf)
    return (draw.tensor(*shape), order, draw.pick(draw.dims(len(shape)), None), draw.flag()), {}


def _old_norm(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.pick(None, 1, 2, 3), draw.dims(len(shape)), draw.flag()), {}


def _unary(draw: Draw) -> Arguments:
    return (draw.tensor(*draw.shape()),), {}


def _halves(draw: Draw) -> tuple[Tensor, int]:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    shape[dim] *= 2
    return draw.tensor(*shape), dim


def _glu(draw: Draw) -> Arguments:
    return _halves(draw), {}


def _glu_backward(draw: Draw) -> Arguments:
    source, dim = _halves(draw)
    return (draw.tensor(*aten.glu(source, dim).shape), source, dim), {}


def _log_sigmoid_backward(draw: Draw) -> Arguments:
    source = draw.tensor(*draw.shape()) * 5
    return (draw.tensor(*source.shape), source, aten.log_sigmoid_forward(source)[1]), {}


def _safe_softmax(draw: Draw) -> Arguments:
    (source, dim, _), _ = CASES[aten._softmax.default](draw)
    return (source, dim), {}


def _new(*values: Any) -> Build:
    def build(draw: Draw) -> Arguments:
        options = {"dtype": draw.pick(torch.float32, torch.int64)} if draw.flag() else {}
        return (draw.tensor(2), draw.shape(), *values), options

    return build


def _scalar_like(*values: Any) -> Build:
    def build(draw: Draw) -> Arguments:
        options = {"dtype": draw.pick(torch.float32, torch.int64)} if draw.flag() else {}
        return (draw.tensor(), *values), options

    return build


def _pixels(up: bool) -> Build:
    def build(draw: Draw) -> Arguments:
        times, (n, c, y, x) = draw.pick(1, 2, 3), draw.sizes(4)
        lead = [n] if draw.flag() else []
        shape = [c * times**2, y, x] if up else [c, y * times, x * times]
        return (draw.tensor(*lead, *shape), times), {}

    return build


def _cat(draw: Draw) -> Arguments:
    (parts, dim), _ = CASES[aten.cat.default](draw)
    empty = [torch.empty(0, dtype=torch.float64)] if draw.flag() else []
    return ([*empty, *parts[: draw.pick(1, len(parts))]], dim), {}


def _stack(draw: Draw) -> Arguments:
    shape = draw.shape()
    return ([draw.tensor(*shape) for _ in range(draw.pick(1, 3))], draw.dim(len(shape) + 1)), {}


def _batch_norm(draw: Draw) -> Arguments:
    (source, weight, bias, mean, variance, *_), _ = CASES[aten._native_batch_norm_legit_functional.default](draw)
    return (source, weight, bias, *draw.pick((None, None), (mean, variance)), True, 0.1, 1e-5), {}


def _batch_norm_backward(draw: Draw) -> Arguments:
    (grad, source, weight, *_, mean, scale, train, eps, mask), _ = CASES[aten.native_batch_norm_backward.default](draw)
    channels = source.shape[1]
    running = draw.tensor(channels), draw.tensor(channels).abs() + 0.5
    return (grad, source, weight, *running, mean, scale, train, eps, mask), {}


def _strided(scatters: bool) -> Build:
    def build(draw: Draw) -> Arguments:
        a, b, c = draw.sizes(3)
        kind = draw.pick("in order", "columns", "transposed", "a part")
        source, size, stride, offset = {
            "in order": (draw.tensor(a, b, c), [a * b, c], [c, 1], None),
            "columns": (draw.tensor(a, b, c + 2), [a, b, c], [b * (c + 2), c + 2, 1], 1),
            "transposed": (draw.tensor(a, b).t(), [a, b], [b, 1], 0),
            "a part": (draw.tensor(a + 1, b), [a, b - 1], [b, 1], b + 1),
        }[kind]
        written = (draw.tensor(*size),) if scatters else ()
        return (source, *written, size, stride, offset), {}

    return build


def _weight_norm(backward: bool) -> Build:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape(2, 3)
        dim = draw.pick(0, len(shape) - 1)
        lengths = [size if other == dim else 1 for other, size in enumerate(shape)]
        v, g = draw.tensor(*shape), draw.tensor(*lengths)
        if not backward:
            return (v, g, dim), {}
        return (draw.tensor(*shape), v, g, aten._weight_norm_interface(v, g, dim)[1], dim), {}

    return build


def _with_logits(draw: Draw) -> Arguments:
    (logits, labels, *rest), _ = _loss()(draw)
    weights = [draw.positive(logits.shape[-1]) if draw.flag() else None for _ in range(2)]
    return (logits * 20, labels, *weights, *rest), {}


def _masked(backward: bool) -> Build:
    def build(draw: Draw) -> Arguments:
        shape = draw.shape(2, 3)
        kept = draw.pick(len(shape), len(shape) - 1)
        mask = draw.bools(*shape[:kept], *[1] * (len(shape) - kept)).expand(shape)
        values = draw.tensor(math.prod(shape) + (shape[-1] if draw.flag() else 1))
        if not backward:
            return (draw.tensor(*shape), mask, values), {}
        return (draw.tensor(*shape), mask, [len(values)]), {}

    return build


def _margin(name: str, *settings: Any, forward: Any) -> Build:
    """``forward``: the operator whose gradient it is, or None."""

    def build(draw: Draw) -> Arguments:
        n, c = draw.sizes(2)
        rows = [n] if draw.flag() else []
        labels = draw.integers(c, *rows, *([c] if "label" in name else []))
        given = (draw.tensor(*rows, c), labels, *settings, draw.pick(*REDUCTIONS))
        if forward is None:
            return given, {}
        shown = present(forward(*given))
        return (draw.tensor(*shown[0].shape), *given, *shown[1:]), {}

    return build


CANONICAL_CASES: Mapping[Any, Build] = {
    aten.addmm.default: _added(lambda m, k, n, g: [m, n], lambda m, k, n, g: [m, k], lambda m, k, n, g: [k, n]),
    aten.addmv.default: _added(lambda m, k, n, g: [m], lambda m, k, n, g: [m, k], lambda m, k, n, g: [k]),
    aten.baddbmm.default: _added(
        lambda m, k, n, g: [g, m, n], lambda m, k, n, g: [g, m, k], lambda m, k, n, g: [g, k, n]
    ),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.nll_loss_forward.default: _likelihood(True, space=False),
    aten.nll_loss_backward.default: _likelihood(False, space=False),
    aten.nll_loss2d_forward.default: _likelihood(True, space=True),
    aten.nll_loss2d_backward.default: _likelihood(False, space=True),
    aten.binary_cross_entropy.default: _loss(None, positive=True),
    aten.binary_cross_entropy_backward.default: _loss_backward(None, positive=True),
    aten.huber_loss.default: _loss(after=(0.5,)),
    aten.huber_loss_backward.default: _loss_backward(after=(0.5,)),
    aten.mse_loss.default: _loss(),
    aten.mse_loss_backward.default: _loss_backward(),
    aten.smooth_l1_loss.default: _loss(after=(0.5,)),
    aten.smooth_l1_loss_backward.default: _loss_backward(after=(0.5,)),
    aten.soft_margin_loss.default: _loss(),
    aten.soft_margin_loss_backward.default: _loss_backward(),
    aten.mean.default: _unary,
    aten.mean.dim: _mean,
    aten.var.correction: _spread,
    aten.std.correction: _spread,
    aten.var_mean.correction: _spread,
    aten.std_mean.correction: _spread,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: lambda draw: ((*_unary(draw)[0], draw.pick(1, 2, 3)), {}),
    aten.norm.ScalarOpt_dim: _old_norm,
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu_backward,
    aten.log_sigmoid_forward.default: _unary,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.new_zeros.default: _new(),
    aten.new_ones.default: _new(),
    aten.new_full.default: _new(2.0),
    aten.new_empty.default: _new(),
    aten.ones_like.default: _scalar_like(),
    aten.zeros_like.default: _scalar_like(),
    aten.full_like.default: _scalar_like(2.0),
    aten.new_empty_strided.default: lambda draw: ((draw.tensor(2), [2, 3], [3, 1]), {}),
    aten.pixel_shuffle.default: _pixels(up=True),
    aten.pixel_unshuffle.default: _pixels(up=False),
    aten._weight_norm_interface.default: _weight_norm(backward=False),
    aten._weight_norm_interface_backward.default: _weight_norm(backward=True),
    aten.as_strided.default: _strided(scatters=False),
    aten.as_strided_scatter.default: _strided(scatters=True),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.view.default: lambda draw: ((draw.tensor(3, 4).t(), [12]), {}),
    aten.addr.default: _added(lambda m, k, n, g: [m, n], lambda m, k, n, g: [m], lambda m, k, n, g: [n]),
    aten.addbmm.default: _added(lambda m, k, n, g: [m, n], lambda m, k, n, g: [g, m, k], lambda m, k, n, g: [g, k, n]),
    aten.vdot.default: lambda draw: (tuple(draw.tensor(5) for _ in range(2)), {}),
    aten.dist.default: lambda draw: ((draw.tensor(4, 6), draw.tensor(6), draw.pick(1, 2, 3)), {}),
    aten.binary_cross_entropy_with_logits.default: _with_logits,
    aten.channel_shuffle.default: lambda draw: ((draw.tensor(3, 6, 4), draw.pick(1, 2, 3)), {}),
    aten.rot90.default: lambda draw: ((draw.tensor(3, 4, 5), draw.pick(0, 1, 2, 3, -1), [0, draw.pick(1, 2)]), {}),
    aten.masked_scatter.default: _masked(backward=False),
    aten.masked_scatter_backward.default: _masked(backward=True),
    aten.multi_margin_loss.default: _margin("margin", 1, 0.7, None, forward=None),
    aten.multi_margin_loss_backward.default: _margin("margin", 1, 0.7, None, forward=aten.multi_margin_loss),
    aten.multilabel_margin_loss_forward.default: _margin("label", forward=None),
    aten.multilabel_margin_loss_backward.default: _margin("label", forward=aten.multilabel_margin_loss_forward),
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
UNSET = frozenset({aten.new_empty.default, aten.new_empty_strided.default})
"""Operators whose values are whatever lies in memory."""
REFUSED: dict[Any, Any] = {aten.view.default: aten.reshape.default}
"""Operators that refuse what their canonical form takes, and what that is to give."""
INNER = frozenset({aten._native_batch_norm_legit.default})
"""What functionalization turns into an operator with a rule."""
FIRST_ONLY = frozenset({aten.log_sigmoid_forward.default})
"""Operators whose second output only their own gradient reads."""


def test_every_canonical_form_has_a_case() -> None:
    assert set(CANONICAL_CASES) == set(CANONICAL)


@pytest.mark.parametrize("target", CANONICAL_CASES, ids=str)
def test_canonical_form(target: Any) -> None:
    rewritten = 0

    def values_of(result: Any) -> list[Tensor]:
        values = present(result)[: 1 if target in FIRST_ONLY else None]
        return [torch.zeros_like(value) if target in UNSET else value for value in values]

    @tries(5)
    @given(st.data())
    def run(data: Any) -> None:
        nonlocal rewritten
        args, kwargs = CANONICAL_CASES[target](Draw(data.draw))
        expected = values_of(REFUSED.get(target, target)(*_cloned(args), **kwargs))
        result = CANONICAL[target](*_cloned(args), **kwargs)
        if result is NotImplemented:
            return
        rewritten += 1
        actual = values_of(result)
        for index, (value, other) in enumerate(zip(actual, expected, strict=True)):
            compare(value, other, f"output {index}")

    run()
    assert rewritten


@pytest.mark.parametrize("target", CANONICAL_CASES, ids=str)
def test_canonical_form_is_made_of_operators_with_rules(target: Any) -> None:
    @tries(2)
    @given(st.data())
    def run(data: Any) -> None:
        args, kwargs = CANONICAL_CASES[target](Draw(data.draw))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

        def call(*values: Tensor) -> Any:
            given_values = iter(values)
            filled = tree_map(lambda leaf: next(given_values) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            return target(*filled[0], **filled[1])

        module = make_fx(call, decomposition_table=cast(Any, dict(CANONICAL)))(*tensors)
        for node in module.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                assert operator_rule(node.target) is not None or node.target in INNER, node.target
                assert node.target not in (aten.mean.default, aten.mean.dim)

    run()


WIDE: dict[str, Tensor] = {
    "large": torch.full((4, 512), 20.0, dtype=torch.float16) * torch.tensor([1, -1]).repeat(256),
    "fine": torch.rand(4, 512, generator=torch.Generator().manual_seed(0)).add(1).bfloat16(),
    "complex": torch.randn(4, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(
    "function",
    [
        lambda value: aten.linalg_vector_norm.default(value),
        lambda value: aten.linalg_vector_norm.default(value, 1, [1]),
        lambda value: aten.linalg_vector_norm.default(value, 3, [1]),
        lambda value: aten.norm.Scalar(value),
        lambda value: aten.mean.dim(value, [1]),
        lambda value: aten.std.correction(value, [1]),
        lambda value: aten.std_mean.correction(value, [0, 1])[0],
        lambda value: aten.var.correction(value, [1], correction=0),
        lambda value: aten.var_mean.correction(value, [1])[0],
    ],
    ids=["norm", "norm_1", "norm_3", "old_norm", "mean", "std", "std_mean", "var", "var_mean"],
)
def test_halves_and_complex_numbers(function: Any, name: str) -> None:
    """Squares and sums of halves leave their range or precision; of complex numbers, magnitudes count."""
    expected = function(WIDE[name])
    actual = make_fx(function, decomposition_table=cast(Any, dict(CANONICAL)))(WIDE[name])(WIDE[name])
    assert actual.dtype == expected.dtype
    assert torch.allclose(actual, expected, rtol=1e-12 if name == "complex" else 2e-3), (actual, expected)


def _cloned(args: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)


def test_a_single_label_is_not_read_for_its_class_weight() -> None:
    """Its value would then be a constant of the captured step."""

    def call(*values: Tensor) -> Any:
        return aten.nll_loss_forward(*values, MEAN, -100)

    args = torch.randn(3, dtype=torch.float64), torch.tensor(1), torch.rand(3, dtype=torch.float64)
    captured = make_fx(call, decomposition_table=cast(Any, dict(CANONICAL)))(*args)
    for label in (0, 2):
        other = args[0], torch.tensor(label), args[2]
        for value, expected in zip(captured(*other), call(*other), strict=True):
            compare(value, expected, f"label {label}")
