"""Predicts the steps of a run, and compares them with the measured ones."""

import logging
import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from meshwright import build
from meshwright.api.data import FeedForetold, data_use, foretell_feed, with_waits
from meshwright.api.planned_runs import cluster_of
from meshwright.api.plans import cost_of
from meshwright.api.run_memory import memory_parts
from meshwright.comm.clock import on_rank_0
from meshwright.comm.groups import codings_of, from_every_rank, from_rank_0
from meshwright.cost.coded import foretold as foretold_codings
from meshwright.cost.occupancy import box_of, num_peers
from meshwright.data.ahead import PrefetchLoader
from meshwright.data.loaders import Loader
from meshwright.errors import MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec_use import CodecUse
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.ledger import Ledger
from meshwright.ir.make_ledger import make_ledger
from meshwright.ir.plan import Plan, Prediction
from meshwright.ir.replica_use import ReplicaUse
from meshwright.ir.run import Run
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import Foretold, foretell
from meshwright.planner.replicas import replica_step
from meshwright.runtime import launch
from meshwright.runtime.device import taken_bytes
from meshwright.runtime.loop import Loop
from meshwright.runtime.replica import EXCHANGE
from meshwright.runtime.trainer import Trainer
from meshwright.schedules.replicas import all_ranks
from meshwright.simulate.replicas import simulate_replicas

log = logging.getLogger("meshwright")

LEDGER_FILES = ("trace.json", "predicted.json", "ledger.json")
"""Files of a finished run: the trace of its last step, the predicted trace, and the comparison of both."""


def prediction_of(plan: Plan, predicted: Callable[[], Foretold | None]) -> Prediction | None:
    """The prediction of the plan's step on rank 0, if there is one. Ranks that our launcher starts again take the one
    that is in their plan: no rank then waits for it before its first step."""
    if launch.has_begun_before() and plan.prediction is not None:
        return plan.prediction
    foretold = predicted()
    return foretold.prediction if foretold is not None else None


def foretold_step(run: Run, trainer: Trainer, plan: Plan) -> Foretold | None:
    """Predict the step of a plan on this machine, or on the cluster that the run names; None (and a warning in the log)
    if it cannot be predicted."""
    try:
        return foretell(
            PlanLowering(trainer.graph),
            plan,
            cluster_of(run, trainer.device, plan.mesh.world_size),
            optimizer=cost_of(build.optimizer(run), trainer.graph),
            clips=run.train.max_grad_norm > 0,
            threads=torch.get_num_threads() if trainer.device.type == "cpu" else 1,
        )
    except MeshwrightError as error:
        log.warning("nothing is predicted: %s", error)
        return None


def foretold_feed(run: Run, trainer: Trainer, loader: Loader, prediction: Prediction | None) -> FeedForetold | None:
    """The predicted waits for data that does not lie in memory, on rank 0. Every rank must call it."""
    step_s = from_rank_0(lambda: prediction.step_s if prediction is not None else 0.0)
    if not isinstance(loader, PrefetchLoader) or not step_s:
        return None
    return foretell_feed(loader, step_s, run.train.steps - trainer.step_number)


def ledger_of(
    run: Run, trainer: Trainer, directory: Path, loop: Loop, foretold: Foretold | None, feed: FeedForetold | None,
    held_bytes: int,
) -> Ledger | None:  # fmt: skip
    """Gather the traces of the last steps, compare them with the prediction, and write both into the run's directory.
    Return the ledger on rank 0; None on other ranks, or if nothing can be compared. Every rank must call it."""
    held = dict(enumerate(from_every_rank(held_bytes)))
    taken = dict(enumerate(from_every_rank(taken_bytes(trainer.device))))
    plan, device = trainer.plan, trainer.device
    measured = [on_rank_0(trace, device).above(held) for trace in loop.traces if trace.plan == plan.digest]
    parts = memory_parts(trainer, loop, cost_of(build.optimizer(run), trainer.graph))
    use = data_use(loop.loader, loop.data_waits, feed) if isinstance(loop.loader, PrefetchLoader) else None
    if trainer.rank != 0 or foretold is None or not measured:
        return None
    cluster = cluster_of(run, device, plan.mesh.world_size)
    peers = num_peers(plan.mesh.sizes, box_of(cluster))
    predicted = msgspec.structs.replace(foretold.trace(), plan=plan.digest)  # before the run amended it
    predicted = predicted.above({rank: -sum(part.predicted_bytes for part in those) for rank, those in parts.items()})
    if feed is not None:
        predicted = with_waits(predicted, feed.last_waits)
    codecs = _codecs(trainer, cluster)
    ledger = make_ledger(plan, predicted, measured, cluster, foretold.host_share, taken, peers, codecs, parts)
    exchange = _replicas(run, trainer, measured, foretold.played.step_s)
    ledger = msgspec.structs.replace(ledger, replicas=exchange, data=use)
    try:
        amended = msgspec.structs.replace(plan, prediction=plan.prediction or foretold.prediction)
        for name, content in zip((*LEDGER_FILES, "plan.json"), (measured[-1], predicted, ledger, amended), strict=True):
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
