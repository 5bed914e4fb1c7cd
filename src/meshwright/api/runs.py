"""Verifies and trains the run that a RUN.toml describes."""

import logging
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright import build, config
from meshwright.api.data import meet
from meshwright.api.other_ranks import fitting, has_begun
from meshwright.api.planned_runs import cluster_of, layout_of
from meshwright.api.run_ledger import LEDGER_FILES, foretold_feed, foretold_step, ledger_of, prediction_of
from meshwright.api.run_memory import held_besides
from meshwright.api.trainers import parallelize, verify
from meshwright.comm.groups import from_rank_0
from meshwright.data.ahead import PrefetchLoader
from meshwright.errors import FileFormatError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.consistency import Ensemble, Sync, consistency_of
from meshwright.ir.layout import Layout
from meshwright.ir.ledger import Ledger
from meshwright.ir.plan import Plan, Prediction
from meshwright.ir.run import Run
from meshwright.ir.run_data import TextData
from meshwright.runtime import launch, manifest, worlds
from meshwright.runtime.agree import convert_errors
from meshwright.runtime.failures import Status
from meshwright.runtime.launch_replicas import folder_of
from meshwright.runtime.lock import TRAINER, locked
from meshwright.runtime.loop import HeldOut, Loop, Progress, Silent, resumed_schedule
from meshwright.runtime.memory_copies import MemoryCopies
from meshwright.runtime.metrics import Meter
from meshwright.runtime.preemption import Preemption
from meshwright.runtime.sinks import Sink, opened
from meshwright.runtime.trainer import Trainer
from meshwright.runtime.verify import Verification
from meshwright.schedules.replicas import of_replica, server_ranks

log = logging.getLogger("meshwright")


def verify_run(run: Run, steps: int, device: str, progress: Progress) -> tuple[Verification, ...]:
    """Call ``verify`` for the run of a RUN.toml. Every rank must call it."""
    progress.begin("reading the data")
    launch.start(device)
    return verify(
        build.model(run),
        build.loss_function(run),
        build.DataSource(run).example(),
        run.layout.chosen(),
        optimizer=build.optimizer(run),
        max_grad_norm=run.train.max_grad_norm or None,
        steps=steps,
        seed=run.train.seed,
        strict=run.layout.strict,
        opaque=build.opaque_choice(run),
        device=device,
        progress=progress,
    )


