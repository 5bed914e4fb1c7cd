"""Kernels: sizes alone and lowered calls have the same seconds; attention is priced as it is lowered."""

from typing import Any

import msgspec
import pytest
import torch

from meshwright.cost.attention import scratch_bytes
from meshwright.cost.convnet import layer_cost
from meshwright.cost.fitted_kernels import fitted_kernels
from meshwright.cost.kernels import Cost, Rates
from meshwright.errors import ClusterError
from meshwright.ir.cluster_names import load_device
from meshwright.ir.convnet import NetLayer
from meshwright.ir.device import Device, Kernels
from meshwright.ir.kernel import Kernel, Product
from meshwright.ir.kind import COMPUTE, KINDS
from meshwright.lower.counts import Counter
from meshwright.ops import collectives
from meshwright.ops.base import Call

aten = torch.ops.aten

CALIBRATED = Device(
    name="core",
    kind="cpu",
    memory_bytes=10**10,
    memory_bandwidth_bytes_per_s=2e10,
    peak_flops_per_s={"float32": 1e11, "float64": 5e10},
    efficiency={
        kind: ((1e5, 0.2 + 0.01 * at), (1e9, 0.5 + 0.01 * at)) if kind in COMPUTE else ((1e4, 0.3), (1e8, 0.6))
        for at, kind in enumerate(KINDS)
    },
    kernels=Kernels(processors=1, matmul_fraction=1.0, bandwidth_fraction=0.7, kernel_s=2e-6, launch_s=0.0),
)
DEVICES = {name: load_device(name) for name in ("h100", "a100-80gb", "v100")} | {"calibrated": CALIBRATED}
PRODUCTS = ((4096, 4096, 4096, 1), (1, 12288, 4096, 1), (513, 1000, 64, 1), (128, 128, 64, 96), (8192, 32, 2048, 8))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(target: Any, args: tuple[Any, ...], *outputs: torch.Tensor) -> tuple[Kernel, ...]:
    """What a lowered call is counted as."""
    return Counter({}).kernels(Call(target, args, {}, outputs))


