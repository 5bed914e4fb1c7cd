"""Do products in pieces pay on CPUs, and does the planner know? ``python -m benchmarks.pieces [--only PART]``.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

network    GPT-S on 2 ranks (tp2, sequence parallel, float32, one thread a rank) in two emulated boxes at 1 Gbit/s
           (``emulation/network.py``; as root, else nothing is judged): the plan for the calibrated network, beside the
           plain form of all products, and beside 2, 4 and 8 pieces of all products whose rows travel.
memory     The same on 2 ranks that share memory, where ranks move the bytes themselves.

All forms are plans of the same layout, with the same words on the wire, and take turns in the same processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import meshwright as mw
from benchmarks import report
from benchmarks.boxes import GBIT, LINK_SIZES, known
from benchmarks.prediction import MODELS, calibrated
from meshwright.bench.repeat import alternate
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.operator_algorithm import PIECES, in_pieces
from meshwright.ir.plan import starred
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ir.statistics import ratio
from meshwright.runtime import launch
from meshwright.runtime.between import MeasuredSizes, between, boxes_of_world
from tests.distributed.pool import Ranks

COMMAND = "python -m benchmarks.pieces"
ROUNDS, STEPS, WARMUP_STEPS, COMPARED = 15, 3, 2, 3
LAYOUT = mw.Layout(tp=2, sequence_parallel=True)
MODEL = MODELS["GPT-S"]
PLAIN, CHOSEN = "plain", "chosen"
COUNTS = (2, 4, 8)
PAYS, NEVER_SLOWER, SPREAD = 0.97, 1.03, 1e-3
"""Limits on ratios. ``PAYS``: the time of a step in pieces over the time of the plain form. ``NEVER_SLOWER``: the time
of the planner's form over the time of the fastest form. ``SPREAD``: the relative difference of losses in float32."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
TABLE = msgspec.structs.replace(LINK_SIZES, repeats=3, most_s=1.0, operations=OPERATIONS)