def trainer_of(run: Run, batch: Any, plan: str | Layout | None = None) -> Trainer:
    """The trainer of a run file, for batches like ``batch``. ``plan`` replaces the plan that the file names. Every rank
    must call it."""
    searched = plan is None and run.layout.searched
    return parallelize(
        build.model(run),
        build.loss_function(run),
        batch,
        plan=plan or run.layout.chosen(),
        optimizer=build.optimizer(run),
        max_grad_norm=run.train.max_grad_norm or None,
        seed=run.train.seed,
        precision=run.layout.precision,
        offload=run.layout.offload != "none",
        codec=run.layout.codec if searched else "",
        float8=run.layout.float8 if searched else "",
        seconds=run.layout.seconds,
        cluster=run.layout.cluster or None,
        strict=run.layout.strict,
        compile=run.train.compile,
        copies=True,
        opaque=build.opaque_choice(run),
    )


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The results of ``train``.

    ``text`` is the text that the model wrote, if the run has a ``[sample]``. ``stopped`` is the reason why the run was
    asked to end early, such as ``SIGTERM``."""

    directory: str
    steps: int
    resumed_from: int
    checkpoint: str
    held_out: tuple[HeldOut, ...] = ()
    text: str = ""
    ledger: Ledger | None = None
    stopped: str = ""


def num_replica_jobs(run: Run) -> int:
    """The number of replicas that are jobs of their own; 1 without such replicas."""
    layout = layout_of(run)
    return 1 if isinstance(consistency_of(layout.consistency), Sync) or server_ranks(layout) else layout.replicas


def ranks_of_replica(run: Run) -> int:
    """The number of ranks of each replica of a run on this machine."""
    num_ranks = run.num_ranks(launch.num_devices())
    return num_ranks if run.layout.file else of_replica(layout_of(run), num_ranks)[1]


def directory_of(run: Run, replica: int) -> Path:
    """The directory of a run. Replicas other than the first have a folder in it."""
    return folder_of(Path(run.train.directory or "runs/run"), replica)


def train(run: Run, progress: Progress | None = None, preemption: Preemption | None = None) -> Trained:
    """Train the run of a RUN.toml on the ranks that the launcher has started. Every rank must call it.

    A run that stopped in the same directory continues from its latest checkpoint. The directory holds run.toml,
    plan.json, metrics.jsonl and checkpoints. At the end it also holds trace.json, predicted.json and ledger.json, which
    compare the last steps with the prediction.

    After SIGTERM or SIGUSR1 (or ``preemption.ask``) on any rank, all ranks save the step that they have reached, within
    ``train.grace_s``, and return.

    Raises:
        MeshwrightError: the model, the data, the layout or the checkpoint is wrong.
        LaunchError: another run is at work in the directory.
    """
    with ExitStack() as stack:
        return _train(
            run, progress or Silent(), stack.enter_context(preemption or Preemption(run.train.grace_s)), stack
        )


def _train(run: Run, progress: Progress, preemption: Preemption, stack: ExitStack) -> Trained:
    replica, rank = worlds.place(layout_of(run))
    directory = directory_of(run, replica)
    if isinstance(
        consistency_of(layout_of(run).consistency), Ensemble
    ):  # members of an ensemble start with different values and read samples in different orders
        run = msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, seed=run.train.seed + replica))
    status = Status(directory, rank)
    stack.enter_context(launch.keeping_flights(directory / "ranks"))
    status.set("while reading the data")
    progress.begin("reading the data")
    source = build.DataSource(run)
    status.set("while capturing and planning")
    progress.begin("capturing and planning")
    run = fitting(run, directory)
    trainer = trainer_of(run, source.example(), _asked(run, directory))
    lock = locked(directory, TRAINER, takes_over=launch.has_begun_before())
    from_rank_0(lambda: convert_errors(f"{directory}", lambda: stack.enter_context(lock)))
    sinks: list[Sink] = []
    from_rank_0(lambda: sinks.extend(convert_errors(f"{directory}", lambda: opened(run.train.metrics, directory))))
    predicts = rank == 0 and not run.schedule.batch_sizes
    predicted = cache(partial(foretold_step, run, trainer, trainer.plan)) if predicts else lambda: None
    prediction = prediction_of(trainer.plan, predicted)
    progress.end()
    items, unit = source.items_per_step
    loader = source.training(trainer.data_shard)
    if isinstance(loader, PrefetchLoader):
        meet(loader)
    loop = Loop(
        trainer,
        loader,
        source.held_out(trainer.own_shard),
        Meter(
            sinks=sinks,
            steps=run.train.steps,
            items_per_step=items,
            unit=unit,
            flops_per_step=trainer.graph.flops(),
            peak_flops_per_s=_peak_flops_per_s(run, trainer),
            device=trainer.device,
            predicted_step_s=prediction.step_s if prediction is not None else 0.0,
        ),
        run.train,
        directory,
        batch_sizes=run.batch_sizes() if run.schedule.batch_sizes else None,
        bytes_are_tokens=isinstance(run.data, TextData),
        progress=progress,
        preemption=preemption,
        copies=MemoryCopies(trainer, loader, *launch.memory_of_launcher()),
    )
    held_bytes = held_besides(trainer)
    progress.begin("looking for a checkpoint")
    resumed = loop.resume()
    progress.end()
    first = trainer.step_number
    from_rank_0(lambda: _note_run(run, trainer, directory, prediction, resumed=resumed))
    feed = foretold_feed(run, trainer, loader, prediction)
    loop.run(resumed_schedule(trainer, build.hyperparameters(run), run.lr_factors()))
    ledger, text = None, ""
    if not loop.stopped:
        ledger = ledger_of(run, trainer, directory, loop, predicted(), feed, held_bytes)
        text = _write(run, trainer, progress) if run.sample is not None and run.sample.length else ""
    loader.close()
    saved = manifest.steps_in(directory / "checkpoints")
    return Trained(
        directory=str(directory),
        steps=trainer.step_number,
        resumed_from=first,
        checkpoint=str(directory / "checkpoints" / saved[0]) if saved else "",
        held_out=tuple(loop.evaluations),
        text=text,
        ledger=ledger,
        stopped=loop.stopped,
    )


def _asked(run: Run, directory: Path) -> Layout | str:
    """The layout or plan that the run asks for. If a continued run searched its layout, it keeps the plan of its first
    part as long as the number of ranks is the same. Its results are then the same bit for bit. Ranks that our launcher
    starts again keep every plan, which saves the time to make it."""
    file = directory / "plan.json"
    again = launch.has_begun_before()
    kept = (again or (run.layout.searched and has_begun(directory))) and not run.layout.file and file.exists()
    if not kept:
        if not run.layout.file and not again and launch.launched_rank() == 0:
            file.unlink(missing_ok=True)  # of another run: if this one is started again, the plan is its own
        return run.layout.chosen()
    try:
        plan = files.load(file, Plan)
    except MeshwrightError as error:
        remedy = "remove it: the plan is then searched again, and the run goes on from its last checkpoint"
        raise FileFormatError(f"the plan of this run is damaged: {error.problem}", where=error.where, remedy=remedy) \
            from error  # fmt: skip
    return str(file) if plan.mesh.world_size == launch.what_is_launched().size else run.layout.chosen()


def _note_run(run: Run, trainer: Trainer, directory: Path, prediction: Prediction | None, *, resumed: bool) -> None:
    """Write run.toml and plan.json, with the prediction of the step. Log that a run is continued, and which of its
    settings have changed."""
    if resumed:
        done = "this run is complete" if trainer.step_number >= run.train.steps else "going on"
        log.info("%s at step %d of %d", done, trainer.step_number, run.train.steps)
        for change in config.changes(directory / "run.toml", run):
            log.info("changed since: %s", change)
    config.save(run, directory / "run.toml")
    for name in LEDGER_FILES:  # these files belong to an earlier part of the run, perhaps under another plan
        (directory / name).unlink(missing_ok=True)
    plan = trainer.plan
    files.save(msgspec.structs.replace(plan, prediction=prediction or plan.prediction), directory / "plan.json")


def _write(run: Run, trainer: Trainer, progress: Progress) -> str:
    """The text that the trained model writes. Rank 0 writes it with all cores of this machine. Every rank must call
    it."""
    weights = trainer.full_state_dict()
    if trainer.rank != 0:
        return ""
    assert run.sample is not None
    assert isinstance(run.data, TextData)
    model = build.model(run)
    model.load_state_dict(weights)
    threads = torch.get_num_threads()
    torch.set_num_threads(launch.num_cores())
    try:
        return build.write_text(model, run.sample, run.data.sequence_length, run.train.seed, progress)
    finally:
        torch.set_num_threads(threads)


def _peak_flops_per_s(run: Run, trainer: Trainer) -> float:
    """The peak FLOP/s of all ranks together; 0 if it is not known for this device and dtype."""
    known = cluster_of(run, trainer.device).device
    peak = known.peak_flops_per_s.get(trainer.graph.precision or run.train.dtype, 0.0)
    if known.kind == "cpu":  # the device is one core, and a rank may use several
        peak *= torch.get_num_threads()
    return peak * trainer.plan.mesh.world_size if (known.kind == "cpu") == (trainer.device.type == "cpu") else 0.0
