"""What do stages by speed gain, if one box is slow? `python -m benchmarks.unlike`, as part of ``make bench-planning``.

Four ranks lie in two boxes. Ranks compute for real, and then sleep: those of the fast box take a quarter of a core,
those of the slow box an eighth. So the four take at most 0.75 cores to compute, also on a machine that does other work;
the cores that they keep busy are measured. `plan="auto"` knows the speeds of the boxes. It is compared with the fastest
uniform layouts of an exhaustive enumeration (``benchmarks.enumeration``). The enumeration takes some minutes, and the
measurement five.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

import meshwright as mw
from benchmarks import report
from benchmarks.enumeration import Uniform
from benchmarks.report import judged
from meshwright.api.machine import calibrated
from meshwright.bench.repeat import alternate
from meshwright.catalog import load_cluster
from meshwright.comm.groups import from_every_rank
from meshwright.emulation.slow import slow_down
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.result import Scalar, Settings
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.runtime import launch
from meshwright.runtime.ranks import run_ranks

FAST, SLOW = 4.0, 8.0
"""The time of a rank, as a multiple of its computing: a quarter of a core, an eighth of a core."""
BOX, RANKS, BATCH, ROUNDS, STEPS = 2, 4, 128, 6, 1
LIMIT = 1 / 1.25
CONFIG = GPTConfig(layers=6, width=128, heads=4, vocabulary=256, sequence_length=128, dropout=0.0, tied_head=False)
AUTO, SETTINGS, COMMAND = "plan by speed", "two boxes", "python -m benchmarks.unlike"
MOST_MEASURED = 8
"""The number of uniform layouts that are measured."""


def slowed(device: Device, factor: float) -> Device:
    """A device that takes ``factor`` times as long."""
    kernels = device.kernels
    if kernels is not None:
        kernels = msgspec.structs.replace(kernels, kernel_s=kernels.kernel_s * factor)
    return msgspec.structs.replace(
        device,
        name=f"{device.name} / {factor:g}",
        kernels=kernels,
        conditions=tuple(
            msgspec.structs.replace(condition, kernel_s=condition.kernel_s * factor) for condition in device.conditions
        ),
        peak_flops_per_s={name: peak / factor for name, peak in device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / factor,
    )


def cluster_of(*factors: float) -> Cluster:
    """Boxes of ranks that take these multiples of the time of a core."""
    known = (calibrated() or load_cluster("cpu-local")).resized(BOX)

    members = tuple(
        LevelMembers(count=1, device=slowed(known.device, factor), levels=known.levels) for factor in factors
    )
    inside = known.levels[-1]
    between = Level(
        name="machine", fan_out=len(factors), alpha_s=inside.alpha_s, beta_s_per_byte=inside.beta_s_per_byte,
        members=members,
    )  # fmt: skip
    return Cluster(name="two boxes", num_devices=RANKS, device=slowed(known.device, factors[0]), levels=(between,))


def model() -> GPT:
    """The model that all plans train, with equal values."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch() -> dict[str, torch.Tensor]:
    """One global batch."""
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.sequence_length + 1), generator=torch.Generator())
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def fastest_uniform(graph: Graph, cluster: Cluster) -> tuple[list[mw.Layout], str]:
    """The uniform layouts to measure, the fastest by simulation first, and how many were enumerated.

    Of layouts that differ only in their micro-batches, chunks, recomputation and non-zero ZeRO stage, the one with the
    shortest simulated step is measured. So an error of the simulation cannot leave only one kind of layouts.
    """
    uniform = Uniform(graph, cluster)
    uniform.run()
    best: dict[str, mw.Layout] = {}
    for step in sorted((step for step in uniform.steps if step.fits), key=lambda step: step.step_s):
        best.setdefault(kind_of(step.layout), step.layout)
    counts = uniform.counts
    text = (
        f"Of {counts.total():,} uniform layouts, {counts['simulated']} were simulated, {counts['left out']} cannot be "
        f"the fastest by simulation, and {counts['refused']} are impossible. The fastest of each of {len(best)} kinds "
        f"(axes, schedule, with or without ZeRO) are in order; the first {min(len(best), MOST_MEASURED)} are measured."
    )
    return list(best.values())[:MOST_MEASURED], text


