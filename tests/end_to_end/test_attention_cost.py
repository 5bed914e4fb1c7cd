"""Attention that forms its scores is priced by what its kernels read and write."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
import meshwright.ops.library
from meshwright.capture.builder import capture
from meshwright.catalog import load_device
from meshwright.cost.attention import scratch_bytes
from meshwright.cost.kernels import Rates
from meshwright.cost.program import step_work
from meshwright.lower.counts import Counter
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.ops.base import Call
from meshwright.planner.explicit import plan_layout

ours = torch.ops.meshwright
BATCH, HEADS, ROWS, WIDTH = 2, 3, 256, 16


class Traffic(TorchDispatchMode):
    """Counts the bytes of tensors that kernels read and write, and sees whether one is fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.fused = 0, False

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = target(*args, **(kwargs or {}))
        self.fused |= "flash" in str(target)
        if not any(one.alias_info and not one.alias_info.is_write for one in target._schema.returns):  # no view
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            # logsumexp is four kernels: maximum, difference, exponential, sum
            times = 6 if "logsumexp" in str(target) else 1
            self.num_bytes += sum(times * one.numel() * one.element_size() for one in tensors)
        return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "fused"), [(torch.float16, False), (torch.float32, True)])
def test_the_bytes_of_attention_are_those_of_its_kernels(dtype: torch.dtype, fused: bool, causal: bool) -> None:
    parts = [torch.randn(BATCH, HEADS, ROWS, WIDTH, dtype=dtype) for _ in range(4)]
    query, key, value, grad = parts
    settings = (0.0, causal, 0.25, 0, 0)
    with Traffic() as forward:
        output, logsumexp = ours.attention.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), query, key, value, None, *settings
        )
    with Traffic() as backward:
        ours.attention_backward.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
            grad, query, key, value, None, output, logsumexp, *settings,
        )  # fmt: skip
    rates = Rates(load_device("generic-cpu"))
    for traffic, target, args, outputs in (
        (forward, ours.attention.default, (query, key, value, None), (output, logsumexp)),
        (backward, ours.attention_backward.default, (grad, query, key, value, None, output, logsumexp), (grad,) * 3),
    ):
        (kernel,) = Counter({}).kernels(Call(target, (*args, *settings), {}, outputs))
        cost = rates.cost(kernel)
        assert traffic.fused == fused
        assert (scratch_bytes(kernel, on_cpu=True) == 0) == fused
        if not fused:
            assert cost.bytes == pytest.approx(traffic.num_bytes, rel=0.2)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_plan_on_a_gpu_holds_the_scores_and_one_on_a_cpu_does_not(microbatches: int) -> None:
    config = GPTConfig(layers=1, width=32, heads=4, vocabulary=64, sequence_length=512)
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(4, 512, dtype=torch.int64)
    graph = capture(model, language_model_loss, {"tokens": tokens, "targets": tokens}).graph
    layout = mw.Layout(dp=2, microbatches=microbatches)
    scores = 4 // 2 // microbatches * 4 * 512 * 512 * 4
    found = {}
    gpu, cpu = mw.Cluster.load("a100-80gb-dgx"), mw.Cluster.load("cpu-local")
    plan = plan_layout(graph, layout, world_size=2, cluster=gpu)
    programs = PlanLowering(graph)(plan)
    for cluster in (gpu, cpu):
        found[cluster.name] = step_work(programs, plan, cluster).stages[0].workspace_bytes
    assert found["a100-80gb-dgx"] >= 3.5 * scores
    assert found["cpu-local"] < 2 * scores
    kernels = [one for phase in programs[0].phases for node in phase.nodes for one in node.kernels]
    products = [one for one in kernels if one.kind == "matmul"]
    assert len(products) > 8
    for one in products:
        assert one.product is not None
        m, n, k, batch = one.product
        assert one.flops == 2 * m * n * k * batch
