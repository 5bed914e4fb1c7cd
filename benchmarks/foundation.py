"""Does the foundation reach its targets? Parity with one process, speed beside PyTorch's own ways: pass or fail.

Run as ``make bench-foundation``. ``--slow`` also times ``make demo`` and ``make test``. The exit code is 1 if a target
is missed. What is timed is a whole training step in float32 with one thread a rank: zero_grad, forward, loss, backward,
SGD with momentum 0.9, no clipping. All sides of a comparison start from the same weights, see the same batches, and
alternate in the same processes (meshwright/bench/repeat.py). Where a peer can be set up in several ways, all of them
run, and the fastest is the one that counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import meshwright as mw
from benchmarks import matrix, peers, report
from benchmarks.report import decided, judged
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.ir.result import Check, Duration, Finding, Series, Settings
from meshwright.models import GPT, demo_gpt, gpt_s, language_model_loss
from tests.distributed import oracle
from tests.distributed.pool import Ranks

COMMAND = "make bench-foundation"
ROUNDS = 31
STEPS = 3
BATCH = 8
NUM_BATCHES = 4
LOSS_SPREAD = 1e-4
"""All sides begin alike and see the same batches: more difference than this is another computation."""
OURS = "meshwright"
MODELS: Mapping[str, Callable[[], GPT]] = {"GPT-S": gpt_s, "demo GPT": demo_gpt}
LIMITS_S = {"make demo": 300.0, "make test": 600.0}

Batches = list[dict[str, torch.Tensor]]
Sides = dict[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class SpeedTarget:
    """One target of speed: Meshwright's step over the fastest peer's is at most ``limit``."""

    name: str
    layout: mw.Layout
    model: Callable[[], GPT]
    peers: Mapping[str, Mapping[str, bool]]
    limit: float

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks


EAGER: dict[str, dict[str, bool]] = {"eager PyTorch": {}, "eager PyTorch, fused optimizer": {"fused": True}}
DDP = {
    "DistributedDataParallel": {},
    "DistributedDataParallel, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "DistributedDataParallel, gradient_as_bucket_view, static_graph, fused optimizer": {
        "gradient_as_bucket_view": True, "static_graph": True, "fused": True,
    },
}  # fmt: skip
PARALLELIZE_MODULE = {
    "parallelize_module": {},
    "parallelize_module, vocabulary split, foreach": {"vocabulary": True, "foreach": True},
}
COMPARISONS = [
    *(SpeedTarget(f"world size 1, {name}", mw.Layout(), model, EAGER, 1.03) for name, model in MODELS.items()),
    *(
        SpeedTarget(f"dp2, {name}", mw.Layout(dp=2), model, DDP, 0.97 if model is gpt_s else 1.0)
        for name, model in MODELS.items()
    ),
    SpeedTarget("tp2, GPT-S", mw.Layout(tp=2), gpt_s, PARALLELIZE_MODULE, 0.65),
]


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(comparison: SpeedTarget, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step by side and round, and the first losses of every side."""
    sides = sides_of(comparison)
    losses = {name: [float(step()) for _ in range(NUM_BATCHES)] for name, step in sides.items()}
    if comparison.layout.dp > 1:  # DistributedDataParallel gives the loss of its part of the batch
        for name in comparison.peers:
            parts = torch.tensor(losses[name], dtype=torch.float64)
            dist.all_reduce(parts)
            losses[name] = (parts / comparison.layout.dp).tolist()
    return alternate(sides, rounds=rounds, steps=steps), losses


def sides_of(comparison: SpeedTarget) -> Sides:
    """Meshwright and its peers, each with a model and an optimizer of its own."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = _model(comparison)
    batches = text_batches(model)
    trainer = mw.parallelize(model, language_model_loss, batches[0], plan=comparison.layout, optimizer=sgd)
    sides: Sides = {OURS: over(trainer.step, batches)}
    parts = [list(oracle.shards(batch, ranks))[rank] for batch in batches]
    for name, options in comparison.peers.items():
        peer = _model(comparison)
        if comparison.layout.feature_ranks > 1:
            sides[name] = over(peers.tensor_parallel(peer, ranks, sgd, **dict[str, Any](options)), batches)
        elif comparison.layout.dp > 1:
            sides[name] = over(peers.data_parallel(peer, sgd, language_model_loss, **options), parts)
        else:
            sides[name] = over(peers.eager(peer, sgd, language_model_loss, **options), batches)
    return sides


def sgd(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """The optimizer of every side."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def _model(comparison: SpeedTarget) -> GPT:
    torch.manual_seed(0)
    return comparison.model()


