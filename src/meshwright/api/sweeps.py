"""Plans the run that a RUN.toml describes for several numbers of devices, or several clusters."""

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from meshwright.api.machine import known_cluster
from meshwright.api.planned_runs import CPU, captured
from meshwright.api.plans import plan
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.layout_text import layout_text
from meshwright.ir.run import Run
from meshwright.lower.plans import PlanLowering
from meshwright.planner.data_limits import DataLimit, data_limits


class PlanSize(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a sweep: a number of devices of a cluster, and the plan for it.

    ``efficiency`` is the plan's samples per second and device, divided by those of the first plan of the sweep.
    ``search_s`` is the time of the search in seconds, or the time to read the plan from the cache. Without a plan,
    ``problem`` gives the reason, and ``remedy`` a change that would help."""

    cluster: str
    devices: int
    batch: int
    layout: str = ""
    step_s: float = 0.0
    samples_per_s: float = 0.0
    efficiency: float = 0.0
    peak_memory_bytes: int = 0
    search_s: float = 0.0
    limits: tuple[DataLimit, ...] = ()
    problem: str = ""
    remedy: str = ""


def sweep_run(
    run: Run,
    sizes: Sequence[tuple[str, int]],
    memory_bytes: float | None = None,
    *,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[PlanSize]:
    """Search a plan for each pair (cluster, number of devices), and yield it as soon as the search ends. The model is
    captured once. An empty name means this machine; the number 0 means all devices of a cluster.

    The batch is the batch of the run, so that more devices share the same work (strong scaling).

    Raises:
        LayoutError: the run sets a layout, so that there is nothing to search for.
    """
    if not msgspec.structs.replace(run.layout, plan=run.layout.plan or "auto").searched:
        raise LayoutError(
            "a layout is given, but each row of a sweep is searched for", where="layout",
            remedy="leave out dp, tp, ... and plan; precision, offload, float8, seconds and codec=auto may stay",
        )  # fmt: skip
    graph, optimizer, _ = captured(run, 1)
    clips, first = run.train.max_grad_norm > 0, 0.0
    for name, wanted in sizes:
        row = PlanSize(cluster=name, devices=wanted, batch=graph.batch_size)
        started = time.perf_counter()
        try:
            known = known_cluster(name or None, CPU, wanted)
            row = msgspec.structs.replace(row, cluster=known.name, devices=wanted or known.num_devices)
            plan_found = plan(
                graph, known, devices=row.devices, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips,
                offload=run.layout.offload != "none", codec=run.layout.codec, float8=run.layout.float8,
                seconds=run.layout.seconds, fresh=fresh, progress=progress,
            )  # fmt: skip
        except (LayoutError, ClusterError) as error:
            yield msgspec.structs.replace(
                row, search_s=time.perf_counter() - started, problem=error.problem, remedy=error.remedy
            )
            continue
        search_s = time.perf_counter() - started
        progress("what limits data parallelism")
        limits = data_limits(
            graph, plan_found, known, PlanLowering, memory_bytes=memory_bytes, optimizer=optimizer, clips=clips
        )
        assert plan_found.prediction is not None, "a search predicts what it chooses"
        rate = graph.batch_size / plan_found.prediction.step_s
        first = first or rate / row.devices
        yield msgspec.structs.replace(
            row, layout=layout_text(plan_found.layout), step_s=plan_found.prediction.step_s, samples_per_s=rate,
            efficiency=rate / row.devices / first, peak_memory_bytes=plan_found.prediction.peak_memory_bytes,
            search_s=search_s, limits=limits,
        )  # fmt: skip
