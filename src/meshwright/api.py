"""The public functions: they join the plan side and the run side, and the command line calls only these."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from meshwright import build, config
from meshwright.capture import builder
from meshwright.capture.tracer import LossFunction
from meshwright.catalog import cluster_names, device_names, load_cluster
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.errors import ClusterError, LaunchError, LayoutError, MeshwrightError, RankError
from meshwright.ir import files
from meshwright.ir.cluster import Calibration, Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.ir.run import Run, TextData
from meshwright.ops.base import OperatorRule, Target
from meshwright.planner.explicit import adapt_plan, plan_layout
from meshwright.runtime import calibrate as calibration
from meshwright.runtime import launch, manifest
from meshwright.runtime.failures import Status
from meshwright.runtime.launch import launched, launched_rank, num_devices
from meshwright.runtime.loop import HeldOut, Loop, Options, Progress, Silent, resumed_schedule
from meshwright.runtime.metrics import Meter
from meshwright.runtime.optimizer import OptimizerFactory, check_factory
from meshwright.runtime.ranks import run_ranks
from meshwright.runtime.restarts import Restarts
from meshwright.runtime.trainer import Trainer
from meshwright.runtime.verify import Comparison, batch_in_float64, compare, eager_steps, in_float64, parallel_steps

__all__ = [
    "Cluster", "Comparison", "HeldOut", "Progress", "Restarts", "Trained", "calibrate", "calibrated",
    "calibration_file", "capture", "cluster_names", "is_busy", "launched", "launched_rank", "load_cluster",
    "measure_machine", "num_devices", "parallelize", "plan", "plan_run", "run_ranks", "train", "verify", "verify_run",
]  # fmt: skip

log = logging.getLogger("meshwright")

Rules = Mapping[Target, OperatorRule]


def capture(model: nn.Module, loss_fn: LossFunction, batch: Any, *, rules: Rules | None = None) -> Graph:
    """The training step of ``model`` on a global batch, as a graph. Computes nothing; meta models are fine.

    Raises:
        CaptureError: the step cannot be traced (data-dependent control flow, for one).
    """
    return builder.capture(model, loss_fn, batch, rules=rules).graph


def plan(
    graph: Graph,
    cluster: Cluster | str | None = None,
    *,
    devices: int | None = None,
    layout: Layout | None = None,
) -> Plan:
    """A plan for ``graph`` on ``devices`` ranks of ``cluster`` (a name, a path or a Cluster; default ``cpu-local``).

    Without a layout the batch is divided over all ranks.

    Raises:
        LayoutError: the layout does not fit the model, the batch or the ranks.
        ClusterError: the cluster is unknown.
    """
    known = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or "cpu-local")
    layout = layout if layout is not None else Layout(dp=-1)
    world_size = devices or (layout.num_ranks if layout.num_ranks > 0 else known.num_devices)
    return plan_layout(graph, layout, world_size=world_size, cluster=known)


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    again: bool = True,
    measured_by: Callable[[], Cluster | None] | None = None,
) -> Cluster:
    """Measure this machine's cores and what joins them, without running any model; takes some seconds.

    Args:
        path: where the cluster file is written; default: this user's cache, where ``calibrated`` finds it.
        again: measure even if what is there still holds.
        measured_by: what every rank runs, if it should show progress; a top-level function.

    Raises:
        LaunchError: the ranks could not be started, or the file cannot be written.
    """
    target = Path(path) if path is not None else calibration_file()
    if not again and path is None and (known := calibrated()) is not None:
        return known
    scratch = Path(tempfile.mkdtemp(prefix="meshwright-calibrate-"))
    found = run_ranks(measured_by or measure_machine, num_ranks=calibration.num_ranks(), directory=scratch)
    shutil.rmtree(scratch)  # after an error it stays: it holds the ranks' output
    assert found is not None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.save(found, target)
    except OSError as error:
        raise LaunchError(
            f"the cluster file cannot be written: {error.strerror}", where=str(target), remedy="choose another path"
        ) from None
    return found


def measure_machine(progress: Progress | None = None) -> Cluster | None:
    """What every rank of a calibration runs; the cluster on rank 0, None elsewhere."""
    progress = progress or Silent()
    shown = ""

    def advance(what: str) -> None:
        nonlocal shown
        if what != shown:
            progress.begin(what)
            shown = what

    found = calibration.measure(calibration.Effort(), advance)
    progress.end()
    return found


def calibrated() -> Cluster | None:
    """This machine as it was last calibrated; None where it was not, or where that no longer holds (another machine,
    another torch, too old)."""
    path = calibration_file()
    if not path.exists():
        return None
    try:
        found = files.load(path, Cluster)
    except MeshwrightError as error:  # of another version of ours, or damaged: it can be measured again
        log.warning("%s cannot be used: %s", path, error)
        return None
    reason = calibration.stale(found, time.time())
    if reason:
        log.info("%s is stale: %s", path, reason)
        return None
    return found


def is_busy(found: Calibration) -> bool:
    """Whether somebody else used the machine while it was calibrated."""
    return found.spread > calibration.BUSY_SPREAD


def calibration_file() -> Path:
    """Where ``calibrate`` keeps what it measured of this machine, unless told otherwise."""
    return launch.cache_directory() / "this-machine.toml"


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    plan: str | os.PathLike[str] | Layout | Plan = "auto",
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    cluster: Cluster | str | None = None,
    rules: Rules | None = None,
) -> Trainer:
    """Make a trainer of an unmodified model.

    Args:
        model: any traceable module; rank 0's values are used; it may be on the meta device.
        loss_fn: ``loss_fn(model, batch)`` gives a scalar, or (scalar, {metric: scalar}). It is captured, not
            called in every step: numbers that it, or the model, takes from elsewhere (a variable, an attribute) stay as
            they are then. What changes from step to step must come in the batch.
        batch: an example of the *global* batch: a tree of tensors whose dim 0 is the batch, and of numbers.
        plan: ``"auto"`` (the batch divided over all ranks), a Layout, a Plan, or the path of a plan file.
        optimizer: gets a list of (name, parameter), as torch.optim takes it:
            ``lambda p: torch.optim.AdamW(p, lr=3e-4)``.
        max_grad_norm: clip gradients to this norm over the whole model.
        seed: of dropout and of meta models' initial values.
        device: default: this rank's CUDA device where there is one (experimental), else the CPU.
        cluster: what the plan is for; default ``cpu-local``.
        rules: rules for operators of your own, by operator.

    The same script runs under ``python`` (one rank), ``torchrun`` and ``meshwright train``: where a launcher has set
    its environment, torch.distributed is started here.

    Raises:
        CaptureError, DataError, LayoutError, PlanError, FileFormatError, OptimizerError, LaunchError, RankError.
    """
    _check_plan(plan)
    check_factory(optimizer, max_grad_norm)
    target = launch.start(device)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    captured = builder.capture(model, loss_fn, batch, rules=rules)
    graph = captured.graph
    _agree(graph)
    made = from_rank_0(lambda: files.encode_json(_choose(plan, graph, world_size, cluster, target)))
    chosen = files.decode(made, Plan, where="plan of rank 0")
    return Trainer(
        model,
        loss_fn,
        captured,
        chosen,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        seed=seed,
        device=target,
        replan=adapt_plan,
        rules=rules,
    )


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    plan: str | os.PathLike[str] | Layout | Plan = "auto",
    *,
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    steps: int = 3,
    seed: int = 0,
    rules: Rules | None = None,
    progress: Progress | None = None,
) -> tuple[Comparison, ...]:
    """Compare the plan on these ranks with one process of eager PyTorch: forward, backward, and ``steps`` updates.

    Both sides run copies of the model in float64 on the CPU, with dropout off; AdamW where no optimizer is given. Every
    rank must call it, and gets the same rows. ``rows.ok`` says whether a difference is at most 1e-9 of the largest
    value (or of 1).

    Raises:
        CaptureError: the step cannot be traced, or draws random numbers.
        LayoutError, PlanError, FileFormatError, OptimizerError, RankError: as ``parallelize``.
    """
    progress = progress or Silent()
    _check_plan(plan)
    factory = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    doubled = batch_in_float64(batch)
    progress.begin("capturing and planning")
    mine = in_float64(model, seed)
    if not isinstance(plan, Layout) and plan != "auto":
        launch.start("cpu")
        pairs = (model, batch), (mine, doubled)
        plan = _in_float64(plan, *(capture(one, loss_fn, data, rules=rules) for one, data in pairs))
    trainer = parallelize(
        mine, loss_fn, doubled, plan=plan, optimizer=factory, max_grad_norm=max_grad_norm, seed=seed, device="cpu",
        rules=rules,
    )  # fmt: skip
    progress.begin("parallel steps", steps)
    found = parallel_steps(trainer, doubled, steps, progress)

    def against_eager() -> tuple[Comparison, ...]:
        progress.begin("one process", steps)
        twin = in_float64(model, seed)
        return compare(found, eager_steps(twin, loss_fn, doubled, steps, factory, max_grad_norm, progress))

    rows = from_rank_0(against_eager)
    progress.end()
    return rows


def _in_float64(plan: Any, graph: Graph, doubled: Graph) -> Plan:
    """A plan of ``graph`` for the same model in float64, where casts inside the model may come or go."""

    def adapted() -> bytes:
        loaded, where = _loaded(plan)
        if loaded.graph_fingerprint != doubled.fingerprint:
            loaded.check(graph, where)
            loaded = adapt_plan(loaded, doubled)
        return files.encode_json(loaded)

    return files.decode(from_rank_0(adapted), Plan, where="plan of rank 0")


def plan_run(run: Run, ranks: int = 0) -> Plan:
    """The plan of a RUN.toml for ``ranks`` ranks (0: what its layout asks for, or its cluster has)."""
    graph = capture(build.model(run), build.loss_function(run), build.example_batch(run))
    known = _known(run.layout.cluster or None, torch.device("cpu"))
    if run.layout.plan:
        return _choose(run.layout.plan, graph, ranks or run.num_ranks(0), known, torch.device("cpu"))
    world_size = ranks or run.num_ranks(known.num_devices if run.layout.cluster else launch.num_cores())
    return plan_layout(graph, run.layout.chosen(), world_size=world_size, cluster=known)


def verify_run(run: Run, steps: int, progress: Progress) -> tuple[Comparison, ...]:
    """``verify`` for what a RUN.toml names; every rank must call it."""
    progress.begin("reading the data")
    launch.start("cpu")
    return verify(
        build.model(run),
        build.loss_function(run),
        next(iter(build.Source(run).training())),
        run.layout.plan or run.layout.chosen(),
        optimizer=build.optimizer(run),
        max_grad_norm=run.train.max_grad_norm or None,
        steps=steps,
        seed=run.train.seed,
        progress=progress,
    )


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What ``train`` did. ``text`` is what the model wrote, where the run has a ``[sample]``."""

    directory: str
    steps: int
    resumed_from: int
    checkpoint: str
    held_out: tuple[HeldOut, ...] = ()
    text: str = ""


