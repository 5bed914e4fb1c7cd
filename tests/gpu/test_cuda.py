"""One CUDA device: the same losses and parameters as eager PyTorch there."""

import copy
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import api
from meshwright.api.machine import known_cluster
from meshwright.api.measured_gpus import gpu_cluster
from meshwright.comm.backend import all_reduce_start
from meshwright.comm.record import SpanRecorder, recording
from meshwright.comm.started import wait
from meshwright.errors import NonFiniteLossError
from meshwright.ir.kernel import Product
from meshwright.ir.trace import COPY
from meshwright.models import GPT, GPTConfig, LeNet, ResNet, classification_loss, language_model_loss
from meshwright.runtime import calibrate_gpus
from meshwright.runtime.calibrate_gpus import GpuEffort
from meshwright.runtime.device import CudaKind
from meshwright.torch_private import keep_gpu_busy
from tests.gpu.test_operators import no_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _cases() -> list[tuple[nn.Module, Any, Any]]:
    tokens = torch.randint(0, 64, (4, 16))
    images = {"image": torch.randn(4, 1, 16, 16, dtype=torch.float64), "label": torch.randint(0, 10, (4,))}
    gpt = GPT(GPTConfig(layers=2, width=32, heads=4, vocabulary=64, sequence_length=16))
    return [
        (gpt, language_model_loss, {"tokens": tokens, "targets": tokens.roll(-1, 1)}),
        (LeNet(image_size=16), classification_loss, images),
        (ResNet(depth=8, width=8, image_channels=1), classification_loss, images),
    ]


@pytest.mark.parametrize("case", range(3), ids=["gpt", "lenet", "resnet"])
def test_five_steps_equal_eager(case: int) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = _cases()[case]
    model = model.double()
    twin = copy.deepcopy(model).cuda()
    trainer = mw.parallelize(model, loss_fn, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    on_device = {name: value.cuda() for name, value in batch.items()}
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn(twin, on_device)[0]
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(batch), loss.detach(), rtol=1e-9, atol=1e-9)
    for name, value in trainer.full_state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name].cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("optimizer", "skips"), [(torch.optim.SGD, True), (torch.optim.RMSprop, False)])
def test_a_loss_that_is_no_number_is_seen_one_step_late_and_its_error_says_so(optimizer: Any, skips: bool) -> None:
    model, loss_fn, batch = _cases()[1]
    trainer = mw.parallelize(model.double(), loss_fn, batch, optimizer=lambda p: optimizer(p, lr=0.1))
    trainer.step(batch)
    trainer.step(batch | {"image": batch["image"] * torch.nan})
    assert all(bool(torch.isfinite(value).all()) == skips for value in trainer.full_state_dict().values())
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.step(batch)
    assert str(caught.value).startswith("step 2: the loss became nan at step 2\n")
    left = "as they were before step 2" if skips else "those after step 2"
    assert f"; parameters are {left}" in str(caught.value)


def test_without_a_cluster_the_device_at_hand_is_known() -> None:
    cluster = known_cluster(None, torch.device("cuda"))
    assert cluster.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_batches_that_are_fetched_ahead_lie_in_pinned_memory() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    with mw.load(data, 4, 10**6, epochs=1) as loader:
        for (batch,) in loader:
            assert batch.is_pinned()
            assert batch.cuda(non_blocking=True).sum() == batch.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_steps_equal_uncompiled_ones(dtype: torch.dtype) -> None:
    config = GPTConfig(layers=3, width=64, heads=2, vocabulary=128, sequence_length=64)
    torch.manual_seed(0)
    text = torch.randint(128, (4, 65))
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    losses = []
    for compile in (False, True):
        torch.manual_seed(1)
        model = GPT(config).to(dtype)
        trainer = mw.parallelize(
            model, language_model_loss, batch, compile=compile, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
        )
        losses.append(torch.stack([trainer.step(batch) for _ in range(4)]).cpu())
        assert (trainer.num_kernels > 0) == compile
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)


def test_verify_compares_on_the_device() -> None:
    model, loss_fn, batch = _cases()[0]
    rows = mw.verify(model, loss_fn, batch, mw.Layout(microbatches=2), device="cuda")
    assert all(row.ok for row in rows), rows


def test_calibration_makes_a_cluster_of_this_device(tmp_path: Path) -> None:
    effort = GpuEffort(
        products=(Product(1024, 1024, 1024), Product(256, 1024, 512)), elements=(2**16, 2**20), lengths=(128, 256),
        heads=2, width=64, copied_bytes=2**20,
    )  # fmt: skip
    measured = calibrate_gpus.measure(effort, lambda what: None)
    assert measured is not None
    cluster = gpu_cluster(measured)
    assert cluster.device.name
    assert cluster.device.kernels is not None
    assert 1e-7 < cluster.device.kernels.kernel_s < 1e-4
    assert 1e-7 < cluster.device.kernels.launch_s < 1e-3
    api.save_cluster(cluster, tmp_path / "gpu.toml")
    assert mw.Cluster.load(tmp_path / "gpu.toml") == cluster


def test_spans_are_timed_by_the_device() -> None:
    model, loss_fn, batch = _cases()[0]
    trainer = mw.parallelize(
        model, loss_fn, batch, plan=mw.Layout(microbatches=2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    for _ in range(3):
        trainer.step(batch)
    trace = trainer.trace()
    spans = [span for span in trace.spans if span.stream == "compute"]
    assert spans
    assert all(early.end_s <= late.start_s + 1e-6 for early, late in itertools.pairwise(spans))
    copies = [span for span in trace.spans if span.stream == COPY]
    assert [span.bytes for span in copies] == [value.nbytes for value in batch.values()]
    assert all(early.end_s <= late.start_s + 1e-6 for early, late in itertools.pairwise(copies))


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of one rank, whose collectives run on a stream of NCCL."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("PyTorch has no NCCL")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_a_collective_that_ends_before_its_wait_is_drawn_until_its_end(group: Any) -> None:
    """Kernels of about 0.1 s run between its start and its wait. Marks neither delay them nor let the host wait."""
    device = torch.device("cuda:0")
    timeline = CudaKind(device).timeline()
    recorder, value = SpanRecorder({group.group_name: "dp"}, timeline=timeline), torch.ones(2**20, device=device)
    wait(all_reduce_start(value, "sum", group.group_name, "native"))  # NCCL makes its communicator
    torch.cuda.synchronize()
    with recording(recorder):
        recorder.clear()
        with no_waits():
            started = all_reduce_start(value, "sum", group.group_name, "native")
            keep_gpu_busy(150_000_000)
            begun = time.perf_counter()
            wait(started)
            recorder.span("compute", "after", begun, time.perf_counter())
    spans = {span.stream: span for span in recorder.trace(0).spans}
    collective, waited = spans["communication"], spans["wait"]
    assert collective.end_s < waited.start_s - 0.02
    assert waited.duration_s < 0.01
