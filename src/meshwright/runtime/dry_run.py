"""Runs the set-up and two steps of one rank on fake tensors, under a process group that sends nothing."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.capture.batch import take_apart
from meshwright.capture.builder import Capture
from meshwright.errors import LaunchError, MeshwrightError
from meshwright.ir.dry_run import Finding
from meshwright.ir.plan import Plan
from meshwright.runtime.fake_operators import DEVICE, UnfollowableError
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.rehearsal import SET_UP, Rehearsal
from meshwright.runtime.rehearsed_kind import RehearsedKind
from meshwright.runtime.rehearsed_line import failed_at
from meshwright.runtime.trainer import Replan, Trainer
from meshwright.schedules.rendezvous import Awaited, StartedOperation
from meshwright.torch_private import FakeStore

MOMENTS = (SET_UP, "step 1", "step 2")


class Rehearsed(NamedTuple):
    """What one rank did: the findings, its stream of messages and collectives by moment, the most bytes on the device
    in the last step, and the bytes that it held between the steps."""

    rank: int
    findings: Sequence[Finding]
    streams: dict[str, list[StartedOperation | Awaited]]
    peak_bytes: int
    held_bytes: int


class DryRunJob(NamedTuple):
    """The arguments of the trainers of a dry run, equal on all ranks. ``dtypes``: those in which the device computes.
    ``box``: the number of GPUs of a box."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    batch: Any
    captured: Capture
    plan: Plan
    replan: Replan
    optimizer: OptimizerFactory
    max_grad_norm: float | None = None
    seed: int = 0
    dtypes: frozenset[str] = frozenset()
    box: int = 1


def rehearse(job: DryRunJob, rank: int) -> Rehearsed:
    """Run the set-up and two steps of a rank. The caller's model stays as it is.

    Raises:
        LaunchError: this process is a rank of a real job.
    """
    rehearsal = Rehearsal(rank, job.dtypes)
    held = 0
    with _world(rank, job.plan.mesh.world_size), rehearsal.watching():
        try:
            trainer = _trainer(job, rehearsal)
            batch = _fake_batch(job.batch)
            for moment in MOMENTS[1:]:
                rehearsal.begin(moment)
                held = rehearsal.memory.held
                trainer.step(batch)
        except UnfollowableError as error:
            rehearsal.note("error", f"the dry run cannot go on: {error}")
        except MeshwrightError:
            raise
        except Exception as error:  # noqa: BLE001 - what fails here would fail on the device: the report says so
            text = str(error).splitlines()[0] if str(error) else ""
            rehearsal.note("error", f"{type(error).__name__}: {text}", failed_at(error))
    return Rehearsed(rank, rehearsal.findings, rehearsal.stream, rehearsal.memory.peak, held)


def _trainer(job: DryRunJob, rehearsal: Rehearsal) -> Trainer:
    trainer = Trainer(
        _fake_model(job.model), job.loss_fn, job.captured, job.plan, optimizer=job.optimizer,
        max_grad_norm=job.max_grad_norm, seed=job.seed, device=DEVICE, replan=job.replan, rules=job.captured.rules,
        kind=RehearsedKind(rehearsal, job.box),
    )  # fmt: skip
    for group in trainer.optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # PyTorch's choice on CUDA, which it does not make for fake tensors
    return trainer


def _fake_model(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are fake tensors on the device: a fake tensor's ``data`` cannot
    move there later."""
    kept: dict[int, Any] = {}
    for value in (*model.parameters(), *model.buffers()):
        fake = torch.empty_like(value, device=DEVICE, memory_format=torch.contiguous_format)
        kept[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
    return copy.deepcopy(model, kept)


def _fake_batch(batch: Any) -> Any:
    leaves = take_apart(batch)
    return leaves.with_tensors([_fake(value) for value in leaves.tensors.values()])


def _fake(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)


@contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    """Make this process a rank of a job that does not exist."""
    if dist.is_initialized():
        raise LaunchError(
            "this process is a rank of a job", where="dry run", remedy="make the dry run in a process of its own"
        )
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