def train(run: Run, progress: Progress | None = None) -> Trained:
    """Train what a RUN.toml names, on the ranks that are there; every rank must call it.

    A run that stopped in the same directory is continued from its latest checkpoint. The directory then holds
    run.toml, plan.json, metrics.jsonl and checkpoints.

    Raises:
        MeshwrightError: whatever is wrong with the model, the data, the layout or the checkpoint.
    """
    progress = progress or Silent()
    device = launch.start()
    directory = Path(run.train.directory or "runs/run")
    rank = launch.launched_rank()
    status = Status(directory, rank)
    status.set("while reading the data")
    progress.begin("reading the data")
    source = build.Source(run)
    status.set("while capturing and planning")
    progress.begin("capturing and planning")
    trainer = parallelize(
        build.model(run),
        build.loss_function(run),
        next(iter(source.training())),
        plan=run.layout.plan or run.layout.chosen(),
        optimizer=build.optimizer(run),
        max_grad_norm=run.train.max_grad_norm or None,
        seed=run.train.seed,
        cluster=run.layout.cluster or None,
    )
    progress.end()
    items, unit = source.items_per_step
    loop = Loop(
        trainer,
        source.training(trainer.data_shard),
        source.held_out(trainer.data_shard),
        Meter(
            path=directory / "metrics.jsonl" if rank == 0 else None,
            steps=run.train.steps,
            items_per_step=items,
            unit=unit,
            flops_per_step=trainer.graph.flops(),
            peak_flops_per_s=_peak_flops_per_s(run, trainer, device),
            device=device,
        ),
        Options(**{name: getattr(run.train, name) for name in Options.__struct_fields__}),
        directory,
        bytes_are_tokens=isinstance(run.data, TextData),
        progress=progress,
    )
    progress.begin("looking for a checkpoint")
    found = loop.resume()
    progress.end()
    first = trainer.step_number
    from_rank_0(lambda: _note_run(run, trainer, directory, found))
    factors = [run.schedule.factor(step, run.train.steps) for step in range(run.train.steps)]
    loop.run(resumed_schedule(trainer, build.hyperparameters(run), factors))
    text = ""
    if run.sample is not None and run.sample.length:
        weights = trainer.full_state_dict()
        if rank == 0:
            text = _write(run, weights, progress)
    saved = manifest.steps_in(directory / "checkpoints")
    return Trained(
        directory=str(directory),
        steps=trainer.step_number,
        resumed_from=first,
        checkpoint=str(directory / "checkpoints" / saved[0]) if saved else "",
        held_out=tuple(loop.evaluations),
        text=text,
    )


