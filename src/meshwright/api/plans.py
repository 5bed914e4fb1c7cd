"""From a model to a plan, and to what the plan will do."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright import optim
from meshwright.api.machine import calibrated, check_size, known_cluster
from meshwright.capture import builder
from meshwright.capture.tracer import LossFunction
from meshwright.cost import optimizer as cost
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.ir.precision import Precision
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.ops.base import OperatorRule, Target
from meshwright.planner.auto import plan_auto
from meshwright.planner.checks import check_strict
from meshwright.planner.explicit import Ask, adapt_plan, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.simulate.faults import Faults

log = logging.getLogger("meshwright")

Rules = Mapping[Target, OperatorRule]


def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    rules: Rules | None = None,
    precision: Precision | None = None,
) -> Graph:
    """The training step of ``model`` on a global batch, as a graph. Computes nothing; meta models are fine.

    ``precision``: of products; parameters stay in float32 (``Layout.precision``).

    Raises:
        CaptureError: the step cannot be traced (data-dependent control flow, for one).
    """
    return builder.capture(model, loss_fn, batch, rules=rules, precision=precision).graph


def plan(
    graph: Graph,
    cluster: Cluster | str | None = None,
    *,
    devices: int | None = None,
    layout: Layout | None = None,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    pipelines: bool = True,
    offload: bool = False,
    strict: bool = False,
    rules: Rules | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """A plan for ``graph`` on ``devices`` ranks of ``cluster`` (a name, a path or a Cluster; default: this machine as
    it was calibrated, else ``cpu-local``).

    ``memory_bytes`` are for each rank (default: what a device of the cluster has). Without a layout the fastest that
    fits them is searched (``planner.auto``); with one they say how large buckets may be. ``optimizer`` says what it
    keeps and moves (``cost.optimizer``), ``clips``, where a layout is searched, whether gradients are clipped.
    ``pipelines=False`` divides operators alone, and makes no stages; ``offload=True`` may put optimizer state on the
    host, where nothing fits otherwise. An operator without a rule runs whole on every rank, and the plan says what that
    costs; ``strict`` refuses it. ``rules`` are those that ``capture`` was given. A search tells ``progress`` what it
    weighs, and ends after about ``seconds`` with the best layout so far, as a note of the plan then says (None: when
    all are weighed).

    Raises:
        LayoutError: the layout does not fit the model, the batch or the ranks; or no layout fits in memory, or was
            found in time.
        ClusterError: the cluster is unknown.
        RuleError: an operator has no rule, under ``strict``; or its rule is not among ``rules``.
    """
    if strict:
        check_strict(graph)
    known = known_cluster(cluster, torch.device("cpu"), devices or 0)
    if layout is None:
        world_size = devices or known.num_devices
        return plan_auto(
            graph, world_size, known, PlanLowering(graph, rules), memory_bytes=memory_bytes, optimizer=optimizer,
            clips=clips, pipelines=pipelines, offload=offload, seconds=seconds, progress=progress,
        )  # fmt: skip
    world_size = devices or (layout.num_ranks if layout.num_ranks > 0 else known.num_devices)
    return plan_layout(
        graph, layout, world_size=world_size, cluster=known,
        ask=Ask(optimizer=optimizer, room_bytes=memory_bytes, lower=PlanLowering(graph, rules)),
    )  # fmt: skip


def simulate(
    graph: Graph,
    cluster: Cluster | str | None,
    plan: Plan,
    *,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    threads: int = 1,
    contention: bool = False,
    faults: Faults | None = None,
    rules: Rules | None = None,
) -> Trace:
    """One training step of ``graph`` under ``plan`` on ``cluster`` (a name, a path or a Cluster; None: this machine),
    as every rank will spend it.

    Args:
        optimizer: what it keeps and moves (``cost.optimizer``).
        clips: whether gradients are clipped.
        threads: of each rank, on a CPU.
        contention: whether transfers that share a link share its rate; without it, closed forms say what they take.
        faults: slow ranks, noise, ranks that die.
        rules: those that ``capture`` was given.

    Raises:
        PlanError: the plan is not of this graph, or its stages have different submeshes.
        ClusterError: the cluster is unknown, or too small.
    """
    plan.check(graph)
    known = known_cluster(cluster, torch.device("cpu"), plan.mesh.world_size)
    return foretell(
        PlanLowering(graph, rules), plan, known, optimizer=optimizer, clips=clips, threads=threads,
        contention=contention, faults=faults,
    ).trace()  # fmt: skip


def choose(
    wanted: Any,
    graph: Graph,
    world_size: int,
    cluster: Cluster | str | None,
    device: torch.device,
    optimizer: OptimizerCost,
    *,
    clips: bool,
    offload: bool = False,
    seconds: float | None = None,
    rules: Rules | None = None,
) -> Plan:
    """The plan that is meant by ``"auto"``, a Layout, a Plan or a path; see ``parallelize``."""
    if isinstance(wanted, Layout) or wanted == "auto":
        layout = wanted if isinstance(wanted, Layout) else None
        if layout is None and cluster is None and world_size > 1 and device.type == "cpu" and calibrated() is None:
            log.warning(
                "this machine was not measured, so its layout is chosen for a generic one: `meshwright calibrate`"
            )
        known = known_cluster(cluster, device, world_size)
        check_size(known, world_size)
        return plan(
            graph, known, devices=world_size, layout=layout, optimizer=optimizer, clips=clips, offload=offload,
            seconds=seconds, rules=rules,
        )  # fmt: skip
    chosen, where = loaded(wanted)
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


def cost_of(factory: OptimizerFactory | None, graph: Graph) -> OptimizerCost:
    """What the optimizer that a function makes of ``graph``'s parameters keeps and moves. It is made over parameters
    without memory. RMSprop and Adagrad move as much as SGD with momentum, LARC as LARS; what is not known, and what
    cannot be made so, counts as AdamW, and the log says so."""
    if factory is None:
        return ADAMW
    shapes = {name: graph.tensors[name].shape for name in graph.parameters}
    try:
        made: Any = factory([(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in shapes.items()])
    except Exception as error:  # noqa: BLE001 - by code that we do not know; where it is wrong, training says so
        log.info("planned as for AdamW: over parameters without memory the optimizer cannot be made: %s", error)
        return ADAMW
    if isinstance(made, torch.optim.SGD) and any(group["momentum"] for group in made.param_groups):
        return cost.MOMENTUM
    found = next((one for kinds, one in _COSTS if isinstance(made, kinds)), None)
    if found is None:
        log.info("planned as for AdamW: what %s keeps and moves is not known", type(made).__name__)
        return ADAMW
    more = sum(any(group.get(option) for group in made.param_groups) for option in _STATES.get(type(made), ()))
    return msgspec.structs.replace(found, states=found.states + more, moved=found.moved + 2 * more)


_COSTS: tuple[tuple[tuple[type[torch.optim.Optimizer], ...], OptimizerCost], ...] = (
    ((torch.optim.AdamW,), ADAMW),
    ((torch.optim.Adam,), cost.ADAM),
    ((optim.LAMB,), cost.LAMB),
    ((optim.LARS, optim.LARC), cost.LARS),
    ((torch.optim.RMSprop, torch.optim.Adagrad), cost.MOMENTUM),
    ((torch.optim.SGD,), cost.SGD),
)
"""The first that an optimizer is one of: AdamW is an Adam."""
_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("amsgrad",),
    torch.optim.Adam: ("amsgrad",),
    torch.optim.RMSprop: ("centered", "momentum"),
}
"""Options for which one more number is kept of every element."""


def loaded(plan: Any) -> tuple[Plan, str]:
    """A plan or a plan file's, and what to call it in errors."""
    return (plan, "plan") if isinstance(plan, Plan) else (files.load(Path(plan), Plan), str(plan))


def precision_of(plan: Any, precision: Precision | None) -> Precision | None:
    """What a plan is to compute in, as ``choose`` takes it: the precision of a plan or a layout, else the one given. A
    LayoutError if both are given, and differ."""
    if plan == "auto":
        return precision
    said = plan.precision if isinstance(plan, Layout) else loaded(plan)[0].precision
    if precision is not None and said != precision and not (said is None and isinstance(plan, Layout)):
        raise LayoutError(
            f"precision={precision!r}, but the plan has {said!r}", where="precision", remedy="give it in one place"
        )
    return said or precision


def check_plan(plan: Any) -> None:
    """A LayoutError if it is nothing that a plan can be told by."""
    if not isinstance(plan, str | os.PathLike | Layout | Plan):
        raise LayoutError(
            f"it is {plan!r}", where="plan", remedy='pass "auto", a mw.Layout, a Plan, or the path of a plan file'
        )
