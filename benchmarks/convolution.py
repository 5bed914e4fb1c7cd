"""Does convolution in every direction reach its targets? Parity, plans, speed and memory of images cut over ranks.

Run as ``make bench-convolution``. The exit code is 1 if a target is missed. There are two result files:
``--only convolution-parity`` makes the one (half an hour), ``--only convolution`` the other; ``--only plans`` (or
speed, memory, bytes, chosen) runs one part and writes nothing. Parity is in float64, under every layout, beside one
process. Plans are for 8 devices in one box and for 8 boxes on 10 Gbit/s Ethernet. Speed is that of a stack of 3x3
convolutions on one image, on two ranks of one thread each, beside one rank and beside the same exchange of halos
written by hand in eager PyTorch, by turns in the same processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from benchmarks import report
from benchmarks.foundation import OURS, ROUNDS, timed
from benchmarks.memory import status_bytes
from benchmarks.report import decided, judged, show
from benchmarks.zero import _resident_bytes as resident_bytes
from meshwright.bench.repeat import alternate
from meshwright.cost.closed_form import Predicted, predict_step
from meshwright.cost.optimizer import SGD
from meshwright.ir.graph import Graph
from meshwright.ir.kind import COMPUTE, kind_of
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Finding, Settings
from meshwright.lower.plans import PlanLowering
from meshwright.models import AlexNet, GoogLeNet, ResNet, UNet, WideResNet, classification_loss, segmentation_loss
from meshwright.planner.foretell import foretell
from meshwright.schedules.pipeline import schedule_of
from tests.distributed import hugging_face, oracle, test_mixed
from tests.distributed.pool import Ranks, RanksFailedError

COMMAND = "make bench-convolution"
NUM_RANKS = 2
FILES = {
    "convolution-parity": ("parity",),
    "convolution": ("plans", "speed", "memory", "bytes", "chosen"),
}
"""By result file, the parts that it holds."""
SIDE, CHANNELS, DEPTH = 2048, 8, 4
"""The stack: so many 3x3 convolutions of so many channels, with ReLU, on an image of 2048 x 2048."""
STEPS = 1
BY_HAND = "eager halos by hand"
LEAST_SPEEDUP, MOST_MEMORY, MEMORY_RUNS = 1.7, 0.55, 3
ONE_BOX, ETHERNET = "v100-dgx1", "v100-box1-eth10x1"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


# --- parity ----------------------------------------------------------------------------------------------------------

WAYS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "rows": ((2,), "height@m1"),
    "columns": ((2,), "width@m1"),
    "rows and columns": ((2, 2), "height@m1 width@m2"),
    "stationary-x": ((2,), "stationary-x@m1"),
    "stationary-y": ((2,), "stationary-y@m1"),
    "stationary-w": ((2, 2), "stationary-w@m1,m2"),
    "samples and filters": ((2, 2), "sample@m1 filter@m2"),
    "rows and channels": ((2, 2), "height@m1 channel@m2"),
}
"""By name the mesh, and how every convolution that can is split."""


def trained(name: str, layout: mw.Layout) -> oracle.LargestErrors:
    return test_mixed.train(name, layout)


def trained_as_it_comes(name: str, layout: str) -> hugging_face.Found:
    return hugging_face.compare(name, layout, 2)


def parity() -> list[Finding]:
    """Every network under every layout, and image models of Hugging Face as they come."""
    checks: list[Finding] = []
    with Ranks() as ranks:
        for name in test_mixed.NETWORKS | test_mixed.LARGE:
            cells: dict[str, float | str] = {}
            for way in ("dp2", "spatial 2x2", "planned on 4", *WAYS):
                try:
                    layout = _layout(name, way)
                    results = ranks(layout.num_ranks, trained, name, layout, timeout=900.0)
                    cells[way] = max(result.error for result in results)
                except (RanksFailedError, AssertionError) as error:
                    cells[way] = str(error).strip().splitlines()[-1]
            checks.append(_parity(name, cells, oracle.TOLERANCE))
            show(checks[-1])
        for name in hugging_face.CONVOLUTIONAL:
            cells = {}
            for way in ("dp2", "spatial2", "mixed2", "dp2 x mixed2"):
                try:
                    ran = ranks(hugging_face.num_ranks(way), trained_as_it_comes, name, way, timeout=900.0)
                    cells[way] = max(result.error for result in ran)
                except RanksFailedError as error:
                    cells[way] = next(iter(error.failures.values())).strip().splitlines()[-1]
            checks.append(_parity(f"Hugging Face's {name}", cells, hugging_face.tolerance(name)))
            show(checks[-1])
    return checks


def _layout(name: str, way: str) -> mw.Layout:
    if way not in WAYS:
        plain = {
            "dp2": mw.Layout(dp=2),
            "spatial 2x2": mw.Layout(spatial=(2, 2)),
            "planned on 4": mw.Layout(mixed=(4,)),
        }
        return plain[way]
    mesh, words = WAYS[way]
    return test_mixed.possible(name, mw.Layout(mixed=mesh, pin=test_mixed.pinned(name, words)))


def _parity(name: str, cells: Mapping[str, float | str], limit: float) -> Check:
    good = [way for way, cell in cells.items() if isinstance(cell, float) and cell <= limit]
    text = ", ".join(
        f"{way} {cell:.0e}" if isinstance(cell, float) else f"{way}: {cell}" for way, cell in cells.items()
    )
    return Check(
        target=f"parity of {name}: at most {limit:.0e} in float64", passed=len(good), total=len(cells),
        verdict="pass" if len(good) == len(cells) else "fail", measured=text, notes={"errors": dict(cells)},
    )  # fmt: skip


# --- plans -----------------------------------------------------------------------------------------------------------


def captured(make: Callable[[], nn.Module], batch: int) -> Graph:
    """A classifier's step on images of 224 x 224."""
    with torch.device("meta"):
        images = {"image": torch.zeros(batch, 3, 224, 224), "label": torch.zeros(batch, dtype=torch.int64)}
        return mw.capture(make(), classification_loss, images)


