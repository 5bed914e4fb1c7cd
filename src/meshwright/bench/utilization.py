"""Measure the fractions of this machine's peak that tuned code and naive code reach: two products and two steps."""

import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright import api
from meshwright.bench.machine import measured_peak, nominal_peak, square_product, this_machine, today, versions
from meshwright.bench.repeat import WARMUP_STEPS, alternate, eager_step, measuring
from meshwright.errors import ClusterError
from meshwright.ir.result import Peak, Result, Series, Settings, Utilization
from meshwright.ir.statistics import median
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.runtime import launch
from meshwright.runtime.loop import Progress, Silent

PRODUCT, ROWS, STEP, SMALL_STEP = "matrix product", "rows one at a time", "naive step", "step of small operators"
NUM_ROWS = 64
"""Rows that are multiplied one at a time. Each reads the whole other matrix, so the rate does not depend on their
number."""
SMALL = GPTConfig(layers=2, width=64, heads=2, vocabulary=256, sequence_length=64)
"""The GPT of the step of small operators: its products are too small to fill a core's vector units for long."""
TIMED = (
    "matrix product: torch.mm of two square float32 matrices into a third. Rows one at a time: {rows} rows of the "
    "first matrix, by a torch.mv for each, as a loop over rows does. Naive step: a training step of a GPT in "
    "plain eager PyTorch, one process, float32: zero_grad, forward, loss, backward, SGD with momentum. Step of small "
    "operators: the same step of a GPT of width {width}. All by turns, "
    "{rounds} rounds after {warmup} of warm-up, on {threads} threads; 95 % intervals by resampling. 100 % is the "
    "larger of the measured and the nominal peak, or the one that was given."
)


def utilization(
    *,
    size: int = 2048,
    config: GPTConfig | None = None,
    batch_size: int = 8,
    repetitions: int = 15,
    threads: int = 0,
    peak_flops_per_s: float = 0.0,
    command: str = "",
    progress: Progress | None = None,
) -> Result:
    """Measure a matrix product, some of its rows one at a time, and training steps of a GPT and of a small GPT, as
    fractions of the CPU's float32 peak on ``threads`` cores.

    Args:
        size: rows and columns of the matrices.
        config: sizes of the GPT; default: GPT-S.
        batch_size: sequences of the GPT's batch.
        threads: 0 means all cores.
        peak_flops_per_s: a data sheet's peak, which replaces the larger of the measured and the nominal peak.

    Raises:
        ClusterError: the given peak is less than the measured peak.
    """
    progress = progress or Silent()
    config = config or GPTConfig()
    threads = threads or launch.num_cores()
    with measuring(progress):
        torch.set_num_threads(threads)
        progress.begin("measuring the peak", 4)
        measured = measured_peak(threads, progress)
        product, product_flops = square_product(size)
        rows, rows_flops = product_by_rows(size, NUM_ROWS)
        step, step_flops = naive_step(config, batch_size)
        small, small_flops = naive_step(SMALL, batch_size)
        sides = {PRODUCT: product, ROWS: rows, STEP: step, SMALL_STEP: small}
        progress.begin("measuring products and naive steps", repetitions)
        seconds = alternate(sides, rounds=repetitions, steps=1, progress=progress)
    peaks = _peaks(peak_flops_per_s, measured, nominal_peak(threads), product_flops / min(seconds[PRODUCT]), threads)
    run = uuid.uuid4().hex[:12]
    settings = {
        PRODUCT: Settings(dtype="float32", ranks=1, threads=threads, sizes={"rows": size, "columns": size}),
        ROWS: Settings(dtype="float32", ranks=1, threads=threads, sizes={"rows": NUM_ROWS, "columns": size}),
        STEP: Settings(dtype="float32", ranks=1, threads=threads, sizes=sizes_of(config, batch_size)),
        SMALL_STEP: Settings(dtype="float32", ranks=1, threads=threads, sizes=sizes_of(SMALL, batch_size)),
    }
    flops = {PRODUCT: product_flops, ROWS: rows_flops, STEP: step_flops, SMALL_STEP: small_flops}
    return Result(
        date=today(),
        name="utilization",
        command=command,
        machine=this_machine(),
        versions=versions(),
        timed=TIMED.format(rounds=repetitions, warmup=WARMUP_STEPS, threads=threads, rows=NUM_ROWS, width=SMALL.width),
        settings=settings,
        findings=tuple(_finding(name, seconds[name], flops[name], peaks, run) for name in settings),
    )


def product_by_rows(size: int, num_rows: int) -> tuple[Callable[[], Tensor], float]:
    """A function that multiplies ``num_rows`` rows with a random square float32 matrix of ``size`` rows, one row after
    the other, and its FLOPs. It returns the products, one row each."""
    rows, right = torch.randn(num_rows, size), torch.randn(size, size)
    out = torch.empty(num_rows, size)

    def multiply() -> Tensor:
        for row, into in zip(rows, out, strict=True):
            torch.mv(right, row, out=into)
        return out

    return multiply, 2.0 * num_rows * size**2


def naive_step(config: GPTConfig, batch_size: int) -> tuple[Callable[[], object], float]:
    """A training step of a GPT in plain eager PyTorch on random tokens, and its FLOPs according to the captured
    graph."""
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(config.vocabulary, (batch_size, config.sequence_length + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    flops = api.capture(model, language_model_loss, batch).flops()
    step = eager_step(model, language_model_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return (lambda: step(batch)), flops


def sizes_of(config: GPTConfig, batch_size: int) -> dict[str, int | str | float | bool]:
    """The sizes that determine the time of a GPT's step."""
    names = ("layers", "width", "heads", "vocabulary", "sequence_length")
    return {name: getattr(config, name) for name in names} | {"batch": batch_size}


def _peaks(given: float, measured: Peak, nominal: Peak | None, product: float, threads: int) -> list[Peak]:
    """All known peaks; the first counts as 100 %."""
    if product > measured.flops_per_s:
        source = f"measured: the fastest of the matrix products that are shown, on {threads} threads, a lower bound"
        measured = Peak(flops_per_s=product, dtype="float32", found=source)
    found_here = sorted([measured, *([nominal] if nominal else [])], key=lambda peak: -peak.flops_per_s)
    if not given:
        return found_here
    if given < measured.flops_per_s:
        raise ClusterError(
            f"{given:g} FLOP/s is no peak: {measured.flops_per_s:.3g} were measured",
            where="--peak",
            remedy="give the peak of all cores that are used in float32, in FLOP/s, or leave it out",
        )
    return [Peak(flops_per_s=given, dtype="float32", found="given with --peak"), *found_here]


def _finding(name: str, seconds: list[float], flops: float, peaks: list[Peak], run: str) -> Utilization:
    peak = peaks[0]
    fraction = median(seconds).inverse().times(flops / peak.flops_per_s)
    text = f"{fraction.value:.1%} (95 %: {fraction.low:.1%} to {fraction.high:.1%})"
    measured = next((other for other in peaks if other.found.startswith("measured")), peak)
    if measured is not peak:
        text += f"; {fraction.value * peak.flops_per_s / measured.flops_per_s:.1%} of the measured peak"
    return Utilization(
        target=f"{name}: part of the peak",
        verdict="reported",
        measured=text,
        series=Series.of(seconds, settings=name, run=run),
        flops=flops,
        peak=peak,
        fraction=fraction.value,
        interval=fraction.interval,
        notes={"other_peaks": {other.found: other.flops_per_s for other in peaks[1:]}},
    )