def text_batches(model: GPT) -> Batches:
    """Random texts, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, model.config.sequence_length + 1)
    drawn = [torch.randint(model.config.vocabulary, shape, generator=generator) for _ in range(NUM_BATCHES)]
    return [{"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()} for text in drawn]


def over(step: Callable[[Any], torch.Tensor], batches: Batches) -> Callable[[], torch.Tensor]:
    """``step`` on one batch after the other, and again from the first."""
    count = 0

    def run() -> torch.Tensor:
        nonlocal count
        count += 1
        return step(batches[(count - 1) % len(batches)])

    return run


# --- targets ---------------------------------------------------------------------------------------------------------


def speed(comparison: SpeedTarget, rounds: int, steps: int) -> Finding:
    """Measure one comparison and judge it."""
    return decided(
        lambda seconds, losses: judged(
            f"{comparison.name}: at most {comparison.limit:.2f} x {next(iter(comparison.peers))}",
            seconds,
            OURS,
            comparison.limit,
            settings=comparison.name,
            num_ranks=comparison.num_ranks,
            steps=steps,
            losses=losses,
            loss_spread=LOSS_SPREAD,
        ),
        comparison.num_ranks,
        measure,
        comparison,
        rounds,
        steps,
    )


def parity(console: Console) -> Finding:
    """The pairwise cases of the tests; ``make matrix`` runs the full product."""
    cases = oracle.pairwise_cases()
    with Ranks() as ranks, console.status("parity"):
        rows = [matrix.run(ranks, case, matrix.compare, oracle.TOLERANCE) for case in cases]
        plain = [
            matrix.run(ranks, case, matrix.compare_with_casts_as_they_come, matrix.PLAIN_TOLERANCE)
            for case in cases
            if case.model.startswith("HF")
        ]
    every = (*rows, *plain)
    return Check(
        target=f"parity with one process: within {oracle.TOLERANCE:.0e} in float64, "
        f"{matrix.PLAIN_TOLERANCE:.0e} with casts to float32",
        verdict="pass" if all(row.passed for row in every) else "fail",
        measured=f"{sum(row.passed for row in rows)} of {len(rows)} pairwise cases, largest error "
        f"{max(row.error for row in rows):.0e}; with casts {sum(row.passed for row in plain)} of {len(plain)}, "
        f"{max(row.error for row in plain):.0e}",
        passed=sum(row.passed for row in every),
        total=len(every),
        notes={f"{row.case}, at most {row.tolerance:.0e}": row.failure or row.error for row in every},
    )


def duration(command: str, slow: bool) -> Finding:
    """How long a make target takes. It takes minutes, so it is run only when asked, and once: it can fail, not pass."""
    target = f"{command}: under {LIMITS_S[command] / 60:g} minutes"
    if not slow:
        return Check(
            target=target, verdict="reported", measured=f"not run: `time {command}`, or this benchmark with --slow"
        )
    start = time.monotonic()
    code = subprocess.run(
        command.split(), cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, check=False
    ).returncode
    seconds = time.monotonic() - start
    if code:
        return Check(target=target, verdict="fail", measured=f"exit code {code}", total=1)
    return Duration(
        target=target,
        verdict="reported" if seconds < LIMITS_S[command] else "fail",
        measured=f"{seconds:.0f} s, once",
        series=Series.of([seconds], settings=command, run=report.new_run()),
        limit_s=LIMITS_S[command],
    )


# --- report ----------------------------------------------------------------------------------------------------------


def settings() -> dict[str, Settings]:
    """By comparison and command: precision, ranks, threads and sizes."""
    by_name = {command: Settings(sizes={"command": command}) for command in LIMITS_S}
    for comparison in COMPARISONS:
        sizes = asdict(comparison.model().config) | {"batch": BATCH}
        by_name[comparison.name] = Settings(dtype="float32", ranks=comparison.num_ranks, threads=1, sizes=sizes)
    return by_name


def write(results: Sequence[Finding], rounds: int, steps: int) -> None:
    """``results/foundation.json`` and ``.md``."""
    described = "; ".join(
        f"{name}: {config.layers} layers, {config.width} wide, {config.heads} heads, vocabulary {config.vocabulary}, "
        f"batch {BATCH} x {config.sequence_length}"
        for name, config in ((name, make().config) for name, make in MODELS.items())
    )
    text = f"""{report.how(rounds, steps)} All run over gloo, with one thread a rank. A step is zero_grad, forward,
loss, backward and SGD with momentum 0.9, in float32, without clipping. Of a peer's several settings the fastest counts.
Sizes: {described}."""
    report.write("foundation", "The foundation's targets", COMMAND, timed(rounds, steps), settings(), results, text)


def timed(rounds: int, steps: int) -> str:
    """What is timed, and how it is repeated."""
    return (
        "A training step: zero_grad, forward, loss, backward, SGD with momentum 0.9, float32, no clipping; gloo. All "
        f"sides by turns in the same processes: {rounds} rounds of {steps} steps each after {WARMUP_STEPS} of warm-up, "
        "from when all ranks have met until the slowest is done."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foundation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--slow", action="store_true", help="also time make demo and make test")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS}, at least 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    parser.add_argument("--only", default="", help="run only targets whose name contains this; writes no file")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    warnings.simplefilter("ignore")  # of the peers' libraries
    console = Console(highlight=False, soft_wrap=True)
    planned: list[tuple[str, Callable[[], Finding]]] = [("parity", partial(parity, console))]
    for comparison in COMPARISONS:
        planned.append((comparison.name, partial(speed, comparison, options.rounds, options.steps)))
    for command in LIMITS_S:
        planned.append((command, partial(duration, command, options.slow)))
    results = []
    for name, run in planned:
        if options.only in name:
            result = run()
            results.append(result)
            console.print(f"{result.verdict:<8}  {result.target}\n          {result.measured}", markup=False)
    if not options.only:
        write(results, options.rounds, options.steps)
        console.print("written to benchmarks/results/foundation.md and .json")
    return 1 if any(result.verdict == "fail" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
