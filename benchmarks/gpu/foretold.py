"""The part ``foretold``: what the calibrated cluster and dry runs foretell, beside what earlier parts measured."""

from __future__ import annotations

import functools
from typing import Any

import torch

import meshwright as mw
from benchmarks.gpu import layouts
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import WORKLOADS
from benchmarks.gpu.several import MEASURED
from benchmarks.gpu.speed import OPERATORS, WITHIN, compare_prediction
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster
from meshwright.ir.result import Check, Settings
from meshwright.lower.plans import PlanLowering
from meshwright.models import language_model_loss
from meshwright.planner.foretell import foretell

LAYOUT_S = 10.0
"""Seconds that must be left for the dry run of a layout."""


def run(context: Context) -> None:
    """Foretell each model that was measured, by the calibrated cluster, then by a dry run."""
    cluster = Cluster.load(context.cluster_file) if context.cluster_file.exists() else None
    for part in ("gpt", "llama", "attention"):
        kept = context.kept(part)
        if f"{OPERATORS}_s" in kept and cluster is not None:
            context.notes.tried(f"{part}: predictions", lambda: _predicted(context, part, kept, cluster))  # noqa: B023
    for part in ("attention", "gpt", "llama"):
        kept = context.kept(part)
        if f"{OPERATORS}_bytes" in kept and context.left_s > 20:
            context.notes.tried(f"{part}: dry run", lambda: _rehearsed(context, part, kept))  # noqa: B023
    if most := context.kept("ranks").get("ranks"):
        several_layouts(context, most)


def several_layouts(context: Context, most: int) -> None:
    """Note the peak memory of dry runs of layouts of several GPUs beside that which was measured."""
    notes: dict[str, str] = {}
    right = total = 0
    for name, checked in layouts.layouts(most).items():
        kept = context.kept(f"ranks-parity-{checked.layout.num_ranks}").get(f"{name}{MEASURED}")
        if kept is None or context.left_s < LAYOUT_S:
            notes[name] = "not measured" if kept is None else "no dry run: no time was left"
            continue
        cluster = context.catalog_cluster(checked.layout.num_ranks) or "h100-dgx"
        args = context, checked, kept["plan"], cluster
        result = context.notes.tried(f"{name}: dry run", functools.partial(layouts.foretold, *args))
        total += 1
        if result is None:
            notes[name] = "failed"
            continue
        peak, findings = result
        off = peak / kept["bytes"] - 1 if kept["bytes"] else 0.0
        right += not findings and abs(off) <= WITHIN
        notes[name] = "; ".join([f"{off:+.1%}: {peak / 2**20:.1f} MiB in the dry run", *findings[:3]])
    context.notes.add_finding(
        Check(
            target=f"layouts of up to {most} ranks: dry runs are clean, and their peak memory within {WITHIN:.0%}",
            verdict="pass" if total and right == total else "fail", passed=right, total=max(total, 1),
            measured=f"{right} of {total} layouts", notes=notes,
        )
    )  # fmt: skip


def _predicted(context: Context, part: str, kept: dict[str, Any], cluster: Cluster) -> None:
    work = WORKLOADS[part](context.rehearse)
    with torch.device("meta"):
        model = work.make()
    batch = work.batch()
    graph = mw.capture(model, language_model_loss, batch, precision="bfloat16")
    layout = mw.Layout(precision="bfloat16")
    one_device = cluster.resized(1) if cluster.num_devices > 1 else cluster
    plan = mw.plan(graph, one_device, devices=1, layout=layout)
    prediction = foretell(PlanLowering(graph), plan, one_device, optimizer=ADAMW)
    settings = {work.name: Settings(dtype="bfloat16", ranks=1, threads=torch.get_num_threads(), sizes=work.sizes)}
    seconds = list(kept[f"{OPERATORS}_s"])
    name = f"{OPERATORS}, calibrated"
    compare_prediction(
        context, work.name, name, seconds, kept[f"{OPERATORS}_bytes"], prediction, "this machine", settings
    )
    pieces = sorted(
        (piece for stage in prediction.work.stages for each in stage.pieces.values() for piece in each),
        key=lambda piece: -getattr(piece, "seconds", 0.0),
    )
    print(*pieces[:5], sep="\n", flush=True)


def _rehearsed(context: Context, part: str, kept: dict[str, Any]) -> None:
    """Compare the peak of a dry run with the measured one."""
    work = WORKLOADS[part](context.rehearse)
    with torch.device("meta"):
        model = work.make()
    cluster = context.catalog_cluster()
    dry_run = mw.dry_run(
        model, language_model_loss, work.batch(), mw.Layout(precision="bfloat16"), cluster or "h100-dgx", devices=1,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )  # fmt: skip
    measured, foretold = kept[f"{OPERATORS}_bytes"], dry_run.ranks[0].peak_bytes
    off = foretold / measured - 1 if measured else 0.0
    findings = [f"{each.kind}: {each.what}" for each in dry_run.findings[:5]]
    context.notes.add_finding(
        Check(
            target=f"{work.name}: the dry run is clean, and its peak memory within {WITHIN:.0%}",
            verdict="pass" if dry_run.clean and abs(off) <= WITHIN else "fail", total=2,
            passed=int(dry_run.clean) + int(abs(off) <= WITHIN), notes={"findings": findings},
            measured=f"{off:+.1%}: {foretold / 2**30:.2f} GiB in the dry run, {measured / 2**30:.2f} GiB on the device"
            + f"; {len(dry_run.findings)} findings" * (not dry_run.clean),
        )
    )  # fmt: skip
