"""Make the ledger of a run from the traces of its predicted step and of its measured steps."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from meshwright.errors import Problem, TraceError, refuse
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec_use import CodecUse
from meshwright.ir.copies import MemoryPart
from meshwright.ir.interval import step_deviation
from meshwright.ir.layout_text import layout_text
from meshwright.ir.ledger import Ledger, RankEntry
from meshwright.ir.plan import Plan
from meshwright.ir.summary import RankTimes, exposed_share, summarize
from meshwright.ir.trace import Trace


def make_ledger(
    plan: Plan, predicted: Trace, measured: Sequence[Trace], cluster: Cluster, host_share: float = 0.0,
    taken: Mapping[int, tuple[int, int]] | None = None, peers: int = 0, codecs: tuple[CodecUse, ...] = (),
    parts: Mapping[int, tuple[MemoryPart, ...]] | None = None,
) -> Ledger:  # fmt: skip
    """The ledger of a run of ``plan`` on ``cluster``, from a trace of the predicted step and of each measured step.
    ``host_share`` is the fraction of the predicted step in which the device waits for its host. ``taken`` maps a rank
    to the bytes that the allocator took and the bytes in use on the device (None: unknown). ``peers`` has the same
    meaning as in ``Ledger``. ``parts`` maps a rank to the parts of its peaks that are no tensors of the step.

    Every trace holds all ranks of the plan's mesh. Measured traces must contain only the memory of the model, as
    predicted traces do (see ``Trace.above``).

    Raises:
        TraceError: no step was measured, or a trace belongs to another plan, has a wrong source or lacks ranks.
    """
    if not measured:
        raise TraceError("no step was measured", where="ledger", remedy="let the run make a step with a recorder")
    traces = [("predicted", predicted), *((f"measured step {index}", traced) for index, traced in enumerate(measured))]
    for name, trace in traces:
        check_belongs(trace, plan.digest, name)
        refuse(TraceError, _problems(trace, name, plan.mesh.world_size))
    step_times = [{times.rank: times for times in summarize(trace)} for trace in measured]
    foretold = sorted(summarize(predicted), key=lambda times: times.rank)
    levels = _levels(cluster, plan.mesh.world_size)
    betas = cluster.betas
    held = {sample.rank: sample.bytes for sample in sorted(predicted.memory, key=lambda sample: -sample.time_s)}
    stages = {rank: plan.mesh.coordinates(rank).get("pp", 0) for rank in range(plan.mesh.world_size)}
    return Ledger(
        model=plan.model,
        layout=layout_text(plan.layout),
        cluster=cluster.name,
        constants=cluster.constants,
        software=cluster.software.name,
        deviation=step_deviation(cluster.software.spread, exposed_share(foretold), host_share),
        peers=peers,
        memory_deviation=cluster.software.spread.memory,
        pace=cluster.software.pace,
        heap=cluster.software.heap if cluster.device.kind == "cpu" else 0.0,
        beta_s_per_byte=tuple(betas[level] for level in levels),
        plan=plan.digest,
        levels=levels,
        predicted_by=predicted.source,
        measured_by=measured[0].source,
        num_steps=len(measured),
        codecs=codecs,
        ranks=tuple(
            RankEntry(
                rank=times.rank,
                stage=stages[times.rank],
                predicted=times,
                measured=_median([step[times.rank] for step in step_times]),
                held_bytes=held.get(times.rank, 0),
                reserved_bytes=(taken or {}).get(times.rank, (0, 0))[0],
                device_bytes=(taken or {}).get(times.rank, (0, 0))[1],
                parts=(parts or {}).get(times.rank, ()),
            )
            for times in foretold
        ),
    )


def check_belongs(trace: Trace, digest: str, where: str) -> None:
    """Check that a trace belongs to the plan with this digest. ``where`` is the trace's name or file.

    Raises:
        TraceError: the trace names no plan, or another plan.
    """
    if trace.plan != digest:
        origin = f"of plan {trace.plan}" if trace.plan else "of no plan"
        raise TraceError(
            f"the trace is {origin}, the run's plan is {digest}", where=where, remedy="take the traces of this run"
        )


def _problems(trace: Trace, name: str, world_size: int) -> Iterator[Problem]:
    sources = ("simulated", "emulated") if name == "predicted" else ("measured", "emulated")
    if trace.source not in sources:
        yield name, f"the trace is {trace.source}", f"one that is {' or '.join(sources)} belongs there"
    seen = sorted({span.rank for span in trace.spans})
    if seen != list(range(world_size)):
        shown = ", ".join(map(str, seen[:8])) or "none"
        problem = f"the trace has {len(seen)} ranks ({shown}), the plan {world_size}"
        yield name, problem, "take a trace of all ranks"
    if not trace.duration_s:
        yield name, "the step takes no time", "take the trace of a step that was made"


def _levels(cluster: Cluster, world_size: int) -> tuple[str, ...]:
    """The names of the levels that join ranks 0 to ``world_size`` - 1, innermost first."""
    if world_size == 1 or cluster.num_devices == 1:
        return ()
    last = min(world_size, cluster.num_devices) - 1
    crossed = {cluster.level_of(0, rank).name for rank in range(1, last + 1)}
    return tuple(name for name in reversed(cluster.level_names) if name in crossed)


def _median(steps: Sequence[RankTimes]) -> RankTimes:
    """The median over the steps of one rank, taken separately for each field."""
    fields = [field for field in RankTimes.__struct_fields__ if field not in ("rank", "peak_bytes")]
    medians = {field: statistics.median(getattr(step, field) for step in steps) for field in fields}
    peak_bytes = round(statistics.median(step.peak_bytes for step in steps))
    return RankTimes(rank=steps[0].rank, peak_bytes=peak_bytes, **medians)
