"""Does ZeRO reach its targets of speed and memory? Beside fully_shard, DistributedDataParallel and the formulas.

Run as ``make bench-zero``. The exit code is 1 if a target is missed. Speed is measured as ``benchmarks.foundation``
does: whole training steps in float32 on two ranks with one thread each, SGD with momentum 0.9, all sides from the same
weights, by turns in the same processes, and the fastest setting of a peer counts. Memory is that of a large GPT under
AdamW, beside the same formulas that plans are made with.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import meshwright as mw
from benchmarks import overlap, peers, report
from benchmarks.foundation import LOSS_SPREAD, NUM_BATCHES, OURS, ROUNDS, STEPS, Sides, over, sgd, timed
from benchmarks.memory import MIB, status_bytes
from benchmarks.prediction import text
from benchmarks.report import decided, judged, show
from meshwright.bench.repeat import alternate
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import stage_held, step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Finding, Settings
from meshwright.lower.plans import PlanLowering
from meshwright.models import (
    GPT,
    MLP,
    VGG,
    AlexNet,
    GoogLeNet,
    GPTConfig,
    LeNet,
    ResNet,
    UNet,
    WideResNet,
    classification_loss,
    demo_gpt,
    gpt_s,
    language_model_loss,
    segmentation_loss,
)
from meshwright.runtime.precision import missing_instructions
from meshwright.schedules.pipeline import schedule_of
from tests.distributed import oracle
from tests.distributed.pool import Ranks

COMMAND = "make bench-zero"
NUM_RANKS = 2
ERROR = 0.10
LEAST_BYTES = 2**30
"""Smaller cases show what libraries take, not what is trained."""
CLASSES = 10


def pictures(size: int, channels: int, pixels: int, by_pixel: bool = False) -> dict[str, torch.Tensor]:
    """``size`` square pictures with a label each, or one for each pixel."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(size, channels, pixels, pixels, generator=generator)
    labels = (size, pixels, pixels) if by_pixel else (size,)
    return {"image": image, "label": torch.randint(CLASSES, labels, generator=generator)}


@dataclass(frozen=True)
class ZeroModel:
    """A model, its loss, and its global batch. All of it goes to other processes by name: no lambdas."""

    name: str
    make: Callable[[], torch.nn.Module]
    loss: peers.Loss
    samples: Callable[[int], dict[str, torch.Tensor]]
    batch: int
    loss_spread: float | None = LOSS_SPREAD
    """The most by which the losses of the sides may differ; None where they are not the same by intent
    (dropout)."""
    has_batch_norm: bool = False


ROUNDED = 2e-2
"""In four steps of GoogLeNet losses come to lie 1e-2 apart in float32; in float64, 1e-13 in three."""
GPT_S = ZeroModel("GPT-S", gpt_s, language_model_loss, partial(text, length=128, vocabulary=2048), 8)
MODELS = [
    GPT_S,
    ZeroModel("demo GPT", demo_gpt, language_model_loss, partial(text, length=256, vocabulary=256), 8),
    ZeroModel("MLP", partial(MLP, (1024, 2048, 2048, 2048, CLASSES)), classification_loss,
          partial(pictures, channels=1, pixels=32), 256),
    ZeroModel("LeNet", LeNet, classification_loss, partial(pictures, channels=1, pixels=28), 1024),
    ZeroModel("ResNet", partial(ResNet, depth=8, width=32), classification_loss,
          partial(pictures, channels=3, pixels=32), 32, has_batch_norm=True),
    ZeroModel("AlexNet", partial(AlexNet, 79, classes=CLASSES, dense=(1024, 1024)), classification_loss,
          partial(pictures, channels=3, pixels=79), 16, loss_spread=None),
    ZeroModel("VGG", partial(VGG, (1, 1, 2), 32, 32, classes=CLASSES, dense=(256,)), classification_loss,
          partial(pictures, channels=3, pixels=32), 32, loss_spread=None),
    ZeroModel("GoogLeNet", partial(GoogLeNet, 16, classes=CLASSES), classification_loss,
          partial(pictures, channels=3, pixels=64), 16, loss_spread=ROUNDED, has_batch_norm=True),
    ZeroModel("Wide-ResNet", partial(WideResNet, (1, 1, 1), 32, classes=CLASSES), classification_loss,
          partial(pictures, channels=3, pixels=32), 32, has_batch_norm=True),
    ZeroModel("U-Net", partial(UNet, width=16, classes=CLASSES), segmentation_loss,
          partial(pictures, channels=3, pixels=64, by_pixel=True), 8),
]  # fmt: skip