def _note_run(run: Run, trainer: Trainer, directory: Path, found: Path | None) -> None:
    """Write run.toml and plan.json, and say what is continued, and with which changes."""
    if found is not None:
        done = "this run is complete" if trainer.step_number >= run.train.steps else "going on"
        log.info("%s at step %d of %d", done, trainer.step_number, run.train.steps)
        for change in config.changes(directory / "run.toml", run):
            log.info("changed since: %s", change)
    config.save(run, directory / "run.toml")
    files.save(trainer.plan, directory / "plan.json")


def _write(run: Run, weights: dict[str, torch.Tensor], progress: Progress) -> str:
    """What the trained model writes, on all cores of this machine."""
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


def _peak_flops_per_s(run: Run, trainer: Trainer, device: torch.device) -> float:
    """The peak of all ranks together; 0 where it is not known for this device and dtype."""
    known = _known(run.layout.cluster or None, device).device
    peak = known.peak_flops_per_s.get(run.train.dtype, 0.0)
    if known.kind == "cpu":  # a device is one core there, and a rank may have several
        peak *= torch.get_num_threads()
    return peak * trainer.plan.mesh.world_size if (known.kind == "cpu") == (device.type == "cpu") else 0.0


def _known(cluster: Cluster | str | None, device: torch.device) -> Cluster:
    """The cluster; where none is given, this machine: ``cpu-local``, or one box of the CUDA device at hand."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None or device.type == "cpu":
        return load_cluster(cluster or "cpu-local")
    found = torch.cuda.get_device_name(device)
    name = next((name for name in device_names() if name.split("-")[0] in found.lower().split()[-1]), None)
    if name is None:
        raise ClusterError(
            f"no cluster is known for {found!r}", where="cluster", remedy="pass cluster= by name or file"
        )
    return load_cluster(f"{name}-dgx")


def _choose(plan: Any, graph: Graph, world_size: int, cluster: Cluster | str | None, device: torch.device) -> Plan:
    if isinstance(plan, Layout) or plan == "auto":
        layout = plan if isinstance(plan, Layout) else Layout(dp=-1)
        return plan_layout(graph, layout, world_size=world_size, cluster=_known(cluster, device))
    chosen, where = _loaded(plan)
    chosen.check(graph, where)
    if chosen.mesh.world_size != world_size:
        raise LayoutError(
            f"the plan is for {chosen.mesh.world_size} ranks, there are {world_size}",
            where=where,
            remedy=f"start {chosen.mesh.world_size} ranks, or plan again",
        )
    if chosen.batch_size != graph.batch_size:
        chosen = adapt_plan(chosen, graph)
    return chosen


def _loaded(plan: Any) -> tuple[Plan, str]:
    """A plan or a plan file's, and what to call it in errors."""
    return (plan, "plan") if isinstance(plan, Plan) else (files.load(Path(plan), Plan), str(plan))


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, str | os.PathLike | Layout | Plan):
        raise LayoutError(
            f"it is {plan!r}", where="plan", remedy='pass "auto", a mw.Layout, a Plan, or the path of a plan file'
        )


def _agree(graph: Graph) -> None:
    """Every rank must have captured the same model."""
    dtypes = sorted({graph.tensors[name].dtype for name in graph.parameters})
    model = f"{graph.model} ({graph.num_parameters():,} parameters, {' '.join(dtypes)})"
    every = from_every_rank(f"{model}, batch {graph.batch_size}, fingerprint {graph.fingerprint}")
    for rank, other in enumerate(every):
        if other != every[0]:
            raise RankError(
                f"rank {rank} has {other}, rank 0 has {every[0]}",
                where=f"rank {rank}",
                remedy="build the same model and pass batches of the same shape on every rank",
            )
