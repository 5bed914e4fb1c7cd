"""Train under a consistency rule for a given time, on every rank of every replica, and record the ends of steps."""

import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright import build
from meshwright.bench.batch_size import mean_loss, prepared
from meshwright.bench.codec import sent_bytes_of
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.emulation.slow import stretch
from meshwright.errors import NonFiniteLossError
from meshwright.ir import files
from meshwright.ir.replica_runs import ReplicaRun
from meshwright.ir.run import Run
from meshwright.runtime.loop import resumed_schedule
from meshwright.runtime.replica import EXCHANGE
from meshwright.runtime.trainer import Trainer
from meshwright.simulate.faults import ReplicaFaults

SOON_S = 0.1
"""Seconds between the moment when the last replica is ready and the common start."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of steps. A step takes at least ``step_s`` seconds (0: the real time of its computing), times the
    factor of its replica and step in ``faults``."""

    step_s: float = 0.0
    faults: ReplicaFaults = ReplicaFaults()

    @property
    def emulated(self) -> bool:
        """Whether steps are made longer than their computing."""
        return self != Pace()


def train(run: Run, num_replicas: int, pace: Pace, seconds: float, directory: Path) -> None:
    """Train until ``seconds`` have passed since all replicas began. Write the record to ``directory``: a file for each
    replica, or a single file if all replicas are one process group (``sync``)."""
    torch.set_num_threads(1)
    trainer, loader, held_out = prepared(run, run.data.batch_size)
    one_world = trainer.replica is None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    replica = trainer.rank * num_replicas // ranks if trainer.replica is None else trainer.replica.number
    if pace.emulated:
        factors = pace.faults.factors(replica, num_replicas)
        stretch(trainer.executor, lambda past_s: max(pace.step_s, past_s) * next(factors),
                "reduce" if one_world else "finish")  # fmt: skip
    schedule, batches = resumed_schedule(trainer, build.hyperparameters(run), run.lr_factors()), iter(loader)
    times_s, losses, diverged = list[float](), list[float](), False
    begun_s, computed_s = list[float](), list[float]()
    begun = begin_together(trainer, num_replicas)
    while not any(from_every_rank(time.monotonic() - begun > seconds)):
        try:
            losses.append(float(trainer.step(next(batches), local=True)))
        except NonFiniteLossError:
            diverged = True
            break
        times_s.append(time.monotonic() - begun)
        if not one_world:
            first, then, *_ = (span for span in trainer.trace().spans if span.what.startswith(EXCHANGE))
            begun_s.append(first.end_s - begun)
            computed_s.append(then.start_s - begun)
        schedule.step()
    sent_bytes = sum(from_every_rank(_sent_bytes(trainer)))
    if trainer.replica is not None:
        trainer.replica.settle()
        trainer.replica.leave()
    loss = None if diverged else mean_loss(trainer, held_out)
    if trainer.rank == 0:
        samples = run.data.batch_size // (1 if one_world else num_replicas)
        files.save(
            ReplicaRun(
                replica=replica, samples=samples, times_s=tuple(times_s), losses=tuple(losses), held_out=loss,
                begun_s=tuple(begun_s), computed_s=tuple(computed_s), sent_bytes=sent_bytes,
            ),
            directory / f"{replica}.json",
        )  # fmt: skip


def begin_together(trainer: Trainer, num_replicas: int) -> float:
    """Wait until all ranks of all replicas are ready, and begin together. Return the start time, which is the same on
    all ranks."""
    store = None
    if trainer.replica is not None:
        trainer.replica.connected()
        store = trainer.replica.world.store
    from_every_rank(None)

    def meet() -> float:
        if store is None:
            return time.monotonic()
        if store.add("bench/ready", 1) == num_replicas:
            store.set("bench/begin", str(time.monotonic() + SOON_S))
        return float(store.get("bench/begin"))

    begin = float(from_rank_0(meet))
    time.sleep(max(0.0, begin - time.monotonic()))
    return begin


def _sent_bytes(trainer: Trainer) -> int:
    """The bytes of tensors that this rank has sent to other replicas."""
    if trainer.replica is None:
        return trainer.step_number * sent_bytes_of(trainer)
    return trainer.replica.sent_bytes
