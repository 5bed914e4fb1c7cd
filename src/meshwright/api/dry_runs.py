"""Dry runs: the step of a plan on fake tensors of a cluster's device, for ranks of a job that does not exist."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from meshwright import build
from meshwright.api.machine import known_cluster
from meshwright.api.opaque_costs import with_costs
from meshwright.api.planned_runs import captured as captured_run
from meshwright.api.planned_runs import cluster_of
from meshwright.api.plans import Rules, choose, cost_of, loaded, precision_of
from meshwright.capture import opaque_capture
from meshwright.capture.builder import Capture
from meshwright.capture.opaque_capture import OpaqueChoice
from meshwright.capture.tracer import LossFunction
from meshwright.cost.occupancy import box_of, num_peers, room_of
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import Sync, consistency_of
from meshwright.ir.dry_run import DryRun, Finding, RankRun
from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Plan
from meshwright.ir.precision import Precision
from meshwright.ir.run import Run
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import adapt_plan
from meshwright.planner.foretell import foretell
from meshwright.runtime.dry_run import MOMENTS, DryRunJob, Rehearsed, rehearse
from meshwright.runtime.optimizer import OptimizerFactory, check_factory
from meshwright.schedules.rendezvous import StartedOperation, Stream, as_of, unmatched

CPU = torch.device("cpu")
FEW_RANKS = 16
"""All ranks of a job of at most this size are run, if none are chosen."""


def dry_run(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    plan: str | os.PathLike[str] | Layout | Plan = "auto",
    cluster: Cluster | str = "h100-dgx",
    *,
    devices: int | None = None,
    ranks: Sequence[int] | None = None,
    optimizer: OptimizerFactory | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    precision: Precision | None = None,
    rules: Rules | None = None,
    opaque: OpaqueChoice = "",
    progress: Callable[[str], None] = lambda what: None,
) -> DryRun:
    """Run the set-up and two steps of a plan on fake tensors of a GPU that is not there, rank by rank in this process.

    The report names what would break or wait there: tensors of host and device in one operator, waits of the host for
    the device, operators without a kernel, messages and collectives that never end (sends block until they are
    received, as under NCCL). It has the peak memory of each rank beside the prediction. Nothing is computed, the model
    stays as it is and may be on the meta device.

    Args:
        plan: as in ``parallelize``. ``devices``: the number of ranks of the job (default: those of the layout or plan;
            for ``"auto"`` those of the cluster).
        cluster: the name or the file of a cluster of GPUs.
        ranks: the ranks to run; if there are none: all of a job of up to 16 ranks, else one of each kind
            (``kinds_of_ranks``).
        optimizer: as in ``parallelize``; default: AdamW.
        progress: called with each rank that begins.

    Raises:
        ClusterError: the cluster has no GPUs, or is unknown.
        LaunchError: this process is a rank of a real job.
        LayoutError, PlanError, CaptureError, RuleError, OptimizerError: as ``parallelize``.
    """
    check_factory(optimizer, max_grad_norm)
    captured = opaque_capture.capture(
        model, loss_fn, batch, rules=rules, precision=precision_of(plan, precision), opaque=opaque
    )
    return dry_run_captured(
        captured, model, loss_fn, batch, plan, cluster, devices=devices, ranks=ranks, optimizer=optimizer,
        max_grad_norm=max_grad_norm, seed=seed, progress=progress,
    )  # fmt: skip


def dry_run_captured(
    captured: Capture, model: nn.Module, loss_fn: LossFunction, batch: Any,
    plan: str | os.PathLike[str] | Layout | Plan, cluster: Cluster | str, *, devices: int | None = None,
    ranks: Sequence[int] | None = None, optimizer: OptimizerFactory | None = None, max_grad_norm: float | None = None,
    seed: int = 0, progress: Callable[[str], None] = lambda what: None,
) -> DryRun:  # fmt: skip
    """``dry_run`` of a step that is captured already, so that many layouts share a capture."""
    rules, graph = captured.rules, with_costs(captured)
    factory = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    world_size = devices or _size_of(plan, known_cluster(cluster, CPU).num_devices)
    known = known_cluster(cluster, CPU, world_size)
    _check_gpus(known)
    kept, clips = cost_of(factory, graph), max_grad_norm is not None
    chosen = choose(plan, graph, world_size, known, CPU, kept, clips=clips, rules=rules)
    if not isinstance(consistency_of(chosen.consistency), Sync) or chosen.layout.replicas > 1:
        raise LayoutError(
            f"replicas joined by {chosen.consistency} run on CPUs only", where="dry run", remedy="dry run one replica"
        )
    box = box_of(known)
    foretold = foretell(PlanLowering(graph, rules, box), chosen, known, optimizer=kept, clips=clips)
    job = DryRunJob(
        model, loss_fn, batch, captured, chosen, adapt_plan, factory, max_grad_norm, seed,
        frozenset(known.device.peak_flops_per_s), box,
    )  # fmt: skip
    wanted = tuple(dict.fromkeys(ranks or ())) or kinds_of_ranks(chosen)
    rehearsed = []
    for rank in wanted:
        chosen.mesh.coordinates(rank)  # raises a LayoutError if there is no such rank
        progress(f"rank {rank}")
        with _quiet(rank != wanted[0]):
            rehearsed.append(rehearse(job, rank))
    peaks = [foretold.memory[chosen.mesh.coordinates(rank).get("pp", 0)].peak_bytes for rank in wanted]
    room = room_of(known, range(chosen.mesh.world_size), num_peers(chosen.mesh.sizes, box))
    streams, matched = _streams(rehearsed, chosen)
    return DryRun(
        model=graph.model,
        cluster=known.name,
        device=known.device.name,
        memory_bytes=known.device.memory_bytes,
        room_bytes=room,
        layout=layout_text(chosen.layout),
        world_size=chosen.mesh.world_size,
        matched=matched,
        ranks=tuple(map(_figures, rehearsed, peaks)),
        findings=(*_merged(rehearsed), *_never_ending(streams), *_too_large(rehearsed, room)),
        unchecked=tuple(captured.opaque.names) if captured.opaque is not None else (),
    )


def dry_run_of(
    run: Run, devices: int = 0, ranks: Sequence[int] = (), progress: Callable[[str], None] = lambda what: None
) -> DryRun:
    """The dry run of a RUN.toml, whose ``layout.cluster`` names the cluster. Arguments and errors: see ``dry_run``."""
    _check_gpus(cluster_of(run, CPU))
    _, _, world_size = captured_run(run, devices)
    return dry_run(
        build.model(run),
        build.loss_function(run),
        build.example_batch(run),
        run.layout.chosen(),
        run.layout.cluster,
        devices=world_size,
        ranks=ranks,
        optimizer=build.optimizer(run),
        max_grad_norm=run.train.max_grad_norm or None,
        seed=run.train.seed,
        precision=run.layout.precision,
        opaque=build.opaque_choice(run),
        progress=progress,
    )


def kinds_of_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks of a plan that are run. If a plan has few ranks, all are run. Otherwise, each stage has its first rank
    run, and the ranks that are second or last along one axis and first along all others."""
    world = range(plan.mesh.world_size)
    if len(world) <= FEW_RANKS or plan.uneven:
        return tuple(world)
    sizes = plan.mesh.sizes

    def counts(rank: int) -> bool:
        off = [(axis, at) for axis, at in plan.mesh.coordinates(rank).items() if at and axis != "pp"]
        return not off or (len(off) == 1 and off[0][1] in (1, sizes[off[0][0]] - 1))

    return tuple(filter(counts, world))


