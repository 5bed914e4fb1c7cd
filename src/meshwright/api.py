"""The public functions: they join the plan side and the run side, and the command line calls only these."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.capture import builder
from meshwright.capture.tracer import LossFunction
from meshwright.catalog import device_names, load_cluster
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.errors import ClusterError, LayoutError, RankError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Layout, Plan
from meshwright.ops.base import OperatorRule, Target
from meshwright.planner.explicit import adapt_plan, plan_layout
from meshwright.runtime import launch
from meshwright.runtime.trainer import OptimizerFactory, Trainer

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
    asked = layout.dp * layout.tp
    world_size = devices or (asked if asked > 0 else known.num_devices)
    return plan_layout(graph, layout, world_size=world_size, cluster=known)


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
        loss_fn: ``loss_fn(model, batch)`` gives a scalar, or (scalar, {metric: scalar}).
        batch: an example of the *global* batch: a tree of tensors whose dim 0 is the batch.
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
        CaptureError, LayoutError, PlanError, FileFormatError, OptimizerError, RankError.
    """
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
    where = "plan" if isinstance(plan, Plan) else str(plan)
    chosen = plan if isinstance(plan, Plan) else files.load(Path(plan), Plan)
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


def _agree(graph: Graph) -> None:
    """Every rank must have captured the same model."""
    every = from_every_rank((graph.fingerprint, graph.model, graph.batch_size, graph.num_parameters()))
    for rank, other in enumerate(every):
        if other != every[0]:
            raise RankError(
                f"rank {rank} has {_described(other)}, rank 0 has {_described(every[0])}",
                where=f"rank {rank}",
                remedy="build the same model and pass batches of the same shape on every rank",
            )


def _described(mine: tuple[str, str, int, int]) -> str:
    fingerprint, model, batch, count = mine
    return f"{model} ({count:,} parameters, batch {batch}, fingerprint {fingerprint})"
