"""Plans and simulates the run that a RUN.toml describes, without starting processes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import msgspec
import torch
from torch import nn

from meshwright import build
from meshwright.api.machine import known_cluster
from meshwright.api.plans import capture, choose, cost_of, loaded, plan, precision_of, simulate
from meshwright.api.quick import quick_answer_of
from meshwright.api.run_memory import beside_steps
from meshwright.cost.occupancy import Occupancy, box_of, fit_chance, memory_verdict, num_peers, taken_bytes
from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.copies import StateCopies
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Alternative, Plan
from meshwright.ir.program import RankPrograms
from meshwright.ir.run import Run
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.planner import compare
from meshwright.planner.by_sizes import QuickAnswer
from meshwright.planner.candidates import Only
from meshwright.planner.checks import check_strict
from meshwright.planner.compare import SearchComparison, SearchCosts
from meshwright.planner.foretell import foretell
from meshwright.planner.remedy import Change
from meshwright.planner.replicas import choose_rule
from meshwright.runtime import launch
from meshwright.runtime.worlds import World
from meshwright.schedules.replicas import of_replica
from meshwright.simulate.faults import Faults

CPU = torch.device("cpu")


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its prediction, and whether it fits in a rank's memory (``verdict``, with the chance that it does).
    ``constants``: the source of the cluster's constants. ``software``: the name of the software profile. ``programs``:
    the programs of one rank, if a rank was asked for. ``changes``: if the layout may not fit, single changes that would
    make it fit, the cheapest first. ``lost``: why another layout was not chosen, if the caller asked.
    ``copies``: the copies of the state in a rank's memory, which the verdict counts; none if there is no room for
    them. ``carried``: the plan as its file has it, if it was made for another batch or another cluster."""

    plan: Plan
    constants: str
    memory_bytes: float
    verdict: Occupancy
    fit_chance: float
    software: str
    copies: StateCopies = StateCopies()
    programs: RankPrograms | None = None
    changes: tuple[Change, ...] = ()
    lost: Alternative | None = None
    carried: Plan | None = None


def plan_run(
    run: Run,
    ranks: int = 0,
    memory_bytes: float | None = None,
    progress: Callable[[str], None] = lambda what: None,
    program_of: int | None = None,
    why_not: Layout | None = None,
    *,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
    quick: Callable[[QuickAnswer], None] | None = None,
    allow: Sequence[str] = (),
) -> PlannedRun:
    """The plan of a RUN.toml for ``ranks`` ranks (0: the number of ranks in its layout or its cluster).

    ``program_of``: return the programs of this rank too. ``why_not``: also return the reason why this layout was not
    chosen. Each rank has ``memory_bytes`` (default: the memory of a device of the cluster). ``progress`` is called with
    each layout that the search considers. ``fresh``, ``stop`` and ``allow`` are as in ``mw.plan``. Before a search,
    ``quick`` is called with the best layout by the model's sizes, if sizes describe the run (``api.quick``); a search
    that ends early considers this layout too.

    Raises:
        LayoutError: the layout does not fit the model or the batch; or no layout of the search fits in memory.
    """
    graph, chosen, optimizer = planned(
        run, ranks, memory_bytes, progress, fresh=fresh, stop=stop, quick=quick, allow=allow
    )  # fmt: skip
    known = cluster_of(run, CPU, chosen.mesh.world_size)
    carried = loaded(run.layout.file)[0] if run.layout.file else None
    if carried is not None and (carried.batch_size, carried.cluster) == (chosen.batch_size, known.name):
        carried = None
    programs = _programs(graph, chosen, program_of) if program_of is not None else None
    clips = run.train.max_grad_norm > 0
    lower = PlanLowering(graph)
    foretold = foretell(lower, chosen, known, optimizer=optimizer, clips=clips)
    chosen = msgspec.structs.replace(chosen, prediction=foretold.prediction)
    fullest, limit = foretold.fullest(memory_bytes)
    software, kind, peers = known.software, known.device.kind, num_peers(chosen.mesh.sizes, box_of(known))
    # A limit that the user gives is the memory for tensors alone. By default, tensors share the device with its
    # context.
    taken = fullest.peak_bytes if memory_bytes else taken_bytes(fullest.peak_bytes, software, kind, peers)
    deviation = 0.0 if memory_bytes else software.spread.memory
    copies = beside_steps(graph, optimizer, known, chosen.mesh.world_size)
    if memory_verdict(taken + copies.total_bytes, limit, deviation) == "does not fit":
        copies = StateCopies()
    taken += copies.total_bytes
    verdict, chance = memory_verdict(taken, limit, deviation), fit_chance(taken, limit, deviation)
    changes: tuple[Change, ...] = ()
    lost = None
    if verdict != "fits" and not chosen.layout.stage_sizes:
        changes = compare.changes_that_fit(
            graph,
            chosen.layout,
            known,
            PlanLowering,
            memory_bytes=memory_bytes,
            optimizer=optimizer,
            clips=clips,
            graph_of=partial(_graph_of_batch, run) if chosen.layout.replicas == 1 else None,
        )
    if why_not is not None:
        lost = compare.why_not(
            graph, why_not, chosen, known, lower, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips
        )
    return PlannedRun(
        plan=chosen, constants=known.constants, memory_bytes=limit, programs=programs, verdict=verdict,
        fit_chance=chance, software=software.name, copies=copies, changes=changes, lost=lost,
        carried=carried,
    )  # fmt: skip


