"""What a plan will do: its schedule played with its work, and the memory of every pipeline rank."""

import msgspec

from meshwright.cost.occupancy import RankMemory, peak_memory
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.cost.program import step_work
from meshwright.cost.work import Work
from meshwright.errors import PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Plan, Prediction
from meshwright.ir.program import Lower
from meshwright.ir.trace import Trace
from meshwright.schedules.pipeline import schedule_of
from meshwright.simulate.engine import Played, play
from meshwright.simulate.faults import Faults


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """The step of the plan ``digest`` before it is run; ``memory`` is by pipeline rank."""

    digest: str
    work: Work
    played: Played
    memory: tuple[RankMemory, ...]

    @property
    def peak(self) -> RankMemory:
        """The largest of all ranks."""
        return max(self.memory, key=lambda one: one.peak_bytes)

    def trace(self) -> Trace:
        """What every rank will do, and hold."""
        return msgspec.structs.replace(self.played.trace(), plan=self.digest)

    @property
    def prediction(self) -> Prediction:
        """In short."""
        return Prediction(step_s=self.played.step_s, peak_memory_bytes=self.peak.peak_bytes)


def foretell(
    lower: Lower,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    threads: int = 1,
    contention: bool = False,
    faults: Faults | None = None,
    work: Work | None = None,
) -> Foretold:
    """Lower ``plan``, and play one training step of it on ``cluster``, whose devices have ``threads`` threads.

    ``work``: where it is known already, from a plan that differs in its schedule only.

    Raises:
        PlanError: stages of different submeshes, which are not simulated.
        ClusterError: the cluster is too small.
    """
    if plan.uneven:
        raise PlanError(
            "stages of different submeshes are not simulated", where="plan: stages[].axes",
            remedy="give all stages the same sizes of dp and tp",
        )  # fmt: skip
    done = work or step_work(lower(plan), plan, cluster, optimizer=optimizer, clips=clips, threads=threads)
    schedule = schedule_of(plan)
    overlap = contention or cluster.device.kind != "cpu"  # CPU ranks copy and add themselves
    played = play(schedule, done, plan.mesh, cluster, overlap=overlap, contention=contention, faults=faults)
    return Foretold(digest=plan.digest, work=done, played=played, memory=peak_memory(done, schedule))