def _size_of(plan: Any, usual: int) -> int:
    if isinstance(plan, Layout):
        return plan.num_ranks
    return usual if plan == "auto" else loaded(plan)[0].mesh.world_size


def _check_gpus(cluster: Cluster) -> None:
    if cluster.device.kind != "gpu":
        raise ClusterError(
            f"its device, {cluster.device.name}, is no GPU", where=f"cluster {cluster.name}",
            remedy="name a cluster of GPUs, such as h100-dgx: `meshwright clusters` lists names",
        )  # fmt: skip


@contextmanager
def _quiet(silent: bool) -> Iterator[None]:
    """Log what ranks say only once."""
    log = logging.getLogger("meshwright")
    before, log.disabled = log.disabled, silent or log.disabled
    try:
        yield
    finally:
        log.disabled = before


def _figures(rehearsed: Rehearsed, predicted_bytes: int) -> RankRun:
    last = [entry for entry in rehearsed.streams.get(MOMENTS[-1], ()) if isinstance(entry, StartedOperation)]
    return RankRun(
        rank=rehearsed.rank,
        peak_bytes=rehearsed.peak_bytes,
        predicted_bytes=predicted_bytes,
        held_bytes=rehearsed.held_bytes,
        messages=sum(len(entry.messages) for entry in last),
        collectives=sum(bool(entry.ranks) for entry in last),
    )


