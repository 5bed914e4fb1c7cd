"""What notes of every step cost: steps with and without, alternating. `python -m benchmarks.tracing`."""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import meshwright as mw
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


def measure(layout: mw.Layout) -> tuple[float, float, int, float]:
    """Median seconds of a step without and with notes; how many notes; seconds that they alone take."""
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
    )


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


def main() -> int:
    """Print what notes cost in every case; 1 if they take more than the limit of a step."""
    worst = 0.0
    print(f"{'case':20} {'without':>10} {'with':>10} {'ratio':>7}   notes   alone")
    for name, (num_ranks, layout) in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            without, noted, spans, alone = run_ranks(measure, layout, num_ranks=num_ranks, directory=Path(directory))
        worst = max(worst, alone / without)
        print(
            f"{name:20} {without * 1e3:7.2f} ms {noted * 1e3:7.2f} ms {noted / without:7.3f}   {spans:5}   "
            f"{alone * 1e6:.0f} µs = {alone / without:.2%} of a step"
        )
    print(f"notes take {worst:.2%} of a step at most (limit: {LIMIT:.0%})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
