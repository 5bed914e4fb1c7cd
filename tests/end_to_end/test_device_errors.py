"""Errors of a GPU within a step are named: what holds its memory, the change that makes room, and a lost device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.api import gpus
from meshwright.cli import run
from meshwright.errors import (
    ClusterError,
    DeviceError,
    DeviceMemoryError,
    FailedRankError,
    LaunchError,
    LostRankError,
    MeshwrightError,
)
from meshwright.models import MLP, classification_loss
from meshwright.runtime.device import CpuKind, Processor, Properties
from meshwright.runtime.device_errors import holders
from meshwright.runtime.executor import Executor
from meshwright.runtime.failures import first_failure, record

FULL = (
    "CUDA out of memory. Tried to allocate 3.00 KiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 KiB is "
    "free. Process 7 has 79.15 GiB memory in use."
)
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
NO_BUFFERS = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3632, {}, NCCL version 2.27.5\n{}"
TAKES = "memory that CUDA takes for itself, such as a context, a graph or pinned memory of the host"
SIZES = (6, 64, 64, 4)


def batch() -> dict[str, torch.Tensor]:
    return {"inputs": torch.randn(64, 6), "label": torch.randint(4, (64,))}


def trainer() -> mw.Trainer:
    result = mw.parallelize(
        MLP(SIZES), classification_loss, batch(), plan=mw.Layout(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        device="cpu",
    )  # fmt: skip
    result.step(batch())
    return result


class Full(CpuKind):
    """A device that holds 1 MiB."""

    @property
    def memory_now(self) -> Callable[[], int] | None:
        return lambda: 2**20


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Executor, "run", run)


def test_a_full_gpu_names_what_holds_its_memory_and_the_smallest_change(monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer()
    training._kind = Full()
    fails(monkeypatch, torch.OutOfMemoryError(FULL))
    with pytest.raises(DeviceMemoryError) as caught:
        training.step(batch())
    error = caught.value
    assert error.where == "rank 0, cpu, step 2"
    assert error.problem.startswith("its memory is full, and has no room for ")
    held = holders(training)
    parameters = sum(value.numel() for value in MLP(SIZES).parameters()) * 4
    assert held["parameters"] == parameters
    assert held["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    assert sum(held.values()) == 2**20
    assert list(held.values()) == sorted(held.values(), reverse=True)
    assert "optimizer state" in error.problem
    assert "microbatches" in error.remedy
    assert "saves" in error.remedy


def test_without_a_change_that_is_enough_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer()
    fails(monkeypatch, torch.OutOfMemoryError(FULL.replace("3.00 KiB", "60.00 GiB")))
    with pytest.raises(DeviceMemoryError, match="use more ranks"):
        training.step(batch())


def test_parameters_that_do_not_fit_are_told_before_the_first_step() -> None:
    with pytest.raises(DeviceMemoryError) as caught, gpus.making_trainer(torch.device("cpu")):
        raise torch.OutOfMemoryError(FULL)
    assert caught.value.where == "cpu, before the first step"
    assert caught.value.problem.startswith("the parameters do not fit (CUDA out of memory.")
    assert "zero=3" in caught.value.remedy


def test_what_nccl_and_cuda_say_before_the_first_step_is_told() -> None:
    refused = f"{SYSTEM}\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<4321> failed : Connection refused"
    for text, kind, problem in (
        (NCCL.format("unhandled system error", refused), LostRankError, "NCCL lost another rank or the network"),
        (NCCL.format("unhandled system error", SYSTEM), DeviceError, "NCCL failed (ncclSystemError)"),
        (
            "CUDA driver error: out of memory",
            DeviceMemoryError,
            "beside the parameters there is no room for memory that CUDA takes for itself",
        ),
        (
            NCCL.format("unhandled cuda error", NO_BUFFERS),
            DeviceMemoryError,
            "beside the parameters there is no room for buffers of NCCL",
        ),
        ("CUDA error: no kernel image is available", DeviceError, "the device failed (no kernel image is available)"),
    ):
        with pytest.raises(kind) as caught, gpus.making_trainer(torch.device("cuda", 1)):
            raise RuntimeError(text)
        assert caught.value.where == "cuda:1, before the first step"
        assert caught.value.problem.startswith(problem)
    with pytest.raises(RuntimeError, match="of shape"), gpus.making_trainer(torch.device("cpu")):
        raise RuntimeError("of shape")


def test_the_command_line_names_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run(["calibrate", "--device", "cuda"]) == 2
    stderr = capsys.readouterr().err
    assert "device: there is no device 'cuda' here: " in stderr
    assert "-> " in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (
            "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported elsewhere",
            "the device failed (uncorrectable ECC error encountered)",
            "goes on from the last checkpoint",
        ),
        ("CUDA error: unspecified launch failure", "the device failed (unspecified launch failure)", "Xid"),
        (
            "CUDA error: device-side assert triggered",
            "a kernel read or wrote out of bounds (device-side assert triggered)",
            "not below the number of classes",
        ),
    ],
)
def test_a_gpu_that_fails_in_a_run_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str, remedy: str
) -> None:
    training = trainer()
    fails(monkeypatch, RuntimeError(text))
    with pytest.raises(DeviceError) as caught:
        training.step(batch())
    assert caught.value.where == "rank 0, cpu, step 2"
    assert caught.value.problem == problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "kind", "problem", "remedy"),
    [
        (
            NCCL.format(
                "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                "Cuda failure 999 'unknown error'",
            ),
            DeviceError,
            "the device failed (ncclUnhandledCudaError: Cuda failure 999 'unknown error')",
            "leave it out with CUDA_VISIBLE_DEVICES",
        ),
        (
            NCCL.format(
                "remote process exited or there was a network error",
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
                "prematurely.\nLast error:\nsocketProgress: Connection closed by gpu2",
            ),
            LostRankError,
            "NCCL lost another rank or the network (ncclRemoteError: socketProgress: Connection closed by gpu2)",
            "look for its own error",
        ),
        (
            NCCL.format("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
            DeviceError,
            "NCCL failed (ncclInvalidUsage)",
            "NCCL_DEBUG=INFO",
        ),
        (
            NCCL.format("unhandled system error", f"{SYSTEM}\nLast error:\nsocketStartConnect: Connection refused"),
            LostRankError,
            "NCCL lost another rank or the network (ncclSystemError: socketStartConnect: Connection refused)",
            "look for its own error",
        ),
        (
            NCCL.format(
                "unhandled system error",
                f"{SYSTEM}\nLast error:\nError while creating shared memory segment /dev/shm/nccl-Ab12 (size 4)",
            ),
            DeviceError,
            "NCCL failed (ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-Ab12 (size 4))",
            "--shm-size",
        ),
        (
            NCCL.format("unhandled system error", f"{SYSTEM}\nLast error:\nCall to socket failed: Too many open files"),
            DeviceError,
            "NCCL failed (ncclSystemError: Call to socket failed: Too many open files)",
            "ulimit -n",
        ),
        (
            NCCL.format("unhandled system error", SYSTEM),
            DeviceError,
            "NCCL failed (ncclSystemError)",
            "/dev/shm",
        ),
    ],
    ids=["GPU", "rank", "usage", "network", "shared memory", "file descriptors", "no last error"],
)  # fmt: skip
def test_a_collective_that_nccl_does_not_start_is_told(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[MeshwrightError], problem: str, remedy: str
) -> None:
    training = trainer()
    fails(monkeypatch, torch.distributed.DistBackendError(text))
    with pytest.raises(kind) as caught:
        training.step(batch())
    assert (caught.value.where, caught.value.problem) == ("rank 0, cpu, step 2", problem)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (torch.distributed.DistBackendError(NCCL.format("unhandled cuda error", NO_BUFFERS)), "buffers of NCCL"),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"), TAKES),
        (RuntimeError("CUDA driver error: out of memory"), TAKES),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), TAKES),
    ],
    ids=["NCCL", "CUDA", "driver", "cuBLAS"],
)
def test_a_gpu_without_room_outside_of_the_allocator_names_what_holds_its_memory(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, asks: str
) -> None:
    training = trainer()
    training._kind = Full()
    fails(monkeypatch, error)
    with pytest.raises(DeviceMemoryError) as caught:
        training.step(batch())
    assert caught.value.where == "rank 0, cpu, step 2"
    assert caught.value.problem.startswith(f"its memory is full, and has no room for {asks}: ")
    assert "optimizer state" in caught.value.problem
    assert "saves" in caught.value.remedy


@pytest.mark.parametrize("kind", [DeviceMemoryError, DeviceError])
def test_a_rank_whose_gpu_fails_in_a_call_of_nccl_failed_first(tmp_path: Path, kind: type[MeshwrightError]) -> None:
    """Other ranks lose it, and may say so earlier."""
    record(LostRankError("rank 3 has ended, and this rank waits", where="rank 3"), tmp_path, 0)
    error = kind("its memory is full, and has no room for buffers of NCCL", where="rank 3, cuda:3")
    error.__cause__ = torch.distributed.DistBackendError(NCCL.format("unhandled cuda error", NO_BUFFERS))
    assert not record(error, tmp_path, 3).lost_peer
    failure = first_failure(tmp_path, 4, 0, 1)
    assert (type(failure), failure.where) == (kind, "rank 3, cuda:3")


def ended_by_its_watchdog(folder: Path, rank: int, status: str, log: str) -> FailedRankError:
    """The error of a job of four ranks if NCCL's watchdog has ended a rank, with this exit status and log."""
    ranks = folder / "ranks"
    ranks.mkdir()
    (ranks / f"{rank}.status").write_text(status)
    (ranks / f"{rank}.log").write_text(log)
    error = first_failure(folder, 4, rank, -6)
    assert isinstance(error, FailedRankError)
    return error


