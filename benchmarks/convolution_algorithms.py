"""Do algorithms and pieces of samples let convolutions run in an eighth of the workspace that the fastest wants?

Run as ``make bench-convolution-algorithms`` (10 minutes on a quiet core). The exit code is 1 if a target is missed.
AlexNet and ResNet-18 train on images of 224 x 224, on one rank with one thread. A rank first measures the algorithms of
all convolutions. The limit is an eighth of the largest workspace that a convolution of the fastest plan has. On a CPU,
PyTorch has two choices, oneDNN and, without it, the windows of all samples unfolded; a user can only give it fewer
samples: beside ours, every convolution of eager PyTorch computes one sample at a time, and the table says in how many
of them that fits within the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks import report
from benchmarks.report import judged, show
from meshwright.api.convolutions import convolutions_of
from meshwright.api.times import times_file
from meshwright.bench import repeat
from meshwright.bench.repeat import alternate
from meshwright.cost.scratch import scratch_bytes
from meshwright.ir import files
from meshwright.ir.convolution import native_bytes
from meshwright.ir.graph import Graph
from meshwright.ir.result import Check, Finding, Settings
from meshwright.lower.plans import PlanLowering
from meshwright.models import AlexNet, classification_loss
from meshwright.models.resnet import Residual
from meshwright.runtime import algorithm_times
from tests.distributed import oracle
from tests.distributed.pool import Ranks

COMMAND = "make bench-convolution-algorithms"
ROUNDS, STEPS, SHARE, LAPS = 7, 1, 8, 3
BATCHES = {"AlexNet": 16, "ResNet-18": 8}
Seconds = dict[str, list[float]]
LEAST_SPEEDUP, NOT_SLOWER = 1.2, 1.03
OURS, NATIVE, SMALL = "Meshwright", "eager", "eager, convolutions of one sample"


class ResNet18(nn.Module):
    """ResNet-18 for images of 224 x 224 (He et al. 2016)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        shapes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
        self.blocks = nn.Sequential(*(Residual(a, (b, 3, s), (b, 3, 1)) for a, b, s in [*shapes, (512, 512, 1)]))
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(self.pool(self.stem(images))).mean((2, 3))))


MODELS: dict[str, Callable[[], nn.Module]] = {"AlexNet": AlexNet, "ResNet-18": ResNet18}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def fast(parameters: Any) -> torch.optim.Optimizer:
    """With a learning rate that shows errors of gradients."""
    return torch.optim.SGD(parameters, lr=0.1)


def subject(name: str, size: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"image": torch.randn(size, 3, 224, 224, dtype=dtype), "label": torch.randint(1000, (size,))}
    return MODELS[name]().to(dtype), batch