Peers = Mapping[str, Callable[..., peers.StepOn]]
DDP: Peers = {
    "DistributedDataParallel": peers.data_parallel,
    "DistributedDataParallel, gradient_as_bucket_view": partial(peers.data_parallel, gradient_as_bucket_view=True),
    "DistributedDataParallel, gradient_as_bucket_view, static_graph, fused optimizer": partial(
        peers.data_parallel, gradient_as_bucket_view=True, static_graph=True, fused=True
    ),
}
FSDP: Peers = {
    "fully_shard per block": peers.fully_sharded,
    "fully_shard per block, foreach": partial(peers.fully_sharded, foreach=True),
    "fully_shard per block, foreach, prefetch": partial(peers.fully_sharded, foreach=True, prefetch=True),
    "fully_shard per block, foreach, whole until backward": partial(peers.fully_sharded, foreach=True, reshard=False),
    "fully_shard per block, foreach, whole until backward, prefetch": partial(
        peers.fully_sharded, foreach=True, reshard=False, prefetch=True
    ),
}


@dataclass(frozen=True)
class ZeroTarget:
    """One target of speed: Meshwright's step over the fastest peer's is at most ``limit``."""

    model: ZeroModel
    layout: mw.Layout
    peers: Peers
    limit: float

    def __str__(self) -> str:
        return f"{self.model.name}, {layout_text(self.layout)}"


AS_DDP = mw.Layout(dp=NUM_RANKS, batch_statistics="rank")
"""DistributedDataParallel takes statistics of each rank's samples."""
COMPARISONS = [
    ZeroTarget(GPT_S, mw.Layout(dp=NUM_RANKS, zero=3), FSDP, 0.85),
    ZeroTarget(GPT_S, mw.Layout(dp=NUM_RANKS, zero=1), DDP, 1.0),
    *(ZeroTarget(model, AS_DDP if model.has_batch_norm else mw.Layout(dp=NUM_RANKS), DDP, 1.0) for model in MODELS),
]


PRECISIONS = {name: mw.Layout(dp=NUM_RANKS, precision=name) for name in ("bfloat16", "float32")}
LOW_PRECISION = 0.8
"""Of a step in float32, where the CPU has instructions for bfloat16."""
EITHER = "GPT-S, dp2, either precision"
LOW_SPREAD = 0.05
"""Losses of 7.6, of products that are rounded to 8 bits."""


class MeasuredMemory(msgspec.Struct, frozen=True):
    """Bytes of one rank beyond what a process holds that has trained a small model: between steps, and at most."""

    persistent_bytes: int
    peak_bytes: int


