"""Random numbers: replicas draw the same, shards and steps draw differently, a backward draws what its forward drew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.capture.builder import Capture, capture
from meshwright.errors import RuleError
from meshwright.ir.rule import Rule
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, make_rule
from meshwright.ops.random import RULES
from tests.distributed import oracle
from tests.distributed.lockstep import RANDOM_KEY, Wires, execute, present, rank_graph, run_step, subject
from tests.distributed.oracle import plan_of

aten = torch.ops.aten
ours = torch.ops.meshwright


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- one operator -----------------------------------------------------------------------------------------------------

ONES = torch.ones(40, 30, dtype=torch.float64)
HALF = torch.full((40, 30), 0.5, dtype=torch.float64)
SHAPE: dict[str, Any] = {"dtype": torch.float64}
CALLS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.bernoulli.default: ((HALF,), {}),
    aten.bernoulli.p: ((ONES, 0.5), {}),
    aten.bernoulli.Tensor: ((ONES, HALF), {}),
    aten.exponential.default: ((ONES,), {}),
    aten.native_dropout.default: ((ONES, 0.5, True), {}),
    aten.normal_functional.default: ((ONES, 2.0, 0.5), {}),
    aten.rand_like.default: ((ONES,), {}),
    aten.randint_like.default: ((ONES, 5), {}),
    aten.randint_like.low_dtype: ((ONES, 2, 5), {}),
    aten.randn_like.default: ((ONES,), {}),
    aten.uniform.default: ((ONES, 2.0, 4.0), {}),
    aten.rand.default: (([40, 30],), SHAPE),
    aten.randint.default: ((5, [40, 30]), {}),
    aten.randint.low: ((2, 5, [40, 30]), {}),
    aten.randn.default: (([40, 30],), SHAPE),
    aten.randperm.default: ((40,), {}),
}


def drawn(
    target: Any, strategy: dict[str, str], at: dict[str, int], key: int = RANDOM_KEY, name: str = "", call: Any = None
) -> Tensor:
    """What the rank at these coordinates of a 2 x 2 mesh draws."""
    args, kwargs = call or CALLS[target]
    whole = subject(target, args, kwargs)
    assert not isinstance(whole, Unsplit)
    mesh = {"dp": 2, "tp": 2}
    letters = whole.factors
    chosen = {axis: letters[int(factor)] for axis, factor in strategy.items()}
    graph, groups = rank_graph(whole, chosen, mesh, at, name or "module:random#0")
    inputs = [value[: value.shape[0] // (2 if "dp" in strategy else 1)].clone() for value in whole.call.tensors]
    return present(execute(graph, [*inputs, key], groups, Wires()))[0]


def test_every_random_rule_is_tested() -> None:
    assert set(CALLS) == set(RULES)


@pytest.mark.parametrize("target", CALLS, ids=str)
def test_draws(target: Any) -> None:
    split = {"dp": "0"} if target is not aten.randperm.default else {}
    origin = {"dp": 0, "tp": 0}
    first = drawn(target, split, origin)
    assert torch.equal(first, drawn(target, split, {"dp": 0, "tp": 1})), "replicas draw the same"
    assert torch.equal(first, drawn(target, split, {"dp": 1, "tp": 0})) == (not split), "shards draw differently"
    assert not torch.equal(first, drawn(target, split, origin, key=RANDOM_KEY + 1)), "steps draw differently"
    assert not torch.equal(first, drawn(target, split, origin, name="module:random#1")), "operators draw differently"


@pytest.mark.parametrize("target", CALLS, ids=str)
def test_draws_have_the_distribution_of_the_operator(target: Any) -> None:
    args, kwargs = CALLS[target]
    torch.manual_seed(0)
    expected, draws = present(target(*args, **kwargs))[0], drawn(target, {}, {"dp": 0, "tp": 0})
    assert draws.dtype == expected.dtype
    assert draws.shape == expected.shape
    if target is aten.randperm.default:
        assert draws.sort()[0].tolist() == list(range(40))
        return
    sample, other = draws.double(), expected.double()
    error = (sample.var() / sample.numel() + other.var() / other.numel()).sqrt()
    assert (sample.mean() - other.mean()).abs() < 5 * error
    assert 0.8 < sample.std() / other.std() < 1.25


def test_exponential_numbers_are_never_zero() -> None:
    """gumbel_softmax takes the logarithm of what is drawn."""
    ones = torch.ones(400, 100, dtype=torch.float16)
    draws = drawn(aten.exponential.default, {}, {"dp": 0, "tp": 0}, call=((ones,), {}))
    assert bool((draws > 0).all())
    assert bool(draws.log().isfinite().all())


HALVES = [torch.float16, torch.bfloat16]
ORIGIN = {"dp": 0, "tp": 0}


@pytest.mark.parametrize("target", [aten.bernoulli.default, aten.bernoulli.Tensor], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_rare_event_is_as_rare_in_half_precision(target: Any, dtype: torch.dtype) -> None:
    """A uniform number of 11 bits is below 0.0001 once in 2048 times, one of 8 bits once in 256 times."""

    def draws_of(probability: Tensor) -> Tensor:
        args = (probability,) if target is aten.bernoulli.default else (torch.ones_like(probability), probability)
        return drawn(target, {}, ORIGIN, call=(args, {}))

    rare = torch.full((1000, 500), 1e-4, dtype=dtype)
    draws = draws_of(rare)
    assert draws.dtype == dtype
    assert 30 <= int(draws.sum(dtype=torch.float32)) <= 70
    assert torch.equal(draws.float(), draws_of(rare.float()))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_exponential_numbers_in_half_precision_are_those_of_single_precision(dtype: torch.dtype) -> None:
    ones = torch.ones(400, 500)
    single, half = (
        drawn(aten.exponential.default, {}, ORIGIN, call=((tensor,), {})) for tensor in (ones, ones.to(dtype))
    )
    assert half.dtype == dtype
    assert single.max() > 10
    assert torch.allclose(half.float(), single, rtol=8e-3, atol=8e-3)


def test_a_random_operator_without_a_key_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RReLU())
    with pytest.raises(RuleError) as caught:
        capture(model, lambda model, batch: model(batch).sum(), torch.ones(2, 4))
    assert str(caught.value) == (
        "aten.rrelu_with_noise_functional.default: this random operator has no form with a key, so that ranks would "
        "draw different numbers\n  -> draw with torch.rand, randn, randint, bernoulli or dropout, or pass a rule of "
        "your own (rules=)"
    )


@torch.library.custom_op("tests::noise", mutates_args=())
def noise(value: Tensor) -> Tensor:
    return torch.rand_like(value)


@torch.library.custom_op("tests::tagged_noise", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def tagged_noise(value: Tensor) -> Tensor:
    return torch.rand_like(value)


noise.register_fake(torch.empty_like)
tagged_noise.register_fake(torch.empty_like)


def noise_rule(call: Call) -> Rule:
    return make_rule(call, "b k -> b k")


def noise_local(local: Local) -> Any:
    return local.call(ours.uniform.default, local.args[0], 0.0, 1.0, *local.key())


@pytest.mark.parametrize(("operator", "says_so"), [(noise, True), (tagged_noise, False)], ids=["rule", "tag"])
def test_what_a_rule_of_ones_own_draws_is_drawn_in_every_micro_batch(operator: Any, says_so: bool) -> None:
    """It depends on no parameter, but is no part of the prologue; the rule says so, or the operator's tag."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch * operator(batch.cos())).square().sum()
        return loss

    rules = {operator._opoverload: OperatorRule(noise_rule, noise_local, random=says_so)}
    captured = capture(nn.Linear(4, 2), loss_fn, torch.ones(4, 4), rules=rules)
    prologue = {operator.target: operator.prologue for operator in captured.graph.operators}
    assert prologue["aten.cos.default"]
    assert not prologue[str(operator._opoverload)]
    assert not prologue["aten.mul.Tensor"]