def measured(graph: Graph) -> int:
    """Measure the graph's convolutions, keep the table where plans find it, and return the limit."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-bench-")
    lower = PlanLowering(graph)
    times = algorithm_times.measure(convolutions_of(lower(mw.plan(graph, layout=mw.Layout()))), laps=LAPS)
    times_file().parent.mkdir(parents=True, exist_ok=True)
    files.save(times, times_file())
    return wanted(graph, mw.plan(graph, layout=mw.Layout())) // SHARE


def wanted(graph: Graph, plan: mw.Plan) -> int:
    """The largest workspace of a convolution under a plan."""
    nodes = (node for program in PlanLowering(graph)(plan) for phase in program.phases for node in phase.nodes)
    return max(scratch_bytes(kernel, True) for node in nodes if "convolution" in node.target for kernel in node.kernels)


def own_choices(graph: Graph, limit: int) -> str:
    """What PyTorch can do within the limit, in words."""
    plan = mw.plan(graph, layout=mw.Layout())
    native = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(plan.stage, operator_algorithms={}),))
    convolutions = convolutions_of(PlanLowering(graph)(native))
    whole = sum(native_bytes(sizes) <= limit for sizes in convolutions)
    unfolded = sum(native_bytes(sizes._replace(dtype="float64")) // 2 <= limit for sizes in convolutions)
    by_sample = sum(native_bytes(sizes._replace(samples=1)) <= limit for sizes in convolutions)
    return (
        f"limit {limit / 2**20:.2f} MiB; of {len(convolutions)} convolutions, PyTorch's own fits in {whole} with "
        f"oneDNN, in {unfolded} without, in {by_sample} with oneDNN on one sample"
    )


def run(name: str, rounds: int, steps: int) -> dict[bool, tuple[Seconds, Seconds, str]]:
    """With the limit (True) and without: seconds a step of each side by turns, losses, and what the plan chose."""
    model, batch = subject(name, BATCHES[name], torch.float32)
    graph = mw.capture(model, classification_loss, batch)
    limit = measured(graph)
    return {limited: side_by_side(name, graph, limit if limited else 0, rounds, steps) for limited in (True, False)}


def of_one_sample(convolution: nn.Conv2d) -> None:
    """Let a convolution compute one sample at a time, as a user of PyTorch could write it."""
    whole = convolution.forward

    def forward(images: Tensor) -> Tensor:
        return torch.cat([whole(image) for image in images.split(1)])

    convolution.forward = forward  # type: ignore[method-assign,assignment]


def side_by_side(name: str, graph: Graph, limit: int, rounds: int, steps: int) -> tuple[Seconds, Seconds, str]:
    """Ours under a limit (0: none) and eager PyTorch, by turns."""
    count = BATCHES[name]
    model, batch = subject(name, count, torch.float32)
    layout = mw.Layout(workspace_bytes=limit)
    trainer = mw.parallelize(model, classification_loss, batch, plan=layout, optimizer=sgd)
    eager, _ = subject(name, count, torch.float32)
    for convolution in eager.modules() if limit else ():
        if isinstance(convolution, nn.Conv2d):
            of_one_sample(convolution)
    eager_step = repeat.eager_step(eager, classification_loss, sgd(eager.parameters()))

    def step() -> Tensor:
        return eager_step(batch)

    other = SMALL if limit else NATIVE
    losses = {OURS: [float(trainer.step(batch))], other: [float(step())]}
    seconds = alternate({OURS: lambda: trainer.step(batch), other: step}, rounds=rounds, steps=steps, warmup_steps=1)
    chosen = Counter(trainer.plan.stage.operator_algorithms.values()).most_common(4)
    words = ", ".join(f"{times} x {text}" for text, times in chosen) or "native everywhere"
    return seconds, losses, f"{own_choices(graph, limit)}; chosen: {words}" if limit else f"chosen: {words}"


def speed(name: str, rounds: int, steps: int) -> list[Finding]:
    """Under the limit beside what PyTorch does with the least workspace; without a limit beside eager PyTorch."""
    results: list[Finding] = []
    with Ranks() as ranks:
        both = ranks(1, run, name, rounds, steps, timeout=1800.0)[0]
    for limited, (seconds, losses, words) in both.items():
        target = (
            f"{name}, an eighth of the workspace: at least {LEAST_SPEEDUP} x as fast as PyTorch on one sample"
            if limited
            else f"{name}, no limit: at most {NOT_SLOWER} x the time of eager PyTorch"
        )
        limit = 1 / LEAST_SPEEDUP if limited else NOT_SLOWER
        comparison = judged(target, seconds, OURS, limit, settings=name, num_ranks=1, steps=steps, losses=losses)
        results.append(msgspec.structs.replace(comparison, measured=f"{comparison.measured}; {words}"))
        show(results[-1])
    return results


def trained(name: str) -> tuple[float, int]:
    """The largest relative error of losses and parameters after 2 steps in float64 under the limit, beside eager."""
    model, batch = subject(name, 2, torch.float64)
    graph = mw.capture(model, classification_loss, batch)
    limit = wanted(graph, mw.plan(graph, layout=mw.Layout())) // 2
    serial, _ = subject(name, 2, torch.float64)
    expected = oracle.in_one_process(oracle.Subject(serial, classification_loss, [batch, batch]), fast)
    pair = oracle.Subject(model, classification_loss, [batch, batch])
    before = {key: value.clone() for key, value in serial.state_dict().items()}
    result, trainer = oracle.in_parallel(pair, mw.Layout(workspace_bytes=limit), fast)
    return oracle.compared(before, expected, result, trainer).error, len(trainer.plan.stage.operator_algorithms)


def parity(name: str) -> Finding:
    with Ranks() as ranks:
        error, count = ranks(1, trained, name, timeout=1800.0)[0]
    good = error <= oracle.TOLERANCE and count > 0
    check = Check(
        target=f"{name}: the same numbers in float64, in training", passed=int(good), total=1,
        verdict="pass" if good else "fail",
        measured=f"largest relative error {error:.1e} after 2 steps; {count} convolutions and gradients not native",
    )  # fmt: skip
    show(check)
    return check


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolution_algorithms")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS}, at least 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    parser.add_argument("--only", default="", choices=("", *MODELS), help="one model; writes no file")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    warnings.simplefilter("ignore")
    names = [options.only] if options.only else list(MODELS)
    results: list[Finding] = [parity(name) for name in names]
    results += [each for name in names for each in speed(name, options.rounds, options.steps)]
    if not options.only:
        settings = {
            name: Settings(dtype="float32", ranks=1, threads=1, sizes={"batch": BATCHES[name], "image": 224})
            for name in MODELS
        }
        timed = (
            "A training step: zero_grad, forward, loss, backward, SGD, float32, one thread. Both sides by turns in one "
            f"process: {options.rounds} rounds of {options.steps} steps each after 1 of warm-up."
        )
        text = (__doc__ or "").partition("\n\n")[2].partition("missed.\n")[2]
        report.write(
            "convolution_algorithms", "Algorithms of convolutions under a limit of workspace", COMMAND, timed, settings,
            results, text,
        )  # fmt: skip
    return int(any(each.verdict == "fail" for each in results))


if __name__ == "__main__":
    sys.exit(main())
