"""Is training with codecs faster than with PyTorch's communication hooks? ``python -m benchmarks.codec_steps``.

Two emulated boxes of two ranks (network namespaces, ``emulation/network.py``; as root, else nothing is judged), joined
by links of 0.1 and of 1 Gbit/s. A GPT of the demo's size and an MLP on real digits take steps of SGD by turns in the
same processes, one thread a rank: DistributedDataParallel plain and with its hooks, and Meshwright with the codecs of
equal settings. Then dense DistributedDataParallel trains for some steps; the lowest mean loss of ten steps in a row is
the loss to reach. All sides see the same batches. The time to it is the number of the first step with which a side's
mean is as low, times the median time of a step.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from benchmarks import report
from benchmarks.report import at_most
from meshwright.bench.repeat import alternate
from meshwright.catalog import load_cluster
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.errors import NonFiniteLossError
from meshwright.ir.cluster import Cluster
from meshwright.ir.result import Check, Finding
from meshwright.ir.statistics import Estimate, ratio
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.runtime import launch

COMMAND = "python -m benchmarks.codec_steps"
ROUNDS, RATES = 7, (0.1, 1.0)
RANKS, WINDOW = 4, 10
STEPS = {"GPT": 40, "MLP": 100}
MOST = 4
"""A codec may take so many times the steps of dense training to reach its loss."""
PAIRS = {"fp16": "hook fp16", "powersgd(4)": "hook PowerSGD(4)", "qsgd(8)": "hook quantization"}
"""Our codec, and the hook of equal settings: 8 bits an element for the quantization of whole tensors."""
CODECS = ("bf16", "qsgd(8)", "qsgd(4)", "topk(1%)", "topk(1%)+qsgd(4)", "powersgd(4)", "auto")
HALF, FASTER, SLOWER = 0.5, 4.0, 1.02
ONE_BUCKET_MIB = 1024


@dataclass(frozen=True)
class CodecSubject:
    """A model, its loss, its batches (by the number of the step), and its learning rate."""

    make: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Any]
    batch: Callable[[int], dict[str, Tensor]]
    lr: float


def gpt() -> CodecSubject:
    """The demo's GPT on the bytes of Python's own library."""
    config = GPTConfig(layers=4, width=256, heads=4, vocabulary=256, sequence_length=128)
    library = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(step: int) -> dict[str, Tensor]:
        starts = torch.randint(len(data) - 129, (8,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([data[start : start + 129] for start in starts.tolist()])
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    return CodecSubject(
        lambda: GPT(config), language_model_loss, batch, 0.03
    )  # 0.3 is unstable, with and without codecs


def mlp() -> CodecSubject:
    """An MLP on scikit-learn's pictures of handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    def batch(step: int) -> dict[str, Tensor]:
        chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
        return {"inputs": images[chosen], "label": labels[chosen]}

    return CodecSubject(lambda: MLP((64, 1024, 1024, 10)), classification_loss, batch, 0.1)


SUBJECTS = {"GPT": gpt, "MLP": mlp}


def boxes(gbit: float) -> Cluster:
    """Two boxes of two ranks, joined by links of this rate."""
    here = load_cluster("cpu-local")
    inner = msgspec.structs.replace(here.levels[0], name="box", fan_out=2)
    network = msgspec.structs.replace(inner, name="network", fan_out=2, alpha_s=1e-4, beta_s_per_byte=8e-9 / gbit)
    return msgspec.structs.replace(here, name="boxes", num_devices=RANKS, levels=(inner, network), collectives=())


# --- on every rank ---------------------------------------------------------------------------------------------------

Step = Callable[[int], float]


