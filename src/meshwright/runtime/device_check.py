"""Refuses GPUs on which a run could not begin, or would crawl: no driver, no kernels, no NCCL, unlike devices."""

from collections.abc import Sequence
from itertools import groupby

import torch

from meshwright.errors import ClusterError, LaunchError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.runtime.device import CudaSupport, Processor, cuda_support, num_cuda_devices, processor

FLOAT64_UNITS = {(6, 0): 32, (7, 0): 32, (7, 2): 32, (8, 0): 32, (9, 0): 64, (10, 0): 64}
"""Multiply-adds in float64 per cycle and multiprocessor, of the processors that are made for it (CUDA C++ Programming
Guide 12.8, section "Arithmetic Instructions"). All others have ``FEW_UNITS``."""
FLOAT8_CAPABILITY = (8, 9)
"""The oldest compute capability with products in float8 (CUDA C++ Programming Guide 12.8, section "Features and
Technical Specifications")."""
FEW_UNITS = 2
NOMINAL_HZ = 1.5e9
"""About the clock of a GPU, to tell seconds from days."""
CRAWL_S = 10.0
"""A step that computes longer than this in float64 is refused, on a device that is not made for float64."""


def available(device: torch.device | str, *, chosen: bool = True) -> torch.device:
    """A device of this machine. ``chosen``: the user has named it; otherwise it was found here.

    Raises:
        LaunchError: the device is not there; the error of a CUDA device says why. Or no GPU was found because the
            driver is too old: the run would go to the CPU unnoticed.
    """
    count = num_cuda_devices()
    kinds = ("cpu", "cuda") if count else ("cpu",)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = None
    if not chosen and not count:
        check_driver(cuda_support())
    there = parsed is not None and parsed.type in kinds and (parsed.type == "cpu" or (parsed.index or 0) < count)
    if parsed is None or not there:
        raise unavailable(str(device), cuda_support(), kinds, count)
    return parsed


def check_gpu(device: torch.device, num_ranks: int) -> None:
    """Raise a LaunchError if PyTorch has no kernels for a GPU, or no NCCL for several ranks."""
    if device.type == "cuda":
        support = cuda_support()
        check_kernels(processor(device), support, device)
        check_nccl(support, num_ranks)


def unavailable(device: str, support: CudaSupport, kinds: Sequence[str], num_gpus: int = 0) -> LaunchError:
    """The error that a device is not there. If it is a CUDA device, the error says why. ``kinds``: the kinds of devices
    that are there."""
    problem, use = f"there is no device {device!r} here", f"use {' or '.join(kinds)}"
    if not device.startswith("cuda"):
        return LaunchError(problem, where="device", remedy=use)
    if num_gpus:
        last = f"cuda:{num_gpus - 1}"
        return LaunchError(problem, where="device", remedy=f"use {'cuda:0' + f' to {last}' * (num_gpus > 1)}, or cpu")
    why, remedy = "no GPU is visible", "look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES"
    if not support.build:
        why, remedy = f"PyTorch {torch.__version__} was built without CUDA", "install a build of PyTorch with CUDA"
    elif not support.driver:
        why, remedy = "there is no NVIDIA driver", "install the driver"
    elif is_older(support):
        why, remedy = _older(support), _update(support)
    return LaunchError(f"{problem}: {why}", where="device", remedy=f"{remedy}; or {use}")


def is_older(support: CudaSupport) -> bool:
    """Whether the driver is older than PyTorch's build: drivers of one major version of CUDA run all of its builds."""
    return bool(support.build and support.driver) and support.driver[0] < support.build[0]


def check_driver(support: CudaSupport) -> None:
    """Raise a LaunchError if PyTorch finds no GPU because the driver is too old: the run would go to the CPU."""
    if is_older(support):
        raise LaunchError(_older(support), where="device", remedy=f"{_update(support)}; or give device='cpu'")


def _older(support: CudaSupport) -> str:
    return f"the NVIDIA driver supports CUDA {_text(support.driver)}, and PyTorch was built for {_text(support.build)}"