def costs(graph: Graph, plan: mw.Plan, cluster: mw.Cluster) -> tuple[float, Predicted]:
    """Seconds of a simulated step, by which the planner judges, and its parts as if nothing were hidden."""
    foretold = foretell(PlanLowering(graph), plan, cluster)
    return foretold.played.step_s, predict_step(foretold.work, schedule_of(plan), plan.mesh, cluster)


def ways(graph: Graph, plan: mw.Plan) -> tuple[set[str], set[str]]:
    """How convolutions and how products are split: by ``batch``, by another factor's letter, or by ``none``."""
    letters_of: tuple[set[str], set[str]] = (set(), set())
    for operator in graph.operators:
        if not operator.backward and kind_of(operator) in COMPUTE:
            strategy = plan.stage.strategy(operator.name)
            letters = [letter for letter in strategy.values() if not letter.startswith("^")]
            batch = all(
                graph.factor_classes[operator.classes[letter]].role == "batch"
                for letter in letters[-1:] if letter in operator.classes
            )  # fmt: skip
            letters_of[kind_of(operator) == "matmul"].add("batch" if batch and letters else (letters or ["none"])[-1])
    return letters_of


def plans() -> tuple[list[Finding], str]:
    """The planning targets, and the plans beside the pure ones as text. Batches are large enough to pay for more than
    one device: a step of 16 images for Wide-ResNet, or 32 for GoogLeNet, takes one device less time than eight that are
    joined by slow links, and the fastest plan divides no convolution."""
    lines: list[str] = []
    checks: list[Finding] = []
    cases = [
        ("AlexNet", AlexNet, 1024, ONE_BOX), ("AlexNet", AlexNet, 1024, ETHERNET),
        ("Wide-ResNet", WideResNet, 64, ETHERNET), ("GoogLeNet", GoogLeNet, 128, ETHERNET),
    ]  # fmt: skip
    for name, make, batch, where in cases:
        graph, cluster = captured(make, batch), mw.Cluster.load(where).resized(8)
        plan = mw.plan(graph, cluster, devices=8)
        sides = {"planned": plan}
        for layout in (mw.Layout(dp=8), mw.Layout(tp=8)):
            sides[layout_text(layout)] = mw.plan(graph, cluster, layout=layout)
        priced = {side: costs(graph, chosen, cluster) for side, chosen in sides.items()}
        lines += ["", f"{name}, batch {batch}, 8 devices of {where}", ""]
        lines += [f"    {'ms of a simulated step':<32} {'':9}   computing + communication, hidden or not"]
        for side, (step_s, step_costs) in priced.items():
            what = f"{side} ({layout_text(plan.layout)})" if side == "planned" else side
            lines.append(f"    {what:<32} {step_s * 1e3:9.2f}   "
                        f"{step_costs.compute_s * 1e3:9.2f} + {step_costs.communication_s * 1e3:.2f}")  # fmt: skip
        lines += ["", *(f"    {line}" for line in plan.explain().splitlines())]
        convolutions, products = ways(graph, plan)
        least = min(step_s for side, (step_s, _) in priced.items() if side != "planned")
        ratio = priced["planned"][0] / least
        if name == "AlexNet":
            as_asked = convolutions == {"batch"} and not products & {"batch", "none"}
        else:  # what stays whole is no way to split
            as_asked = len((convolutions | products) - {"none"}) > 1
        good = as_asked and ratio <= 1.02
        checks.append(Check(
            target=f"plan of {name}, batch {batch}, on {where}: " + (
                "convolutions by sample, dense layers by tensor" if name == "AlexNet" else "mixed"),
            verdict="pass" if good else "fail", passed=int(good), total=1,
            measured=f"{layout_text(plan.layout)}: {ratio:.3f} of the better pure plan; convolutions split by "
                     f"{', '.join(sorted(convolutions))}; dense layers by {', '.join(sorted(products))}",
            notes={"ratio_to_pure": ratio},
        ))  # fmt: skip
        show(checks[-1])
    return checks, "\n".join(lines)


