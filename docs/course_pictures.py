"""Draws the pictures of docs/course, most of them from the experiments of its pages."""

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.compress.select import largest
from meshwright.ir.halo import fetched, window_ranges
from meshwright.ir.trace import Span, Trace
from meshwright.ir.units import seconds, size
from meshwright.prediction import find_layouts, predict
from meshwright.report import drawing, svg, timeline_picture
from meshwright.report.run_drawing import PlotLine, plot_with_names
from meshwright.report.template import packaged
from meshwright.schedules.collectives import operations

FOLDER = Path(__file__).parent / "course"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def file(drawn: str) -> str:
    """A picture as a file of its own, in the colours of the reports."""
    return svg.file(drawn, packaged("style.css"))


@functools.cache
def experiment(page: str) -> dict[str, Any]:
    """The names of a page's experiment, its first Python block, after it has run in this process."""
    block = _BLOCK.search((FOLDER / page).read_text())
    assert block is not None, f"{page} has no experiment"
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda *words, **options: None}
    torch.manual_seed(0)
    exec(compile(block[1], page, "exec"), names)
    return names


def one_neuron() -> str:
    """The loss of a neuron over steps, for three learning rates."""
    names = experiment("01-one-neuron.md")
    lines = []
    for color, rate in enumerate((0.2, 2.0, 40.0)):
        trainer = mw.parallelize(
            names["new_neuron"](), names["loss_fn"], names["batch"], plan=mw.Layout(dp=-1),
            optimizer=functools.partial(torch.optim.SGD, lr=rate),
        )  # fmt: skip
        losses = [float(trainer.step(names["batch"])) for _ in range(40)]
        words = f"learning rate {rate:g}"
        lines.append(PlotLine(name=words, legend=words, points=list(enumerate(losses)), color=color))
    return file(plot_with_names(lines, "loss over steps", x_name="step", y_name="loss", from_zero=True))


def data_parallelism() -> str:
    """A simulated step of two data-parallel GPUs in two boxes."""
    with torch.device("meta"):
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(4096, 4096), torch.nn.GELU())]
    batch = {"x": torch.empty(4096, 4096), "y": torch.empty(4096, 4096)}
    model = torch.nn.Sequential(*layers)
    graph = mw.capture(model, lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]), batch)
    cluster = "a100-40gb-box1-eth100x1"
    plan = mw.plan(graph, cluster, devices=2, layout=mw.Layout(dp=2))
    return timeline_picture({"simulated": mw.simulate(graph, cluster, plan)})


def all_reduce() -> str:
    """The time of an all-reduce over 16 ranks by the size of the vector, on logarithmic axes."""
    names = experiment("03-all-reduce.md")
    lines = []
    for color, name in enumerate(("ring", "butterfly", "rabenseifner", "star")):
        steps = operations.all_reduce(name, 16, 16)
        points = [
            (float(power), math.log10(names["seconds"](steps, 2**power)))
            for power in range(8, 31)
        ]  # fmt: skip
        lines.append(PlotLine(name=name, legend=name, points=points, color=color))
    return file(plot_with_names(
        lines, "time of an all-reduce over 16 ranks", x_name="bytes of the vector", y_name="seconds",
        x_text=_bytes_text, y_text=lambda power: seconds(10**power),
    ))  # fmt: skip


