"""The training loop: steps, log lines, evaluation on held-out data, checkpoints."""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from meshwright.comm.groups import from_rank_0
from meshwright.data.loaders import Loader
from meshwright.errors import CheckpointError, DiskError, LayoutError
from meshwright.ir.run import Train
from meshwright.ir.trace import Trace
from meshwright.runtime import joining, manifest
from meshwright.runtime.failures import Status, lost_peer
from meshwright.runtime.memory_copies import MemoryCopies
from meshwright.runtime.metrics import Meter
from meshwright.runtime.preemption import Preemption
from meshwright.runtime.trainer import Trainer

log = logging.getLogger("meshwright")

TRACED = 7
"""Number of steps whose traces are kept: the last steps of a run."""


class Progress(Protocol):
    """Shows the progress of activities; ``Silent`` shows nothing."""

    def begin(self, what: str, total: int = 0) -> None:
        """Begin the activity ``what``, which has ``total`` parts (0: unknown). The previous activity ends."""

    def advance(self) -> None:
        """Count one more finished part."""

    def end(self) -> None:
        """End the activity."""


class Silent:
    """Shows no progress."""

    def begin(self, what: str, total: int = 0) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class HeldOut(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of an evaluation on held-out data after ``step`` steps; the loss is in nats."""

    step: int
    loss: float
    bits_per_byte: float | None = None
    accuracy: float | None = None

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}"
        if self.bits_per_byte is not None:
            text += f", {self.bits_per_byte:.3f} bits per byte"
        return text + (f", accuracy {self.accuracy:.2%}" if self.accuracy is not None else "")


class Loop:
    """Trains until step ``options.steps``. Call ``resume`` before ``run`` to continue from the latest checkpoint.

    Args:
        loader: yields this rank's part of each global batch.
        held_out: yields this rank's part of the held-out data, one epoch per ``for`` loop; None: no data are held out.
        options: the table ``[train]`` of RUN.toml.
        batch_sizes: samples in the global batch of each step; None: always the batch size of ``loader``.
        bytes_are_tokens: whether the loss is per byte, so that bits per byte can be reported.
        preemption: says whether the run is asked to end before its last step.
        copies: makes copies of the state in memory.

    ``traces`` holds the traces of this rank's last steps, at most ``TRACED``; ``copies_held`` the bytes of the copies
    of the state that lay in the memory of these steps: in the launcher's memory, and for saves. ``data_waits`` has the
    seconds that each step waited for its batch. ``stopped`` is the reason why the run was asked to end early; empty if
    it was not.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: Loader,
        held_out: Loader | None,
        meter: Meter,
        options: Train,
        directory: Path,
        *,
        batch_sizes: Sequence[int] | None = None,
        bytes_are_tokens: bool,
        progress: Progress,
        preemption: Preemption,
        copies: MemoryCopies,
    ) -> None:
        self.trainer, self.loader, self.held_out, self.meter, self.options = trainer, loader, held_out, meter, options
        self.checkpoints = directory / "checkpoints"
        self.status = Status(directory, trainer.rank)
        self.progress, self.preemption, self.copies, self.stopped = progress, preemption, copies, ""
        self.from_memory = False
        self.bytes_are_tokens = bytes_are_tokens
        self.evaluations: list[HeldOut] = []
        self.traces: list[Trace] = []
        self.copies_held: list[tuple[int, int]] = []
        self.data_waits: list[float] = []
        self.batch_sizes = batch_sizes
        trainer.saver.before = meter.flush
        for size in dict.fromkeys(batch_sizes or ()):
            _check_batch(size, trainer, loader)

    def resume(self) -> bool:
        """Load the latest checkpoint, or a copy in memory that is as late. Return False if there is none."""
        self.status.set("while loading a checkpoint")
        replica = self.trainer.replica
        if replica is not None:
            replica.loader = self.loader
        joined = replica is not None and replica.has_state_of_another
        self.from_memory = not joined and self.copies.resume(lambda: manifest.latest_step(self.checkpoints))
        resumed = self.from_memory or (
            not joined and self.trainer.load_latest(self.checkpoints, loader=self.loader) is not None
        )
        joining.align(self.trainer)
        if replica is not None and replica.loader_state is not None:
            self.loader.load_state_dict(replica.loader_state)
        # Only rank 0 has the file. Ranks that disagree on the remaining work would wait for each other for ever.
        rows = from_rank_0(lambda: self.meter.rewind(self.trainer.step_number))
        self.evaluations = [HeldOut(step=row["step"], **row["held_out"]) for row in rows if "held_out" in row]
        return resumed

    def run(self, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Train until the last step, or until the run is asked to end; then the step that was reached is saved.

        Even after an error, metrics.jsonl holds the metrics of all finished steps. Raise a CheckpointError if the last
        step could not be saved. In earlier saves a disk error is only a warning."""
        trainer, steps, first = self.trainer, self.options.steps, self.trainer.step_number + 1
        self.preemption.connect(trainer.step_number)
        if self.held_out is not None and not self.evaluations:
            self.evaluate()
        batches = iter(self.loader)
        self.progress.begin("training", steps - trainer.step_number)
        self.meter.start()
        try:
            while trainer.step_number < steps:
                self.stopped = self.preemption.due(trainer.step_number)
                if self.stopped:
                    break
                self.status.set(f"at step {trainer.step_number + 1}")
                if self.batch_sizes is not None:
                    self._resize(self.batch_sizes[trainer.step_number])
                lr = float(schedule.get_last_lr()[0])
                begun = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter()
                if trainer.recorder is not None:
                    trainer.recorder.waited_for_data(begun, waited)
                self.data_waits.append(waited - begun)
                trainer.step(batch, local=True)
                if trainer.step_number > steps - TRACED and trainer.step_number > first:  # the first step is slower
                    self._keep_trace()
                schedule.step()
                self.meter.note(trainer.step_number, trainer.metrics, lr, waited - begun)
                self.progress.advance()
                self._after(trainer.step_number)
        except Exception as error:
            if not lost_peer(error):
                with suppress(CheckpointError):
                    trainer.wait_for_save()  # the save that is still running belongs to an earlier step
            raise
        finally:
            self.progress.end()
            self._tell()
        if self.stopped:
            self._save_early(unsaved=trainer.step_number >= first or self.from_memory)
            return
        if self.held_out is not None and (not self.evaluations or self.evaluations[-1].step != trainer.step_number):
            self.evaluate()
        self.meter.finish()
        self.status.set("while saving the last step")
        if trainer.replica is not None and trainer.replica.has_state_of_another and trainer.step_number < first:
            trainer.save_in(self.checkpoints, keep=self.options.keep, loader=self.loader)  # a peer made the last step
        trainer.wait_for_save()
        self.copies.finish()
        if trainer.replica is not None:
            trainer.replica.leave()

    def _keep_trace(self) -> None:
        """Keep the trace of the last step. On a CPU its memory includes the copies in the launcher's memory, which are
        no pages of this process."""
        trainer, kept, staged = self.trainer, 0, 0
        if trainer.saver.copies is None:
            kept, staged = self.copies.num_bytes, trainer.saver.num_staged_bytes
        self.copies_held.append((kept, staged))
        self.traces.append(trainer.trace().above({trainer.rank: -kept}))

    def _save_early(self, *, unsaved: bool) -> None:
        """Save the step that was reached, if it is ``unsaved`` so far, and no save of it has ended meanwhile."""
        trainer = self.trainer
        self.meter.finish()
        self.status.set(f"while saving step {trainer.step_number} after {self.stopped}")
        with suppress(DiskError):  # of an earlier step, and logged
            trainer.wait_for_save()
        saved = from_rank_0(lambda: manifest.latest_step(self.checkpoints))
        if unsaved and saved != trainer.step_number:
            trainer.save_in(self.checkpoints, keep=self.options.keep, loader=self.loader)
        self.copies.finish()
        if trainer.replica is not None:
            trainer.replica.leave()

    def evaluate(self) -> HeldOut:
        """Evaluate on all held-out data, record the result and return it."""
        assert self.held_out is not None
        trainer, step = self.trainer, self.trainer.step_number
        self.status.set(f"while evaluating after step {step}")
        self.progress.begin("evaluating", len(self.held_out))
        total, correct, samples = 0.0, 0, 0
        self.held_out.rewind()
        for batch in self.held_out:
            count = len(next(iter(batch.values()))) * trainer.own_shard[1]
            total += float(trainer.evaluate(batch, local=True)) * count
            correct += int(trainer.metrics["correct"]) if "correct" in trainer.metrics else 0
            samples += count
            self.progress.advance()
        self.progress.end()
        loss = total / samples
        evaluation = HeldOut(
            step=step,
            loss=loss,
            bits_per_byte=loss / math.log(2) if self.bytes_are_tokens else None,
            accuracy=correct / samples if "correct" in trainer.metrics else None,
        )
        self.evaluations.append(evaluation)
        values = {name: value for name, value in msgspec.to_builtins(evaluation).items() if name != "step"}
        self.meter.write({"step": step, "held_out": values})
        if trainer.rank == 0:
            log.info("held out, after step %d: %s", step, evaluation)
        return evaluation

    def _resize(self, size: int) -> None:
        """From now on, take batches of ``size`` samples."""
        if size != self.loader.batch_size:
            self._tell()
            self.meter.grow(size / self.loader.batch_size)
            if self.trainer.rank == 0:
                log.info("the batch is %d samples from step %d on", size, self.trainer.step_number + 1)
            self.loader.resize(size)

    def _after(self, step: int) -> None:
        """Log, evaluate or save, if due after ``step``."""
        due, last = self.options, step == self.options.steps
        if step % due.log_every == 0 or last:
            self._tell()
        save = last or (due.checkpoint_every > 0 and step % due.checkpoint_every == 0)
        if due.evaluate_every > 0 and step % due.evaluate_every == 0 and not last and self.held_out is not None:
            self._tell()
            self.evaluate()
            self.progress.begin("training", due.steps - step)
            self.meter.start()
        if save:
            self._tell()
            self.status.set(f"while saving step {step}")
            self.trainer.save_in(self.checkpoints, keep=due.keep, loader=self.loader, blocking=False)
            self.meter.start()
        if not last and self.copies.is_due(step):
            self.meter.settle()  # the rows of these steps will not be made again
            self.copies.make(step)
            self.meter.settle()

    def _tell(self) -> None:
        line = self.meter.read()
        if line and self.trainer.rank == 0:
            log.info("%s", line)


def _check_batch(size: int, trainer: Trainer, loader: Loader) -> None:
    """Check a batch size before the first step. Raise a LayoutError if the size does not divide over data-parallel
    ranks and micro-batches. Raise a DataError if the loader refuses the size."""
    parts = trainer.data_shard[1] * trainer.plan.microbatches
    if size % parts:
        raise LayoutError(
            f"a batch of {size} does not divide over {parts} parts (ranks and micro-batches)",
            where="schedule.batch_sizes",
            remedy=f"give multiples of {parts}",
        )
    before = loader.batch_size
    loader.resize(size)
    loader.resize(before)


def resumed_schedule(
    trainer: Trainer, hyperparameters: dict[str, Any], factors: Sequence[float]
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning-rate schedule ``hyperparameters["lr"] * factors[step]``, positioned at the trainer's step.

    The last element of ``factors`` holds for all later steps too. The optimizer takes ``hyperparameters`` instead of
    those that were loaded from a checkpoint.
    """
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        group.update(hyperparameters, initial_lr=hyperparameters["lr"])
    if trainer.replica is not None:  # torch would warn if only servers make optimizer steps
        trainer.optimizer._opt_called = True  # type: ignore[attr-defined]
    # The constructor advances the schedule by one step, so that it gives the learning rate of the next training step.
    return torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: factors[min(step, len(factors) - 1)], last_epoch=trainer.step_number - 1
    )