def _update(support: CudaSupport) -> str:
    return f"update the driver, or install a build of PyTorch for CUDA {support.driver[0]}"


def check_kernels(processor: Processor, support: CudaSupport, device: torch.device) -> None:
    """Raise a LaunchError if PyTorch has no kernels for a device. Kernels (``sm_80``) run on processors of the same
    major version, from their own minor version on. Portable code (``compute_80``) runs on all later processors."""
    kernels = [name for name in support.kernels if name.startswith(("sm_", "compute_"))]
    major, minor = processor.capability

    def runs(name: str) -> bool:
        kind, _, number = name.rstrip("af").partition("_")
        own_major, own_minor = divmod(int(number), 10)
        if kind == "compute":
            return (own_major, own_minor) <= (major, minor)
        return own_major == major and own_minor <= minor

    if kernels and not any(map(runs, kernels)):
        raise LaunchError(
            f"{processor}: PyTorch {torch.__version__} has kernels for {', '.join(kernels)} only",
            where=f"device {device}",
            remedy="install a build of PyTorch for this GPU, choose another with CUDA_VISIBLE_DEVICES, or give "
            "device='cpu'",
        )


def check_nccl(support: CudaSupport, num_ranks: int) -> None:
    """Raise a LaunchError if ranks on GPUs cannot communicate because PyTorch has no NCCL."""
    if num_ranks > 1 and not support.has_nccl:
        raise LaunchError(
            f"{num_ranks} ranks on GPUs communicate by NCCL, which PyTorch {torch.__version__} does not have",
            where="device", remedy="install a build of PyTorch with NCCL; or run one rank, or give device='cpu'",
        )  # fmt: skip


def check_alike(processors: Sequence[str], *, whose: str = "rank", described: bool = False) -> None:
    """Raise a ClusterError if processors differ, by index of rank or device. ``described``: the cluster file says so,
    and the plan gives each device its share."""
    if described or len(set(processors)) < 2:
        return
    ranges = []
    for name, members in groupby(range(len(processors)), key=lambda index: processors[index]):
        first, *_, last = [*members] * 2
        ranges.append(f"{whose}{'s' * (first != last)} {first}{f' to {last}' * (first != last)}: {name}")
    raise ClusterError(
        f"its GPUs differ, and the plan would wait for the slowest ({'; '.join(ranges)})", where="device",
        remedy="choose equal GPUs with CUDA_VISIBLE_DEVICES, or describe them in a cluster file, as members of a level",
    )  # fmt: skip


def check_float8(layout: Layout, processor: Processor) -> None:
    """Raise a LaunchError if a plan may multiply in float8 and the GPU cannot."""
    if layout.float8 and processor.capability < FLOAT8_CAPABILITY:
        least = ".".join(map(str, FLOAT8_CAPABILITY))
        raise LaunchError(
            f"float8={layout.float8!r}, and {processor} has no products in float8 (they need compute capability "
            f"{least})", where="device", remedy="leave float8 out, or use a GPU of Ada's generation or later",
        )  # fmt: skip


def check_float64(graph: Graph, processor: Processor, processors: int, num_ranks: int) -> None:
    """Raise a LaunchError if a step in float64 would take longer than ``CRAWL_S`` on a device that is not made for
    float64. ``processors`` is its number of multiprocessors."""
    if processor.capability in FLOAT64_UNITS:
        return
    doubled = sum(
        operator.flops
        for operator in graph.operators
        if operator.outputs and graph.tensors[operator.outputs[0]].dtype == "float64"
    )
    seconds = doubled / num_ranks / (2 * FEW_UNITS * processors * NOMINAL_HZ)
    if seconds > CRAWL_S:
        raise LaunchError(
            f"a step of {doubled:.2g} FLOP in float64 takes at least {seconds:.0f} s on {processor.name}, which has "
            f"{FEW_UNITS} float64 units beside every 64 or 128 of float32",
            where="device", remedy="train in float32 (model.float()) or bfloat16 (precision=), or on the CPU",
        )  # fmt: skip


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
