"""Compiled steps equal those that are not: losses and parameters, masks of dropout and recomputation included."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx, nn
from torch._inductor.config import patch

import meshwright as mw
from meshwright.errors import CompileError
from meshwright.lower.regions import WORTH, Compiler, Region, _check_arguments
from meshwright.models import GPT, GPTConfig, classification_loss, language_model_loss
from meshwright.ops import collectives
from tests.distributed import oracle
from tests.distributed.oracle import Subject
from tests.distributed.pool import Ranks

SEQUENCE = 64
CASES = {
    "dp2, zero": (mw.Layout(dp=2, zero=3), torch.float32),
    "tp2": (mw.Layout(tp=2), torch.float64),
    "pp2, recomputed": (mw.Layout(pp=2, microbatches=2, recompute="full"), torch.float64),
}
TOLERANCES = {torch.float64: oracle.TOLERANCE, torch.float32: 5e-5}
"""In float32, kernels that a compiler fused round otherwise: within 1e-5 on an AMD EPYC, 2.1e-5 on an Intel Xeon."""


def subject(dtype: torch.dtype, dropout: float = 0.1) -> Subject:
    torch.manual_seed(3)
    config = GPTConfig(layers=2, width=32, heads=2, vocabulary=64, sequence_length=SEQUENCE, dropout=dropout)
    batches = []
    for _ in range(2):
        tokens = torch.randint(64, (8, SEQUENCE + 1))
        targets = oracle.ragged_ends(tokens[:, 1:])
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": targets})
    return Subject(GPT(config).to(dtype), language_model_loss, batches)


def both(layout: mw.Layout, dtype: torch.dtype) -> tuple[float, float, int]:
    """Largest errors of losses and of parameters; and how many kernels were made."""
    (plain, _), (compiled, trainer) = (
        oracle.in_parallel(
            subject(dtype), layout, oracle.OPTIMIZERS["AdamW"],
            parallelize=functools.partial(oracle.sharing_capture(("compile", dtype)), compile=compile),
        )
        for compile in (False, True)
    )  # fmt: skip
    losses = oracle.error_of(torch.stack(compiled.losses), torch.stack(plain.losses))
    return losses, oracle.largest_error(compiled.state, plain.state), trainer.num_kernels


@pytest.mark.parametrize("name", [pytest.param("dp2, zero", marks=pytest.mark.product), "tp2", "pp2, recomputed"])
def test_compiled_equals_uncompiled(ranks: Ranks, name: str) -> None:
    layout, dtype = CASES[name]
    for losses, state, kernels in ranks(layout.num_ranks, both, layout, dtype, timeout=300.0):
        assert losses <= TOLERANCES[dtype]
        assert state <= TOLERANCES[dtype]
        assert kernels >= 1, "something was compiled"


# --- regions ----------------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., object], *values: torch.Tensor) -> fx.Graph:
    """A graph as lowering makes it: values noted, outputs in a list."""
    module = torch.fx.experimental.proxy_tensor.make_fx(function)(*values)
    return module.graph


def run(graph: fx.Graph, *values: torch.Tensor) -> object:
    return fx.GraphModule(nn.Module(), graph)(*values)


def targets(graph: fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"]


def test_collectives_stay_where_they_were() -> None:
    """What is started before a region is started before it, and what is waited for after it is waited for after."""
    ours = torch.ops.meshwright_comm

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp() * y + 1
        started = ours.all_gather_start(a, "group", 2, "native")
        b = (x * y).sin() + y
        whole = ours.wait(started)
        return [whole, (b * 2 + x) * whole[0]]

    value = torch.ones(64, 64)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        graph = graph_of(function, mode.from_tensor(value), mode.from_tensor(value))
    Compiler(torch.device("cpu")).compile(graph)
    names = [name for name in targets(graph) if "region" in name or "start" in name or "wait" in name]
    assert names == ["region_0", "all_gather_start.default", "region_1", "wait.default", "region_2"]
    assert collectives.ALL_GATHER in [node.target for node in graph.nodes]


def test_a_view_that_others_read_too_stays() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = (x.exp() * 2 + 1).reshape(-1, 64)
        z = y.sin() * y
        return [y @ w, z, x.reshape(-1, 64) * 3 + z]

    x, w = torch.randn(4, 32, 64).double(), torch.randn(64, 8).double()
    graph = graph_of(function, x, w)
    expected = function(x, w)
    Compiler(torch.device("cpu")).compile(graph)
    assert sum(name.startswith("region") for name in targets(graph)) == 2
    for result, other in zip(run(graph, x, w), expected, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(result, other)


def gelu_and_gradient(x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ops.aten.gelu(x), torch.ops.aten.gelu_backward(gradient, x)]


def test_gelu_and_its_gradient_share_an_exponential() -> None:
    x = torch.cat([torch.linspace(-20, 20, 2 * WORTH), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e19, -1e19])])
    gradient = torch.linspace(-1, 1, len(x))
    graph = graph_of(gelu_and_gradient, x, gradient)
    Compiler(torch.device("cpu")).compile(graph)
    assert not any("gelu" in name for name in targets(graph))
    for result, true in zip(run(graph, x, gradient), gelu_and_gradient(x.double(), gradient.double()), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(result.double(), true, rtol=1e-6, atol=1e-6)


def test_gelu_stays_where_nothing_is_gained() -> None:
    """In float64, of which the formula is no good; where it is small; without its gradient in the same graph."""
    x = torch.randn(2 * WORTH)
    for graph in (
        graph_of(gelu_and_gradient, x[: WORTH - 1], x[: WORTH - 1]),
        graph_of(gelu_and_gradient, x.double(), x.double()),
        graph_of(lambda x: [torch.ops.aten.gelu(x) * 2], x),
    ):
        Compiler(torch.device("cpu")).compile(graph)
        assert any("gelu" in name for name in targets(graph))


def test_the_gradient_of_a_softmax_takes_its_exponentials() -> None:
    graphs: list[fx.Graph] = []

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        logarithm = torch.log_softmax(x, 1)
        return [logarithm.sum(1) * 2, logarithm.exp() - 1]

    class Kept(Compiler):
        def _kernel(self, inner: fx.Graph, values: Sequence[torch.Tensor]) -> Region | None:
            graphs.append(inner)
            return super()._kernel(inner, values)

    x = torch.randn(64, 128) * 30
    graph = graph_of(function, x)
    Kept(torch.device("cpu")).compile(graph)
    assert sum(targets(inner).count("exp.default") for inner in graphs) == 1
    assert "exp.default" not in targets(graph)
    for result, true in zip(run(graph, x), function(x.double()), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(result.double(), true, rtol=1e-6, atol=2e-5)


def test_small_operators_stay_as_they_are() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp() * 2 + 1]

    graph = graph_of(function, torch.randn(WORTH - 1))
    Compiler(torch.device("cpu")).compile(graph)
    assert "region_0" not in targets(graph)


def test_no_compiler() -> None:
    training = subject(torch.float32)
    missing = patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(CompileError, match="there is no C\\+\\+ compiler") as error:
        mw.parallelize(training.model, training.loss_fn, training.batches[0], plan=mw.Layout(), compile=True)
    assert "CXX" in error.value.remedy


def test_attention_has_the_strides_that_are_foretold() -> None:
    ours = torch.ops.meshwright
    for dropout, causal in ((0.0, True), (0.5, False)):
        query, key, value = (torch.randn(2, 3, 8, 4) for _ in range(3))
        settings = (dropout, causal, 0.5, 1, 2)
        output, statistics = ours.attention(query, key, value, None, *settings)
        given = (output, query, key, value, None, output, statistics)
        real = [output, statistics, *ours.attention_backward(*given, *settings)]
        with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
            fake = [mode.from_tensor(tensor) if tensor is not None else None for tensor in given]
            foretold = [
                *ours.attention(*fake[1:4], None, *settings),
                *ours.attention_backward(*fake, *settings),
            ]
        assert [tensor.stride() for tensor in real] == [tensor.stride() for tensor in foretold]


def test_classification_is_compiled_too() -> None:
    torch.manual_seed(0)
    batch = {"inputs": torch.randn(64, 96), "label": torch.randint(128, (64,))}

    def loss(compile: bool) -> float:
        torch.manual_seed(1)
        model = mw.models.MLP((96, 128, 128))
        return float(
            mw.parallelize(model, classification_loss, batch, plan=mw.Layout(), compile=compile).evaluate(batch)
        )

    assert loss(True) == pytest.approx(loss(False), rel=1e-6)


# --- regions as on a GPU ----------------------------------------------------------------------------------------------


def test_wide_regions_end_at_what_a_compiler_must_not_touch() -> None:
    """On a GPU, products and norms belong to regions; attention, random numbers and in-place operators stay."""
    ours = torch.ops.meshwright

    def function(x: torch.Tensor, w: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        a = torch.nn.functional.gelu(x @ w) @ w
        mask = ours.bernoulli(a, 0.5, 1, 2)
        b = (a * mask) @ w + x
        total.add_(b)
        return [(b @ w).exp() + total, b]

    values = [torch.randn(64, 64).double() * 0.1 for _ in range(2)]
    zeros = torch.zeros(64, 64).double()
    expected = function(values[0], values[1], zeros.clone())
    graph = graph_of(function, *values, zeros)
    for node, value in zip(graph.find_nodes(op="placeholder"), (*values, values[0]), strict=True):
        node.meta["val"] = value
    Compiler(torch.device("cpu"), wide=True).compile(graph)
    names = [name for name in targets(graph) if name not in ("getitem", "contiguous.default")]
    assert names == ["region_0", "bernoulli.default", "region_1", "add_.Tensor", "region_2"]
    results = run(graph, *values, torch.zeros(64, 64).double())
    for result, other in zip(results, expected, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(result, other)


def test_a_kernel_is_not_given_what_it_was_not_compiled_for() -> None:
    expected = [(torch.bfloat16, (4, 1))]
    _check_arguments("region_0", [torch.zeros(2, 4, dtype=torch.bfloat16)], expected)
    _check_arguments("region_0", [torch.zeros(1, 4, dtype=torch.bfloat16).as_strided((1, 4), (9, 1))], expected)
    with pytest.raises(CompileError, match="region_0, input 0 \\(2x4\\): it is float32 with strides \\(4, 1\\)"):
        _check_arguments("region_0", [torch.zeros(2, 4)], expected)
    with pytest.raises(CompileError, match="was compiled as bfloat16 with strides \\(4, 1\\)"):
        _check_arguments("region_0", [torch.zeros(4, 2, dtype=torch.bfloat16).t()], expected)


def interpreted(inner: fx.Graph, values: object, device: object, name: str) -> Region:
    """A region that is not compiled: its graph runs operator by operator."""
    module = fx.GraphModule(nn.Module(), inner)
    return lambda *arguments: tuple(module(*arguments))


def test_steps_of_wide_regions_equal_uncompiled_ones_and_equal_layers_share_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.runtime.trainer.Compiler", functools.partial(Compiler, wide=True))
    monkeypatch.setattr("meshwright.lower.regions._compiled", interpreted)
    num_regions = []
    for layers in (3, 4):
        config = GPTConfig(layers=layers, width=32, heads=2, vocabulary=64, sequence_length=64)
        torch.manual_seed(3)
        text = torch.randint(64, (4, 65))
        batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
        losses: dict[bool, list[float]] = {}
        kernel_counts = []
        for compile in (False, True):
            torch.manual_seed(4)
            trainer = mw.parallelize(
                GPT(config).double(), language_model_loss, batch, plan=mw.Layout(), compile=compile,
                optimizer=oracle.OPTIMIZERS["AdamW"], device="cpu",
            )  # fmt: skip
            losses[compile] = [float(trainer.step(batch)) for _ in range(3)]
            kernel_counts.append(trainer.num_kernels)
        assert losses[True] == pytest.approx(losses[False], rel=1e-9)
        num_regions.append(kernel_counts[-1])
    assert num_regions[0] == num_regions[1] > 4
