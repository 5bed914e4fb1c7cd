"""The parts ``gpt``, ``llama`` and ``attention``: our step beside eager PyTorch and torch.compile, on one GPU.

All sides keep float32 parameters and compute products in bfloat16, under the same casts (torch.autocast; ours captures
them), with PyTorch's fused AdamW. The peers share a model; the compiled one has its blocks compiled, as torchtitan
does, and its loss. What ours takes from the call of ``parallelize`` to the end of the first step, its peak memory and
its step time are kept for the part ``foretold``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import WORKLOADS, Workload
from benchmarks.report import judged
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import interval
from meshwright.ir.result import Check, Duration, Peak, PredictedTime, Series, Settings, Utilization, Verdict
from meshwright.ir.statistics import median
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import Foretold, foretell

OURS, OPERATORS, EAGER, COMPILED = "compiled", "operator by operator", "eager PyTorch", "torch.compile"
LIMIT, MFU, FIRST_S, WITHIN = 1.0, 0.55, 30.0, 0.05
LOSS_SPREAD = 0.01
SCORES = 1.3
"""The most peak memory of attention at 8,192 tokens, beside eager PyTorch's."""

KERNELS = 40
"""The kernels of a step that are printed."""

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Ours:
    """A step of a trainer; ``others`` are the bytes that others held on the device before it was made."""

    trainer: mw.Trainer
    batch: Mapping[str, Tensor]
    others: int

    def __call__(self) -> Tensor:
        return self.trainer.step(self.batch)


def run(context: Context) -> None:
    """Time one model, our steps first, so that what they show is there if a peer fails."""
    work = WORKLOADS[context.name](context.rehearse)
    settings = {work.name: Settings(dtype="bfloat16", ranks=1, threads=torch.get_num_threads(), sizes=work.sizes)}
    torch.manual_seed(0)
    with context.device:
        model = work.make()
    flops = work.flops(model)
    print(f"{work.name}: {sum(value.numel() for value in model.parameters()) / 1e9:.3f} B parameters, "
          f"{flops / 1e12:.1f} TFLOP a step", flush=True)  # fmt: skip
    tried = context.notes.tried
    tried(f"{work.name}: {OPERATORS}", functools.partial(_alone, context, work, model, settings, flops))
    context.free()
    batch = work.batch(context.device)
    with torch.no_grad(), torch.autocast(context.device.type, torch.bfloat16):
        expected = tried(f"{work.name}: loss of {EAGER}", lambda: float(_loss(model, batch)))
    sides: dict[str, Step] = {}
    ours = tried(f"{work.name}: {OURS}", lambda: _ours(context, work, model, settings, compile=True))
    if ours is not None:
        sides[f"ours, {OURS}"] = ours
        tried(f"{work.name}: {OURS}, alone", lambda: _utilization(context, work, flops, settings, ours, OURS))
    _same_loss(context, work, expected)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sides[EAGER] = functools.partial(plain_step, model, optimizer, batch, context.device.type, _loss)
    peak = tried(f"{work.name}: {EAGER}", lambda: context.peak_bytes(sides[EAGER]))
    if peak is None:
        del sides[EAGER]
    elif context.name == "attention":
        _beside(context, work, peak[1])
    if context.left_s > 30:
        compiled = tried(f"{work.name}: {COMPILED}", lambda: _compiled(context, model, optimizer, batch))
        if compiled is not None:
            sides[COMPILED] = compiled
    for name, step in sides.items():
        print_kernels(context, name, step)
    if ours is not None and len(sides) > 1:
        tried(f"{work.name}: ours beside PyTorch", lambda: _compared(context, work, sides, settings))