def counted(rates: Rates, target: Any, args: tuple[Any, ...], *outputs: torch.Tensor) -> Cost:
    (kernel,) = kernels(target, args, *outputs)
    return rates.cost(kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", DEVICES)
def test_a_lowered_product_takes_what_the_same_sizes_take(name: str, dtype: torch.dtype) -> None:
    rates, text = Rates(DEVICES[name]), str(dtype).removeprefix("torch.")
    for m, n, k, batch in PRODUCTS:
        lead, target = ((batch,), aten.bmm.default) if batch > 1 else ((), aten.mm.default)
        *inputs, output = (meta(*lead, *shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
        counts = counted(rates, target, tuple(inputs), output)
        assert counts.seconds == pytest.approx(rates.matmul_s(m, n, k, batch=batch, dtype=text), rel=1e-12)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_lowered_convolution_is_the_product_of_positions_by_filters(name: str, groups: int, kernel: int) -> None:
    """All three passes read two of images, filters and results, and write the third; sizes alone say the same."""
    rates = Rates(DEVICES[name])
    images, weight, results = meta(8, 64, 14, 14), meta(128, 64 // groups, kernel, kernel), meta(8, 128, 14, 14)
    rows, columns, depth = 8 * 14 * 14, 128 // groups, 64 // groups * kernel**2
    rest = (None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    flops, moved = (
        2.0 * groups * rows * columns * depth,
        4 * sum(tensor.numel() for tensor in (images, weight, results)),
    )
    forward = counted(rates, aten.convolution.default, (images, weight, *rest), results)
    wanted = rates.seconds("convolution", "float32", flops, moved, Product(rows, columns, depth, groups))
    assert forward.bytes == moved
    assert forward.seconds == pytest.approx(wanted, rel=1e-9)
    passes = {
        "convolution_input": (images, (rows, depth, columns)),
        "convolution_weight": (weight, (depth, columns, rows)),
    }
    backward_s = 0.0
    for index, (kind, (output, sizes)) in enumerate(passes.items()):
        args = (results, images, weight, *rest, [other == index for other in range(3)])
        counts = counted(rates, aten.convolution_backward.default, args, output)
        wanted = rates.seconds(kind, "float32", flops, moved, Product(*sizes, groups))
        assert counts.bytes == moved
        assert counts.seconds == pytest.approx(wanted, rel=1e-9), kind
        backward_s += counts.seconds
    layer = NetLayer(
        name="c", kind="convolution", inputs=64, outputs=128, kernel=kernel, groups=groups, pixels_in=196,
        pixels_out=196,
    )  # fmt: skip
    cost, result_bytes = layer_cost(layer, 8, rates, "float32"), 4 * results.numel()
    if rates.launch_s == 0:
        after_s = rates.memory_bound("pointwise", 2 * result_bytes).seconds
        after_backward_s = rates.memory_bound("pointwise", 3 * result_bytes, 2).seconds
        assert cost.forward_s == pytest.approx(forward.seconds + after_s)
        assert cost.backward_s == pytest.approx(backward_s + after_backward_s)


@pytest.mark.parametrize("name", DEVICES)
def test_a_lowered_stream_takes_what_the_same_bytes_take(name: str) -> None:
    rates = Rates(DEVICES[name])
    for size in (10, 10**4, 10**7):
        tensor = meta(size)
        for target, kind in ((aten.neg.default, "pointwise"), (aten.gelu.default, "activation")):
            assert counted(rates, target, (tensor,), tensor).seconds == rates.memory_bound(kind, 8 * size).seconds


def test_rows_that_are_added_in_place_are_all_that_is_read_and_written() -> None:
    (kernel,) = kernels(collectives.ADD_ROWS, (meta(4, 64, 56, 224), meta(4, 64, 1, 224), -2, 0), meta(4, 64, 56, 224))
    assert kernel.bytes == 3 * 4 * 4 * 64 * 224


def attention(backward: bool, part: torch.Tensor, rest: torch.Tensor, dropout: float, causal: bool) -> Kernel:
    settings = (dropout, causal, 0.25, 0, 3)
    if backward:
        args, gradients = (part, part, part, part, None, part, rest, *settings), (part, part, part)
        (kernel,) = kernels(torch.ops.meshwright.attention_backward.default, args, *gradients)
    else:
        (kernel,) = kernels(torch.ops.meshwright.attention.default, (part, part, part, None, *settings), part, rest)
    return kernel


@pytest.mark.parametrize("device", [CALIBRATED, load_device("generic-cpu")])
@pytest.mark.parametrize("backward", [False, True])
def test_lowered_attention_on_a_cpu_is_the_fused_kernel(device: Device, backward: bool) -> None:
    rates, part, rest = Rates(device), meta(2, 4, 128, 16), meta(2, 4, 128)
    flops = 2.0 * 2 * 4 * 128 * 128 * 16 * (5 if backward else 2)
    kind = "attention_backward" if backward else "attention"
    moved = 4 * ((8 if backward else 4) * part.numel() + rest.numel())
    kernel = attention(backward, part, rest, 0.0, True)
    assert rates.cost(kernel).seconds == rates.seconds(kind, "float32", flops, moved)
    assert scratch_bytes(kernel, on_cpu=True) == 0


@pytest.mark.parametrize(("name", "dropout"), [("h100", 0.1), ("a100-80gb", 0.1), ("calibrated", 0.1)])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_that_forms_its_scores_pays_for_them(name: str, dropout: float, backward: bool) -> None:
    """With dropout, and in float64 on GPUs (``ir/attention.py``): S x S elements are written, read, and held."""
    rates, rows, width = Rates(DEVICES[name]), 2048, 64
    part, rest = meta(4, 16, rows, width), meta(4, 16, rows)
    scores = 4 * 16 * rows * rows * 4
    products = 5 if backward else 2
    flops = 2.0 * part.numel() * rows * products
    kernel = attention(backward, part, rest, dropout, False)
    cost = rates.cost(kernel)
    moved = 4 * ((8 if backward else 4) * part.numel() + rest.numel())
    fused_s = rates.seconds("attention_backward" if backward else "attention", "float32", flops, moved)
    assert cost.bytes > 10 * scores
    assert cost.seconds > rates.memory_bound("pointwise", 8 * scores).seconds + 0.5 * products / 5 * fused_s
    assert scratch_bytes(kernel, on_cpu=name == "calibrated") >= 2 * scores
    assert cost.flops == flops


def test_measured_curves_say_all_that_a_kernel_takes() -> None:
    rates, of, bandwidth = Rates(CALIBRATED), CALIBRATED.efficiency_at, CALIBRATED.memory_bandwidth_bytes_per_s
    flat = 2e-6 + 1e7 / (1e11 * of("matmul", 1e7)) + 1e6 / (bandwidth * of("operands", 1e6))
    assert rates.seconds("matmul", "float32", 1e7, 1e6) == flat
    convolution = 1e7 / (5e10 * of("convolution", 1e7)) + 1e3 / (bandwidth * of("convolution_operands", 1e3))
    assert rates.seconds("convolution", "float64", 1e7, 1e3) == 2e-6 + convolution
    for flops, moved in ((1e7, 1e3), (1e3, 1e7)):
        roofline = max(flops / (1e11 * of("attention", flops)), moved / bandwidth)
        assert rates.seconds("attention", "float32", flops, moved) == 2e-6 + roofline
    without = msgspec.structs.replace(CALIBRATED, efficiency={"convolution": CALIBRATED.efficiency["convolution"]})
    assert Rates(without).seconds("convolution", "float32", 1e3, 1e7) == 2e-6 + 1e7 / bandwidth, "an older calibration"
    assert rates.seconds("norm", "float32", 0.0, 1e6) == 2e-6 + 1e6 / (bandwidth * of("norm", 1e6))


def test_kinds_without_a_curve_follow_the_fractions_of_the_device() -> None:
    part = msgspec.structs.replace(CALIBRATED, efficiency={"matmul": ((1.0, 0.5),)})
    rates = Rates(part)
    assert rates.seconds("matmul", "float32", 1e9, 0.0) == 2e-6 + 1e9 / 5e10
    assert rates.seconds("norm", "float32", 0.0, 1e6) == 2e-6 + 1e6 / 1.4e10


def test_float32_products_do_not_use_tensor_cores_and_convolutions_do() -> None:
    rates, a100 = Rates(DEVICES["a100-80gb"]), DEVICES["a100-80gb"]
    plain, tensor = (rates.matmul_s(8192, 8192, 8192, dtype=dtype) for dtype in ("float32", "tfloat32"))
    ratio = a100.peak("tfloat32") / a100.peak("float32")
    assert plain > 0.9 * ratio * tensor
    assert rates.matmul_s(8192, 8192, 8192, dtype="float32", kind="convolution") == tensor


def test_a_dtype_that_the_device_does_not_have_is_named() -> None:
    assert Rates(CALIBRATED).matmul_s(64, 64, 64, dtype="bfloat16") < Rates(CALIBRATED).matmul_s(
        64, 64, 64, dtype="float32"
    )
    with pytest.raises(
        ClusterError, match=r"device tpu-v4: there is no peak for 'float64'\n  -> use float32 or bfloat16"
    ):
        Rates(load_device("tpu-v4")).matmul_s(64, 64, 64, dtype="float64")


# --- constants that are fitted to measured products -------------------------------------------------------------------

MEASURED = [
    Product(m, n, k)
    for m, n, k in (
        (8192, 8192, 8192), (8192, 2048, 8192), (8192, 6144, 2048), (2048, 2048, 2048), (1024, 1024, 1024),
        (256, 2048, 2048), (512, 512, 512), (8192, 50304, 2048),
    )
]  # fmt: skip


def test_fitted_constants_are_those_that_made_the_times() -> None:
    h100 = load_device("h100")
    assert h100.kernels is not None
    constants = msgspec.structs.replace(h100.kernels, matmul_fraction=0.8, extra_depth=200.0, operand_cost=8.0)
    rates = Rates(msgspec.structs.replace(h100, kernels=constants))
    times = [(size, "bfloat16", rates.matmul_s(size.m, size.n, size.k)) for size in MEASURED]
    fitted = fitted_kernels(h100, h100.kernels, times)
    assert (fitted.kernels.extra_depth, fitted.kernels.operand_cost) == (constants.extra_depth, constants.operand_cost)
    assert fitted.kernels.matmul_fraction == pytest.approx(constants.matmul_fraction, rel=1e-3)
    assert fitted.deviation < 1e-3


def test_what_no_constants_explain_is_the_deviation() -> None:
    h100 = load_device("h100")
    assert h100.kernels is not None
    rates = Rates(h100)
    factors = [1.0, 1.3, 0.8, 1.1, 0.9, 1.25, 0.75, 1.05]
    times = [
        (size, "bfloat16", factor * rates.matmul_s(size.m, size.n, size.k))
        for size, factor in zip(MEASURED, factors, strict=True)
    ]
    fitted = fitted_kernels(h100, h100.kernels, times)
    assert 0.03 < fitted.deviation < 0.25
    assert fitted.kernels.matmul_fraction <= 1.0
    assert fitted.kernels.kernel_s == h100.kernels.kernel_s
