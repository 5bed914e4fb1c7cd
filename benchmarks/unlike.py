"""What do stages by speed gain, if one box is slow? `python -m benchmarks.unlike`.

Four ranks lie in two boxes. Ranks compute for real, and then sleep: those of the fast box take a quarter of a core,
those of the slow box an eighth. So the four take at most 0.75 cores, also on a machine that does other work.
`plan="auto"` knows the speeds of the boxes. It is compared with layouts of equal stages, cut as for equal devices.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import torch

import meshwright as mw
from benchmarks import report
from benchmarks.report import judged
from meshwright.api.machine import calibrated
from meshwright.bench.repeat import alternate
from meshwright.catalog import load_cluster
from meshwright.comm.groups import from_every_rank
from meshwright.emulation.slow import slow_down
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.files import decode, encode_json
from meshwright.ir.layout_text import layout_text
from meshwright.ir.level import Level, Member
from meshwright.ir.result import Finding, Scalar, Settings
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.runtime import launch
from meshwright.runtime.ranks import run_ranks

FAST, SLOW = 4.0, 8.0
"""The time of a rank, as a multiple of its computing: a quarter of a core, an eighth of a core."""
BOX, RANKS, BATCH, ROUNDS, STEPS = 2, 4, 128, 6, 1
LIMIT = 1 / 1.25
CONFIG = GPTConfig(layers=6, width=128, heads=4, vocabulary=256, sequence_length=128, dropout=0.0, tied_head=False)
AUTO, SETTINGS, COMMAND = "plan by speed", "two boxes", "python -m benchmarks.unlike"
UNIFORM = (
    mw.Layout(dp=4),
    mw.Layout(dp=2, tp=2),
    *(mw.Layout(dp=2, pp=2, microbatches=count) for count in (4, 8)),
)


def cluster_of(*factors: float) -> Cluster:
    """Boxes of ranks that take these multiples of the time of a core."""
    known = (calibrated() or load_cluster("cpu-local")).resized(BOX)

    def device(factor: float) -> Device:
        kernels = known.device.kernels
        if kernels is not None:
            kernels = msgspec.structs.replace(kernels, kernel_s=kernels.kernel_s * factor)
        conditions = tuple(
            msgspec.structs.replace(condition, kernel_s=condition.kernel_s * factor)
            for condition in known.device.conditions
        )
        return msgspec.structs.replace(
            known.device,
            name=f"core / {factor:g}",
            kernels=kernels,
            conditions=conditions,
            peak_flops_per_s={name: peak / factor for name, peak in known.device.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=known.device.memory_bandwidth_bytes_per_s / factor,
        )

    members = tuple(Member(count=1, device=device(factor), levels=known.levels) for factor in factors)
    inside = known.levels[-1]
    between = Level(
        name="machine", fan_out=len(factors), alpha_s=inside.alpha_s, beta_s_per_byte=inside.beta_s_per_byte,
        members=members,
    )  # fmt: skip
    return Cluster(name="two boxes", num_devices=RANKS, device=device(factors[0]), levels=(between,))


def model() -> GPT:
    """The model that all plans train, with equal values."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch() -> dict[str, torch.Tensor]:
    """One global batch."""
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.sequence_length + 1), generator=torch.Generator())
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def plans() -> dict[str, mw.Plan]:
    """The plan by speed, and the plans with equal stages."""
    graph = mw.capture(model(), language_model_loss, batch())
    found = {AUTO: mw.plan(graph, cluster_of(FAST, SLOW), devices=RANKS)}
    for layout in UNIFORM:
        found[layout_text(layout)] = mw.plan(graph, cluster_of(FAST, FAST), devices=RANKS, layout=layout)
    return found


def on_a_rank(texts: dict[str, bytes]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each plan in each round, and the loss of the first step of each plan."""
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
    seconds = alternate(sides, rounds=ROUNDS, steps=STEPS, warmup_steps=1)
    from_every_rank(None)
    return seconds, losses


def findings() -> list[Finding]:
    """How many times faster the plan by speed is than the fastest layout with equal stages."""
    found = plans()
    with tempfile.TemporaryDirectory() as directory:
        seconds, losses = run_ranks(
            on_a_rank, {name: encode_json(plan) for name, plan in found.items()}, num_ranks=RANKS,
            directory=Path(directory),
        )  # fmt: skip
    chosen = layout_text(found[AUTO].layout)
    target = f"a box at half speed: plan=auto ({chosen}) is 1.25 times as fast as the best layout with equal stages"
    return [
        judged(
            target, seconds, AUTO, LIMIT, settings=SETTINGS, num_ranks=RANKS, steps=STEPS, losses=losses,
            loss_spread=1e-5,
        )
    ]  # fmt: skip


def main() -> int:
    """Print the comparison, and write it."""
    if calibrated() is None:  # generic rates hide what small micro-batches cost
        print("this machine is not calibrated: run `meshwright calibrate` first")
        return 1
    results = findings()
    for finding in results:
        report.show(finding)
    sizes: dict[str, Scalar] = {
        "layers": CONFIG.layers,
        "width": CONFIG.width,
        "sequence": CONFIG.sequence_length,
        "batch": BATCH,
    }
    settings = {SETTINGS: Settings(dtype="float32", ranks=RANKS, threads=1, sizes=sizes)}
    text = (
        f"Ranks sleep after they compute: those of one box take {FAST:g} times the time of their core, those of the "
        f"other {SLOW:g} times. So they take at most 0.75 cores together, although there are more ranks than cores."
    )
    report.write("unlike", "A box at half speed", COMMAND, "a training step", settings, results, text)
    print("written to benchmarks/results/unlike.md and .json")
    return int(any(finding.verdict == "fail" for finding in results))


if __name__ == "__main__":
    sys.exit(main())
