"""Grids of tensor-parallel ranks: training equals one process, and products move the words of AxoNN's formula."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cost.grid import linear_words
from meshwright.ir.graph import ITEM_BYTES, Graph
from meshwright.ir.layout import Layout
from meshwright.ir.program import Collective, Program
from meshwright.lower.plans import PlanLowering
from tests.distributed import oracle
from tests.distributed.oracle import Subject
from tests.distributed.pool import Ranks

STEPS = 5
MODELS = {
    "MLP": oracle.mlp,
    "GPT": lambda ragged: oracle.gpt(ragged, tied=False),
    "GPT, large vocabulary": lambda ragged: oracle.gpt(ragged, vocabulary=oracle.LARGE_VOCABULARY),
    "ResNet": oracle.resnet,
}


def grids(ranks: int) -> list[tuple[int, int, int]]:
    """All grids of so many ranks."""
    every = itertools.product(range(1, ranks + 1), repeat=3)
    return [(x, y, z) for x, y, z in every if x * y * z == ranks]


CASES = [
    *(("MLP", {"tp": grid}) for ranks in (2, 4) for grid in grids(ranks)),
    *(("GPT", {"tp": grid}) for grid in [(1, 1, 2), (1, 4, 1), (2, 2, 1)]),
    ("GPT, large vocabulary", {"tp": (2, 1, 2)}),
    ("ResNet", {"tp": (2, 1, 2)}),
    ("MLP", {"dp": 2, "tp": (2, 1, 1)}),
    ("GPT", {"dp": 2, "tp": (1, 2, 1), "zero": 1}),
    ("GPT", {"dp": 2, "tp": (2, 1, 1), "zero": 3}),
    ("GPT", {"dp": 2, "tp": (1, 1, 2)}),
    ("MLP", {"dp": 2, "tp": (1, 1, 2), "zero": 1}),
    ("GPT", {"tp": (2, 1, 2), "zero": 2, "microbatches": 2}),
    ("GPT", {"tp": (1, 2, 2), "zero": -1}),
    ("GPT", {"tp": (2, 1, 2), "microbatches": 2, "recompute": "full"}),
    ("GPT", {"pp": 2, "tp": (2, 1, 1), "microbatches": 4}),
    ("GPT", {"pp": 2, "tp": (1, 1, 2), "microbatches": 4, "schedule": "zb-h1"}),
]  # fmt: skip
MORE = [
    *(("GPT", {"tp": grid}) for ranks in (2, 4) for grid in grids(ranks)),
    *(("MLP", {"tp": grid}) for grid in grids(3)),
    *(("GPT, large vocabulary", {"tp": grid}) for grid in [(2, 2, 1), (1, 2, 2)]),
]  # fmt: skip


def subject_of(name: str) -> Subject:
    """The model, and as many batches as there are steps."""
    torch.manual_seed(11)
    subject = MODELS[name](True)
    return replace(subject, batches=[*subject.batches, *subject.batches][:STEPS])


def train(name: str, layout: Layout) -> oracle.LargestErrors:
    serial, parallel = subject_of(name), subject_of(name)
    before = {each: value.clone() for each, value in serial.model.state_dict().items()}
    settings, key = (oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM), ("grids", name)
    expected = oracle.reference(serial, *settings, key=key)
    run, trainer = oracle.in_parallel(parallel, layout, *settings, oracle.sharing_capture(key))
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.product) for case in MORE if case not in CASES)],
    ids=str,
)
def test_training_on_a_grid_equals_one_process(ranks: Ranks, name: str, sizes: dict[str, object]) -> None:
    layout = Layout(**sizes)  # type: ignore[arg-type]
    for result in ranks(layout.num_ranks, train, name, layout, timeout=300):
        assert result.error <= oracle.TOLERANCE, result
        assert result.moved > 1e-3, "the parameters were trained"
        assert result.num_split, "parameters lie in parts"


def evaluate(layout: Layout) -> list[float]:
    """Losses of an evaluation of the whole batch, and of a ragged one, after a step; then those of one process."""
    subject, serial = subject_of("GPT"), subject_of("GPT")
    trainer = oracle.sharing_capture(("grids", "GPT"))(
        subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=oracle.OPTIMIZERS["SGD"]
    )
    trainer.step(subject.batches[0])
    oracle.in_one_process(replace(serial, batches=serial.batches[:1]), oracle.OPTIMIZERS["SGD"])
    ragged = {name: value[:5] for name, value in serial.batches[1].items()}
    losses = [float(trainer.evaluate(batch)) for batch in (serial.batches[1], ragged)]
    with torch.no_grad():
        plain = [serial.loss_fn(serial.model.eval(), batch) for batch in (serial.batches[1], ragged)]
    return [*losses, *(float(loss[0] if isinstance(loss, tuple) else loss) for loss in plain)]


@pytest.mark.parametrize("grid", [(2, 1, 2), pytest.param((2, 2, 1), marks=pytest.mark.product)], ids=str)
def test_evaluations_on_a_grid_equal_one_process(ranks: Ranks, grid: tuple[int, int, int]) -> None:
    for whole, ragged, *plain in ranks(4, evaluate, Layout(tp=grid), timeout=300):
        assert [whole, ragged] == pytest.approx(plain, rel=oracle.TOLERANCE)


# --- AxoNN's placement, by pins ---------------------------------------------------------------------------------------

ROWS, SIZES = 32, (32, 64, 16, 48)
"""Rows of a batch, and features of three dense layers."""


class Product(nn.Module):
    """A dense layer without its bias, so that pins of its factors are pins of the product alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight


