"""Does a message-driven pipeline bridge jitter, as simulated? p = 4, m = 16. `make bench-message-driven`.

Every rank is a process with the executor, the channels and the schedule of training; its stage's functions sleep for
times that jitter draws, so that 4 ranks run on 2 cores. Schedules take turns and meet the same draws. A busy machine
wakes sleepers late: all schedules then take longer than simulated.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.emulation import CLUSTER
from benchmarks.report import at_most
from meshwright.cost.work import Compute, StageWork, StepWork
from meshwright.emulation.devices import emulate
from meshwright.emulation.stages import EmulatedStage, emulated_stages
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ir.schedule import Schedule
from meshwright.ir.statistics import ratio
from meshwright.runtime import launch
from meshwright.runtime.ranks import run_ranks
from meshwright.schedules.pipeline import training_schedule
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults

COMMAND = "make bench-message-driven"
RANKS, MICROBATCHES, ROUNDS, STEPS, JITTER, SLOW, LIMIT = 4, 16, 9, 4, 0.3, 1.3, 0.97
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "message-driven")
SECONDS = {"F": 10e-3, "B": 20e-3, "I": 10e-3, "W": 10e-3}
STAGE = StageWork(
    pieces={kind: (Compute(kind, seconds),) for kind, seconds in SECONDS.items()},
    sent_up_bytes=10**5,
    sent_down_bytes=10**5,
)
WORK, MESH = StepWork((STAGE,) * RANKS), Mesh.of(pp=RANKS)


def on_a_rank(stages: tuple[EmulatedStage, ...], schedule: Schedule, faults: Faults) -> list[float]:
    """The seconds of each step; on rank 0, of all ranks together."""
    launch.start("cpu")
    return [trace.duration_s for trace in emulate(stages, schedule, STEPS, faults)]


def measured_s(schedule: Schedule, faults: Faults) -> float:
    """The mean of some steps on ranks."""
    stages = emulated_stages(WORK, MESH, CLUSTER, schedule)
    with tempfile.TemporaryDirectory() as directory:
        return statistics.fmean(
            run_ranks(on_a_rank, stages, schedule, faults, num_ranks=RANKS, directory=Path(directory))
        )


def findings() -> list[Finding]:
    """With and without a slow rank: the step beside 1f1b's, simulated and on ranks."""
    results: list[Finding] = []
    schedules = {name: training_schedule(name, RANKS, MICROBATCHES) for name in SCHEDULES}
    for slow in ({}, {RANKS // 2: SLOW}):
        rounds = [Faults(jitter=JITTER, seed=number, slow=slow) for number in range(ROUNDS)]
        many = [Faults(jitter=JITTER, seed=number, slow=slow) for number in range(100)]
        simulated = {
            name: statistics.fmean(play(schedule, WORK, MESH, CLUSTER, faults=faults).step_s for faults in many)
            for name, schedule in schedules.items()
        }
        steps = {name: list[float]() for name in SCHEDULES}
        for faults in rounds:
            for name, schedule in schedules.items():
                steps[name].append(measured_s(schedule, faults))
        slower = ratio(steps["message-driven"], steps["1f1b"])
        others = ", ".join(
            f"{name} {statistics.median(steps[name]) / statistics.median(steps['1f1b']):.2f} "
            f"(simulated {simulated[name] / simulated['1f1b']:.2f})"
            for name in SCHEDULES
        )
        what = f", rank {RANKS // 2} takes {SLOW} of its time" if slow else ""
        verdict = at_most(slower, LIMIT)
        results.append(
            Check(
                target=f"emulated devices, p = {RANKS}, m = {MICROBATCHES}, jitter {JITTER}{what}: "
                f"a message-driven step takes at most {LIMIT} of 1f1b's",
                verdict=verdict,
                measured=f"{slower}; beside 1f1b: {others}",
                passed=int(verdict == "pass"),
                total=1,
            )
        )
    return results


def main() -> int:
    """Measure, print and write."""
    results = findings()
    timed = (
        f"Emulated training steps, the mean of {STEPS}, from when all ranks have met until the last has ended; "
        f"schedules take turns for {ROUNDS} rounds. There are more ranks than cores, but emulated ranks sleep: only "
        "ratios are told."
    )
    sizes: dict[str, str | int | float | bool] = {"stages": RANKS, "microbatches": MICROBATCHES, "jitter": JITTER}
    settings = {"emulated": Settings(ranks=RANKS, threads=1, sizes=sizes)}
    text = (__doc__ or "").partition("\n\n")[2]
    report.write("message_driven", "Message-driven pipelines under jitter", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
