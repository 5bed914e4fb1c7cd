"""Experts without numbers on the host: groups equal the loop over experts, and gathered tokens equal one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.cost import experts as cost
from meshwright.cost.scratch import scratch_bytes
from meshwright.errors import PlanError
from meshwright.ir.kernel import COPIED_BYTES, ExpertSizes, Kernel
from meshwright.ir.operator_algorithm import GATHER
from meshwright.ir.plan import starred
from meshwright.lower.plans import PlanLowering
from meshwright.ops import experts, grouped_experts
from meshwright.ops.grouped_experts import ACTIVATIONS, Groups, gated, gated_backward
from meshwright.runtime.live_bytes import CountingBytes
from tests.distributed import hugging_face, oracle
from tests.distributed.pool import Ranks


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("halves", [1, 2])
def test_the_gradient_of_a_gate_is_that_of_autograd(activation: str, halves: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 6 * halves, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 6, dtype=torch.float64)
    (expected,) = torch.autograd.grad(gated(hidden, activation, 6), hidden, grad)
    assert torch.allclose(gated_backward(grad, hidden.detach(), activation), expected, rtol=1e-14, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.data())
def test_groups_hold_every_token_of_an_expert_and_nothing_else(tokens: int, total: int, data: Any) -> None:
    """Blocks of 8, as for grouped products: each block has rows of one expert, in the order of the tokens."""
    slots, num_experts = data.draw(st.integers(1, total)), data.draw(st.integers(1, total))
    first = data.draw(st.integers(0, total - num_experts))
    index = torch.stack([torch.tensor(data.draw(st.permutations(range(total)))[:slots]) for _ in range(tokens)])
    groups = Groups.of(index, first, num_experts, grouped=True)
    source, ends = groups.source.tolist(), groups.ends.tolist()
    assert not len(source) % 8
    begin = 0
    for expert, end in enumerate(ends):
        rows = [slot for slot in source[begin:end] if slot < index.numel()]
        assert rows == (index.reshape(-1) == first + expert).nonzero().flatten().tolist()
        assert end - begin - len(rows) < 8
        begin = end
    assert all(slot == index.numel() for slot in source[begin:])
    values = torch.randn(index.numel(), 3)
    present = ((index >= first) & (index < first + num_experts)).reshape(-1, 1)
    assert torch.equal(groups.of_slots(groups.rows_of_slots(values)), values * present)


WAYS = [("blocks", torch.float64), ("blocks", torch.float32), ("grouped", torch.float32)]


@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize(("first", "number"), [(0, 4), (1, 2), (3, 1)])
@pytest.mark.parametrize(("activation", "halves"), [("silu", 2), ("gelu_tanh", 1)])
def test_groups_compute_what_the_loop_computes(
    way: str, dtype: torch.dtype, first: int, number: int, activation: str, halves: int
) -> None:
    """The loop over experts is the oracle. An expert has no tokens here, and matrices are copied in several parts."""
    torch.manual_seed(first)
    tokens, grad = torch.randn(2, 13, 8, dtype=dtype)
    weights = torch.rand(13, 2, dtype=dtype)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(13)])
    up, down = torch.randn(number, 16 * halves, 8, dtype=dtype), torch.randn(number, 8, 16, dtype=dtype)
    given_to = (tokens, index, weights, up, down)
    output, kept = torch.ops.meshwright.experts_kept(*given_to, activation, first)
    gradients = torch.ops.meshwright.experts_backward(grad, *given_to, activation, first)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    with (
        patch.object(grouped_experts, "has_grouped_product", lambda *_: way == "grouped"),
        patch.multiple(grouped_experts, BLOCK_ROWS=4, COPIED_BYTES=3000),
    ):
        result, groups, hidden = grouped_experts.forward(*given_to, activation, first)
        slots = groups.of_slots(hidden)
        for again in (None, slots):
            back = grouped_experts.backward(grad, *given_to, again, activation, first)
            for gradient, expected in zip(back, gradients, strict=True):
                assert torch.allclose(gradient, expected, tolerance, tolerance)
    assert torch.allclose(result, output, tolerance, tolerance)
    num_kept = int(((index >= first) & (index < first + number)).sum())
    assert torch.allclose(slots.sum(0), kept[:num_kept].sum(0), tolerance, tolerance)


def test_a_token_that_is_not_a_number_stays_in_its_row() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(9, 8, dtype=torch.float64)
    tokens[-1] = torch.nan
    index, weights = torch.randint(3, (9, 1)), torch.ones(9, 1, dtype=torch.float64)
    up, down = torch.randn(3, 16, 8, dtype=torch.float64), torch.randn(3, 8, 16, dtype=torch.float64)
    result = grouped_experts.forward(tokens, index, weights, up, down, "relu", 0)[0]
    assert bool(result[:-1].isfinite().all())
    assert bool(result[-1].isnan().all())


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 6), st.integers(1, 4), st.sampled_from([32, 48, 96]),
    st.sampled_from([64, 96, 160]), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([2**17, COPIED_BYTES]),
)  # fmt: skip
def test_memory_of_groups_is_counted(
    tens: int, number: int, slots: int, width: int, inner: int, halves: int, grouped: bool, copied_bytes: int
) -> None:
    """The bytes of all tensors while experts run, beyond their results: those of groups and of copied matrices, of
    which ``copied_bytes`` are there at a time."""
    tokens, slots = 10 * tens, min(slots, number)
    dtype = torch.bfloat16 if grouped else torch.float32
    values, grad = torch.zeros(2, tokens, width, dtype=dtype)
    weights, index = torch.zeros(tokens, slots, dtype=dtype), torch.zeros(tokens, slots, dtype=torch.int64)
    up, down = torch.zeros(number, halves * inner, width, dtype=dtype), torch.zeros(number, width, inner, dtype=dtype)
    with (
        patch.object(grouped_experts, "has_grouped_product", lambda *_: grouped),
        patch.object(grouped_experts, "COPIED_BYTES", copied_bytes),
        patch.object(cost, "COPIED_BYTES", copied_bytes),
    ):
        for backward in (False, True):
            counted, given_to = CountingBytes(), (values, index, weights, up, down)
            for each in (grad, *given_to):
                counted.live.hold(each)
            held = counted.live.held
            with counted:
                results: tuple[Tensor, ...]
                if backward:
                    results = grouped_experts.backward(grad, *given_to, None, "silu", 0)
                else:
                    results = grouped_experts.forward(*given_to, "silu", 0)[:1]
            sizes = ExpertSizes(tokens, tokens * slots, number, width, halves * inner, inner, width, backward)
            kernel = Kernel("experts", str(dtype).removeprefix("torch."), experts=sizes)
            predicted = scratch_bytes(kernel, on_cpu=False) + sum(value.nbytes for value in results)
            numbers = 40 * (tokens * slots + 64 * number)  # numbers and flags of rows are not predicted
            assert predicted == pytest.approx(counted.live.peak - held, rel=0.01, abs=numbers)
            assert scratch_bytes(kernel, on_cpu=True) == 0


# --- gathered tokens --------------------------------------------------------------------------------------------------


def gathered(graph: mw.Graph, layout: mw.Layout) -> mw.Plan:
    plan = mw.plan(graph, layout=layout)
    names = {starred(operator.name) for operator in graph.operators if operator.target.startswith("meshwright.experts")}
    stages = []
    for stage in plan.stages:
        own = names & {*map(starred, stage.strategies)}
        assert own
        stages.append(msgspec.structs.replace(stage, operator_algorithms=dict.fromkeys(own, GATHER)))
    return msgspec.structs.replace(plan, stages=tuple(stages))


LAYOUTS = [mw.Layout(dp=2, ep=2, tp=2), mw.Layout(dp=2, ep=2, pp=2, microbatches=2)]


def train(layout: mw.Layout) -> tuple[list[float], dict[str, Tensor], list[str]]:
    subject = hugging_face.subject("Mixtral", 3)
    with oracle.WiderCasts():
        captured = oracle.captured("gathered experts", subject)
        plan = gathered(captured.graph, layout)
        run, trainer = oracle.in_parallel(subject, plan, oracle.OPTIMIZERS["SGD"])
    programs = PlanLowering(trainer.graph)(trainer.plan)
    targets = [node.target for program in programs for phase in program.phases for node in phase.nodes]
    return [loss.item() for loss in run.losses], run.state, targets


def train_all() -> list[Any]:
    return [train(layout) for layout in LAYOUTS]


def test_gathered_tokens_train_as_in_one_process(ranks: Ranks) -> None:
    with oracle.WiderCasts():
        expected = oracle.in_one_process(hugging_face.subject("Mixtral", 3), oracle.OPTIMIZERS["SGD"])
    for result in ranks(4, train_all):
        for losses, state, targets in result:
            assert not any("experts_across" in target for target in targets)
            assert any("experts" in target for target in targets)
            assert losses == pytest.approx([loss.item() for loss in expected.losses], rel=1e-9)
            if state:
                assert oracle.largest_error(state, expected.state) <= oracle.TOLERANCE


def test_a_device_that_runs_behind_its_host_gathers() -> None:
    subject = hugging_face.subject("Mixtral", 3)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    mixtures = {operator.name for operator in graph.operators if operator.target.startswith("meshwright.experts")}
    layout = mw.Layout(dp=2, ep=2)
    gpu, cpu = (mw.plan(graph, cluster, layout=layout, devices=2) for cluster in ("h100-dgx", "cpu-local"))
    assert {gpu.stage.operator_algorithm(name) for name in mixtures} == {GATHER}
    assert not cpu.stage.operator_algorithms
    assert {gpu.stage.strategy(name)["ep"] for name in mixtures} == {"te"}
    wrong = msgspec.structs.replace(gpu.stage, operator_algorithms=dict.fromkeys(gpu.stage.operator_algorithms, "fft"))
    with pytest.raises(PlanError, match="'fft' is no algorithm of experts"):
        PlanLowering(graph)(msgspec.structs.replace(gpu, stages=(wrong,)))


def test_half_of_the_experts_take_half_of_the_products() -> None:
    """Costs count the tokens that an equal routing sends to the experts of a rank."""
    flops = []
    for parts in (1, 2):
        given_to = torch.empty(6, 8), torch.zeros(6, 2, dtype=torch.int64), torch.empty(6, 2), torch.empty(4, 10, 8)
        call = experts.Call(
            torch.ops.meshwright.experts_kept.default, (*given_to, torch.empty(4, 8, 5), "silu", 0, parts), {}, ()
        )
        flops.append(experts.KERNEL_FLOPS[call.target](call, None))
    assert flops[0] == 2 * flops[1] == 2 * 12 * (10 * 8 + 8 * 5)