class Bias(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.bias


class Dense(nn.Module):
    """Three dense layers with a ReLU before each."""

    def __init__(self, sizes: Sequence[int], bias: bool) -> None:
        super().__init__()
        self.products = nn.ModuleList(Product(*pair) for pair in itertools.pairwise(sizes))
        self.biases = nn.ModuleList(Bias(size) if bias else nn.Identity() for size in sizes[1:])

    def forward(self, value: Tensor) -> Tensor:
        for product, bias in zip(self.products, self.biases, strict=True):
            value = bias(product(value.relu()))
        return value


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["inputs"]).square().mean()
    return loss


def dense(scale: int = 1, bias: bool = True, widths: Sequence[int] = SIZES) -> Subject:
    torch.manual_seed(5)
    sizes = [scale * size for size in widths]
    batches = [{"inputs": torch.randn(scale * ROWS, sizes[0], dtype=torch.float64)} for _ in range(STEPS)]
    return Subject(Dense(sizes, bias).double(), squares, batches)


@cache
def dense_graph(scale: int = 1, bias: bool = True) -> Graph:
    subject = dense(scale, bias)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


def alternating(graph: Graph, grid: tuple[int, int, int], dp: int = 1, zero: Literal[0, 2] = 0) -> Layout:
    """The layout whose layers split input features over tx and output features over ty, and the other way round in
    turn."""
    pins = {}
    products = [operator for operator in graph.operators if operator.target == "aten.mm.default"]
    for number, product in enumerate(operator for operator in products if not operator.backward):
        rule = product.rule
        assert rule is not None
        inner = next(letter for letter in rule.sizes if rule.reduced(letter, 0))
        outer = rule.parsed.outputs[0].dims[-1][0].name
        axes = ("tx", "ty") if number % 2 == 0 else ("ty", "tx")
        pins[product.module] = f"{inner}@{axes[0]} {outer}@{axes[1]}"
    return Layout(dp=dp, tp=grid, pin=pins, zero=zero)


def train_dense(layout: Layout) -> oracle.LargestErrors:
    serial, parallel = dense(), dense()
    before = {key: value.clone() for key, value in serial.model.state_dict().items()}
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.reference(serial, optimizer, key="dense")
    run, trainer = oracle.in_parallel(parallel, layout, optimizer, parallelize=oracle.sharing_capture("dense"))
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=() if min(grid[:2]) > 1 else pytest.mark.product) for grid in [*grids(2), *grids(4)]]
    + [(2, 1, 2)],
    ids=str,
)
def test_alternate_layers_with_bias_train_transposed(ranks: Ranks, grid: tuple[int, int, int]) -> None:
    for result in ranks(grid[0] * grid[1] * grid[2], train_dense, alternating(dense_graph(), grid)):
        assert result.error <= oracle.TOLERANCE, result
        assert result.moved > 1e-3


@pytest.mark.parametrize("grid", [(2, 4, 1), (4, 4, 1)], ids=str)
def test_the_integer_program_transposes_alternate_layers_by_itself(grid: tuple[int, int, int]) -> None:
    """Equal layers in a row, on boxes of four GPUs: from the second on, each splits its two factors over the axes that
    the layer before leaves them on, the other way round."""
    subject = dense(64, bias=False, widths=(32,) * 7)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(
        graph, layout=Layout(tp=grid), cluster="a100-40gb-box4-ss200x4", devices=grid[0] * grid[1]
    )  # fmt: skip
    reductions = []
    for operator in graph.operators:
        if operator.target == "aten.mm.default" and not operator.backward:
            strategy = plan.stages[0].strategy(operator.name)
            reductions.append(
                {axis: operator.rule is not None and operator.rule.reduced(strategy[axis], 0) for axis in ("tx", "ty")}
            )
    assert len(reductions) == 6
    for layer, other in itertools.pairwise(reductions[1:]):
        assert layer["tx"] != layer["ty"], "one axis splits input features, the other output features"
        assert other == {"tx": layer["ty"], "ty": layer["tx"]}


# --- words -----------------------------------------------------------------------------------------------------------