# --- the stack: speed, memory, bytes ---------------------------------------------------------------------------------


def stack() -> nn.Sequential:
    """3x3 convolutions with ReLU between them."""
    torch.manual_seed(0)
    widths = [3, *[CHANNELS] * (DEPTH - 1), 3]
    layers: list[nn.Module] = []
    for index in range(DEPTH):
        layers += [nn.Conv2d(widths[index], widths[index + 1], 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def squares(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["image"]), batch["label"])


def picture(side: int = SIDE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(1, 3, side, side, generator=generator) for name in ("image", "label")}


class _Halo(torch.autograd.Function):
    """One row above and below from the neighbours, zeros at the border; backward gives the rows' gradients back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        above, below = _swapped(value[:, :, :1], value[:, :, -1:])
        return torch.cat([above, value, below], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        inside = grad[:, :, 1:-1].clone()
        above, below = _swapped(grad[:, :, :1], grad[:, :, -1:])
        inside[:, :, :1] += above
        inside[:, :, -1:] += below
        return inside


def _swapped(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """What the rank above has last and the rank below first; zeros where there is none."""
    rank, count = dist.get_rank(), dist.get_world_size()
    above, below, messages = torch.zeros_like(first), torch.zeros_like(last), []
    for other, outgoing, incoming in ((rank - 1, first.contiguous(), above), (rank + 1, last.contiguous(), below)):
        if 0 <= other < count:
            messages += [dist.P2POp(dist.isend, outgoing, other), dist.P2POp(dist.irecv, incoming, other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return above, below


def by_hand(part: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """A step of the stack with halos exchanged by hand; every rank has its rows."""
    model = stack()
    optimizer = sgd(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        value = part["image"]
        for layer in model:
            value = F.conv2d(_Halo.apply(value), layer.weight, layer.bias, padding=(0, 1)) if isinstance(
                layer, nn.Conv2d) else layer(value)  # fmt: skip
        loss = F.mse_loss(value, part["label"]) / dist.get_world_size()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    return step


def ours(side: int = SIDE) -> tuple[mw.Trainer, Callable[[], Tensor]]:
    """A step on this rank's rows, which are all that it holds of the picture; on one rank, the whole picture."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout, whole = mw.Layout(spatial=(ranks,)) if ranks > 1 else mw.Layout(), picture(side)
    trainer = mw.parallelize(stack(), squares, whole, plan=layout, optimizer=sgd)
    if ranks == 1:
        return trainer, lambda: trainer.step(whole)
    batch = {name: value[trainer.input_parts[name]].clone() for name, value in whole.items()}
    return trainer, lambda: trainer.step(batch, local=True)


def timed_stack(rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step of ours and of the version by hand by round, and the first losses of each."""
    torch.set_num_threads(1)
    trainer, step = ours()
    part = {name: value[trainer.input_parts[name]].clone() for name, value in picture().items()}
    sides = {OURS: step, BY_HAND: by_hand(part)}
    losses = {name: [float(call()) for _ in range(2)] for name, call in sides.items()}
    return alternate(sides, rounds=rounds, steps=steps, warmup_steps=1), losses


def timed_ours(rounds: int, steps: int) -> list[float]:
    """Seconds a step of ours on all ranks that run this, by round, with no other program in the same processes."""
    torch.set_num_threads(1)
    return alternate({OURS: ours()[1]}, rounds=rounds, steps=steps, warmup_steps=1)[OURS]


def speed(rounds: int, steps: int) -> list[Finding]:
    """Beside the best hand-written version, and as a speed-up over one rank of ours."""
    name = f"stack of 3x3 on {SIDE} x {SIDE}, 2 ranks by rows"
    results: list[Finding] = [
        decided(
            lambda seconds, losses: judged(
                f"{name}: at most 1.000 x {BY_HAND}", seconds, OURS, 1.0, settings="stack", num_ranks=NUM_RANKS,
                steps=steps, losses=losses, loss_spread=1e-4,
            ),
            NUM_RANKS, timed_stack, rounds, steps,
        )
    ]  # fmt: skip
    with Ranks() as ranks:
        on_two = ranks(NUM_RANKS, timed_ours, rounds, steps, timeout=1800.0)[0]
        on_one = ranks(1, timed_ours, rounds, steps, timeout=1800.0)[0]
    results.append(report.speedup(
        f"{name}: at least {LEAST_SPEEDUP} x as fast as one rank", on_one, on_two, NUM_RANKS, LEAST_SPEEDUP,
        base="one rank of Meshwright, with one thread, on the whole picture", unit="samples", work=1.0, steps=steps,
        parameters=sum(value.numel() for value in stack().parameters()), settings=("stack, one rank", "stack"),
    ))  # fmt: skip
    for finding in results:
        show(finding)
    return results


def peak() -> int:
    """The most bytes that this rank held in two steps, beyond what it held after a step on a small picture."""
    torch.set_num_threads(1)
    ours(64)[1]()
    before = resident_bytes()
    step = ours()[1]
    resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    return status_bytes("VmHWM") - before


def memory() -> list[Finding]:
    """A rank's peak beside that of one process: medians over runs, since allocators differ from run to run."""
    peaks: dict[bool, float] = {}
    for split, count in ((True, NUM_RANKS), (False, 1)):
        runs = []
        for _ in range(MEMORY_RUNS):
            with Ranks() as ranks:  # fresh processes: memory is not given back
                runs.append(max(ranks(count, peak, timeout=1800.0)))
        peaks[split] = statistics.median(runs)
    part = peaks[True] / peaks[False]
    words = (
        f"{part:.2f}: {peaks[True] / 2**20:.0f} MiB of {peaks[False] / 2**20:.0f} MiB, medians of {MEMORY_RUNS} runs"
    )
    check = Check(
        target=f"stack of 3x3 on {SIDE} x {SIDE}, 2 ranks by rows: peak memory at most {MOST_MEMORY} of one rank's",
        verdict="pass" if part <= MOST_MEMORY else "fail", passed=int(part <= MOST_MEMORY), total=1, measured=words,
        notes={"split_bytes": peaks[True], "one_rank_bytes": peaks[False]},
    )  # fmt: skip
    show(check)
    return [check]


def halo_bytes() -> tuple[int, int]:
    """Bytes of halos that this rank got in a step, and their closed form: a row of every convolution's input forward,
    and of its gradient backward (but of the picture's, which nobody wants)."""
    trainer, step = ours()
    step()
    spans = [span for span in trainer.trace().spans if span.stream == "communication" and "halo" in span.what]
    channels = [3, *[CHANNELS] * (DEPTH - 1)]
    return sum(span.bytes for span in spans), (sum(channels) + sum(channels[1:])) * SIDE * 4


def closed_form() -> list[Finding]:
    """Measured halos beside the closed form."""
    with Ranks() as ranks:
        halos = ranks(NUM_RANKS, halo_bytes, timeout=900.0)
    good = sum(measured == expected for measured, expected in halos)
    result = Check(
        target=f"stack of 3x3 on {SIDE} x {SIDE}, 2 ranks by rows: bytes of halos equal the closed form",
        verdict="pass" if good == len(halos) else "fail", passed=good, total=len(halos),
        measured="; ".join(f"{measured} of {expected} bytes" for measured, expected in halos),
    )  # fmt: skip
    show(result)
    return [result]


# --- what is chosen --------------------------------------------------------------------------------------------------

CHOSEN: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet": (lambda: ResNet(8, 32), classification_loss, (32, 3, 32, 32), (32,)),
    "U-Net": (lambda: UNet(2, 16), segmentation_loss, (4, 3, 128, 128), (4, 128, 128)),
    "AlexNet": (lambda: AlexNet(classes=10), classification_loss, (16, 3, 224, 224), (16,)),
}
LAYOUTS = {
    "data parallel": mw.Layout(dp=NUM_RANKS),
    "by rows": mw.Layout(spatial=(NUM_RANKS,)),
    "tensor parallel": mw.Layout(tp=NUM_RANKS),
}
"""Layouts beside which the planned layout is timed, unless it is the same."""


def chosen_layout(name: str) -> mw.Layout:
    """What the planner takes for two ranks."""
    make, loss_fn, image, label = CHOSEN[name]
    batch = {"image": torch.zeros(image), "label": torch.zeros(label, dtype=torch.int64)}
    graph = mw.capture(make(), loss_fn, batch)
    return mw.plan(graph, "cpu-local", devices=NUM_RANKS, optimizer=SGD).layout


def timed_choice(
    name: str, layout: mw.Layout, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step of a layout for two ranks, beside the other ``LAYOUTS``, and the first losses."""
    torch.set_num_threads(1)
    make, loss_fn, image, label = CHOSEN[name]
    generator = torch.Generator().manual_seed(1)
    batch = {"image": torch.randn(image, generator=generator), "label": torch.randint(4, label, generator=generator)}
    trainers = {}
    others = {side: other for side, other in LAYOUTS.items() if other != layout}
    for side, plan in {OURS: layout, **others}.items():
        torch.manual_seed(0)
        trainers[side] = mw.parallelize(make(), loss_fn, batch, plan=plan, optimizer=sgd)
    sides = {side: _stepper(trainer, batch) for side, trainer in trainers.items()}
    losses = {side: [float(step()) for _ in range(2)] for side, step in sides.items()}
    return alternate(sides, rounds=rounds, steps=steps, warmup_steps=1), losses


def _stepper(trainer: mw.Trainer, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    return lambda: trainer.step(batch)


def choices(rounds: int, steps: int) -> list[Finding]:
    """That what is chosen is not slower than another layout (2 % are within what is measured)."""
    results: list[Finding] = []
    for name in CHOSEN:
        layout = chosen_layout(name)
        target = f"{name} as planned for 2 ranks ({layout_text(layout)}): at most 1.02 x the fastest other layout"
        results.append(decided(
            lambda seconds, losses, target=target, name=name: judged(  # type: ignore[misc]
                target, seconds, OURS, 1.02, settings=name, num_ranks=NUM_RANKS, steps=steps, losses=losses,
                loss_spread=1e-3,
            ),
            NUM_RANKS, timed_choice, name, layout, rounds, steps,
        ))  # fmt: skip
        show(results[-1])
    return results


# --- report ----------------------------------------------------------------------------------------------------------


def settings() -> dict[str, Settings]:
    """Of what is timed."""
    sizes: dict[str, Any] = {"image": f"1 x 3 x {SIDE} x {SIDE}", "channels": CHANNELS, "convolutions": DEPTH}
    by_name = {
        name: Settings(dtype="float32", ranks=ranks, threads=1, sizes=sizes)
        for name, ranks in (("stack", NUM_RANKS), ("stack, one rank", 1))
    }
    for name, (_, _, image, _) in CHOSEN.items():
        sizes = {"image": " x ".join(map(str, image))}
        by_name[name] = Settings(dtype="float32", ranks=NUM_RANKS, threads=1, sizes=sizes)
    return by_name


def run(part: str, rounds: int, steps: int) -> tuple[list[Finding], str]:
    """One part: its findings, and the plans as text."""
    if part == "plans":
        results, text = plans()
        print(text)
        return results, text
    parts: dict[str, Callable[[], list[Finding]]] = {
        "parity": parity, "memory": memory, "bytes": closed_form, "speed": lambda: speed(rounds, steps),
        "chosen": lambda: choices(rounds, steps),
    }  # fmt: skip
    return parts[part](), ""


def written(name: str, results: Sequence[Finding], plans_text: str, rounds: int, steps: int) -> None:
    """A result file."""
    if name == "convolution":
        title, known = "The targets of convolution in every direction", settings()
        words = f"""{report.how(rounds, steps)} All run over gloo, with one thread a rank. A step is
zero_grad, forward, loss, backward and SGD, in float32; the stack is {DEPTH} convolutions of 3x3, {CHANNELS} channels,
with ReLU. Two ranks and one rank are timed one after the other. Planned layouts are timed beside data parallelism, a
split of the images' rows, and tensor parallelism, except the planned layout itself; the fastest counts. Peak memory is
VmHWM over two steps, reset before, beyond what the process held after a step on a small picture. Plans and what they
cost are predictions.

```text
{plans_text}
```"""
    else:
        title, known = "Convolution in every direction beside one process", {}
        words = f"""The error is the largest of losses, metrics and parameters over {oracle.STEPS} steps in float64,
relative to the largest value (at least 1), beside one process on the whole batch. "planned on 4": as the integer
program splits every layer."""
    report.write(name, title, COMMAND, timed(rounds, steps), known, results, words)
    print(f"written to benchmarks/results/{name}.md and .json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, plan, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convolution", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS}, at least 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    choices_of = ("", *FILES, *(part for parts in FILES.values() for part in parts))
    parser.add_argument("--only", default="", choices=choices_of, help="make one result file, or run one part of it")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    warnings.simplefilter("ignore")  # of the models' libraries
    only: str = options.only
    wanted = FILES if not only else {only: FILES[only]} if only in FILES else {"": (only,)}
    failed = False
    for name, parts in wanted.items():
        done = [run(part, options.rounds, options.steps) for part in parts]
        results = [finding for rows, _ in done for finding in rows]
        failed |= any(finding.verdict == "fail" for finding in results)
        if name:
            written(name, results, "".join(text for _, text in done), options.rounds, options.steps)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
