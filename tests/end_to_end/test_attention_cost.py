"""Attention that forms its scores is priced by what its kernels read and write."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
import meshwright.ops.attention_kernels
from meshwright.capture.builder import capture
from meshwright.cost.attention import scratch_bytes
from meshwright.cost.kernels import Rates
from meshwright.cost.program import step_work
from meshwright.ir.cluster_names import load_device
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
        if not any(value.alias_info and not value.alias_info.is_write for value in target._schema.returns):  # no view
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            # logsumexp is four kernels: maximum, difference, exponential, sum
            times = 6 if "logsumexp" in str(target) else 1
            self.num_bytes += sum(times * tensor.numel() * tensor.element_size() for tensor in tensors)
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
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_only_attention_without_a_fused_kernel_holds_its_scores(microbatches: int, dropout: float) -> None:
    config = GPTConfig(layers=1, width=32, heads=4, vocabulary=64, sequence_length=512, dropout=dropout)
    with torch.device("meta"):
        model, tokens = GPT(config), torch.zeros(4, 512, dtype=torch.int64)
    graph = capture(model, language_model_loss, {"tokens": tokens, "targets": tokens}).graph
    layout = mw.Layout(dp=2, microbatches=microbatches)
    scores = 4 // 2 // microbatches * 4 * 512 * 512 * 4
    gpu, cpu = mw.Cluster.load("a100-80gb-dgx"), mw.Cluster.load("cpu-local")
    plan = plan_layout(graph, layout, world_size=2, cluster=gpu)
    programs = PlanLowering(graph)(plan)
    for cluster in (gpu, cpu):
        workspace_bytes = step_work(programs, plan, cluster).stages[0].workspace_bytes
        assert workspace_bytes >= 3.5 * scores if dropout else workspace_bytes < 2 * scores
    kernels = [kernel for phase in programs[0].phases for node in phase.nodes for kernel in node.kernels]
    products = [kernel for kernel in kernels if kernel.kind == "matmul"]
    assert len(products) > 8
    for product in products:
        assert product.product is not None
        m, n, k, batch = product.product
        assert product.flops == 2 * m * n * k * batch


def llama_like(heads: int = 8, key_heads: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    return Decoder(heads, key_heads), {"x": torch.randn(4, 2048, heads * 64)}


class Decoder(nn.Module):
    """One attention layer, with fewer key heads than query heads."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.sizes = [heads * 64, key_heads * 64, key_heads * 64]
        self.project = nn.Linear(heads * 64, sum(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (-1, 64)).transpose(1, 2) for part in self.project(x).split(self.sizes, 2)
        )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


def chosen(cluster: str, layout: mw.Layout, precision: Any = "bfloat16") -> dict[str, str]:
    with torch.device("meta"):
        model, batch = llama_like()
    graph = capture(model, loss_of, batch, precision=precision).graph
    plan = mw.plan(graph, layout=layout, cluster=cluster)
    return {name.rpartition(":")[2]: text for name, text in plan.stage.operator_algorithms.items()}


def test_a_plan_names_the_fastest_algorithm_of_its_device() -> None:
    both = {"attention#0": "cudnn", "attention_backward#0": "cudnn"}
    assert chosen("h100-dgx", mw.Layout(dp=2)) == both
    assert chosen("h100-dgx", mw.Layout(tp=2)) == both
    assert chosen("a100-80gb-dgx", mw.Layout(dp=2)) == {}, "FlashAttention is as fast there"
    assert chosen("h100-dgx", mw.Layout(dp=2), None) == {}, "memory-efficient attention is the only one in float32"
    assert chosen("h100-dgx", mw.Layout(cp=2)) == {}, "cuDNN has no window for the queries of later ranks"
    assert chosen("h100-dgx", mw.Layout(cp=2, context="ring")) == both
    assert chosen("cpu-local", mw.Layout(dp=2)) == {}


def test_times_follow_the_visible_part_and_the_speed_of_an_algorithm() -> None:
    rates = Rates(load_device("h100"))
    query, shared = (torch.empty(4, heads, 8192, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 4))
    statistics = torch.empty(4, 16, 8192, device="meta")

    def kernel(causal: bool, window: int = 0, algorithm: str = "", key: Tensor = query) -> Any:
        settings = (0.0, causal, 0.1, 0, 0, window, 0, algorithm)
        (attention_kernel,) = Counter({}).kernels(
            Call(ours.attention.default, (query, key, key, None, *settings), {}, (query, statistics))
        )
        return attention_kernel

    def seconds(*given: Any) -> float:
        return rates.cost(kernel(*given)).seconds

    assert seconds(True) == pytest.approx(seconds(False) / 2, rel=0.05)
    assert seconds(True, 512) == pytest.approx(seconds(False) * 512 / 8192, rel=0.2)
    assert seconds(True, 0, "cudnn") == pytest.approx(seconds(True) / 1.5, rel=0.05)
    assert seconds(True, 0, "efficient") > 1.5 * seconds(True)
    assert seconds(True, 0, "plain") > 4 * seconds(True)
    assert rates.cost(kernel(True)).flops == rates.cost(kernel(False)).flops, "those that the model asks for"
    fewer = kernel(True, 0, "", shared)
    assert rates.cost(fewer).bytes < 0.7 * rates.cost(kernel(True)).bytes, "keys are not repeated"
    assert scratch_bytes(fewer, on_cpu=False) == 0
    repeated = kernel(True, 0, "efficient", shared)
    assert scratch_bytes(repeated, on_cpu=False) == 2 * query.nbytes
    assert scratch_bytes(kernel(True, 0, "plain"), on_cpu=False) >= 2 * 4 * 64 * 8192 * 8192
