"""Do pipelines reach their targets? Speed and memory beside torch.distributed.pipelining, live memory by schedule.

Run as ``make bench-pipelines``. The exit code is 1 if a target is missed. A step is zero_grad, forward, loss, backward
and SGD with momentum 0.9 in float32, one thread a rank. Both sides have the same micro-batches and weights. Our stages
are cut where the planner cuts them, also inside a block; the peer's stages are halves (quarters) of the blocks, because
its stages are modules. The GPT has a head of its own, because torch.distributed.pipelining knows no tied weights.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import meshwright as mw
from benchmarks import kills, report
from benchmarks.report import decided, judged
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.comm.groups import from_every_rank
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ir.schedule import Action, ActionKind
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.schedules.check import check
from meshwright.schedules.pipeline import schedule_of
from tests.distributed.pool import Ranks

COMMAND = "make bench-pipelines"
ROUNDS, STEPS = 31, 3
"""Several steps in a round: as in training, a step follows a step of the same program."""
OURS, PEER = "meshwright", "torch.distributed.pipelining"
PEERS: dict[str, dict[str, bool]] = {
    PEER: {},
    f"{PEER}, foreach optimizer": {"foreach": True},
    f"{PEER}, fused optimizer": {"fused": True},
}
"""The settings of the peer's optimizer; the fastest counts. The peer never returns its outputs."""
SEQUENCES = 2
"""Sequences in a micro-batch."""
LIMIT, MEMORY_LIMIT, THROUGHPUT, LIVE = 0.95, 1.0, 1.6, 0.15
GPT_S = GPTConfig(tied_head=False)
LARGE = GPTConfig(layers=4, width=512, heads=8, vocabulary=2048, sequence_length=512, tied_head=False)
"""For memory: a gibibyte of activations in 16 micro-batches."""

