"""Steps of Hugging Face models, timed: beside eager PyTorch and DistributedDataParallel, compiled, as "auto" has them.

Parts of ``make bench-models``: ``speed``, ``compiled``, ``chosen`` and ``memory``. A step is zero_grad, forward, loss,
backward and SGD with momentum 0.9 in float32, one thread a rank; sides alternate in the same processes. Models have two
layers of 256 features and 128 positions.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from benchmarks import peers
from benchmarks.foundation import DDP, EAGER, LOSS_SPREAD, over, sgd
from benchmarks.memory import MIB, status_bytes
from benchmarks.report import decided, judged
from meshwright.bench.repeat import alternate
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import MOMENTUM
from meshwright.cost.program import stage_held, step_work
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Finding
from meshwright.lower.plans import PlanLowering
from meshwright.models import gpt_s, language_model_loss
from meshwright.runtime.launch import num_cores
from meshwright.schedules.pipeline import schedule_of
from tests.distributed import hugging_face, oracle
from tests.distributed.hugging_face import Size
from tests.distributed.oracle import Subject
from tests.distributed.pool import Ranks

ROUNDS, STEPS, NUM_BATCHES = 31, 2, 2
SLOWER, COMPILED, CHOSEN, MEMORY = 1.03, 0.97, 1.05, 0.15
TIMED = Size(
    width=256,
    inner=512,
    vocabulary=2048,
    sequence=128,
    image=64,
    patch=8,
    sounds=256,
    dtype=torch.float32,
    ragged=False,
)
LARGE = Size(
    width=512, inner=1408, layers=4, heads=8, vocabulary=8192, batch=16, sequence=512, dtype=torch.float32, ragged=False
)
"""Needs more than a gibibyte on one rank."""
OURS = "meshwright"
LAYOUTS = (
    mw.Layout(dp=2),
    mw.Layout(dp=2, zero=1),
    mw.Layout(tp=2),
    mw.Layout(tp=2, sequence_parallel=True),
    mw.Layout(cp=2),
    mw.Layout(cp=2, context="ring"),
    mw.Layout(pp=2, microbatches=4),
    mw.Layout(pp=2, microbatches=8),
    mw.Layout(pp=2, microbatches=4, schedule="zb-h1"),
    mw.Layout(pp=2, microbatches=8, schedule="zb-h1"),
    mw.Layout(dp=4),
    mw.Layout(dp=4, zero=1),
    mw.Layout(dp=2, tp=2),
    mw.Layout(dp=2, tp=2, zero=1),
    mw.Layout(tp=4),
    mw.Layout(tp=4, sequence_parallel=True),
    mw.Layout(dp=2, cp=2),
    mw.Layout(cp=2, tp=2),
    mw.Layout(cp=4),
    mw.Layout(dp=2, pp=2, microbatches=4),
    mw.Layout(dp=2, pp=2, microbatches=4, zero=1),
    mw.Layout(dp=2, pp=2, microbatches=4, schedule="zb-h1"),
    mw.Layout(tp=2, pp=2, microbatches=4),
    mw.Layout(pp=4, microbatches=4),
    mw.Layout(pp=4, microbatches=8),
    mw.Layout(pp=4, microbatches=8, schedule="zb-h1"),
)
"""What "auto" is measured beside, on two ranks and on four, where the model and the batch allow it."""
MEMORY_LAYOUTS: Mapping[str, mw.Layout] = {
    "one rank": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "tp2, sequence parallel": mw.Layout(tp=2, sequence_parallel=True),
    "cp2, ring": mw.Layout(cp=2, context="ring"),
}
CHOICES = ("GPT-S", "GPT-2", "Llama", "BERT", "T5", "ViT")
"""Models that "auto" is measured on."""
CHOICE_RANKS = (2, 4)
"""Numbers of ranks that "auto" is measured on."""


# --- on every rank ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What is timed: Meshwright under a layout or a plan, compiled or not; without it PyTorch's own way, with
    ``options`` (``benchmarks.peers``)."""

    name: str
    plan: mw.Layout | mw.Plan | None
    compile: bool = False
    options: Mapping[str, bool] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the side needs; 0: as many as the others."""
        layout = self.plan.layout if isinstance(self.plan, mw.Plan) else self.plan
        return layout.num_ranks if layout is not None else 0


def subject(model: str, size: Size = TIMED) -> Subject:
    """A model with a loss and batches; GPT-S is that of the other benchmarks."""
    if model != "GPT-S":
        return hugging_face.subject(model, NUM_BATCHES, size)
    torch.manual_seed(0)
    gpt = gpt_s()
    texts = [torch.randint(gpt.config.vocabulary, (8, 129)) for _ in range(NUM_BATCHES)]
    batches = [{"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()} for text in texts]
    return Subject(gpt, language_model_loss, batches)


def measure(
    model: str, sides: Sequence[Side], rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step by side and round, and the first losses of every side."""
    torch.set_num_threads(1)
    running = {side.name: _step_of(model, side) for side in sides}
    losses = {name: [float(step()) for _ in range(NUM_BATCHES)] for name, step in running.items()}
    if dist.is_initialized() and dist.get_world_size() > 1:
        for side in sides:
            if side.plan is None:  # DistributedDataParallel gives the loss of its part of the batch
                parts = torch.tensor(losses[side.name], dtype=torch.float64)
                dist.all_reduce(parts)
                losses[side.name] = (parts / dist.get_world_size()).tolist()
    return alternate(running, rounds=rounds, steps=steps), losses


