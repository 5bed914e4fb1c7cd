"""Verifies and trains the run that a RUN.toml describes."""

import logging
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from meshwright import build, config
from meshwright.api.data import FeedForetold, data_use, foretell_feed, meet, with_waits
from meshwright.api.other_ranks import fitting, has_begun
from meshwright.api.planned_runs import cluster_of, layout_of
from meshwright.api.plans import cost_of
from meshwright.api.trainers import parallelize, verify
from meshwright.comm.clock import on_rank_0
from meshwright.comm.groups import codings_of, from_every_rank, from_rank_0
from meshwright.cost.coded import foretold as foretold_codings
from meshwright.cost.occupancy import box_of, num_peers
from meshwright.data.ahead import PrefetchLoader
from meshwright.data.loaders import Loader
from meshwright.errors import FileFormatError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec_use import CodecUse
from meshwright.ir.consistency import Ensemble, Sync, consistency_of
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.layout import Layout
from meshwright.ir.ledger import Ledger
from meshwright.ir.make_ledger import make_ledger
from meshwright.ir.plan import Plan
from meshwright.ir.replica_use import ReplicaUse
from meshwright.ir.run import Run
from meshwright.ir.run_data import TextData
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import Foretold, foretell
from meshwright.planner.replicas import replica_step
from meshwright.runtime import launch, manifest, worlds
from meshwright.runtime.agree import told
from meshwright.runtime.device import device_kind, taken_bytes
from meshwright.runtime.failures import Status
from meshwright.runtime.lock import TRAINER, locked
from meshwright.runtime.loop import HeldOut, Loop, Progress, Silent, resumed_schedule
from meshwright.runtime.memory_copies import MemoryCopies
from meshwright.runtime.metrics import Meter
from meshwright.runtime.preemption import Preemption
from meshwright.runtime.replica import EXCHANGE
from meshwright.runtime.sinks import Sink, opened
from meshwright.runtime.trainer import Trainer
from meshwright.runtime.verify import Verification
from meshwright.schedules.replicas import all_ranks, of_replica, server_ranks
from meshwright.simulate.replicas import simulate_replicas

log = logging.getLogger("meshwright")

LEDGER_FILES = ("trace.json", "predicted.json", "ledger.json")
"""Files of a finished run: the trace of its last step, the predicted trace, and the comparison of both."""


def verify_run(run: Run, steps: int, device: str, progress: Progress) -> tuple[Verification, ...]:
    """Call ``verify`` for the run of a RUN.toml. Every rank must call it."""
    progress.begin("reading the data")
    launch.start(device)
    return verify(
        build.model(run),
        build.loss_function(run),
        build.Source(run).example(),
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
        codec=run.layout.codec if plan is None and run.layout.searched else "",
        seconds=run.layout.seconds,
        cluster=run.layout.cluster or None,
        strict=run.layout.strict,
        compile=run.train.compile,
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
    directory = Path(run.train.directory or "runs/run")
    return directory / f"replica-{replica}" if replica > 0 else directory


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
    source = build.Source(run)
    status.set("while capturing and planning")
    progress.begin("capturing and planning")
    run = fitting(run, directory)
    trainer = trainer_of(run, source.example(), _asked(run, directory))
    lock = locked(directory, TRAINER, takes_over=launch.has_begun_before())
    from_rank_0(lambda: told(f"{directory}", lambda: stack.enter_context(lock)))
    sinks: list[Sink] = []
    from_rank_0(lambda: sinks.extend(told(f"{directory}", lambda: opened(run.train.metrics, directory))))
    held_bytes = _held_besides(trainer)
    foretold = _foretold(run, trainer) if rank == 0 and not run.schedule.batch_sizes else None
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
            predicted_step_s=foretold.played.step_s if foretold is not None else 0.0,
        ),
        run.train,
        directory,
        batch_sizes=run.batch_sizes() if run.schedule.batch_sizes else None,
        bytes_are_tokens=isinstance(run.data, TextData),
        progress=progress,
        preemption=preemption,
        copies=MemoryCopies(trainer, loader, *launch.memory_of_launcher()),
    )
    progress.begin("looking for a checkpoint")
    resumed = loop.resume()
    progress.end()
    first = trainer.step_number
    from_rank_0(lambda: _note_run(run, trainer, directory, resumed=resumed))
    feed = _foretold_feed(run, trainer, loader, foretold)
    loop.run(resumed_schedule(trainer, build.hyperparameters(run), run.lr_factors()))
    ledger, text = None, ""
    if not loop.stopped:
        ledger = _ledger(run, trainer, directory, loop, foretold, feed, held_bytes)
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


def _foretold(run: Run, trainer: Trainer) -> Foretold | None:
    """Predict the plan's step on this machine, or on the cluster that the run names; None (and a warning in the log) if
    it cannot be predicted."""
    try:
        return foretell(
            PlanLowering(trainer.graph),
            trainer.plan,
            cluster_of(run, trainer.device, trainer.plan.mesh.world_size),
            optimizer=cost_of(build.optimizer(run), trainer.graph),
            clips=run.train.max_grad_norm > 0,
            threads=torch.get_num_threads() if trainer.device.type == "cpu" else 1,
        )
    except MeshwrightError as error:
        log.warning("nothing is predicted: %s", error)
        return None


def _foretold_feed(run: Run, trainer: Trainer, loader: Loader, foretold: Foretold | None) -> FeedForetold | None:
    """The predicted waits for data that does not lie in memory, on rank 0. Every rank must call it."""
    step_s = from_rank_0(lambda: foretold.played.step_s if foretold is not None else 0.0)
    if not isinstance(loader, PrefetchLoader) or not step_s:
        return None
    return foretell_feed(loader, step_s, run.train.steps - trainer.step_number)


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


