"""Does an emulated pipeline take as long as simulated? p = 8, m = 32 in 8 processes. `python -m benchmarks.emulation`.

Every rank is a process with the executor, the channels and the schedule of training; its stage's functions sleep for
their predicted time, so that 8 ranks run on 2 cores. A busy machine wakes sleepers late, and is seen in the spread.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.report import alone
from meshwright.cost.work import Communicate, Compute, StageWork, StepWork, Wait
from meshwright.emulation.devices import emulate
from meshwright.emulation.stages import EmulatedStage, emulated_stages
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Check, Finding
from meshwright.ir.schedule import Schedule
from meshwright.ir.trace import Trace
from meshwright.runtime import launch
from meshwright.runtime.ranks import run_ranks
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play

RANKS, MICROBATCHES, STEPS, TOLERANCE = 8, 32, 5, 0.05
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
DEVICE = Device(
    name="emulated", kind="accelerator", memory_bytes=10**11, memory_bandwidth_bytes_per_s=2e12,
    peak_flops_per_s={"bfloat16": 3e14},
)  # fmt: skip
CLUSTER = Cluster(
    name="emulated",
    num_devices=16,
    device=DEVICE,
    levels=(Level(name="box", fan_out=16, alpha_s=1e-4, beta_s_per_byte=1e-9),),
)
MESH = Mesh.of(pp=RANKS, dp=2)


def work_of(num_stages: int) -> StepWork:
    """Uneven stages of tens of milliseconds, and gradients that are reduced beside other computing."""
    stages = []
    for stage in range(num_stages):
        forward = 20e-3 + 2e-3 * (stage % 3)
        stages.append(
            StageWork(
                pieces={
                    "F": (Compute("forward", forward),),
                    "B": (Compute("backward", 2 * forward),),
                    "I": (Compute("input", forward),),
                    "W": (Compute("weight", forward),),
                    "REDUCE_GRAD": (Communicate("gradients", "all_reduce", "dp", 2 * 10**7, blocking=False),),
                },
                after=(Compute("norm", 5e-3), Wait("gradients"), Communicate("norm", "all_reduce", "pp", 8)),
                sent_up_bytes=10**6,
                sent_down_bytes=10**6,
            )
        )
    return StepWork(tuple(stages))


def on_a_rank(stages: tuple[EmulatedStage, ...], schedule: Schedule, num_steps: int) -> list[Trace]:
    """What each rank runs."""
    launch.start("cpu")
    return emulate(stages, schedule, num_steps)


def largest_shift(emulated: Trace, simulated: Trace) -> float:
    """By how much of the step an action ended earlier or later than simulated, at most; both begin with rank 0's first.

    Raises:
        AssertionError: other actions ran than were simulated.
    """
    ends = [
        {
            (span.rank, span.what): span.end_s - min(first.start_s for first in trace.spans if first.what == "0F0")
            for span in trace.spans
            if span.stream == "compute" and span.what[0].isdigit()
        }
        for trace in (emulated, simulated)
    ]
    assert ends[0].keys() == ends[1].keys()
    return max(abs(ends[0][key] - ends[1][key]) for key in ends[1]) / simulated.duration_s


def findings() -> list[Finding]:
    """For each schedule, whether steps took as long as simulated, and whether every action ended when it should."""
    results: list[Finding] = []
    for name, chunks in SCHEDULES:
        schedule = add_reduction(add_communication(build(name, RANKS, MICROBATCHES, chunks)))
        work = work_of(RANKS * chunks)
        simulated = play(schedule, work, MESH, CLUSTER).trace([2 * rank for rank in range(RANKS)])
        simulated = msgspec.structs.replace(
            simulated, spans=tuple(msgspec.structs.replace(span, rank=span.rank // 2) for span in simulated.spans)
        )
        with tempfile.TemporaryDirectory() as directory:
            traces = run_ranks(
                on_a_rank, emulated_stages(work, MESH, CLUSTER, schedule), schedule, STEPS + 1, num_ranks=RANKS,
                directory=Path(directory),
            )[1:]  # fmt: skip
        ratios = sorted(trace.duration_s / simulated.duration_s for trace in traces)
        shift = statistics.median(largest_shift(trace, simulated) for trace in traces)
        ratio = statistics.median(ratios)
        passed = abs(ratio - 1) <= TOLERANCE and shift <= TOLERANCE
        results.append(
            Check(
                target=f"emulated device, p = {RANKS}, m = {MICROBATCHES}, {name}: as simulated within {TOLERANCE:.0%}",
                verdict="pass" if passed else "fail",
                measured=f"step {ratio - 1:+.2%} ({ratios[0] - 1:+.2%} to {ratios[-1] - 1:+.2%} in {STEPS} steps), "
                f"every action within {shift:.2%} of the step",
                passed=int(passed),
                total=1,
                notes={"ratios": ratios, "shift": shift, "load_before": os.getloadavg()[0]},
            )
        )
    return results


if __name__ == "__main__":
    sys.exit(alone(findings()))