# --- ours -------------------------------------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all sides; ours gets PyTorch's fused kernel from the trainer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def _ours(
    context: Context, work: Workload, model: nn.Module, settings: Mapping[str, Settings], *, compile: bool
) -> Ours:
    """A step of the trainer of a copy of the model; what it takes until its first step has ended is noted."""
    from meshwright.models import language_model_loss

    name = OURS if compile else OPERATORS
    batch, own = work.batch(), copy.deepcopy(model).cpu()
    context.free()
    others = context.held_bytes()
    trainer, made_s = context.once(
        lambda: mw.parallelize(
            own,
            language_model_loss,
            batch,
            plan=mw.Layout(),
            optimizer=adamw,
            precision="bfloat16",
            compile=compile,
            device=context.device,
            cluster=context.catalog_cluster() or "h100-dgx",
        )
    )
    loss, first_s = context.once(lambda: trainer.step(batch))
    print(f"{work.name}, {name}: parallelize {made_s:.2f} s, first step {first_s:.2f} s, loss {float(loss):.5f}, "
          f"{trainer.num_kernels} regions compiled", flush=True)  # fmt: skip
    verdict: Verdict = "reported" if made_s + first_s <= FIRST_S else "fail"
    context.notes.add_finding(
        Duration(
            target=f"{work.name}, {name}: at most {FIRST_S:.0f} s from the model to the end of the first step",
            verdict=verdict, measured=f"{made_s + first_s:.1f} s: {made_s:.1f} s until there is a trainer",
            series=Series.of([made_s + first_s], settings=work.name, run=context.name), limit_s=FIRST_S,
        ), settings,
    )  # fmt: skip
    there = {key: value.to(context.device) for key, value in batch.items()}

    context.keep(**{f"{name}_first_loss": float(loss)})
    return Ours(trainer, there, others)


def _alone(context: Context, work: Workload, model: nn.Module, settings: Mapping[str, Settings], flops: float) -> None:
    """Measure our step without a compiler, alone."""
    step = _ours(context, work, model, settings, compile=False)
    _utilization(context, work, flops, settings, step, OPERATORS)
    print_kernels(context, OPERATORS, step)


def _utilization(
    context: Context, work: Workload, flops: float, settings: Mapping[str, Settings], step: Ours, name: str
) -> None:
    """Note the part of the peak that our step reaches, its memory, and both beside their predictions."""
    seconds = context.seconds({name: step})[name]
    peak, rise = context.peak_bytes(step)
    peak -= step.others
    context.keep(**{f"{name}_s": seconds, f"{name}_bytes": peak, f"{name}_rise": rise})
    series = Series.of(seconds, settings=work.name, run=context.name)
    cluster = context.catalog_cluster()
    if cluster is not None:
        top = cluster.device.peak("bfloat16")
        reached = median(seconds).inverse().times(flops / top)
        context.notes.add_finding(
            Utilization(
                target=f"{work.name}, {name}: at least {MFU:.0%} of the peak", series=series, flops=flops,
                verdict="reported" if context.rehearse else "pass" if reached.low >= MFU else "fail"
                if reached.high < MFU else "undecided", fraction=reached.value, interval=reached.interval,
                limit=MFU, measured=f"{reached.value:.1%} (95 %: {reached.low:.1%} to {reached.high:.1%}); "
                f"{work.tokens / series.value_s:,.0f} tok/s, peak memory {peak / 2**30:.2f} GiB",
                peak=Peak(flops_per_s=top, dtype="bfloat16", found=f"data sheet of {cluster.device.name}, dense"),
            ), settings,
        )  # fmt: skip
        prediction = predicted(step.trainer, cluster)
        compare_prediction(context, work.name, name, seconds, peak, prediction, "the catalog", settings)


def predicted(trainer: mw.Trainer, cluster: Cluster) -> Foretold:
    """What the cost model foretells of the trainer's plan on one device of a cluster."""
    return foretell(PlanLowering(trainer.graph), trainer.plan, cluster, optimizer=ADAMW)


def compare_prediction(
    context: Context, model: str, name: str, seconds: list[float], peak_bytes: int, prediction: Foretold, by: str,
    settings: Mapping[str, Settings],
) -> None:  # fmt: skip
    """Note predicted seconds and bytes beside those that were measured."""
    series = Series.of(seconds, settings=model, run=context.name)
    step_s, between = prediction.played.step_s, interval(prediction.played.step_s, prediction.deviation)
    error = step_s / series.value_s - 1
    bounds = median(seconds).interval
    kept = [abs(step_s / bound - 1) <= WITHIN for bound in bounds]
    verdict: Verdict = "pass" if all(kept) and abs(error) <= WITHIN else "fail" if not any(kept) else "undecided"
    context.notes.add_finding(
        PredictedTime(
            target=f"{model}, {name}: step time by {by} within {WITHIN:.0%}", series=series, predicted_s=step_s,
            error=error, limit=WITHIN, verdict="reported" if context.rehearse else verdict,
            measured=f"{error:+.1%}: predicted {step_s * 1e3:.1f} ms "
            f"({between.low * 1e3:.1f} to {between.high * 1e3:.1f}), measured {series.value_s * 1e3:.1f} ms",
        ), settings,
    )  # fmt: skip
    foretold = prediction.peak.peak_bytes
    off = foretold / peak_bytes - 1 if peak_bytes else 0.0
    context.notes.add_finding(
        Check(
            target=f"{model}, {name}: peak memory within {WITHIN:.0%}",
            passed=int(abs(off) <= WITHIN),
            total=1,
            verdict="reported" if context.rehearse else "pass" if abs(off) <= WITHIN else "fail",
            measured=f"{off:+.1%}: predicted {foretold / 2**30:.2f} GiB, measured {peak_bytes / 2**30:.2f} GiB",
        )
    )