def test_a_gpu_that_the_watchdog_finds_lost_is_read_from_the_log(tmp_path: Path) -> None:
    """The watchdog ends the process, so that the rank writes no error of its own."""
    error = ended_by_its_watchdog(
        tmp_path, 3, "at step 7",
        "[rank3]:[E1126 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog "
        "thread terminated with exception: CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`\n",
    )  # fmt: skip
    assert error.problem == "rank 3 lost its GPU at step 7: unspecified launch failure"
    assert "goes on from the last checkpoint" in error.remedy
    assert "Xid" in error.remedy


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainer()
    fails(monkeypatch, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        training.step(batch())


def test_a_timeout_of_nccl_is_read_from_the_log_of_a_rank_that_its_watchdog_ended(tmp_path: Path) -> None:
    error = ended_by_its_watchdog(
        tmp_path, 1, "at step 3",
        "[rank1]:[E1126 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600032 "
        "milliseconds\n",
    )  # fmt: skip
    assert "rank 1 waited 600 s in NCCL's allreduce number 42, to which a rank did not come, at step 3" in str(error)
    assert "MESHWRIGHT_TIMEOUT_S" in error.remedy


def gpu(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Stand-ins of GPUs, one for each rank."""
    monkeypatch.setattr(gpus, "processor", lambda device: Processor(names[0], (8, 9)))
    monkeypatch.setattr(gpus, "properties", lambda device: Properties(names[0], 2**34, 58, len(names)))
    monkeypatch.setattr(gpus, "from_every_rank", lambda own: names)


def test_mixed_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mw.capture(MLP(SIZES), classification_loss, batch())
    gpu(monkeypatch, ["NVIDIA L4", "NVIDIA T4"])
    with pytest.raises(ClusterError, match="its GPUs differ"):
        gpus.check_gpus(torch.device("cuda"), graph, mw.Layout(dp=2), None, 2)
    gpus.check_gpus(torch.device("cpu"), graph, mw.Layout(dp=2), None, 2)
    gpu(monkeypatch, ["NVIDIA L4", "NVIDIA L4"])
    gpus.check_gpus(torch.device("cuda"), graph, mw.Layout(dp=2), None, 2)


def test_a_long_step_in_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = MLP((4096, 4096, 4096, 4)).double()
    wide = {"inputs": torch.zeros(8, 4096, dtype=torch.float64), "label": torch.zeros(8, dtype=torch.int64)}
    monkeypatch.setattr("meshwright.runtime.device_check.CRAWL_S", 1e-4)
    graph = mw.capture(model, classification_loss, wide)
    gpu(monkeypatch, ["NVIDIA L4"])
    with pytest.raises(LaunchError, match="in float64 takes at least"):
        gpus.check_gpus(torch.device("cuda"), graph, mw.Layout(), None, 1)