Step = Callable[[], Any]


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule with its micro-batches, on two ranks."""

    schedule: str
    microbatches: int
    chunks: int = 1
    config: GPTConfig = GPT_S

    @property
    def layout(self) -> mw.Layout:
        kinds: Any = self.schedule
        return mw.Layout(pp=2, microbatches=self.microbatches, schedule=kinds, chunks=self.chunks)

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.schedule}, m = {self.microbatches}{chunks}"


CASES = [
    ScheduleCase(name, m, chunks) for m in (4, 16) for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
]


# --- on every rank ---------------------------------------------------------------------------------------------------


class _Part(nn.Module):
    """The GPT's stage number ``index`` of ``count``: its blocks, with the embeddings first and the head last."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        each = len(model.blocks) // count
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.first = nn.ModuleList([model.token_embedding, model.position_embedding] if index == 0 else [])
        self.last = nn.Sequential(model.final_norm, model.head) if index == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if len(self.first):
            x = self.first[0](x) + self.first[1](torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


def _model(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def _batch(case: ScheduleCase) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (SEQUENCES * case.microbatches, case.config.sequence_length + 1)
    text = torch.randint(case.config.vocabulary, shape, generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _sgd(parameters: Any, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def our_step(case: ScheduleCase) -> Step:
    """A step of the trainer."""
    batch = _batch(case)
    trainer = mw.parallelize(_model(case.config), language_model_loss, batch, plan=case.layout, optimizer=_sgd)
    return lambda: trainer.step(batch)


def torch_step(case: ScheduleCase, **options: bool) -> Step:
    """A step of torch.distributed.pipelining, as its documentation advises. ``options`` are the optimizer's."""
    rank, batch = dist.get_rank(), _batch(case)
    count = 2 * case.chunks
    model = _model(case.config)
    parts = {index: _Part(model, index, count) for index in range(rank, count, 2)}
    stages: list[Any] = [PipelineStage(part, index, count, torch.device("cpu")) for index, part in parts.items()]

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule: Any
    if case.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, case.microbatches, loss_fn=loss_fn)
    else:
        kind = ScheduleGPipe if case.schedule == "gpipe" else Schedule1F1B
        schedule = kind(stages[0], case.microbatches, loss_fn=loss_fn)
    optimizer = _sgd([value for part in parts.values() for value in part.parameters()], **options)

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if 0 in parts and count - 1 in parts:
            schedule.step(batch["tokens"], target=batch["targets"], losses=losses, return_outputs=False)
        elif 0 in parts:
            schedule.step(batch["tokens"], return_outputs=False)
        else:
            schedule.step(target=batch["targets"], losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return step


def measure(case: ScheduleCase, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step by side and round; the first losses, which the last rank has."""
    sides = {OURS: our_step(case)} | {name: torch_step(case, **options) for name, options in PEERS.items()}
    losses = {side: [float(step().detach()) for _ in range(3)] for side, step in sides.items()}
    return alternate(sides, rounds=rounds, steps=steps), from_every_rank(losses)[-1]


def measure_ours(case: ScheduleCase, layout: mw.Layout, rounds: int, steps: int) -> list[float]:
    """Seconds a step of our trainer, with no other program in the same processes."""
    batch = _batch(case)
    trainer = mw.parallelize(_model(case.config), language_model_loss, batch, plan=layout, optimizer=_sgd)
    return alternate({OURS: lambda: trainer.step(batch)}, rounds=rounds, steps=steps)[OURS]


def peak_bytes(case: ScheduleCase, side: str) -> int:
    """What two steps need at their peak beyond what is there before the first: VmHWM minus resident memory."""
    step = our_step(case) if side == OURS else torch_step(case)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return _status("VmHWM") - before


def kept_bytes(case: ScheduleCase) -> int:
    """What this rank's stages keep of one micro-batch between its forward and its backward, by storage; what a step
    has anyway (parameters, inputs) does not count."""
    batch = _batch(case)
    trainer = mw.parallelize(_model(case.config), language_model_loss, batch, plan=case.layout, optimizer=_sgd)
    step = trainer._last
    executor, sizes = step.executor, []
    forward = executor._run[ActionKind.F]

    def counted(stage: Any, action: Action) -> None:
        forward(stage, action)
        whole = {value.untyped_storage().data_ptr() for value in stage.step.values() if isinstance(value, Tensor)}
        kept = [executor._live[action.stage, action.microbatch or 0][name] for name in stage.kept]
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in kept}
        sizes.append(sum(size for pointer, size in storages.items() if pointer not in whole))

    executor._run[ActionKind.F] = counted
    trainer.step(batch)
    return max(sizes)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


# --- targets ---------------------------------------------------------------------------------------------------------


def speed(case: ScheduleCase, rounds: int, steps: int) -> Finding:
    """Step time beside torch.distributed.pipelining."""
    return decided(
        lambda seconds, losses: judged(
            f"{case}: step time at most {LIMIT} x {PEER}", seconds, OURS, LIMIT, num_ranks=2,
            settings=str(case), steps=steps, losses=losses, loss_spread=1e-4,
        ),
        2, measure, case, rounds, steps,
    )  # fmt: skip


def throughput(rounds: int, steps: int) -> Finding:
    """Two ranks against one process that accumulates gradients over the same micro-batches."""
    case = ScheduleCase("1f1b", 16)
    with Ranks() as ranks:
        on_two = ranks(2, measure_ours, case, case.layout, rounds, steps, timeout=1800.0)[0]
        on_one = ranks(1, measure_ours, case, mw.Layout(microbatches=16), rounds, steps, timeout=1800.0)[0]
    return report.speedup(
        f"{case}: throughput of 2 ranks at least {THROUGHPUT} x one process", on_one, on_two, 2, THROUGHPUT,
        base="one process of Meshwright that accumulates gradients over the same micro-batches", unit="samples",
        work=float(SEQUENCES * case.microbatches), steps=steps, settings=(f"{case}, one process", str(case)),
        parameters=sum(value.numel() for value in _model(case.config).parameters()),
    )  # fmt: skip


def memory() -> list[Finding]:
    """Peaks of both sides, and of 1F1B against GPipe."""
    peaks: dict[tuple[str, str], list[int]] = {}
    results: list[Finding] = []
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for side in (OURS, PEER):
            with Ranks() as ranks:  # fresh processes: memory is not given back
                peaks[name, side] = ranks(2, peak_bytes, ScheduleCase(name, 16, chunks, LARGE), side, timeout=1800.0)
        ours, theirs = max(peaks[name, OURS]), max(peaks[name, PEER])
        text = f"{ours / theirs:.3f}: {ours / 2**30:.2f} GiB against {theirs / 2**30:.2f} GiB"
        results.append(
            _check(
                f"{name}, m = 16: peak memory at most {MEMORY_LIMIT:.1f} x {PEER}",
                text,
                {"peaks_bytes": {side: peaks[name, side] for side in (OURS, PEER)}},
                passed=ours <= theirs * MEMORY_LIMIT,
            )
        )
    results.append(_live(peaks))
    return results


def _live(peaks: dict[tuple[str, str], list[int]]) -> Finding:
    """By the validator rank 0 keeps 16 micro-batches under GPipe and 2 under 1F1B: memory must fall accordingly."""
    case = ScheduleCase("1f1b", 16, config=LARGE)
    graph = mw.capture(_model(LARGE), language_model_loss, _batch(case))
    live = {}
    for name in ("gpipe", "1f1b"):
        plan = mw.plan(graph, layout=ScheduleCase(name, 16, config=LARGE).layout)
        live[name] = [rank.live_activations for rank in check(schedule_of(plan)).ranks]
    with Ranks() as ranks:
        kept = ranks(2, kept_bytes, case, timeout=1800.0)
    fewer = live["gpipe"][0] - live["1f1b"][0]
    expected, measured = kept[0] * fewer, peaks["gpipe", OURS][0] - peaks["1f1b", OURS][0]
    off = measured / expected - 1
    return _check(
        f"1f1b against gpipe, m = 16: peak falls as the validator says, within {LIVE:.0%}",
        f"{off:+.1%}: rank 0 falls by {measured / 2**20:.0f} MiB, foretold {expected / 2**20:.0f} MiB "
        f"({live['gpipe'][0]} -> {live['1f1b'][0]} live micro-batches of {kept[0] / 2**20:.1f} MiB)",
        {"live": live, "kept_bytes": kept, "peaks_bytes": {name: peaks[name, OURS] for name in ("gpipe", "1f1b")}},
        passed=abs(off) <= LIVE,
    )


def _check(target: str, measured: str, notes: dict[str, Any], *, passed: int, total: int = 1) -> Finding:
    verdict: Any = "pass" if passed == total else "fail"
    return Check(target=target, verdict=verdict, measured=measured, passed=int(passed), total=total, notes=notes)


def survival(num_kills: int) -> Finding:
    """Random kills of ranks: the run goes on, and its losses are those of an uninterrupted run."""
    rows = kills.run(num_kills)
    good = sum(row.passed for row in rows)
    return _check(
        f"{num_kills} random kills: losses bit for bit those of an uninterrupted run",
        f"{good} of {len(rows)} runs, with {sum(sum(row.kills.values()) for row in rows)} kills",
        {"rows": [str(row) for row in rows]},
        passed=good,
        total=len(rows),
    )


def settings() -> dict[str, Settings]:
    """By case: precision, ranks, threads and sizes."""
    by_name = {}
    for case in CASES:
        sizes = asdict(case.config) | {"batch": SEQUENCES * case.microbatches, "microbatches": case.microbatches}
        for count, name in ((2, str(case)), (1, f"{case}, one process")):
            by_name[name] = Settings(dtype="float32", ranks=count, threads=1, sizes=sizes)
    return by_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    parser.add_argument("--kills", type=int, default=50, help="random kills (default 50)")
    parser.add_argument("--only", default="", help="run only what contains this in its name; writes no file")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    planned: list[tuple[str, Callable[[], list[Finding]]]] = [
        (f"speed {case}", lambda case=case: [speed(case, options.rounds, options.steps)])  # type: ignore[misc]
        for case in CASES
    ]
    planned.append(("throughput", lambda: [throughput(options.rounds, options.steps)]))
    planned.append(("memory", memory))
    planned.append(("kills", lambda: [survival(options.kills)]))
    results: list[Finding] = []
    for name, run in planned:
        if options.only in name:
            for result in run():
                results.append(result)
                console.print(f"{result.verdict:<8}  {result.target}\n          {result.measured}", markup=False)
    if not options.only:
        text = (
            f"{report.how(options.rounds, options.steps)} GPT-S with its own head, "
            f"{SEQUENCES} sequences a micro-batch, float32, one thread a rank. The peer returns no outputs, and runs "
            "with its optimizer's plain, `foreach` and `fused` kernels; the fastest counts. Memory: 4 layers, 512 "
            "wide, sequence 512; the larger rank's peak over two steps, minus what was resident before."
        )
        timed = (
            "A training step: zero_grad, forward, loss, backward, SGD with momentum 0.9, float32; by turns, "
            f"{options.rounds} rounds of {options.steps} steps each after {WARMUP_STEPS} of warm-up, from when all "
            "ranks have met until the slowest is done."
        )
        report.write("pipelines", "The targets of pipelines", COMMAND, timed, settings(), results, text)
        console.print("written to benchmarks/results/pipelines.md and .json")
    return 1 if any(result.verdict == "fail" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