def print_kernels(context: Context, name: str, step: Step) -> None:
    """Print the kernels of a step that take the longest: for the log, which tells where the time goes."""
    if context.device.type != "cuda" or context.left_s < 15:
        return
    try:
        step()
        context.settle()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            _, taken_s = context.once(step)
    except RuntimeError as error:  # the log has less; nothing is judged by it
        print(f"{name}: no kernels are known: {error}", flush=True)
        return
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    rows = [row for row in rows if row.self_device_time_total]
    whole_ms = sum(row.self_device_time_total for row in rows) / 1e3
    print(f"{name}: {sum(row.count for row in rows)} kernels take {whole_ms:.2f} ms of {taken_s * 1e3:.2f} ms")
    for row in rows[:KERNELS]:
        kernel = row.key.replace("at::native::", "").replace("(anonymous namespace)::", "").removeprefix("void ")
        print(f"  {row.self_device_time_total / 1e3:9.3f} ms {row.count:6} x {kernel[:200]}")
    print(flush=True)


# --- peers ------------------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], device: str,
    loss_fn: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
) -> Tensor:  # fmt: skip
    """A step of plain PyTorch."""
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _compiled(
    context: Context, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]
) -> Step:
    """The peer with compiled blocks and a compiled loss, over the same parameters."""
    twin = _with_compiled_blocks(model)
    loss = torch.compile(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = loss(model(batch["tokens"]), batch["targets"])
        return result

    step = functools.partial(plain_step, twin, optimizer, batch, context.device.type, loss_fn)
    _, taken_s = context.once(step)
    print(f"{COMPILED}: first step {taken_s:.1f} s", flush=True)
    return step


def _with_compiled_blocks(model: nn.Module) -> nn.Module:
    """The model again, with the same parameters, and blocks that are compiled when they are first called."""
    shared = {id(value): value for value in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for block in twin.blocks:  # type: ignore[union-attr]
        block.compile()
    return twin


def _same_loss(context: Context, work: Workload, expected: float | None) -> None:
    """Note whether the first losses are those of eager PyTorch."""
    for name in (OPERATORS, OURS):
        first_loss = context.kept(context.name).get(f"{name}_first_loss")
        if first_loss is not None and expected is not None:
            off = abs(first_loss / expected - 1)
            context.notes.add_finding(
                Check(
                    target=f"{work.name}, {name}: the first loss is within {LOSS_SPREAD:.0%} of eager PyTorch's",
                    verdict="pass" if off <= LOSS_SPREAD else "fail",
                    passed=int(off <= LOSS_SPREAD),
                    total=1,
                    measured=f"{first_loss:.5f} beside {expected:.5f}",
                )
            )


def _beside(context: Context, work: Workload, rise: int) -> None:
    """Note by how much our step raises the memory that is held, beside eager PyTorch."""
    kept = context.kept(context.name)
    own = kept.get(f"{OURS}_rise", kept.get(f"{OPERATORS}_rise"))
    if own is None or not rise:
        return
    context.notes.add_finding(
        Check(
            target=f"{work.name}: a step needs at most {SCORES} of the memory of eager PyTorch's (no scores)",
            verdict="pass" if own <= SCORES * rise else "fail",
            passed=int(own <= SCORES * rise),
            total=1,
            measured=f"{own / 2**30:.2f} GiB beside {rise / 2**30:.2f} GiB, beyond parameters and optimizer state",
        )
    )


def _compared(context: Context, work: Workload, sides: dict[str, Step], settings: Mapping[str, Settings]) -> None:
    """Note our compiled step beside the faster of the peers."""
    seconds = context.seconds(sides)
    ours = next(iter(sides))
    finding = judged(
        f"{work.name}: a step at most {LIMIT} x PyTorch's", seconds, ours, LIMIT, settings=work.name, num_ranks=1,
        steps=1 if context.rehearse else 3, losses=dict.fromkeys(sides, ()),
    )  # fmt: skip
    context.notes.add_finding(finding, settings)