def _step_of(model: str, side: Side) -> Callable[[], Tensor]:
    example = subject(model)
    if side.plan is not None:
        trainer = mw.parallelize(
            example.model, example.loss_fn, example.batches[0], plan=side.plan, optimizer=sgd, compile=side.compile
        )
        return over(trainer.step, example.batches)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        result = example.loss_fn(model, batch)
        return result if isinstance(result, tuple) else (result, {})

    example.model.train()
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return over(peers.eager(example.model, sgd, loss, **side.options), example.batches)
    parts = [list(oracle.shards(batch, dist.get_world_size()))[dist.get_rank()] for batch in example.batches]
    return over(peers.data_parallel(example.model, sgd, loss, **side.options), parts)


OWN_SCALE = ("CLIP",)
"""Models whose loss is no mean over samples: DistributedDataParallel trains them otherwise, as it should be said."""


def peak_bytes(layout: mw.Layout) -> int:
    """What two steps of the large Llama need at their peak beyond what is there before the first."""
    torch.set_num_threads(1)
    example = subject("Llama", LARGE)
    trainer = mw.parallelize(example.model, example.loss_fn, example.batches[0], plan=layout, optimizer=sgd)
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        trainer.step(example.batches[0])
    return status_bytes("VmHWM") - before


def chosen_plans(model: str, cluster: Cluster, num_ranks: int) -> list[mw.Plan]:
    """The plan that "auto" chooses for ``num_ranks`` ranks, followed by the plans of all other layouts that the model
    and the batch allow. If there are more ranks than cores, each rank is planned as if it had its own core."""
    example = subject(model)
    graph = mw.capture(example.model, example.loss_fn, example.batches[0])
    if num_ranks > cluster.num_devices:
        levels = (msgspec.structs.replace(cluster.levels[0], fan_out=num_ranks),)
        cluster = msgspec.structs.replace(cluster, num_devices=num_ranks, levels=levels)
    auto = mw.plan(graph, cluster, devices=num_ranks, optimizer=MOMENTUM)
    plans = [auto]
    for layout in LAYOUTS:
        if layout.num_ranks == num_ranks:
            with suppress(LayoutError, PlanError, ScheduleError):  # the model or the batch does not allow it
                plan = mw.plan(graph, cluster, devices=num_ranks, layout=layout, optimizer=MOMENTUM)
                if plan.layout != auto.layout or plan.firsts != auto.firsts:
                    plans.append(plan)
    return plans


# --- targets ----------------------------------------------------------------------------------------------------------


def compared(
    target: str, model: str, sides: Sequence[Side], limit: float, rounds: int, steps: int, *, alike: bool = True
) -> Finding:
    """The first side over the fastest of the others."""
    num_ranks = max(side.num_ranks for side in sides)
    return decided(
        lambda seconds, losses: judged(
            target, seconds, sides[0].name, limit, settings=f"{model}, {num_ranks} ranks", num_ranks=num_ranks,
            steps=steps, losses=losses, loss_spread=LOSS_SPREAD if alike else None,
        ),
        num_ranks, measure, model, list(sides), rounds, steps,
    )  # fmt: skip


