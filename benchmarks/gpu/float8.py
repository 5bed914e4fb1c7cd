"""The part ``float8``: products in float8 are those of the rounded numbers, and a step with them is faster."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

import meshwright as mw
from benchmarks.gpu.context import STEPS, Context
from benchmarks.gpu.models import WORKLOADS
from benchmarks.gpu.speed import adamw
from benchmarks.report import judged
from meshwright.ir.layout import Layout
from meshwright.ir.result import Check, Settings
from meshwright.models import language_model_loss
from meshwright.ops import float8
from meshwright.runtime.device import processor
from meshwright.runtime.device_check import FLOAT8_CAPABILITY

LIMIT, LOSS_SPREAD = 1.0, 0.05
SIZES = (512, 1024, 768)
SIDES = {"bfloat16": "", "float8, tensorwise": "tensorwise", "float8, rowwise": "rowwise"}


def run(context: Context) -> None:
    """Compare numbers, then steps."""
    if not context.rehearse and (gpu := processor(context.device)).capability < FLOAT8_CAPABILITY:
        context.notes.add_finding(Check(target="products in float8", verdict="reported", measured=f"{gpu} has none"))
        return
    for scaling in ("tensorwise", "rowwise"):
        context.notes.tried(f"float8, {scaling}: numbers", functools.partial(_numbers, context, scaling))
    context.notes.tried("float8: steps", functools.partial(_steps, context))


def _numbers(context: Context, scaling: str) -> None:
    """The device's products beside those of the rounded numbers in float64: equal but for the rounding of the
    result."""
    m, k, n = SIZES
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(m, k, generator=draw).bfloat16()
    right = torch.randn(n, k, generator=draw).bfloat16().t()
    dims = (1, 0) if scaling == "rowwise" else (-1, -1)
    worst = 0.0
    for name in ("e4m3",) if scaling == "rowwise" else ("e4m3", "e5m2"):
        formats = (name, "e4m3")
        most = [float8.largest(value, dim) for value, dim in zip((left, right), dims, strict=True)]
        exact = [
            _rounded(value, float8.scale_of(each, form), form)
            for value, each, form in zip((left, right), most, formats, strict=True)
        ]
        expected = exact[0] @ exact[1]
        there = [value.to(context.device) for value in (left, right, *most)]
        actual = float8.multiply(there[0], there[1], there[2], there[3], *formats).cpu().double()
        worst = max(worst, float(((actual - expected).abs() / expected.abs().max()).max()))
    limit = 2 * torch.finfo(torch.bfloat16).eps
    context.notes.add_finding(
        Check(
            target=f"float8, {scaling}: products are those of the rounded numbers within {limit:.1e} of the largest",
            verdict="reported" if context.rehearse else "pass" if worst <= limit else "fail",
            measured=f"{worst:.1e}, {m} x {k} x {n}", passed=int(worst <= limit), total=1,
        )
    )  # fmt: skip


def _rounded(value: Tensor, scale: Tensor, name: str) -> Tensor:
    """The numbers in float64 that stand for ``value``."""
    return float8.round_to_float8(value, scale, float8.FORMATS[name], by_columns=False).double() * scale.double()


def _steps(context: Context) -> None:
    """A step of the GPT with products in float8, beside bfloat16."""
    work = WORKLOADS["gpt"](context.rehearse)
    settings = {work.name: Settings(dtype="bfloat16", ranks=1, threads=torch.get_num_threads(), sizes=work.sizes)}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for name, scaling in SIDES.items():
        if context.left_s < 15:
            break
        step = context.notes.tried(f"{work.name}, {name}", functools.partial(_trainer, context, scaling))
        if step is not None:
            trainer, batch = step
            losses[name] = [float(trainer.step(batch)) for _ in range(STEPS)]
            seconds |= context.seconds({name: functools.partial(trainer.step, batch)})
            del trainer, step
            context.free()
    for name in [name for name in seconds if name != "bfloat16" and "bfloat16" in seconds]:
        both = {side: seconds[side] for side in (name, "bfloat16")}
        context.notes.add_finding(
            judged(
                f"{work.name}, {name}: at most {LIMIT:.2f} x the step in bfloat16, not taking turns", both, name, LIMIT,
                settings=work.name, num_ranks=1, steps=STEPS, losses={side: losses[side] for side in both},
                loss_spread=LOSS_SPREAD,
            ), settings,
        )  # fmt: skip


def _trainer(context: Context, scaling: str) -> tuple[mw.Trainer, Mapping[str, Tensor]]:
    work = WORKLOADS["gpt"](context.rehearse)
    torch.manual_seed(0)
    batch = work.batch()
    trainer = mw.parallelize(
        work.make(), language_model_loss, batch, plan=Layout(precision="bfloat16", float8=scaling),  # type: ignore[arg-type]
        optimizer=adamw, compile=not context.rehearse, device=context.device,
        cluster=context.catalog_cluster() or "h100-dgx",
    )  # fmt: skip
    texts = trainer.plan.stage.operator_algorithms.values()
    print(f"float8 {scaling or 'none'}: {sum('float8' in text for text in texts)} kinds of products", flush=True)
    return trainer, {key: value.to(context.device) for key, value in batch.items()}