def _merged(rehearsed: Sequence[Rehearsed]) -> Iterator[Finding]:
    """The findings of all ranks; equal ones are joined."""
    ranks: dict[Finding, list[int]] = {}
    times: dict[Finding, int] = {}
    for each in rehearsed:
        for finding in each.findings:
            key = Finding(finding.kind, finding.what, finding.where, finding.moment)
            ranks.setdefault(key, []).append(each.rank)
            times[key] = times.get(key, 0) + finding.times
    for key, own in ranks.items():
        yield Finding(key.kind, key.what, key.where, key.moment, tuple(own), times[key])


def _streams(rehearsed: Sequence[Rehearsed], plan: Plan) -> tuple[dict[str, dict[int, Stream]], bool]:
    """The streams of ranks by moment, and whether they are those of the whole job. A rank that was not run does as the
    first rank of its stage, with its own neighbours. That is not known of plans whose ranks differ within a stage: of
    unlike stages, and where ranks of a stage send to each other, as they do for the borders of pictures."""
    run = {each.rank: each for each in rehearsed}
    streams: dict[str, dict[int, Stream]] = {
        moment: {rank: each.streams.get(moment, ()) for rank, each in run.items()} for moment in MOMENTS
    }
    if len(run) == plan.mesh.world_size:
        return streams, True
    firsts = [plan.mesh.stage_ranks(stage).start for stage in range(plan.mesh.num_stages)]
    if plan.uneven or not all(first in run and _sends_to_stages(run[first], plan) for first in firsts):
        return {}, False
    for rank in range(plan.mesh.world_size):
        first = firsts[plan.mesh.coordinates(rank).get("pp", 0)]
        image = cache(partial(_moved, plan, first, rank))
        for of_ranks in streams.values() if rank not in run else ():
            of_ranks[rank] = as_of(of_ranks[first], image)
    return streams, True


def _sends_to_stages(rehearsed: Rehearsed, plan: Plan) -> bool:
    """Whether a rank sends messages only to the ranks with its own place in other stages."""
    linked = {rank for stage in range(plan.mesh.num_stages) for rank in plan.mesh.linked_ranks(rehearsed.rank, stage)}
    entries = (
        entry for stream in rehearsed.streams.values() for entry in stream if isinstance(entry, StartedOperation)
    )
    return all(message.peer in linked for entry in entries for message in entry.messages)


def _moved(plan: Plan, first: int, rank: int, other: int) -> int:
    """The rank that is to ``rank`` what ``other`` is to ``first``: so far away along every axis, around its end."""
    sizes, here = plan.mesh.sizes, plan.mesh.coordinates(other)
    start, end = plan.mesh.coordinates(first), plan.mesh.coordinates(rank)
    return plan.mesh.rank_of({axis: (here[axis] - start[axis] + end[axis]) % sizes[axis] for axis in sizes})


def _never_ending(streams: dict[str, dict[int, Stream]]) -> Iterator[Finding]:
    for moment, of_ranks in streams.items():
        for each in unmatched(of_ranks):
            joint = ", but " if each.mismatch else ": "
            yield Finding("unmatched", f"{each.what}{joint}{each.why}", "", moment, (each.rank,))


def _too_large(rehearsed: Sequence[Rehearsed], room_bytes: int) -> Iterator[Finding]:
    for each in rehearsed:
        if each.peak_bytes > room_bytes:
            what = f"{each.peak_bytes / 2**30:.2f} GiB of tensors, where {room_bytes / 2**30:.2f} GiB surely fit"
            yield Finding("memory", what, "", MOMENTS[-1], (each.rank,))