def kind_of(layout: mw.Layout) -> str:
    """What layouts of one kind have in common, as text."""
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    return layout_text(msgspec.structs.replace(
        layout, microbatches=1, chunks=1, schedule=schedule, recompute="none", zero=min(layout.zero, 1)
    ))  # fmt: skip


def plans() -> tuple[dict[str, mw.Plan], str]:
    """The plan by speed and the plans of the fastest uniform layouts, and how these were found."""
    graph, cluster = mw.capture(model(), language_model_loss, batch()), cluster_of(FAST, SLOW)
    by_name = {AUTO: mw.plan(graph, cluster, devices=RANKS)}
    uniform, text = fastest_uniform(graph, cluster)
    for layout in uniform:
        by_name[layout_text(layout)] = mw.plan(graph, cluster, devices=RANKS, layout=layout)
    return by_name, text


def on_a_rank(texts: dict[str, bytes]) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Seconds of each plan in each round, the loss of the first step of each plan, and the number of cores that all
    ranks together keep busy."""
    launch.start("cpu")
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    sides, losses = {}, {}
    for name, text in texts.items():
        plan = decode(text, mw.Plan, where=f"plan {name}")
        trainer = mw.parallelize(
            model(), language_model_loss, batch(), plan=plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        )  # fmt: skip
        losses[name] = [float(trainer.step(batch()))]
        slow_down(trainer.executor, FAST if rank < BOX else SLOW)
        sides[name] = lambda trainer=trainer: trainer.step(batch())
    begun_s, used_s = time.perf_counter(), time.process_time()
    seconds = alternate(sides, rounds=ROUNDS, steps=STEPS, warmup_steps=1)
    busy = (time.process_time() - used_s) / (time.perf_counter() - begun_s)
    return seconds, losses, sum(from_every_rank(busy))


def main() -> int:
    """Print how many times faster the plan by speed is than the fastest uniform layout, and write it."""
    if calibrated() is None:  # generic rates hide what small micro-batches cost
        print("this machine is not calibrated: run `meshwright calibrate` first")
        return 1
    by_name, how = plans()
    print(how, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        seconds, losses, busy_cores = run_ranks(
            on_a_rank, {name: encode_json(plan) for name, plan in by_name.items()}, num_ranks=RANKS,
            directory=Path(directory),
        )  # fmt: skip
    chosen = layout_text(by_name[AUTO].layout)
    finding = judged(
        f"a box at half speed: plan=auto ({chosen}) is 1.25 times as fast as the best uniform layout", seconds, AUTO,
        LIMIT, settings=SETTINGS, num_ranks=RANKS, steps=STEPS, losses=losses, loss_spread=1e-5, busy_cores=busy_cores,
    )  # fmt: skip
    report.show(finding)
    sizes: dict[str, Scalar] = {
        "layers": CONFIG.layers,
        "width": CONFIG.width,
        "sequence": CONFIG.sequence_length,
        "batch": BATCH,
    }
    settings = {SETTINGS: Settings(dtype="float32", ranks=RANKS, threads=1, sizes=sizes, busy_cores=busy_cores)}
    text = (
        f"Ranks sleep after they compute: those of one box take {FAST:g} times the time of their core, those of the "
        f"other {SLOW:g} times. Together they kept {busy_cores:.2f} cores busy, so they are judged although there are "
        f"more ranks than cores.\n{how} Stages of uniform layouts are cut by FLOPs."
    )
    report.write("unlike", "A box at half speed", COMMAND, "a training step", settings, [finding], text)
    print("written to benchmarks/results/unlike.md and .json")
    return int(finding.verdict == "fail")


if __name__ == "__main__":
    sys.exit(main())
