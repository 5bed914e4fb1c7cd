"""GPUs that cannot run, or would crawl, are refused before the first step. Stand-ins report what is not here."""

from collections.abc import Sequence

import pytest
import torch

from meshwright.errors import ClusterError, LaunchError
from meshwright.ir.graph import Graph, Operator, Tensor
from meshwright.runtime import device_check
from meshwright.runtime.device import CudaSupport, Processor
from meshwright.runtime.device_check import (
    available,
    check_alike,
    check_driver,
    check_float64,
    check_gpu,
    check_kernels,
    check_nccl,
)

H100, V100 = Processor("NVIDIA H100 80GB HBM3", (9, 0)), Processor("Tesla V100-SXM2-32GB", (7, 0))
L4, K80 = Processor("NVIDIA L4", (8, 9)), Processor("Tesla K80", (3, 7))
KERNELS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
USUAL = CudaSupport((12, 8), (12, 9), KERNELS, has_nccl=True)


@pytest.mark.parametrize(
    ("support", "why", "remedy"),
    [
        (CudaSupport(), "was built without CUDA", "install a build of PyTorch with CUDA; or use cpu"),
        (CudaSupport((12, 8)), "there is no NVIDIA driver", "install the driver; or use cpu"),
        (
            CudaSupport((12, 8), (11, 4)),
            "the NVIDIA driver supports CUDA 11.4, and PyTorch was built for 12.8",
            "update the driver, or install a build of PyTorch for CUDA 11; or use cpu",
        ),
        (USUAL, "no GPU is visible", "look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES; or use cpu"),
    ],
)
def test_without_a_gpu_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch, support: CudaSupport, why: str, remedy: str
) -> None:
    monkeypatch.setattr(device_check, "cuda_support", lambda: support)
    with pytest.raises(LaunchError) as caught:
        available("cuda")
    assert str(caught.value).startswith("device: there is no device 'cuda' here: ")
    assert why in caught.value.problem
    assert caught.value.remedy == remedy


def test_of_two_gpus_there_is_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "num_cuda_devices", lambda: 2)
    assert available("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(LaunchError) as caught:
        available("cuda:2")
    assert str(caught.value) == "device: there is no device 'cuda:2' here\n  -> use cuda:0 to cuda:1, or cpu"


def test_an_old_driver_does_not_send_a_run_to_the_cpu_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "cuda_support", lambda: CudaSupport((12, 8), (11, 4)))
    with pytest.raises(LaunchError) as caught:
        available("cpu", chosen=False)
    assert str(caught.value) == (
        "device: the NVIDIA driver supports CUDA 11.4, and PyTorch was built for 12.8\n"
        "  -> update the driver, or install a build of PyTorch for CUDA 11; or give device='cpu'"
    )
    assert available("cpu") == torch.device("cpu"), "it was asked for"
    check_driver(CudaSupport((12, 8), (12, 0)))  # drivers of a major version run all of its builds


@pytest.mark.parametrize("processor", [H100, L4, Processor("NVIDIA A100-SXM4-80GB", (8, 0)), Processor("T4", (7, 5))])
def test_kernels_run_on_processors_of_their_major_version(processor: Processor) -> None:
    check_kernels(processor, USUAL, torch.device("cuda"))


@pytest.mark.parametrize(("processor", "kernels"), [(K80, KERNELS), (V100, KERNELS), (H100, ("sm_80", "compute_100"))])
def test_a_gpu_without_kernels_is_refused(processor: Processor, kernels: Sequence[str]) -> None:
    support = USUAL._replace(kernels=tuple(kernels))
    with pytest.raises(LaunchError) as caught:
        check_kernels(processor, support, torch.device("cuda", 1))
    text = str(caught.value)
    assert text.startswith(f"device cuda:1: {processor.name} (compute capability {processor.capability[0]}.")
    assert f"has kernels for {', '.join(kernels)} only" in text
    assert caught.value.remedy == (
        "install a build of PyTorch for this GPU, choose another with CUDA_VISIBLE_DEVICES, or give device='cpu'"
    )


def test_portable_code_runs_on_later_processors() -> None:
    check_kernels(H100, USUAL._replace(kernels=("sm_70", "compute_80")), torch.device("cuda"))
    check_kernels(H100, USUAL._replace(kernels=("sm_90a",)), torch.device("cuda"))


def test_several_ranks_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    without = USUAL._replace(has_nccl=False)
    check_nccl(without, 1)
    with pytest.raises(LaunchError) as caught:
        check_nccl(without, 4)
    assert caught.value.where == "device"
    assert caught.value.problem.startswith("4 ranks on GPUs communicate by NCCL, which PyTorch ")
    assert caught.value.remedy == "install a build of PyTorch with NCCL; or run one rank, or give device='cpu'"
    monkeypatch.setattr(device_check, "cuda_support", lambda: without)
    monkeypatch.setattr(device_check, "processor", lambda device: H100)
    check_gpu(torch.device("cpu"), 4)
    with pytest.raises(LaunchError, match="NCCL"):
        check_gpu(torch.device("cuda"), 4)


def test_unlike_gpus_are_refused_unless_the_cluster_describes_them() -> None:
    check_alike([str(H100)] * 4)
    mixed = [H100.name, H100.name, V100.name]
    with pytest.raises(ClusterError) as caught:
        check_alike(mixed)
    assert caught.value.problem == (
        "its GPUs differ, and the plan would wait for the slowest "
        "(ranks 0 to 1: NVIDIA H100 80GB HBM3; rank 2: Tesla V100-SXM2-32GB)"
    )
    assert caught.value.where == "device"
    assert caught.value.remedy == (
        "choose equal GPUs with CUDA_VISIBLE_DEVICES, or describe them in a cluster file, as members of a level"
    )
    check_alike(mixed, described=True)


def products(flops: float, dtype: str) -> Graph:
    tensor = Tensor(name="y", shape=(1,), dtype=dtype, kind="activation", storage="y")
    product = Operator(name="mm", target="aten.mm.default", inputs=(), outputs=("y",), rule=None, flops=flops)
    return Graph(
        model="M", batch_size=1, tensors={"y": tensor}, operators=(product,), factor_classes={}, inputs=(),
        parameters=(), buffers=(), loss="y",
    )  # fmt: skip


def test_float64_is_refused_where_it_crawls() -> None:
    """An L4 has 58 multiprocessors: at 2 units each, 1e13 FLOP take 29 s."""
    with pytest.raises(LaunchError) as caught:
        check_float64(products(1e13, "float64"), L4, 58, 1)
    assert str(caught.value) == (
        "device: a step of 1e+13 FLOP in float64 takes at least 29 s on NVIDIA L4, which has 2 float64 units beside "
        "every 64 or 128 of float32\n"
        "  -> train in float32 (model.float()) or bfloat16 (precision=), or on the CPU"
    )
    check_float64(products(1e13, "float64"), H100, 132, 1)
    check_float64(products(1e13, "float32"), L4, 58, 1)
    check_float64(products(1e11, "float64"), L4, 58, 1)
    check_float64(products(1e13, "float64"), L4, 58, 4)