LARGE = GPTConfig(layers=16, width=1024, heads=16, vocabulary=2048, sequence_length=128)
"""Its parameters and two states for each, divided by two, are more than ``LEAST_BYTES``."""
SMALL = GPTConfig(layers=2, width=64, heads=2, vocabulary=256, sequence_length=128)
LARGE_BATCH = 8
LAYOUTS = [mw.Layout(dp=NUM_RANKS, zero=zero, microbatches=2) for zero in (1, 2, 3)]
"""With two micro-batches, gradients outlive a backward: whole under ZeRO-1, in parts under ZeRO-2."""
HYBRID = [mw.Layout(dp=2 * NUM_RANKS, zero=zero, zero_ranks=NUM_RANKS, microbatches=2) for zero in (2, 3)]
"""Parts of pairs of neighbouring ranks, of which the two pairs hold copies: four ranks, which need no more each."""


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(comparison: ZeroTarget, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step by side and round, and the first losses of every side, over the global batch."""
    torch.set_num_threads(1)
    sides = sides_of(comparison)
    losses = {name: [float(step()) for _ in range(NUM_BATCHES)] for name, step in sides.items()}
    for name in comparison.peers:  # theirs are those of this rank's part
        parts = torch.tensor(losses[name], dtype=torch.float64)
        dist.all_reduce(parts)
        losses[name] = (parts / NUM_RANKS).tolist()
    return alternate(sides, rounds=rounds, steps=steps), losses


def sides_of(comparison: ZeroTarget) -> Sides:
    """Meshwright and its peers, each with a model and an optimizer of its own."""
    model = comparison.model
    batches = list(oracle.shards(model.samples(NUM_BATCHES * model.batch), NUM_BATCHES))
    parts = [list(oracle.shards(batch, NUM_RANKS))[dist.get_rank()] for batch in batches]
    trainer = mw.parallelize(_seeded(model), model.loss, batches[0], plan=comparison.layout, optimizer=sgd)
    sides: Sides = {OURS: over(trainer.step, batches)}
    for name, peer in comparison.peers.items():
        sides[name] = over(peer(_seeded(model), sgd, model.loss), parts)
    return sides


def measure_precisions(rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The same of Meshwright in either precision."""
    torch.set_num_threads(1)
    batches = list(oracle.shards(GPT_S.samples(NUM_BATCHES * GPT_S.batch), NUM_BATCHES))
    sides: Sides = {}
    for name, layout in PRECISIONS.items():
        trainer = mw.parallelize(_seeded(GPT_S), GPT_S.loss, batches[0], plan=layout, optimizer=sgd)
        sides[name] = over(trainer.step, batches)
    losses = {name: [float(step()) for _ in range(NUM_BATCHES)] for name, step in sides.items()}
    return alternate(sides, rounds=rounds, steps=steps), losses


def _seeded(model: ZeroModel) -> torch.nn.Module:
    torch.manual_seed(0)
    return model.make()


def measured_memory(layout: mw.Layout, config: GPTConfig) -> MeasuredMemory:
    """What this rank holds of a GPT after two steps, and the most that it held in them."""
    torch.set_num_threads(1)
    _trainer(layout, SMALL).step(_tokens(SMALL))  # what libraries and channels take once
    before = _resident_bytes()
    trainer, batch = _trainer(layout, config), _tokens(config)
    _resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        trainer.step(batch)
    return MeasuredMemory(peak_bytes=status_bytes("VmHWM") - before, persistent_bytes=_resident_bytes() - before)


def _trainer(layout: mw.Layout, config: GPTConfig) -> Any:
    return mw.parallelize(_large(config), language_model_loss, _tokens(config), plan=layout, optimizer=_adamw)


def _large(config: GPTConfig) -> torch.nn.Module:
    with mw.auto_parallelize():  # so that it is never whole on a rank that keeps a part
        return GPT(config)


def _tokens(config: GPTConfig) -> dict[str, torch.Tensor]:
    return text(LARGE_BATCH, config.sequence_length, config.vocabulary)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _resident_bytes() -> int:
    """Of this process, once the heap has given back what nobody uses."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


# --- targets ---------------------------------------------------------------------------------------------------------


def speed(comparison: ZeroTarget, rounds: int, steps: int) -> Finding:
    """Measure one comparison and judge it."""
    return decided(
        lambda seconds, losses: judged(
            f"{comparison}: at most {comparison.limit:.2f} x {next(iter(comparison.peers))}",
            seconds,
            OURS,
            comparison.limit,
            settings=str(comparison),
            num_ranks=NUM_RANKS,
            steps=steps,
            losses=losses,
            loss_spread=comparison.model.loss_spread,
        ),
        NUM_RANKS,
        measure,
        comparison,
        rounds,
        steps,
    )


def low_precision(rounds: int, steps: int) -> Finding:
    """bfloat16 beside float32; only reported of a CPU that has to emulate it, which takes long."""
    missing = missing_instructions("bfloat16")
    if missing:
        rounds, steps = 5, 1
    with Ranks() as ranks:
        seconds, losses = ranks(NUM_RANKS, measure_precisions, rounds, steps, timeout=1800.0)[0]
    comparison = judged(
        f"GPT-S, dp2, bfloat16: at most {LOW_PRECISION:.2f} x float32",
        seconds,
        "bfloat16",
        LOW_PRECISION,
        settings=EITHER,
        num_ranks=NUM_RANKS,
        steps=steps,
        losses=losses,
        loss_spread=LOW_SPREAD,
    )
    if missing:
        words = f"{comparison.measured}; this CPU has none of {', '.join(missing)}"
        return msgspec.structs.replace(comparison, verdict="reported", measured=words)
    return comparison


def predicted_memory(layout: mw.Layout, config: GPTConfig, cluster: Cluster) -> MeasuredMemory:
    """The same by the formulas of plans: ``cost/program.py`` and ``cost/occupancy.py``."""
    graph = mw.capture(_large(config), language_model_loss, _tokens(config))
    plan = mw.plan(graph, cluster, layout=layout)
    programs = PlanLowering(graph)(plan)
    held = stage_held(programs, plan, 0, cluster, ADAMW)
    (peak,) = peak_memory(step_work(programs, plan, cluster, optimizer=ADAMW), schedule_of(plan))
    return MeasuredMemory(persistent_bytes=held.persistent_bytes, peak_bytes=peak.peak_bytes)


def memory(layout: mw.Layout, cluster: Cluster) -> list[Finding]:
    """Predicted beside measured memory between steps and at the peak, each of the rank that needs most."""
    with Ranks() as ranks:  # fresh processes: memory is not given back
        measured: list[MeasuredMemory] = ranks(layout.dp, measured_memory, layout, LARGE, timeout=1800.0)
    return compared(layout, predicted_memory(layout, LARGE, cluster), measured)


def compared(layout: mw.Layout, predicted: MeasuredMemory, measured: Sequence[MeasuredMemory]) -> list[Finding]:
    """Both memories of a layout, predicted and measured by rank; a case below ``LEAST_BYTES`` fails."""
    results: list[Finding] = []
    for what in ("persistent", "peak"):
        foretold, by_rank = (
            getattr(predicted, f"{what}_bytes"),
            [getattr(rank_memory, f"{what}_bytes") for rank_memory in measured],
        )
        most = max(by_rank)
        error = foretold / most - 1
        passed = abs(error) <= ERROR and most >= LEAST_BYTES
        words = f"{error:+.1%}: predicted {foretold / MIB:.0f} MiB, measured {most / MIB:.0f} MiB"
        results.append(
            Check(
                target=f"large GPT, {layout_text(layout)}: {what} memory within {ERROR:.0%}",
                verdict="pass" if passed else "fail",
                measured=words if most >= LEAST_BYTES else f"{words}, which is too little to judge by",
                passed=int(passed),
                total=1,
                notes={"error": error, "predicted_bytes": foretold, "measured_bytes": by_rank},
            )
        )
    return results


# --- report ----------------------------------------------------------------------------------------------------------


def settings() -> dict[str, Settings]:
    """By comparison: precision, ranks, threads and sizes."""
    by_name = {}
    for comparison in COMPARISONS:
        model = comparison.model
        sizes: dict[str, Any] = {"parameters": sum(value.numel() for value in model.make().parameters())}
        sizes |= {name: " x ".join(map(str, value.shape)) for name, value in model.samples(model.batch).items()}
        by_name[str(comparison)] = Settings(dtype="float32", ranks=NUM_RANKS, threads=1, sizes=sizes)
    by_name[overlap.SETTINGS] = by_name[str(COMPARISONS[0])]
    by_name[EITHER] = msgspec.structs.replace(
        by_name[overlap.SETTINGS], dtype="bfloat16 or float32, as the side is named"
    )
    return by_name


def write(results: Sequence[Finding], rounds: int, steps: int) -> None:
    """``results/zero.json`` and ``.md``."""
    words = f"""{report.how(rounds, steps)} All run over gloo, with one thread a rank. A step is zero_grad, forward,
loss, backward and SGD with momentum 0.9, in float32, without clipping. Of a peer's several settings the fastest counts;
PyTorch's fused SGD is among those of DistributedDataParallel, and does not take the DTensors of fully_shard.
Beside bfloat16, float32 is Meshwright's own; a CPU that emulates bfloat16 is measured in 5 rounds of 1 step.
All sides give the same losses to {LOSS_SPREAD}, but for AlexNet and VGG, which draw other dropout; GoogLeNet's to
{ROUNDED}, for float32 rounds through 57 batch norms over few samples. Batch norm takes statistics of each rank's
samples on all sides (`batch_statistics="rank"`): DistributedDataParallel knows no others on CPUs.

Memory is that of the rank that needs most, beyond what it held after a step of a small model. Large GPT:
{LARGE.layers} layers, {LARGE.width} wide, {LARGE.heads} heads, vocabulary {LARGE.vocabulary}, batch {LARGE_BATCH} x
{LARGE.sequence_length}, AdamW, float32. Persistent: resident between steps, after malloc_trim: parameters, optimizer
state, and the memory in which gradients are summed up over micro-batches, which stays. Peak: VmHWM over two steps,
reset before. Predicted: what plans are made with. "in groups of {NUM_RANKS}" is hybrid: of {2 * NUM_RANKS} ranks,
neighbours share what ZeRO cuts, and pairs hold copies.

Exposed communication is what computing stands still for, by the trace of every step, of the rank that waits least (the
other waits for it, too), median of {overlap.STEPS} steps; two network namespaces joined at 1 Gbit/s, beside the
simulated step with transfers that share the link."""
    report.write("zero", "The targets of ZeRO", COMMAND, timed(rounds, steps), settings(), results, words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS}, at least 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    parser.add_argument("--only", default="", help="run only what contains this in its name; writes no file")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    warnings.simplefilter("ignore")  # of the peers' libraries
    results: list[Finding] = []
    for comparison in COMPARISONS:
        if options.only in str(comparison):
            results.append(speed(comparison, options.rounds, options.steps))
            show(results[-1])
    if options.only in "bfloat16":
        results.append(low_precision(options.rounds, options.steps))
        show(results[-1])
    for layout in (*LAYOUTS, *HYBRID):
        if options.only in f"large GPT, {layout_text(layout)}":
            for finding in memory(layout, mw.Cluster.load("cpu-local", layout.dp)):
                results.append(finding)
                show(finding)
    if options.only in "boxes":
        for finding in overlap.findings():
            results.append(finding)
            show(finding)
    if not options.only:
        write(results, options.rounds, options.steps)
        print("written to benchmarks/results/zero.md and .json")
    return int(any(result.verdict == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