class PieceTimes(msgspec.Struct, frozen=True):
    """The measurements of all forms.

    ``seconds`` maps a form to its times of a step, and ``losses`` to the losses of its first steps. ``pieces`` maps the
    products that the planner runs in pieces to their algorithms."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    pieces: dict[str, str]


# --- on every rank ---------------------------------------------------------------------------------------------------


def in_boxes(device: Cluster, table: MeasuredSizes, rounds: int) -> PieceTimes:
    """Measure the links, plan, and run every form."""
    torch.set_num_threads(1)
    launch.start("cpu")
    places = boxes_of_world()
    with torch.inference_mode():
        rows = between(table, places, lambda what: None)
    return forms(known(rows, places.num_boxes, places.each, device), rounds)


def forms(cluster: Cluster, rounds: int) -> PieceTimes:
    """Run the plan for a cluster, the plain form, and all products in pieces."""
    batch = MODEL.batch()
    graph = mw.capture(MODEL.make(), MODEL.loss, batch)
    plan = mw.plan(graph, cluster, layout=LAYOUT)
    plans = {CHOSEN: plan, PLAIN: _divided(plan, graph, 0)}
    plans |= {in_pieces(count): _divided(plan, graph, count) for count in COUNTS}
    trainers, losses = {}, {}
    for name, each in plans.items():
        torch.manual_seed(0)
        trainers[name] = mw.parallelize(MODEL.make(), MODEL.loss, batch, plan=each, optimizer=MODEL.optimizer)
        losses[name] = [float(trainers[name].step(batch)) for _ in range(COMPARED)]
    sides = {name: lambda trainer=trainer: trainer.step(batch) for name, trainer in trainers.items()}
    seconds = alternate(sides, rounds=rounds, steps=STEPS, warmup_steps=WARMUP_STEPS)
    texts = {name: text for name, text in plan.stage.operator_algorithms.items() if text.startswith(PIECES)}
    return PieceTimes(seconds, losses, texts)


def _divided(plan: mw.Plan, graph: Graph, count: int) -> mw.Plan:
    """The plan with ``count`` pieces of every product whose rows travel; 0: all products run whole."""
    names = {starred(operator.name) for operator in graph.operators if operator.target.startswith("aten.mm.")}
    texts = {name: in_pieces(count) for name in names} if count else {}
    return msgspec.structs.replace(
        plan, stages=(msgspec.structs.replace(plan.stage, operator_algorithms=texts),), notes=()
    )


# --- verdicts --------------------------------------------------------------------------------------------------------


def network_findings(rounds: int) -> list[Finding]:
    """Pieces between boxes."""
    if missing := why_not():
        return [
            Check(target="products in pieces between boxes", verdict="reported", measured=f"not measured: {missing}")
        ]
    with tempfile.TemporaryDirectory() as name:
        measured = run_in_boxes(
            in_boxes, calibrated(), TABLE, rounds, boxes=(0, 1), rates_bits_per_s=(GBIT, GBIT), directory=Path(name)
        )
    return _judged("2 boxes, emulated 1 Gbit/s", measured, PAYS)


def memory_findings(rounds: int) -> list[Finding]:
    """Pieces in shared memory."""
    cluster = calibrated()
    with Ranks() as ranks:
        measured = ranks(2, forms, cluster, rounds, timeout=1800.0)[0]
    return _judged("2 ranks that share memory", measured, None)


def _judged(where: str, measured: PieceTimes, pays: float | None) -> list[Finding]:
    """``pays``: the planner's form must take at most this share of the plain form's time (None: it must be plain)."""
    seconds = measured.seconds
    shares = {name: ratio(values, seconds[PLAIN]) for name, values in seconds.items()}
    print(where, *(f"{name}: {report.ms(sorted(seconds[name])[len(seconds[name]) // 2])}, {share} of plain"
                   for name, share in shares.items()), f"chosen: {measured.pieces}", sep="\n  ",
          flush=True)  # fmt: skip
    others = {name: seconds[name] for name in (PLAIN, *map(in_pieces, COUNTS))}
    text = ", ".join(f"{name} {share.value:.3f}" for name, share in shares.items() if name != PLAIN)
    limits = [(f"the planner's form is no slower than {NEVER_SLOWER:g} x the fastest of plain, 2, 4 and 8 pieces",
               others, NEVER_SLOWER)]  # fmt: skip
    if pays is not None:
        limits.append((f"the planner's form takes at most {pays:g} of the plain form", {PLAIN: seconds[PLAIN]}, pays))
    findings: list[Finding] = [
        report.judged(
            f"GPT-S, tp2, sequence parallel, {where}: {what}", {CHOSEN: seconds[CHOSEN], **beside}, CHOSEN, limit,
            settings="GPT-S", num_ranks=2, steps=STEPS,
            losses={name: measured.losses[name] for name in (CHOSEN, *beside)}, loss_spread=SPREAD,
        )
        for what, beside, limit in limits
    ]  # fmt: skip
    if pays is None:
        target = f"GPT-S, tp2, sequence parallel, {where}: the planner takes the plain form of every product"
        findings.append(
            report.share(
                target, int(not measured.pieces), 1, f"{measured.pieces or 'plain'}; of plain, a step takes: {text}"
            )
        )
    return findings


PARTS = {"network": network_findings, "memory": memory_findings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge."""
    results, rounds, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        settings = {
            "GPT-S": Settings(dtype="float32", ranks=2, threads=1, sizes={"batch": MODEL.batch()["tokens"].shape[0]})
        }
        text = f"{(__doc__ or '').partition('is missed.')[2].strip()}\n\n{report.how(rounds, STEPS)}"
        report.write(
            "pieces",
            "Products in pieces",
            COMMAND,
            "A whole step, from when all ranks have met.",
            settings,
            results,
            text,
        )
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