def speed(only: str, rounds: int, steps: int) -> Iterator[Finding]:
    """Models that can be made larger: on one rank beside eager PyTorch, on two beside DistributedDataParallel."""
    ways = (("world size 1", mw.Layout(), EAGER), ("dp2", mw.Layout(dp=2), DDP))
    for model in (candidate for candidate in hugging_face.MODELS if candidate not in hugging_face.OF_ONE_SIZE):
        for name, layout, known in ways:
            target = f"{model}, {name}: at most {SLOWER} x {next(iter(known))}"
            if only in target:
                sides = [Side(OURS, layout), *(Side(peer, None, options=options) for peer, options in known.items())]
                alike = layout.dp == 1 or model not in OWN_SCALE
                yield compared(target, model, sides, SLOWER, rounds, steps, alike=alike)


def compiled(only: str, rounds: int, steps: int) -> Iterator[Finding]:
    """Compiled beside uncompiled on two ranks; the target is of GPT-S, others must not be slower."""
    dp2, tp2 = mw.Layout(dp=2), mw.Layout(tp=2)
    for model, layout in (("GPT-S", dp2), ("GPT-S", tp2), ("Llama", dp2), ("BERT", dp2)):
        limit = COMPILED if model == "GPT-S" else 1.0
        target = f"{model}, {layout_text(layout)}, compiled: at most {limit} x uncompiled"
        if only in target:
            sides = [Side("compiled", layout, compile=True), Side("uncompiled", layout)]
            yield compared(target, model, sides, limit, rounds, steps)


def chosen(cluster: Cluster, only: str, rounds: int, steps: int) -> Iterator[Finding]:
    """What "auto" takes, beside all layouts that are measured. Ranks that share cores are only reported."""
    for num_ranks, model in itertools.product(CHOICE_RANKS, CHOICES):
        shared = f" that share {num_cores()} cores" if num_ranks > num_cores() else ""
        target = f'{model}, {num_ranks} ranks{shared}: "auto" within {CHOSEN - 1:.0%} of the fastest layout measured'
        if only not in target:
            continue
        auto, *others = chosen_plans(model, cluster, num_ranks)
        sides = [Side(layout_text(other.layout), other) for other in others]
        yield compared(target, model, [Side(f"auto: {layout_text(auto.layout)}", auto), *sides], CHOSEN, rounds, steps)


def memory(only: str) -> Iterator[Finding]:
    """Peaks of the large Llama, and that they fall as the plan says."""
    cluster = mw.Cluster.load("cpu-local")
    example = subject("Llama", LARGE)
    graph = mw.capture(example.model, example.loss_fn, example.batches[0])
    for name, layout in MEMORY_LAYOUTS.items():
        target = f"Llama of {LARGE.layers} layers, {name}: peak memory within {MEMORY:.0%}"
        if only not in target:
            continue
        with Ranks() as ranks:  # fresh processes: memory is not given back
            measured = max(ranks(layout.num_ranks, peak_bytes, layout, timeout=1800.0))
        plan = mw.plan(graph, cluster, layout=layout)
        programs = PlanLowering(graph)(plan)
        work = step_work(programs, plan, cluster, optimizer=MOMENTUM)
        held = stage_held(programs, plan, 0, cluster, MOMENTUM)
        peak = max(rank_peak.peak_bytes for rank_peak in peak_memory(work, schedule_of(plan)))
        predicted = peak - held.parameters_bytes - held.buffers_bytes - held.inputs_bytes
        error = predicted / measured - 1
        large = measured >= 1024 * MIB
        yield Check(
            target=target,
            verdict="reported" if not large else "pass" if abs(error) <= MEMORY else "fail",
            measured=f"{error:+.1%}: predicted {predicted / MIB:.0f} MiB, measured {measured / MIB:.0f} MiB"
            + ("" if large else ", less than a gibibyte"),
            passed=int(abs(error) <= MEMORY),
            total=1,
            notes={"error": error, "predicted_bytes": predicted, "measured_bytes": measured},
        )
