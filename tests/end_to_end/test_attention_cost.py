"""Attention that forms its scores is priced by what its kernels read and write."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright.ops.library  # noqa: F401 - defines the operators
from meshwright.catalog import load_device
from meshwright.cost.attention import scratch_bytes
from meshwright.cost.kernels import Rates
from meshwright.cost.operators import kernel_of, kernels_cost
from meshwright.ir.graph import Operator
from meshwright.ir.kernel import Operand

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
    rates, name = Rates(load_device("generic-cpu")), str(dtype).removeprefix("torch.")
    part, rest = Operand((BATCH, HEADS, ROWS, WIDTH), name), Operand((BATCH, HEADS, ROWS), "float32")
    flops = 4.0 * BATCH * HEADS * ROWS * ROWS * WIDTH
    for traffic, kind, inputs, outputs, given in (
        (forward, "attention", [part] * 3, [part, rest], "t0, t1, t2, None"),
        (backward, "attention_backward", [*[part] * 5, rest], [part] * 3, "t0, t1, t2, t3, None, t4, t5"),
    ):
        operator = Operator(
            name=kind, target=f"meshwright.{kind}.default", inputs=(), outputs=(), rule=None, bytes=1,
            arguments=f"{given}, 0.0, {causal}, 0.25, 0, 0",
        )  # fmt: skip
        work = flops * (2.5 if kind == "attention_backward" else 1)
        cost = kernels_cost(rates, operator, inputs, outputs, work)
        assert traffic.fused == fused
        assert (scratch_bytes(kernel_of(operator, inputs, outputs, work), on_cpu=True) == 0) == fused
        if not fused:
            assert cost.bytes == pytest.approx(traffic.num_bytes, rel=0.2)