def test_a_rule_that_draws_and_does_not_say_so_is_refused() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch * noise(batch.cos())).square().sum()
        return loss

    captured = capture(
        nn.Linear(4, 2), loss_fn, torch.ones(4, 4), rules={noise._opoverload: OperatorRule(noise_rule, noise_local)}
    )
    plan = plan_of(captured.graph, mw.Layout(), 1)
    with pytest.raises(RuleError, match="its rule draws random numbers and does not say so"):
        lower_stage(PlannedGraph(captured.graph, plan), 0, {}, rules=captured.rules)


# --- whole steps ------------------------------------------------------------------------------------------------------


class Attentions(nn.Module):
    """Three attentions with dropout in one module, and dropout of other kinds beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for causal in (True, False, True):
            query, key, value = (
                part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.dropout(self.qkv(x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, is_causal=causal)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def slope_error(captured: Capture, model: nn.Module, batch: Tensor, layout: mw.Layout) -> float:
    """How far the gradient is from the slope of the loss in a random direction, all with one random key."""
    plan = plan_of(captured.graph, layout, layout.dp * layout.feature_ranks)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}

    def at(step: float) -> Any:
        moved = {name: value + step * direction[name] for name, value in parameters.items()}
        return run_step(captured, plan, {**moved, "batch": batch})[0]

    gradients = at(0.0).gradients
    slope = sum(float((direction[name] * gradients[name]).sum()) for name in parameters)
    measured = float(at(1e-5).loss - at(-1e-5).loss) / 2e-5
    return abs(slope - measured) / abs(measured)


LAYOUTS = {"dp1": mw.Layout(), "dp2": mw.Layout(dp=2), "tp2": mw.Layout(tp=2), "dp2 x tp2": mw.Layout(dp=2, tp=2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_backward_of_attention_draws_the_mask_of_its_forward(layout: str) -> None:
    torch.manual_seed(5)
    model, batch = Attentions().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    captured = capture(model, squares, batch)
    assert slope_error(captured, model, batch, LAYOUTS[layout]) < 1e-6


def test_another_mask_in_the_backward_would_be_seen() -> None:
    torch.manual_seed(5)
    model, batch = Attentions().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    captured = capture(model, squares, batch)
    operators = list(captured.graph.operators)
    backward = [k for k, operator in enumerate(operators) if operator.target == "meshwright.attention_backward.default"]
    numbers = [operators[k].arguments.rpartition(", ")[2] for k in backward]
    assert len(set(numbers)) == 3
    other = operators[backward[0]].arguments.removesuffix(numbers[0]) + numbers[1]
    operators[backward[0]] = msgspec.structs.replace(operators[backward[0]], arguments=other)
    captured.graph = msgspec.structs.replace(captured.graph, operators=tuple(operators))
    assert slope_error(captured, model, batch, mw.Layout()) > 1e-3


@pytest.mark.parametrize("factor", ["h", "s", "s1"])
def test_a_backward_may_be_split_unlike_its_forward(factor: str) -> None:
    """Masks follow from positions, however forward and backward are split."""
    torch.manual_seed(5)
    model, batch = Attentions().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    captured = capture(model, squares, batch)
    plan = plan_of(captured.graph, mw.Layout(dp=2), 2)
    edited = {**plan.stage.strategies, "attention_backward#1": {"dp": factor}}
    stage = msgspec.structs.replace(plan.stage, strategies=edited)
    values = {**{name: value.detach() for name, value in model.named_parameters()}, "batch": batch}
    own, _ = run_step(captured, msgspec.structs.replace(plan, stages=(stage,)), values)
    serial, _ = run_step(captured, plan_of(captured.graph, mw.Layout(), 1), values)
    for name, gradient in serial.gradients.items():
        own_gradient = own.gradients[name]
        assert own_gradient is not None
        assert gradient is not None
        assert oracle.error_of(own_gradient, gradient) <= oracle.TOLERANCE


def test_steps_draw_differently_and_a_step_is_repeatable() -> None:
    torch.manual_seed(5)
    model, batch = Attentions().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    captured = capture(model, squares, batch)
    plan = plan_of(captured.graph, mw.Layout(), 1)
    values = {**{name: value.detach() for name, value in model.named_parameters()}, "batch": batch}
    losses = [float(run_step(captured, plan, values, key)[0].loss) for key in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]


def test_attention_with_dropout_is_attention_on_average() -> None:
    torch.manual_seed(6)
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind(0)
    whole = ours.attention(query, key, value, None, 0.0, True, 0.5, 0, 0)[0]
    mean = torch.stack(
        [ours.attention(query, key, value, None, 0.5, True, 0.5, 7, salt)[0] for salt in range(4000)]
    ).mean(0)
    assert (mean - whole).abs().max() < 0.1