def searches_of(
    run: Run,
    ranks: int = 0,
    memory_bytes: float | None = None,
    kind: str = "each",
    progress: Callable[[str], None] = lambda what: None,
    *,
    fresh: bool = False,
) -> SearchComparison:
    """Compare the plans of three searches: the first only divides operators, the second only makes stages, and the
    third does both. ``kind`` other than ``each`` selects one of these searches."""
    graph, optimizer, world_size = captured(run, ranks)
    known, clips = cluster_of(run, CPU, world_size), run.train.max_grad_norm > 0
    searches = []
    for only in get_args(Only) if kind == "each" else (kind,):
        try:
            chosen = plan(
                graph, known, devices=world_size, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips,
                only=only, offload=run.layout.offload != "none", codec=run.layout.codec,
                float8=run.layout.float8, seconds=run.layout.seconds, fresh=fresh, progress=progress,
            )  # fmt: skip
        except LayoutError as error:
            searches.append(SearchCosts(only=only, problem=error.problem))
            continue
        searches.append(compare.search_costs(only, chosen, known, PlanLowering(graph), optimizer, clips))
    return SearchComparison(tuple(searches))


def _programs(graph: Graph, plan: Plan, rank: int) -> RankPrograms:
    """The programs of all stages of a rank."""
    place = plan.mesh.coordinates(rank).get("pp", 0)
    programs = PlanLowering(graph)(plan, rank - plan.mesh.stage_ranks(place).start)
    return RankPrograms(rank=rank, programs=tuple(programs[stage] for stage in plan.pipeline.stages_of(place)))


def simulate_run(
    run: Run,
    ranks: int = 0,
    *,
    contention: bool = False,
    slow: dict[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Simulate one step of a run file; see ``simulate``."""
    graph, chosen, optimizer = planned(run, ranks)
    return simulate(
        graph,
        run.layout.cluster or None,
        chosen,
        optimizer=optimizer,
        clips=run.train.max_grad_norm > 0,
        contention=contention,
        faults=Faults(slow=slow or {}, jitter=jitter, seed=seed),
    )


def planned(
    run: Run,
    ranks: int,
    memory_bytes: float | None = None,
    progress: Callable[[str], None] = lambda what: None,
    *,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
    quick: Callable[[QuickAnswer], None] | None = None,
    allow: Sequence[str] = (),
) -> tuple[Graph, Plan, OptimizerCost]:
    """The graph of a run, its plan, and the cost of its optimizer. The arguments are those of ``plan_run``."""
    module, guess = None, None
    if quick is not None and run.layout.searched and not allow:
        module, count = build.model(run), _num_ranks(run, ranks)
        batch, known = build.example_batch(run), cluster_of(run, CPU, count)
        if (answer := quick_answer_of(run, module, batch, known, count, memory_bytes)) is not None:
            guess = answer.layout
            quick(answer)
    graph, optimizer, world_size = captured(run, ranks, module)
    cluster, clips = run.layout.cluster or None, run.train.max_grad_norm > 0
    if allow and not run.layout.searched:
        remedy = "leave out dp, tp, ..., and set layout.plan = auto"
        raise LayoutError("a layout is given, so there is no rule to choose", where="allow", remedy=remedy)
    if not run.layout.searched:
        chosen = choose(run.layout.chosen(), graph, world_size, cluster, CPU, optimizer, clips=clips)
        return graph, chosen, optimizer
    known = known_cluster(cluster, CPU, world_size)

    def search(graph: Graph, devices: int) -> Plan:
        return plan(
            graph, known, devices=devices, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips,
            offload=run.layout.offload != "none", codec=run.layout.codec, float8=run.layout.float8,
            seconds=run.layout.seconds, fresh=fresh, copies=True, guess=guess, progress=progress,
            stop=stop,
        )  # fmt: skip

    if allow:
        return *choose_rule(graph, world_size, known, allow, partial(_graph, run), search, optimizer), optimizer
    return graph, search(graph, world_size), optimizer


def captured(run: Run, ranks: int, model: nn.Module | None = None) -> tuple[Graph, OptimizerCost, int]:
    """The graph of a run, the cost of its optimizer, and the number of ranks. If each replica is a process group of its
    own, these are the graph and the number of ranks of one replica. ``model``: the model of the run, if it is already
    built."""
    world_size = _num_ranks(run, ranks)
    replicas = 1
    if not run.layout.searched:
        replica_layout, each = of_replica(layout_of(run), world_size)
        replicas, world_size = replica_layout.replicas, world_size if run.layout.file else each
    graph = _graph(run, replicas, model)
    if run.layout.strict:
        check_strict(graph)
    return graph, cost_of(build.optimizer(run), graph), world_size


def _graph_of_batch(run: Run, batch_size: int) -> Graph:
    """The graph of a run with another global batch."""
    return _graph(msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, batch_size=batch_size)), 1)


def _num_ranks(run: Run, ranks: int) -> int:
    """``ranks``, or the number of ranks of the run's layout or cluster."""
    return ranks or run.num_ranks(cluster_of(run, CPU).num_devices if run.layout.cluster else launch.num_cores())


def _graph(run: Run, replicas: int, model: nn.Module | None = None) -> Graph:
    """The graph of one of several replicas, with this replica's part of the batch."""
    return capture(
        model or build.model(run),
        build.loss_function(run),
        World(num_replicas=replicas).part(build.example_batch(run)),
        precision=precision_of(run.layout.chosen(), run.layout.precision),
        opaque=build.opaque_choice(run),
    )


def layout_of(run: Run) -> Layout:
    """The layout of a run, from its plan file or its table. If the planner searches, it is the default layout."""
    if run.layout.file:
        return loaded(run.layout.file)[0].layout
    chosen = run.layout.chosen()
    return chosen if isinstance(chosen, Layout) else Layout()


def cluster_of(run: Run, device: torch.device, num_ranks: int = 0) -> Cluster:
    """The cluster that a run names; default: this machine."""
    return known_cluster(run.layout.cluster or None, device, num_ranks)
