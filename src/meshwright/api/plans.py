"""Captures models as graphs, makes their plans, and simulates the plans."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright import optim
from meshwright.api import plan_cache
from meshwright.api.machine import calibrated, check_size, known_cluster
from meshwright.api.opaque_costs import with_costs
from meshwright.api.plan_cache import SearchRequest
from meshwright.api.run_memory import beside_steps, leaving_room
from meshwright.api.times import times_of
from meshwright.capture import opaque_capture
from meshwright.capture.opaque_capture import OpaqueChoice
from meshwright.capture.tracer import LossFunction
from meshwright.cost import optimizer as cost
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError, refuse
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.plan import Plan
from meshwright.ir.plan_check import check_fits
from meshwright.ir.precision import Precision
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.ops.base import OperatorRule, Target
from meshwright.planner.auto import plan_auto
from meshwright.planner.candidates import Only
from meshwright.planner.checks import batch_problems, check_strict
from meshwright.planner.explicit import Ask, adapt_plan, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.opaque_notes import with_region_notes
from meshwright.planner.replicas import choose_rule
from meshwright.planner.time_limit import TimeLimit
from meshwright.runtime.optimizer import OptimizerFactory, takes_fused
from meshwright.schedules.replicas import all_ranks, num_ranks, of_replica
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
    opaque: OpaqueChoice = "",
) -> Graph:
    """The training step of ``model`` on a global batch, as a graph. No tensor is computed, unless the
    step has opaque regions, and models may be on the meta device.

    ``precision``: the precision of matrix products. Parameters stay in float32 (see ``Layout.precision``).
    ``opaque="auto"``: submodules that cannot be captured are one operator each (see ``opaque``).

    Raises:
        CaptureError: the step cannot be traced (for example because of data-dependent control flow).
    """
    return with_costs(opaque_capture.capture(model, loss_fn, batch, rules=rules, precision=precision, opaque=opaque))


def plan(
    graph: Graph,
    cluster: Cluster | str | None = None,
    *,
    devices: int | None = None,
    layout: Layout | None = None,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    only: Only = "both",
    offload: bool = False,
    codec: str = "",
    float8: Float8Scaling = "",
    strict: bool = False,
    allow: Sequence[str] = (),
    graph_of: Callable[[int], Graph] | None = None,
    rules: Rules | None = None,
    seconds: float | None = None,
    fresh: bool = False,
    copies: bool = False,
    guess: Layout | None = None,
    progress: Callable[[str], None] = lambda what: None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """A plan for ``graph`` on ``devices`` ranks of ``cluster`` (a name, a path or a Cluster; default: this machine as
    it was calibrated, else ``cpu-local``).

    ``memory_bytes`` is the memory of each rank (default: the memory of a device of the cluster). Without ``layout``,
    the planner searches for the fastest layout that fits in this memory (``planner.auto``). With ``layout``, the memory
    limits the size of buckets. If the layout has replicas, ``devices`` counts the ranks of all replicas, and ``graph``
    is captured with one replica's part of the batch. ``optimizer`` gives the state that the optimizer keeps and the
    memory that it moves (``cost.optimizer``). ``clips`` says whether gradients are clipped. ``only="intra"`` divides
    operators and makes no stages; ``only="inter"`` makes stages of one rank each. ``offload=True`` lets the search put
    optimizer state on the host if no layout fits otherwise. ``codec="auto"`` lets the search compress gradients with
    the best codecs, which may be lossy (``docs/how-to/compress-gradients.md``). ``"none"`` rules codecs out. ``float8``
    allows a search to multiply matrices in float8 where this is faster (``Layout.float8``). An operator without a rule
    runs whole on every rank, and the plan says what that costs; ``strict`` refuses it. ``rules`` must be the rules that
    ``capture`` was given. A search calls ``progress`` with each layout that it considers, and with the best layout so
    far. After about ``seconds``, or once ``stop`` returns true, the search ends with the best layout so far, and a note
    in the plan says so. ``seconds=None``: no time limit.

    ``allow`` names consistency rules (``["local(16)", "diloco(50)"]``) under which a search may join replicas. The
    search compares the best synchronous plan with replicas under each of these rules, by simulated time for an equal
    number of samples. A note in the plan gives the expected result. If ``local`` or ``diloco`` is given without a
    number of steps, the search takes the smallest number of steps between exchanges at which exchanges cost little.
    ``graph_of(count)`` must then return the captured graph of one of ``count`` replicas, with its part of the batch.
    The resulting plan is for one replica.

    ``copies``: on a CPU, a search leaves memory for the copies of the state that ``meshwright train`` makes beside its
    steps, if it can (``cost.copies``). A note in the plan says how much. ``guess``: a layout that a search considers
    too if it ends early.

    The plan of a search that ran to its end is kept in the user's cache. An equal request gets the kept plan without a
    search, and the log says so. The costs of the plan are computed again. ``fresh`` forces a new search. With
    ``rules``, no plan is kept, because the code of rules may change.

    Raises:
        LayoutError: the layout does not fit the model, the batch or the ranks; or no layout fits in memory, or none was
            found in time.
        ClusterError: the cluster is unknown.
        RuleError: an operator has no rule, under ``strict``; or its rule is not among ``rules``.
    """
    if strict:
        check_strict(graph)
    _check_numbers(devices, memory_bytes)
    known = known_cluster(cluster, torch.device("cpu"), devices or 0)
    if allow:
        if layout is not None or graph_of is None:
            problem = "a layout is given too" if layout is not None else "there is no graph of a replica"
            remedy = "allow rules only where the planner searches, and give graph_of"
            raise LayoutError(problem, where="allow", remedy=remedy)

        def search(graph: Graph, devices: int) -> Plan:
            return plan(
                graph, known, devices=devices, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips, only=only,
                offload=offload, codec=codec, float8=float8, rules=rules, seconds=seconds, fresh=fresh, copies=copies,
                progress=progress, stop=stop,
            )  # fmt: skip

        return choose_rule(graph, devices or known.num_devices, known, allow, graph_of, search, optimizer)[1]
    if layout is None and copies:
        count = devices or known.num_devices
        held = beside_steps(graph, optimizer, known, count)

        def within(memory_bytes: float | None) -> Plan:
            return plan(
                graph, known, devices=devices, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips, only=only,
                offload=offload, codec=codec, float8=float8, rules=rules, seconds=seconds, fresh=fresh,
                guess=guess, progress=progress, stop=stop,
            )  # fmt: skip

        return leaving_room(within, held, known, count, memory_bytes)
    if layout is None:
        clock = TimeLimit(seconds, progress, stop)
        request = SearchRequest(
            graph=graph, cluster=known, devices=devices or known.num_devices, memory_bytes=memory_bytes,
            optimizer=optimizer, clips=clips, only=only, offload=offload, codec=codec,
            float8=float8,
        )  # fmt: skip
        check_size(known, request.devices)
        if not (fresh or rules) and (kept := plan_cache.find(request)) is not None:
            return with_region_notes(kept, graph, known, PlanLowering(graph), optimizer, clips)
        planned = plan_auto(
            graph, request.devices, known, lambda graph: PlanLowering(graph, rules), memory_bytes=memory_bytes,
            optimizer=optimizer, clips=clips, only=only, offload=offload, codec=codec, float8=float8, clock=clock,
            guess=guess,
        )  # fmt: skip
        if not rules:
            plan_cache.keep(request, planned)
        return with_region_notes(planned, graph, known, PlanLowering(graph, rules), optimizer, clips)
    check_searched(layout, codec=codec, float8=float8)
    return plan_by_layout(
        graph, layout, known, PlanLowering(graph, rules), devices=devices, memory_bytes=memory_bytes,
        optimizer=optimizer, clips=clips,
    )  # fmt: skip


def plan_by_layout(
    graph: Graph,
    layout: Layout,
    cluster: Cluster,
    lower: PlanLowering,
    *,
    devices: int | None = None,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
) -> Plan:
    """The plan for ``layout``: what ``plan`` returns if a layout is given, with the same errors. Plans of one graph may
    share ``lower``, which keeps the programs of operators: most of the time of a plan in which operators are split."""
    refuse(LayoutError, layout.contradictions())
    layout, world_size = of_replica(
        layout, devices or (num_ranks(layout) if layout.num_ranks > 0 else cluster.num_devices)
    )
    ask = Ask(optimizer=optimizer, room_bytes=memory_bytes, lower=lower, times=times_of(cluster, world_size))
    planned = plan_layout(graph, layout, world_size=world_size, cluster=cluster, ask=ask)
    return with_region_notes(planned, graph, cluster, lower, optimizer, clips)


def check_searched(plan: object, **options: str) -> None:
    """Raise a LayoutError if an option of the search is not empty although ``plan`` is not ``"auto"``."""
    for name, value in options.items():
        if value and plan != "auto":
            remedy = f"write Layout({name}={value!r}, ...), or leave it out"
            raise LayoutError(f"{name}={value!r} together with a plan or layout", where=name, remedy=remedy)


def _check_numbers(devices: Any, memory_bytes: Any) -> None:
    """Raise a LayoutError unless ``devices`` and ``memory_bytes`` are None or numbers above 0."""
    for name, value in (("devices", devices), ("memory_bytes", memory_bytes)):
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise LayoutError(f"{value!r} is not above 0", where=name, remedy="give a number above 0, or leave it out")


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
    """Simulate one training step of ``graph`` under ``plan`` on ``cluster`` (a name, a path or a Cluster; None: this
    machine). Return the predicted trace of all ranks.

    Args:
        optimizer: the state that the optimizer keeps and the memory that it moves (``cost.optimizer``).
        clips: whether gradients are clipped.
        threads: number of threads of each rank, on a CPU.
        contention: whether transfers that share a link share its rate. Without contention, closed forms give the times
            of transfers.
        faults: slow ranks, noise, ranks that die.
        rules: the rules that ``capture`` was given.

    Raises:
        PlanError: the plan is not of this graph.
        ClusterError: the cluster is unknown, or too small.
    """
    check_fits(plan, graph)
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
    codec: str = "",
    float8: Float8Scaling = "",
    seconds: float | None = None,
    rules: Rules | None = None,
    copies: bool = False,
) -> Plan:
    """Make or load the plan for ``wanted``: ``"auto"``, a Layout, a Plan or a path; see ``parallelize``."""
    if isinstance(wanted, Layout) or wanted == "auto":
        layout = wanted if isinstance(wanted, Layout) else None
        if layout is None and cluster is None and world_size > 1 and device.type == "cpu" and calibrated() is None:
            log.warning(
                "this machine was not measured, so its layout is chosen for a generic one: `meshwright calibrate`"
            )
        known = known_cluster(cluster, device, world_size)
        check_size(known, world_size)
        return plan(
            graph, known, devices=all_ranks(layout, world_size), layout=layout, optimizer=optimizer, clips=clips,
            offload=offload, codec=codec, float8=float8, seconds=seconds, rules=rules, copies=copies,
        )  # fmt: skip
    chosen, where = loaded(wanted)
    if chosen.batch_size != graph.batch_size and not chosen.layout.stage_sizes:
        refuse(LayoutError, batch_problems(graph, chosen.layout, runs_forward=False), where)
    check_fits(chosen, graph, where)
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
    """The state that the optimizer made by ``factory`` keeps, and the memory that it moves in a step. To find out, the
    function makes the optimizer over parameters with the shapes of ``graph`` but without memory. RMSprop and Adagrad
    count as SGD with momentum, LARC counts as LARS. An unknown optimizer, or an optimizer that needs real values,
    counts as AdamW, and the log says so. ``divides`` holds for the known optimizers, but not for subclasses of them."""
    if factory is None:
        return ADAMW
    shapes = {name: graph.tensors[name].shape for name in graph.parameters}
    try:
        optimizer: Any = factory(
            [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in shapes.items()]
        )
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; training shows the error again
        log.info("planned as for AdamW: over parameters without memory the optimizer cannot be made: %s", error)
        return _UNKNOWN
    if isinstance(optimizer, optim.MasterWeights):
        inner = _cost_of_kind(optimizer.inner)
        # in units of the parameter's bytes, of which a float32 state has twice as many
        return msgspec.structs.replace(inner, states=2 * (inner.states + 1), moved=2 * (inner.moved + 2), fused_moved=0)
    return _cost_of_kind(optimizer)


def _cost_of_kind(optimizer: torch.optim.Optimizer) -> OptimizerCost:
    base = next((entry for kinds, entry in _COSTS if isinstance(optimizer, kinds)), None)
    if base is None:
        log.info("planned as for AdamW: the state and the memory traffic of %s are unknown", type(optimizer).__name__)
        return _UNKNOWN
    if base is cost.SGD and any(group["momentum"] for group in optimizer.param_groups):
        base = cost.MOMENTUM
    options = {option for kind, options in _STATES.items() if isinstance(optimizer, kind) for option in options}
    more = sum(any(group.get(option) for group in optimizer.param_groups) for option in options)
    own = all(type(optimizer) not in kinds for kinds, _ in _COSTS)  # a subclass may read whole tensors
    fused = base.fused_moved + 2 * more if base.fused_moved and takes_fused(optimizer) else 0
    return msgspec.structs.replace(
        base, states=base.states + more, moved=base.moved + 2 * more, divides=not own, fused_moved=fused
    )


_UNKNOWN = msgspec.structs.replace(ADAMW, divides=False, fused_moved=0)
_COSTS: tuple[tuple[tuple[type[torch.optim.Optimizer], ...], OptimizerCost], ...] = (
    ((torch.optim.AdamW,), ADAMW),
    ((torch.optim.Adam,), cost.ADAM),
    ((optim.OneBitAdam, optim.ZeroOneAdam), ADAMW),
    ((optim.LAMB,), cost.LAMB),
    ((optim.LARS, optim.LARC), cost.LARS),
    ((torch.optim.RMSprop, torch.optim.Adagrad), cost.RMSPROP),
    ((torch.optim.SGD,), cost.SGD),
)
"""Pairs (optimizer classes, cost). The first match counts; AdamW comes first, because it is a subclass of Adam."""
_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("amsgrad",),
    torch.optim.RMSprop: ("centered", "momentum"),
}
"""Maps an optimizer class (and its subclasses: AdamW is a subclass of Adam) to options. For each of these options that
is set, the optimizer keeps another number per element."""


def loaded(plan: Any) -> tuple[Plan, str]:
    """Return a plan and its name for error messages. If ``plan`` is a path, the plan is read from that file."""
    return (plan, "plan") if isinstance(plan, Plan) else (files.load(Path(plan), Plan), str(plan))


def precision_of(plan: Any, precision: Precision | None) -> Precision | None:
    """The precision that ``plan`` (a Plan, a Layout or a path) asks for, otherwise ``precision``. Raise a LayoutError
    if both are given and differ."""
    if plan == "auto":
        return precision
    planned = plan.precision if isinstance(plan, Layout) else loaded(plan)[0].precision
    if precision is not None and planned != precision and not (planned is None and isinstance(plan, Layout)):
        raise LayoutError(
            f"precision={precision!r}, but the plan has {planned!r}", where="precision", remedy="give it in one place"
        )
    return planned or precision


def check_plan(plan: Any) -> None:
    """Raise a LayoutError unless ``plan`` is a string, a path, a Layout or a Plan."""
    if not isinstance(plan, str | os.PathLike | Layout | Plan):
        raise LayoutError(
            f"it is {plan!r}", where="plan", remedy='pass "auto", a mw.Layout, a Plan, or the path of a plan file'
        )
