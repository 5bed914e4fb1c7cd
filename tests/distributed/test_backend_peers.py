"""PyTorch's own trainers on the backend "meshwright": the numbers are those of gloo."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.comm.process_group.identity import NAME
from meshwright.comm.process_group.registration import register
from tests.distributed.pool import Ranks

STEPS = 3


@contextmanager
def groups() -> Iterator[dict[str, Any]]:
    """A group of each backend."""
    register()
    by_backend = {name: dist.new_group(backend=name) for name in ("gloo", NAME)}
    yield by_backend
    for group in by_backend.values():
        dist.destroy_process_group(group)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank())).double()


def train(model: nn.Module, parameters: Any = None) -> list[Tensor]:
    """Losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def ddp(group: Any) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001)
    return train(model) + [parameter.detach() for parameter in model.parameters()] + list(model.buffers())


def ddp_with_hook(group: Any) -> list[Tensor]:
    """A communication hook that continues after the all-reduce."""
    model = nn.parallel.DistributedDataParallel(net(), process_group=group)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    model.register_comm_hook(None, hook)
    return train(model) + [parameter.detach() for parameter in model.parameters()]


def fsdp(group: Any) -> list[Tensor]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), net()
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model) + [whole(parameter) for parameter in model.parameters()]


def tensor_parallel(group: Any) -> list[Tensor]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), net()
    model.pop(3)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fixed = torch.randn(6, 8, generator=torch.Generator().manual_seed(7)).double()
    results = []
    for _ in range(STEPS):
        loss = model(fixed).square().mean()
        loss.backward()
        results.append(loss.detach())
    grid = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(0)])
    results += [grid.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]).to_local()]
    return results + [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def pipeline(group: Any) -> list[Tensor]:
    rank, model = dist.get_rank(), net()
    model.pop(3)
    parts = [model[:2], model[2:]]
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    torch.manual_seed(1)
    value, target, losses = torch.randn(8, 8).double(), torch.randn(8, 4).double(), []  # type: Tensor, Tensor, list[Tensor]
    schedule.step(value) if rank == 0 else schedule.step(target=target, losses=losses)
    gradients = [parameter.grad for parameter in parts[rank].parameters() if parameter.grad is not None]
    return gradients + [loss.detach() for loss in losses]


def checkpoint(group: Any) -> list[Tensor]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), net()
    fully_shard(model, mesh=mesh)
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=where[0], process_group=group)
    wanted = [whole(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=where[0], process_group=group)
    parameters = [whole(parameter) for parameter in model.parameters()]
    assert all(map(torch.equal, parameters, wanted))
    assert Path(where[0]).exists()
    return parameters


def equal_gloo(trainer: Callable[[Any], list[Tensor]]) -> int:
    with groups() as by_backend:
        results = {name: trainer(group) for name, group in by_backend.items()}
    assert len(results[NAME]) == len(results["gloo"])
    for value, theirs in zip(results[NAME], results["gloo"], strict=True):
        assert torch.equal(value, theirs), (value - theirs).abs().max()
    return len(results[NAME])


@pytest.mark.parametrize("trainer", [ddp, ddp_with_hook, fsdp, tensor_parallel, pipeline, checkpoint])
@pytest.mark.filterwarnings("default")
def test_a_trainer_of_pytorch_has_gloos_numbers(ranks: Ranks, trainer: Callable[[Any], list[Tensor]]) -> None:
    assert min(ranks(2, equal_gloo, trainer)) > 1
