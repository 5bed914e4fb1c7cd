"""``meshwright predict``: predict step time and memory of one layout, with their parts, without running it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.cli.calibrate import print_learned
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir import files
from meshwright.ir.call_text import sizes_of
from meshwright.ir.pipeline import SCHEDULES

if TYPE_CHECKING:
    from meshwright.prediction import Forecast

EPILOG = display.examples(
    "meshwright predict gpt3-175b --cluster a100-80gb-dgx-hdr200x8 --devices 64 --tp 8 --pp 8 --global-batch 64",
    "meshwright predict llama3-8b --cluster h100-dgx-ndr400x8 --devices 8 --zero 3 --micro-batch 2 --global-batch 16",
    "meshwright predict path/to/config.json --cluster a100-40gb-dgx --tp 8 --global-batch 8 --json",
    "meshwright predict llama3-8b --cluster h100-dgx-ndr400x8 --devices 8 --zero 3 --micro-batch 2 --global-batch 16 "
    "--software torchtitan --measured 2.71,2.68,2.70 --output mine.toml",
    note="The exit code is 1 if the layout does not fit in memory.",
)


def predict(
    model: str = typer.Argument(..., help="A name of `meshwright models`, or the path of a Hugging Face config.json."),
    cluster: str = typer.Option(..., help="A name of `meshwright clusters`, or a .toml file."),
    devices: int = typer.Option(0, min=0, help="Number of devices; 0: the product of the axes."),
    dp: int = typer.Option(0, min=0, help="Data-parallel size; 0: all devices that other axes leave."),
    tp: str = typer.Option("1", help="Tensor-parallel size; or a grid for inputs, outputs and depth, as in 2x2x4."),
    pp: int = typer.Option(1, min=1, help="Pipeline stages."),
    cp: int = typer.Option(1, min=1, help="Context-parallel size."),
    ep: int = typer.Option(1, min=1, help="Expert-parallel size."),
    global_batch: int = typer.Option(..., min=1, help="Sequences per step."),
    micro_batch: int = typer.Option(1, min=1, help="Sequences per micro-batch."),
    sequence: int = typer.Option(0, min=0, help="Tokens per sequence; 0: the model's default."),
    schedule: str = typer.Option("1f1b", help=f"The pipeline schedule: {', '.join(SCHEDULES)}."),
    chunks: int = typer.Option(
        1,
        min=1,
        help="Chunks (stages) per pipeline rank, for interleaved schedules; zb-v and dualpipe-v always have 2.",
    ),
    recompute: str = typer.Option("none", help="Recomputation of activations: none, selective (attention only), full."),
    sequence_parallel: bool = typer.Option(
        False, help="Split the sequence over tp between the tensor-parallel operators."
    ),
    zero: int = typer.Option(
        0, min=0, max=3, help="ZeRO: dp shards optimizer state (1), also gradients (2), also parameters (3)."
    ),
    precision: str = typer.Option(
        "",
        help="Precision of matrix products: fp32, tf32, bf16, fp16, fp8; default: bf16, or fp16 on devices without "
        "bfloat16.",
    ),
    flash: bool = typer.Option(True, help="Compute attention in one fused kernel."),
    compiled: bool = typer.Option(False, help="With --zero 3: torch.compile fuses the model's own operations."),
    overlap: str = typer.Option(
        "none", help="Communication that overlaps with compute: none, dp (data parallel), all."
    ),
    inner: str = typer.Option("dp", help="The axis whose ranks are nearer to each other in the cluster: dp or pp."),
    codec: str = typer.Option("", help="The codec of gradients, as in qsgd(4); auto: the fastest, or no codec."),
    software: str = typer.Option(
        "",
        help="The training software: a name of `meshwright clusters --software`, or a .toml file; default: the "
        "cluster's.",
    ),
    measured: str = typer.Option(
        "", help="Measured seconds of a few steps, as in 1.52,1.49, to correct the prediction."
    ),
    output: Path | None = typer.Option(None, help="With --measured: write the cluster with the learned software."),
    memory: float = typer.Option(0.0, min=0.0, help="Memory of a device in bytes; 0: the cluster's value."),
    as_json: bool = display.JSON,
) -> int:
    """Predict a training step: whether it fits in memory, how long it takes, and what the time consists of."""
    from meshwright import prediction

    if not tp.isdecimal() and not sizes_of(tp):
        raise LayoutError(f"{tp!r} is no size", where="--tp", remedy="write a size, or a grid such as 2x2x4")
    layout = {
        "tp": sizes_of(tp) or int(tp), "pp": pp, "cp": cp, "ep": ep, "global_batch": global_batch,
        "micro_batch": micro_batch,
        "schedule": schedule, "chunks": chunks, "recompute": recompute, "sequence_parallel": sequence_parallel,
        "zero": zero, "flash": flash, "compiled": compiled, "overlap": overlap, "inner": inner,
        "codec": codec,
    } | ({"dp": dp} if dp else {}) | ({"precision": precision} if precision else {})  # fmt: skip
    predicted = prediction.predict(
        model, cluster, devices=devices or None, sequence=sequence, memory_bytes=memory or None,
        software=software or None, **layout,
    )  # fmt: skip
    learned = None
    if measured:
        steps = display.seconds(measured, "--measured")
        machine = prediction.load_cluster(cluster, software=predicted.software)
        learned = prediction.learn_step(predicted.setup, machine, steps)
        if output is not None:
            display.write(display.toml_path(output, "--output"), files.encode_toml(learned.cluster))
    elif output is not None:
        raise ClusterError("nothing is learned", where="--output", remedy="give --measured too, or leave it out")
    if as_json:
        display.print_json(predicted if learned is None else {"predicted": predicted, "learned": learned})
    else:
        _print(predicted)
        if learned is not None:
            display.console().print("\nlearned from the measured steps:")
            print_learned(learned)
            if output is not None:
                display.console().print(f"\nwritten to {output}: use it with --cluster {output}")
    return 1 if predicted.verdict == "does not fit" else 0


def _print(predicted: "Forecast") -> None:
    from meshwright.prediction import PARTS

    terminal = display.console()
    step_s, memory = predicted.estimate.step_s, predicted.memory
    tokens = predicted.setup.global_batch * predicted.setup.model.sequence
    devices = f"{predicted.setup.world_size} devices of {predicted.cluster} ({predicted.constants})"
    between = predicted.interval_s
    terminal.print(f"{predicted.setup.model.name} on {devices}")
    terminal.print(
        f"\nstep {step_s:.4g} s ({between.low:.3g} to {between.high:.3g} in 80 % of runs, software "
        f"{predicted.software.name})   {tokens / step_s:,.0f} tokens/s   "
        f"{predicted.estimate.model_flops_per_s / predicted.setup.world_size / 1e12:.1f} TFLOP/s a device   "
        f"mfu {predicted.mfu:.1%}"
    )
    _bars(
        [
            (name, getattr(predicted.estimate, key), f"{getattr(predicted.estimate, key):.4g} s")
            for key, name in PARTS.items()
        ]
    )
    if (exchange := predicted.exchange) is not None and exchange.codec:
        sent = "" if exchange.num_bytes is None else f", {exchange.num_bytes / 2**20:.4g} MiB from each rank"
        terminal.print(
            f"\ngradients coded with {exchange.codec} ({exchange.algorithm}): {exchange.seconds * 1e3:.4g} ms{sent}, "
            f"{exchange.coding_s * 1e3:.4g} ms to encode and decode"
        )
    limit = predicted.device_memory_bytes
    terminal.print(
        f"\nmemory {memory.peak_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB: {predicted.verdict}, "
        f"chance {predicted.fit_chance:.0%} (stage {memory.stage}, at {memory.moment})"
    )
    names = [key for key in memory.__struct_fields__ if key.endswith("_bytes")]
    parts = [(key.removesuffix("_bytes"), float(getattr(memory, key))) for key in names]
    _bars([(name, size, f"{size / 2**30:.2f} GiB") for name, size in parts])
    if predicted.change is not None:
        change = predicted.change
        terminal.print(
            f"\nsmallest change: {change.text}  ({change.peak_bytes / 2**30:.1f} GiB, step {change.step_s:.4g} s)"
        )
    elif predicted.verdict != "fits":
        terminal.print("\nno single change makes it fit: `meshwright plan` looks for another layout")


def _bars(parts: list[tuple[str, float, str]]) -> None:
    total = sum(size for _, size, _ in parts) or 1.0
    table = display.table()
    for name, size, text in parts:
        if size:
            table.add_row(name, text, "█" * max(1, round(40 * size / total)))
    display.console().print(table)