def _bytes_text(power: float) -> str:
    unit = min(3, int(power // 10))
    return f"{2 ** (power - 10 * unit):g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def memory() -> str:
    """The memory of a rank under each stage of ZeRO."""
    rows = []
    for zero in range(4):
        memory = predict("gpt3-6b7", "a100-80gb-dgx-hdr200x8", devices=64, global_batch=64, zero=zero).memory
        rest = memory.peak_bytes - memory.parameters_bytes - memory.gradients_bytes
        rows.append((f"zero {zero}", {
            "parameters": memory.parameters_bytes, "gradients": memory.gradients_bytes,
            "optimizer state": memory.optimizer_bytes, "activations": memory.activations_bytes,
            "everything else": rest - memory.optimizer_bytes - memory.activations_bytes,
        }))  # fmt: skip
    return file(drawing.bars(rows, "memory of a rank by stage of ZeRO", text=size))


def tensor_parallelism() -> str:
    """The parts of a step under several degrees of tensor parallelism."""
    rows = []
    for tp in (1, 2, 4, 8, 16):
        step = predict("gpt3-6b7", "a100-80gb-dgx-hdr200x8", devices=64, global_batch=64, tp=tp, micro_batch=1, zero=1)
        estimate = step.estimate
        rest = estimate.step_s - estimate.compute_s - estimate.tensor_comm_s - estimate.data_comm_s
        rows.append((f"tp {tp}", {
            "computing": estimate.compute_s, "communication over tp": estimate.tensor_comm_s,
            "communication over dp": estimate.data_comm_s, "everything else": rest,
        }))  # fmt: skip
    return file(drawing.bars(rows, "a step by the degree of tensor parallelism", text=seconds))


def pipelines() -> str:
    """A step of four stages under three schedules."""
    names = experiment("06-pipelines.md")
    traces = {}
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = names["pipeline"].build(name, 4, 8)
        spans = [
            Span(rank, "compute", str(action), start * 1e-3, end * 1e-3)
            for rank, (actions, times) in enumerate(
                zip(schedule.ranks, (rank.times for rank in names["report"](name, 4, 8).ranks), strict=True)
            )
            for action, (start, end) in zip(actions, times, strict=True)
        ]
        traces[name] = Trace(source="simulated", spans=tuple(spans))
    return timeline_picture(traces)


def halos() -> str:
    """The rows of three parts of a picture, and those that each part fetches."""
    edges, height, left = [0, 4, 8, 12], 30, 80
    ranges = window_ranges(edges, stride=1, window=3, padding=1)
    width = (svg.WIDTH - left - 16) / edges[-1]
    parts = [svg.text(left + width * (row + 0.5), 18, f"row {row}", "middle") for row in range(edges[-1])]
    for part in range(3):
        y = 30 + (height + 14) * part
        parts.append(svg.text(left - 10, y + height / 2 + 4, f"rank {part}", "end", "strong"))
        shown = [(row, "f", "own") for row in range(edges[part], edges[part + 1])]
        for other, (low, high) in fetched(ranges, edges, part):
            shown += [(row, "b", f"from {other}") for row in range(low, high)]
        for row, style, words in shown:
            parts.append(svg.box(style, left + width * row, y, width - 3, height, f"rank {part}, row {row}: {words}"))
            parts.append(svg.text(left + width * (row + 0.5), y + height / 2 + 4, words, "middle", "inside"))
    label = "12 rows on three ranks, window 3: own rows and halos"
    return file(svg.picture(30 + (height + 14) * 3, label, parts))


def large_batches() -> str:
    """Steps to the goal over the batch size, on logarithmic axes, with lines of constant samples and constant steps."""
    steps = experiment("08-large-batches.md")["steps"]
    points = [(math.log2(batch), math.log2(count)) for batch, count in steps.items()]
    (x, y), least = points[0], points[-1][1]
    perfect = [(x, y), (x + y - least, least)]
    lines = [
        PlotLine(name="measured", legend="steps of the experiment", points=points, color=0, dots=True),
        PlotLine(
            name="perfect", legend="half as many steps with twice the batch", points=perfect, color=1, style="dashed"
        ),
    ]  # fmt: skip
    return file(plot_with_names(
        lines, "steps over batch size", x_name="batch size", y_name="steps", x_text=lambda power: f"{2**power:g}",
        y_text=lambda power: f"{2**power:.3g}",
    ))  # fmt: skip


def compression() -> str:
    """Losses of the experiment's problem, with the largest 5 % of the elements, in one process."""
    names = experiment("09-compression.md")
    x, y = names["batch"]["x"].double(), names["batch"]["y"].double()

    def losses(share: float, feedback: bool) -> list[float]:
        weight, residual, errors = torch.zeros(64, 16, dtype=torch.float64), torch.zeros(1024, dtype=torch.float64), []
        for _ in range(60):
            error = x @ weight - y
            errors.append(float(error.square().mean()))
            residual = residual * feedback + (2 / error.numel() * x.T @ error).flatten()
            chosen = largest(residual, round(share * 1024)).long()
            sent = torch.zeros_like(residual)
            sent[chosen] = residual[chosen]
            residual, weight = residual - sent, weight - sent.view(64, 16)
        return errors

    lines = [
        PlotLine(name=words, legend=words, points=list(enumerate(losses(share, feedback))), color=color)
        for color, (words, share, feedback) in enumerate((
            ("all elements", 1.0, False), ("the largest 5 %, with error feedback", 0.05, True),
            ("the largest 5 %, without error feedback", 0.05, False),
        ))
    ]  # fmt: skip
    return file(plot_with_names(lines, "loss over steps", x_name="step", y_name="loss", from_zero=True))


def asynchrony() -> str:
    """Steps of all replicas over time when one of four replicas is always twice as slow."""
    names = experiment("10-asynchrony.md")
    lines = []
    for color, rule in enumerate(("server(async)", "server(ssp=3)", "sync")):
        spans = names["simulated"](rule, names["always"]).trace.spans
        ends = sorted(span.end_s for span in spans if span.stream == "compute" and span.end_s <= 24)
        points = [(0.0, 0.0), *((end_s, float(count)) for count, end_s in enumerate(ends, start=1))]
        lines.append(PlotLine(name=rule, legend=rule, points=points, color=color, stairs=True))
    return file(plot_with_names(
        lines, "steps of four replicas over time", x_name="seconds", y_name="steps of all replicas", from_zero=True
    ))  # fmt: skip


def cost_models() -> str:
    """Predicted over measured times from the result file of `make bench-prediction`, on logarithmic axes."""
    result = json.loads((FOLDER.parents[1] / "benchmarks" / "results" / "prediction.json").read_text())
    points = sorted(
        (math.log10(row["series"]["value_s"]), math.log10(row["predicted_s"]))
        for row in result["findings"] if row["kind"] == "prediction"
    )  # fmt: skip
    ends = points[0][0] - 0.05, points[-1][0] + 0.05
    lines = [
        PlotLine(name="layout", legend="", points=points, color=0, only_dots=True),
        PlotLine(name="equal", legend="prediction equals measurement", points=[(end, end) for end in ends], color=7),
        *(
            PlotLine(name=f"{factor:g} times", legend=words, color=1, style="dashed",
                     points=[(end, end + math.log10(factor)) for end in ends])
            for factor, words in ((1.25, "25 % off"), (0.75, ""))
        ),
    ]  # fmt: skip
    return file(plot_with_names(
        lines, "predicted over measured step times", x_name="measured", y_name="predicted",
        x_text=lambda power: seconds(10**power), y_text=lambda power: seconds(10**power),
    ))  # fmt: skip


def thousand_gpus() -> str:
    """The speed of the best layout by the number of GPUs."""
    points = []
    for devices in (64, 128, 256, 512, 1024):
        layouts = find_layouts("gpt3-175b", "a100-80gb-dgx-hdr200x8", devices=devices, global_batch=1536, grids="none")
        points.append((devices, 1536 / layouts.options[0].step_s))
    return file(drawing.curve(points))


PICTURES: dict[str, Callable[[], str]] = {
    "one-neuron": one_neuron,
    "data-parallelism": data_parallelism,
    "all-reduce": all_reduce,
    "memory": memory,
    "tensor-parallelism": tensor_parallelism,
    "pipelines": pipelines,
    "halos": halos,
    "large-batches": large_batches,
    "compression": compression,
    "asynchrony": asynchrony,
    "cost-models": cost_models,
    "thousand-gpus": thousand_gpus,
}
"""Maps the name of a picture in docs/course/pictures to the function that draws it."""