def hooked(subject: CodecSubject, hook: str) -> Step:
    """A step of DistributedDataParallel; the loss of this rank's samples, averaged over ranks."""
    torch.manual_seed(0)
    # These hooks wait for collectives in gloo's two threads: two buckets at a time would wait for ever.
    cap = ONE_BUCKET_MIB if hook in ("hook PowerSGD(4)", "hook quantization") else None
    model = DistributedDataParallel(subject.make(), gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if hook == "hook fp16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif hook == "hook quantization":
        model.register_comm_hook(None, quantized)
    elif hook == "hook PowerSGD(4)":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=subject.lr)
    rank = dist.get_rank()

    def step(number: int) -> float:
        whole = subject.batch(number)
        part = {name: value.chunk(RANKS)[rank] for name, value in whole.items()}
        loss, _ = subject.loss_fn(model, part)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def quantized(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PyTorch's ``quantization_pertensor_hook``, by its own functions. With gloo, its own wiring reads the tensors of
    one rank alone, and fails with more than two ranks; here the tensors of all ranks are read."""
    tensor, rank = bucket.buffer(), dist.get_rank()
    observer = torch.ao.quantization.MinMaxObserver()
    observer(tensor)
    own_constants = torch.cat([each.float().reshape(1) for each in observer.calculate_qparams()])
    constants = [torch.zeros_like(own_constants) for _ in range(RANKS)]
    codes = [torch.empty(tensor.shape, dtype=torch.uint8) for _ in range(RANKS)]

    def quantize(_: object) -> object:
        own = quantization_hooks._quantize_per_tensor_backend(tensor, *constants[rank])
        return dist.all_gather(codes, own, async_op=True).get_future().wait()

    def dequantize(_: object) -> Tensor:
        total = torch.zeros_like(tensor)
        for code, constant in zip(codes, constants, strict=True):
            total += quantization_hooks._dequantize_per_tensor_backend(code, *constant)
        return total / RANKS

    gathered = dist.all_gather(constants, own_constants, async_op=True).get_future()
    result: torch.futures.Future[Tensor] = gathered.then(quantize).then(dequantize)
    return result


def ours(subject: CodecSubject, codec: str, cluster: Cluster) -> Step:
    """A step of Meshwright."""
    torch.manual_seed(0)
    layout = mw.Layout(dp=RANKS, codec=codec or "none")
    trainer = mw.parallelize(
        subject.make(), subject.loss_fn, subject.batch(0), plan=layout, cluster=cluster,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=subject.lr),
    )  # fmt: skip
    return lambda number: float(trainer.step(subject.batch(number)))


class CodecTimes(msgspec.Struct, frozen=True):
    """Seconds of steps by side, a number a round; the steps until the loss of dense training, for the sides that reach
    it; and the sides whose loss became NaN."""

    seconds: dict[str, list[float]]
    steps: dict[str, int]
    loss: float
    diverged: tuple[str, ...]


def measure(name: str, gbit: float, rounds: int) -> CodecTimes:
    """All sides."""
    torch.set_num_threads(1)
    launch.start("cpu")
    subject, cluster = SUBJECTS[name](), boxes(gbit)
    makers: dict[str, Callable[[], Step]] = {}
    for side in ("DDP", *PAIRS.values()):
        makers[side] = partial(hooked, subject, side)
    for codec in ("", "fp16", *CODECS):
        makers[codec] = partial(ours, subject, codec, cluster)
    sides = {side: make() for side, make in makers.items()}
    counts = dict.fromkeys(sides, 0)

    def turn(side: str) -> None:
        sides[side](counts[side])
        counts[side] += 1

    seconds = alternate({side: partial(turn, side) for side in sides}, rounds=rounds, steps=1, warmup_steps=3)
    sides.clear()
    diverged: list[str] = []
    target, steps = float("inf"), dict[str, int]()
    for side in ("DDP", *CODECS):
        losses: list[float] = []
        step = makers[side]()
        for number in range(STEPS[name] * (1 if side == "DDP" else MOST)):
            try:
                value = torch.tensor(step(number))
            except NonFiniteLossError:  # on all ranks: this codec diverges at this learning rate
                diverged.append(side)
                break
            dist.all_reduce(value)
            losses.append(float(value) / RANKS)
            mean = statistics.fmean(losses[-WINDOW:])
            if len(losses) < WINDOW:
                continue
            if side == "DDP":
                if mean < target:
                    target, steps[side] = mean, number + 1
            elif mean <= target:
                steps[side] = number + 1
                break
    return CodecTimes(seconds, steps, target, tuple(diverged))


# --- judged ----------------------------------------------------------------------------------------------------------


def findings(rounds: int, names: Sequence[str] = tuple(SUBJECTS), rates: Sequence[float] = RATES) -> list[Finding]:
    """Every subject at every rate, in Gbit/s."""
    if missing := why_not():
        return [Check(target="steps with codecs", verdict="reported", measured=f"not measured: {missing}")]
    results: list[Finding] = []
    for name in names:
        for gbit in rates:
            with tempfile.TemporaryDirectory() as directory:
                results += judged(
                    name, gbit,
                    run_in_boxes(
                        partial(measure, name, gbit, rounds), boxes=(0, 0, 1, 1),
                        rates_bits_per_s=(gbit * 1e9, gbit * 1e9), directory=Path(directory),
                    ),
                )  # fmt: skip
    return results


def judged(name: str, gbit: float, measured: CodecTimes) -> list[Finding]:
    """Steps against the hooks of equal settings, and the time to equal loss against dense training. Only ratios are
    told: there are more ranks than cores."""
    seconds, place = measured.seconds, f"{name}, 2 boxes x 2 ranks, emulated {gbit:g} Gbit/s"
    medians = {side: statistics.median(each) for side, each in seconds.items()}
    results: list[Finding] = []
    for codec, hook in PAIRS.items():
        results.append(
            _check(f"{place}: {codec} takes at most {HALF} x {hook}", ratio(seconds[codec], seconds[hook]), HALF)
        )
    fastest_hook = min(("DDP", *PAIRS.values()), key=medians.__getitem__)
    best = min(("fp16", *CODECS), key=medians.__getitem__)
    shares = ", ".join(
        f"{side or 'no codec'} {medians[side] / medians[fastest_hook]:.2f}"
        for side in sorted(medians, key=medians.__getitem__)
    )
    results.append(
        _check(
            f"{place}: the fastest codec takes at most 1 x the fastest hook",
            ratio(seconds[best], seconds[fastest_hook]), 1.0, f"; medians over {fastest_hook}'s: {shares}",
        )
    )  # fmt: skip
    results.append(
        _check(f"{place}: auto takes at most {SLOWER:g} x no codec", ratio(seconds["auto"], seconds[""]), SLOWER)
    )
    times = {side: steps * medians[side] for side, steps in measured.steps.items()}
    quickest = min((side for side in times if side != "DDP"), key=times.__getitem__, default="")
    text = ", ".join(
        f"{side} {times['DDP'] / times[side]:.2f} ({measured.steps[side]} steps)"
        for side in sorted(times, key=times.__getitem__)
    )
    target = f"{place}: to DistributedDataParallel's loss of {measured.loss:.3f} at least {FASTER:g} x as fast"
    if quickest:
        share = ratio(seconds[quickest], seconds["DDP"]).times(measured.steps[quickest] / measured.steps["DDP"])
        missing = [f"{side} (NaN)" if side in measured.diverged else side for side in CODECS if side not in times]
        late = f"; not reached by {', '.join(missing)}" if missing else ""
        results.append(_check(target, share, 1 / FASTER, f", by {quickest}; as fast: {text}{late}"))
    else:
        results.append(Check(target=target, verdict="fail", measured="no codec reaches it", passed=0, total=1))
    return results


def _check(target: str, share: Estimate, limit: float, more: str = "") -> Check:
    verdict = at_most(share, limit)
    return Check(target=target, verdict=verdict, measured=f"{share}{more}", passed=int(verdict == "pass"), total=1)


def main() -> int:
    """Measure and print; the result file is ``benchmarks.codecs``'."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating rounds, at least 5")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="train this model only")
    parser.add_argument("--gbit", type=float, action="append", help="rate of the links (default: 0.1 and 1)")
    options = parser.parse_args()
    return report.alone(findings(max(5, options.rounds), options.only or [*SUBJECTS], options.gbit or RATES))


if __name__ == "__main__":
    sys.exit(main())