def _held_besides(trainer: Trainer) -> int:
    """The bytes that this rank's process holds in addition to the parameters: interpreter, libraries, data. 0 if
    unknown."""
    read = device_kind(trainer.device).memory_now
    return read() - sum(value.nbytes for value in trainer.parameters.values().values()) if read is not None else 0


def _ledger(
    run: Run, trainer: Trainer, directory: Path, loop: Loop, foretold: Foretold | None, feed: FeedForetold | None,
    held_bytes: int,
) -> Ledger | None:  # fmt: skip
    """Gather the traces of the last steps, compare them with the prediction, and write both into the run's directory.
    Return the ledger on rank 0; None on other ranks, or if nothing can be compared. Every rank must call it."""
    held = dict(enumerate(from_every_rank(held_bytes)))
    taken = dict(enumerate(from_every_rank(taken_bytes(trainer.device))))
    plan, device = trainer.plan, trainer.device
    measured = [on_rank_0(trace, device).above(held) for trace in loop.traces if trace.plan == plan.digest]
    use = data_use(loop.loader, loop.data_waits, feed) if isinstance(loop.loader, PrefetchLoader) else None
    if trainer.rank != 0 or foretold is None or not measured:
        return None
    cluster = cluster_of(run, device, plan.mesh.world_size)
    peers = num_peers(plan.mesh.sizes, box_of(cluster))
    predicted = msgspec.structs.replace(foretold.trace(), plan=plan.digest)  # before the run amended it
    if feed is not None:
        predicted = with_waits(predicted, feed.last_waits)
    codecs = _codecs(trainer, cluster)
    ledger = make_ledger(plan, predicted, measured, cluster, foretold.host_share, taken, peers, codecs)
    exchange = _replicas(run, trainer, measured, foretold.played.step_s)
    ledger = msgspec.structs.replace(ledger, replicas=exchange, data=use)
    try:
        for name, content in zip((*LEDGER_FILES, "plan.json"), (measured[-1], predicted, ledger, plan), strict=True):
            files.save(content, directory / name)
    except OSError as error:
        log.warning("the ledger is not kept: %s", error)
    return ledger


def _replicas(run: Run, trainer: Trainer, measured: list[Trace], step_s: float) -> ReplicaUse | None:
    """What this rank exchanged with other replicas, beside a simulation of equally fast replicas. None without
    replicas, or if the exchange cannot be simulated."""
    replica = trainer.replica
    if replica is None or replica.exchange is None:
        return None
    exchange, layout = replica.exchange, trainer.plan.layout
    cluster = cluster_of(run, trainer.device, all_ranks(layout, trainer.plan.mesh.world_size))
    step = replica_step(trainer.graph, trainer.plan, step_s, cost_of(build.optimizer(run), trainer.graph))
    try:
        times = simulate_replicas(exchange.rule, layout.replicas, step, cluster)
    except MeshwrightError as error:
        log.warning("the exchange of replicas is not predicted: %s", error)
        return None
    waits = [
        sum(span.end_s - span.start_s for span in trace.spans if span.what.startswith(EXCHANGE)) for trace in measured
    ]
    num_steps = max(1, sum(exchange.staleness.values()))
    return ReplicaUse(
        rule=str(exchange.rule), num_replicas=layout.replicas, num_steps=num_steps,
        waited_s=statistics.fmean(waits) / trainer.plan.mesh.world_size,
        sent_bytes=exchange.mailbox.sent_bytes / num_steps, staleness=dict(sorted(exchange.staleness.items())),
        predicted_waited_s=sum(times.waited_s) / times.num_steps, predicted_bytes=times.bytes_per_step,
        predicted_staleness=times.staleness,
    )  # fmt: skip


def _codecs(trainer: Trainer, cluster: Cluster) -> tuple[CodecUse, ...]:
    """Measured use of the codecs of this rank's buckets, beside the prediction."""
    plan, tensors = trainer.plan, trainer.graph.tensors
    stored = {name: ITEM_BYTES[tensors[name].dtype] for name in trainer.graph.parameters}
    predicted = foretold_codings(plan, cluster, stored)
    labeled = [(bucket, bucket.reduction) for bucket in plan.buckets] + [(each, each.label) for each in plan.gathers]
    codings = {(coding.axis, label): coding for bucket, label in labeled for coding in bucket.codings}
    uses = []
    for (axis, label), measured in codings_of(trainer.groups).items():
        if (coding := codings.get((axis, label))) is not None:
            sent_bytes, coding_s = predicted.get((axis, label), (0, 0.0))
            uses.append(CodecUse(
                label=label, axis=axis, codec=coding.codec, algorithm=coding.algorithm, num_bytes=measured.num_bytes,
                predicted_bytes=sent_bytes, sent_bytes=measured.sent_bytes, predicted_coding_s=coding_s,
                coding_s=measured.coding_s, residual_share=measured.residual_share,
            ))  # fmt: skip
    return tuple(uses)


def _note_run(run: Run, trainer: Trainer, directory: Path, *, resumed: bool) -> None:
    """Write run.toml and plan.json. Log that a run is continued, and which of its settings have changed."""
    if resumed:
        done = "this run is complete" if trainer.step_number >= run.train.steps else "going on"
        log.info("%s at step %d of %d", done, trainer.step_number, run.train.steps)
        for change in config.changes(directory / "run.toml", run):
            log.info("changed since: %s", change)
    config.save(run, directory / "run.toml")
    for name in LEDGER_FILES:  # these files belong to an earlier part of the run, perhaps under another plan
        (directory / name).unlink(missing_ok=True)
    files.save(trainer.plan, directory / "plan.json")


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
