"""Choose how many buckets ahead parameters are gathered, and whether phases are launched as graphs of kernels.

Both are compared by simulating the step, and both cost memory: gathered buckets that wait for their use, and the memory
of graphs. Only devices that run behind their host have graphs and collectives on streams of their own.
"""

from collections.abc import Mapping

import msgspec

from meshwright.cost.graphs import moving_part
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Note, Plan
from meshwright.ir.program import Lower, Program
from meshwright.planner.bucket_size import with_notes
from meshwright.planner.foretell import Foretold, foretell
from meshwright.schedules.pipeline import schedule_of

DEPTHS = (0, 1, 2, 4, 8)
"""The numbers of buckets ahead that are compared."""
USUAL = 1
ALIKE = 0.005
"""Steps count as equally fast if their times differ by less than this fraction. The number nearest to ``USUAL`` is then
taken."""
WORTH = 0.03
"""Graphs are taken if they shorten the step by at least this fraction: they take memory, hide the phases of a step from
traces, and the first two steps are slower."""


def look_ahead(lower: Lower, plan: Plan, cluster: Cluster, optimizer: OptimizerCost, memory_bytes: float) -> Plan:
    """Return ``plan`` with the best number of buckets ahead, and with graphs if they make the step faster. The peak
    memory of a rank stays within ``memory_bytes``, or within that of the given plan if this one needs more."""
    if cluster.device.kind == "cpu":
        return plan
    choice = _Choice(lower, cluster, optimizer, memory_bytes)
    return choice.with_graphs(*choice.with_depth(plan))


def with_graphs(lower: Lower, plan: Plan, cluster: Cluster, optimizer: OptimizerCost, memory_bytes: float) -> Plan:
    """Return ``plan`` with graphs if they make the step faster, within the memory of ``look_ahead``."""
    if cluster.device.kind == "cpu":
        return plan
    return _Choice(lower, cluster, optimizer, memory_bytes).with_graphs(plan, None)


def follow_ahead(plan: Plan, base: Plan, *, trains: bool) -> Plan:
    """``plan``, of another capture of the same model, with the choices of ``base``. An evaluation has no graphs."""
    return msgspec.structs.replace(plan, prefetch=base.prefetch, graphs=base.graphs and trains)


class _Choice:
    def __init__(self, lower: Lower, cluster: Cluster, optimizer: OptimizerCost, memory_bytes: float) -> None:
        self.lower, self.cluster, self.optimizer, self.memory_bytes = lower, cluster, optimizer, memory_bytes

    def with_depth(self, plan: Plan) -> tuple[Plan, Foretold | None]:
        """The plan with the number of buckets ahead that makes the step fastest, and its simulated step, if there was
        a choice."""
        if len(plan.gathers) < 2:
            return plan, None
        depths = [depth for depth in DEPTHS if depth <= max(USUAL, len(plan.gathers))]
        plans = {depth: msgspec.structs.replace(plan, prefetch=depth) for depth in depths}
        foretold = {
            depth: self._foretold(each, programs)
            for (depth, each), programs in zip(plans.items(), self.lower.variants([*plans.values()]), strict=True)
        }
        limit = max(self.memory_bytes, min(each.peak.peak_bytes for each in foretold.values()))
        fitting = {depth: each.played.step_s for depth, each in foretold.items() if each.peak.peak_bytes <= limit}
        best_s = min(fitting.values())
        alike = [depth for depth, step_s in fitting.items() if step_s <= (1 + ALIKE) * best_s]
        depth = min(alike, key=lambda depth: (abs(depth - USUAL), depth))
        return with_notes(plans[depth], [_depth_note(depth, foretold)]), foretold[depth]

    def with_graphs(self, plan: Plan, without: Foretold | None) -> Plan:
        """The plan with graphs, if they are possible and worth their memory. ``without`` is its simulated step, if it
        is known."""
        if not self.cluster.software.graphs:
            return plan
        without = without or self._foretold(plan, self.lower(plan))
        if without.host_share < WORTH:
            return plan
        other = msgspec.structs.replace(plan, graphs=True)
        (programs,) = self.lower.variants([other])
        reason = self._impossible(plan, programs)
        if reason:
            return with_notes(plan, [Note(module="launches", split="no graphs", reason=reason)])
        captured = self._foretold(other, programs)
        times = (
            f"a step takes {captured.played.step_s * 1e3:.3g} ms, without graphs {without.played.step_s * 1e3:.3g} ms"
        )
        more = (captured.peak.peak_bytes - without.peak.peak_bytes) / 2**20
        limit = max(self.memory_bytes, without.peak.peak_bytes)
        if captured.peak.peak_bytes > limit:
            reason = f"they would take {more:,.0f} MiB more than fits; {times}"
        elif captured.played.step_s > (1 - WORTH) * without.played.step_s:
            reason = f"they save too little: {times}"
        if reason:
            return with_notes(plan, [Note(module="launches", split="no graphs", reason=reason)])
        note = Note(module="launches", split="a graph for each phase", reason=f"{times}; {more:+,.1f} MiB")
        return with_notes(other, [note])

    @staticmethod
    def _impossible(plan: Plan, programs: tuple[Program, ...]) -> str:
        schedule = schedule_of(plan)
        if schedule.in_flight:
            return "the order of micro-batches is decided while they run"
        return moving_part(programs, {action.kind.value for rank in schedule.ranks for action in rank.actions})

    def _foretold(self, plan: Plan, programs: tuple[Program, ...]) -> Foretold:
        work = step_work(programs, plan, self.cluster, optimizer=self.optimizer)
        return foretell(self.lower, plan, self.cluster, optimizer=self.optimizer, work=work)


def _depth_note(depth: int, foretold: Mapping[int, Foretold]) -> Note:
    words = [
        f"{other} ahead {each.played.step_s * 1e3:.4g} ms and {each.peak.peak_bytes / 2**30:.3g} GiB"
        for other, each in foretold.items() if other != depth
    ]  # fmt: skip
    own = foretold[depth]
    reason = f"a step takes {own.played.step_s * 1e3:.4g} ms, the peak is {own.peak.peak_bytes / 2**30:.3g} GiB"
    return Note(module="parameters", split=f"gathered {depth} ahead", reason="; ".join((reason, *words)))
