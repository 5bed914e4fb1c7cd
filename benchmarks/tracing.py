"""What notes and guards of every step cost, beside the step. `python -m benchmarks.tracing`."""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import meshwright as mw
from benchmarks.report import alone
from meshwright.ir.result import Check, Finding
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.runtime.ranks import run_ranks

LIMIT = 0.01
CASES = {
    "GPT, 1 rank": (1, mw.Layout()),
    "GPT, dp = 2": (2, mw.Layout(dp=2)),
    "GPT, tp = 2": (2, mw.Layout(tp=2)),
    "GPT, pp = 2, m = 8": (2, mw.Layout(pp=2, microbatches=8)),
}
CONFIG = GPTConfig(layers=2, width=128, heads=4, vocabulary=512, sequence_length=64, tied_head=False)
STEPS = 41


def measure(layout: mw.Layout) -> tuple[float, float, int, float, float]:
    """Median seconds of a step without and with notes; how many notes; seconds that they alone take; seconds of the
    guards."""
    torch.manual_seed(0)
    text = torch.randint(CONFIG.vocabulary, (8, CONFIG.sequence_length + 1))
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    trainer = mw.parallelize(
        GPT(CONFIG), language_model_loss, batch, plan=layout, optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
    )
    recorder = trainer.recorder
    assert recorder is not None
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * STEPS + 4):
        noted = bool(number % 2)
        trainer.recorder = recorder if noted else None
        start = time.perf_counter()
        trainer.step(batch)
        if number >= 4:
            seconds[noted].append(time.perf_counter() - start)
    trace = trainer.trace()
    return (
        statistics.median(seconds[False]),
        statistics.median(seconds[True]),
        len(trace.spans),
        _alone_s(trainer, len(trace.spans), len(trace.memory)),
        _guards_s(trainer),
    )


def _guards_s(trainer: mw.Trainer) -> float:
    """The comparisons before a step of the model, and of the values that its capture has read, with what they were."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        trainer._callers.check()
        changed = any(guard.changed(True) for _, guard, _ in trainer._lowered)
        times.append(time.perf_counter() - start)
        assert not changed
    return statistics.median(times)


def _alone_s(trainer: mw.Trainer, num_spans: int, num_samples: int) -> float:
    """So many notes, by themselves: a bound that the noise of steps does not hide."""
    recorder = trainer.recorder
    assert recorder is not None
    recorder.clear()
    start = time.perf_counter()
    for _ in range(num_spans):
        recorder.span("compute", "x", time.perf_counter(), time.perf_counter())
    spans_s = time.perf_counter() - start
    times = []
    for _ in range(20):
        recorder.clear()
        start = time.perf_counter()
        recorder.sample()
        times.append(time.perf_counter() - start)
    return spans_s + num_samples * statistics.median(times)


def findings() -> list[Finding]:
    """For each case, what part of a step its notes and its guards take by themselves; steps with notes over steps
    without, beside."""
    results: list[Finding] = []
    for name, (num_ranks, layout) in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            without, noted, spans, by_themselves, guards_s = run_ranks(
                measure, layout, num_ranks=num_ranks, directory=Path(directory)
            )
        part = by_themselves / without
        results.append(
            Check(
                target=f"notes of every step, {name}: under {LIMIT:.0%} of the step",
                verdict="pass" if part < LIMIT else "fail",
                measured=f"{part:.2%} ({spans} notes); steps by turns with and without: {noted / without:.3f}",
                passed=int(part < LIMIT),
                total=1,
                notes={"part": part, "ratio": noted / without, "spans": spans},
            )
        )
        part = guards_s / without
        results.append(
            Check(
                target=f"guards of every step, {name}: under {LIMIT:.0%} of the step",
                verdict="pass" if part < LIMIT else "fail",
                measured=f"{part:.2%}: {guards_s * 1e6:.0f} us of {without * 1e3:.1f} ms",
                passed=int(part < LIMIT),
                total=1,
                notes={"part": part, "guards_s": guards_s},
            )
        )
    return results


if __name__ == "__main__":
    sys.exit(alone(findings()))