WIDER = 16
"""Factor of all sizes with which words are counted, so that no latency counts more than words."""
TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def received(program: Program) -> dict[str, float]:
    """The elements that a rank receives in a step, by axis, without scalars."""
    words: dict[str, float] = {}
    whole = [phase for phase in program.phases if phase.name not in ("input", "weight")]  # backward in two parts
    for phase in whole:
        for node in phase.nodes:
            each: Collective
            for each in (*([node.starts] if node.starts is not None else ()), *node.inside):
                elements = each.bytes / ITEM_BYTES["float64"]
                if elements > 1:
                    words[each.axis] = (
                        words.get(each.axis, 0) + TIMES[each.kind] * (each.size - 1) / each.size * elements
                    )
    return words


def formula(grid: tuple[int, int, int], dp: int, kept: bool, again: bool) -> dict[str, float]:
    """AxoNN's words of all layers, by axis. The input of the first layer needs no gradient, so that backward does not
    read its weight. ``again``: the weight comes once more all the same, in a bucket with others."""
    x, y, z = grid
    words = dict.fromkeys(("tx", "ty", "tz", "dp"), 0.0)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        (over, along), turned = (("tx", "ty"), (x, y, z)) if number % 2 == 0 else (("ty", "tx"), (y, x, z))
        each = linear_words(
            WIDER * ROWS, WIDER * inputs, WIDER * outputs, turned, dp, kept=kept or not (number or again)
        )
        words[over] += each.output_sum
        words[along] += each.input_gradient_sum if number else 0.0
        words["tz"] += each.weight_gathers + each.gradient_scatter
        words["dp"] += each.data_sum
    return {axis: count for axis, count in words.items() if count}


@pytest.mark.parametrize(
    ("grid", "dp", "kept"),
    [
        ((2, 1, 1), 1, False),
        ((1, 2, 1), 1, False),
        ((1, 1, 2), 1, False),
        ((1, 1, 4), 1, True),
        ((2, 2, 1), 2, False),
        ((2, 2, 2), 2, False),
        ((4, 2, 2), 1, True),
        ((2, 4, 4), 2, False),
    ],
    ids=str,
)
def test_the_lowered_program_moves_the_words_of_the_formula(grid: tuple[int, int, int], dp: int, kept: bool) -> None:
    graph = dense_graph(WIDER, bias=False)
    layout = alternating(graph, grid, dp, zero=2 if kept else 0)
    plan = mw.plan(graph, layout=layout, cluster="a100-40gb-box4-ss200x4", devices=layout.num_ranks)
    (program,) = PlanLowering(graph)(plan)
    words = received(program)
    assert any(words == pytest.approx(formula(grid, dp, kept, again)) for again in (False, True)), words


def test_weight_gradients_are_computed_while_input_gradients_are_summed() -> None:
    graph = dense_graph()
    (program,) = PlanLowering(graph)(mw.plan(graph, layout=alternating(graph, (2, 2, 1))))
    nodes = next(phase.nodes for phase in program.phases if phase.name == "backward")
    between = []
    for begin, node in enumerate(nodes):
        if node.starts is not None and node.starts.axis in ("tx", "ty"):
            end = next(index for index, other in enumerate(nodes) if other.waits == node.name)
            between.append([other.operator for other in nodes[begin:end] if "aten.mm" in other.target])
    assert between == [["products.2:mm#1"], ["products.1:mm#1"]]


# --- checkpoints ------------------------------------------------------------------------------------------------------

RESUMED = [
    Layout(tp=(2, 1, 1)),
    Layout(tp=(1, 2, 1)),
    Layout(tp=(1, 1, 2)),
    Layout(tp=2),
    Layout(dp=2),
]


def trainer_of(layout: Layout) -> mw.Trainer:
    subject = dense()
    return oracle.sharing_capture("dense")(
        subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=oracle.OPTIMIZERS["AdamW"]
    )


def resume(directory: Path) -> list[float]:
    """Two steps under each layout, the others under the next one: the errors against one process."""
    subject, errors = dense(), []
    expected = oracle.in_one_process(subject, oracle.OPTIMIZERS["AdamW"]).state
    for number, layout in enumerate(RESUMED):
        trainer = trainer_of(layout)
        for batch in subject.batches[:2]:
            trainer.step(batch)
        trainer.save(directory / str(number))
        other = trainer_of(RESUMED[(number + 1) % len(RESUMED)])
        other.load(directory / str(number))
        for batch in subject.batches[2:]:
            other.step(batch)
        errors.append(oracle.largest_error(other.full_state_dict(all_ranks=True), expected))
    return errors


def test_a_run_goes_on_under_another_grid(ranks: Ranks, tmp_path: Path) -> None:
    for errors in ranks(2, resume, tmp_path, timeout=300):
        assert max(errors) <= oracle.TOLERANCE, errors
