"""The layouts of a model that is known by its sizes: what ``meshwright plan`` says of it, and its what-ifs."""

import time
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.table import Table

from meshwright.cli import display
from meshwright.errors import LayoutError

if TYPE_CHECKING:
    from meshwright.prediction import Found, Option

VARIED = ("cluster", "devices", "seq", "batch")


def show_layouts(
    model: str, cluster: str, devices: int, batch: int, sequence: int, vary: str, scaling: str, as_json: bool
) -> int:
    """Search, and print what was found; with ``vary``, the best layout of each value."""
    from meshwright import prediction

    asked: dict[str, Any] = {"cluster": cluster, "devices": devices, "seq": sequence, "batch": batch}
    values = varied(vary, asked) if vary else [asked]
    rows = []
    bars = display.Bars(display.console())
    bars.begin("weighing layouts", len(values) if vary else 0)
    try:
        for value in values:
            if vary.startswith("devices") and scaling == "weak":
                value["batch"] = max(1, batch * int(value["devices"]) // int(values[0]["devices"]))
            started = time.perf_counter()
            found = prediction.find_layouts(
                model, value["cluster"], devices=value["devices"] or None, global_batch=value["batch"],
                sequence=value["seq"],
            )  # fmt: skip
            rows.append((value, found, time.perf_counter() - started))
            bars.advance()
    finally:
        bars.end()
    if as_json:
        told = [_as_json(value, found) for value, found, _ in rows]
        typer.echo(msgspec.json.format(msgspec.json.encode(told if vary else told[0])).decode())
    elif vary:
        _print_varied(vary, scaling, rows)
    else:
        _print(model, *rows[0])
    return 0 if all(found.options for _, found, _ in rows) else 1


def varied(vary: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """``cluster=a,b``, ``seq=2048,8192``, or ``devices=64..512`` (doubling), each in place of what was asked.

    Raises:
        LayoutError: the key is unknown, or a value is no number.
    """
    key, _, text = vary.partition("=")
    if key not in VARIED or not text:
        raise LayoutError(
            f"{vary!r} varies nothing",
            where="--vary",
            remedy=f"write one of {', '.join(VARIED)} with values: seq=2048,8192",
        )
    if key == "cluster":
        return [asked | {key: name} for name in text.split(",")]
    low, dots, high = text.partition("..")
    try:
        numbers = [int(low)] if dots else [int(one) for one in text.split(",")]
        while dots and numbers[-1] * 2 <= int(high):
            numbers.append(numbers[-1] * 2)
    except ValueError:
        raise LayoutError(f"{text!r} are no numbers", where="--vary", remedy="write 64,128 or 64..512") from None
    if min(numbers) < 1:
        raise LayoutError(f"{min(numbers)} is less than 1", where="--vary", remedy="give 1 or more")
    return [asked | {key: number} for number in numbers]


def _as_json(value: dict[str, Any], found: "Found") -> dict[str, Any]:
    return {**value, "considered": found.considered, "options": found.options, "front": found.front}


def _print(model: str, value: dict[str, Any], found: "Found", seconds: float) -> None:
    terminal = display.console()
    terminal.print(f"{model} on {value['cluster']}: {found.considered} setups weighed in {seconds:.2f} s\n")
    if not found.options:
        terminal.print("nothing fits", end="")
        if found.nearest is not None:
            lacking = found.nearest.memory.peak_bytes / 2**30
            terminal.print(f"; nearest, with {lacking:.1f} GiB a device: {found.nearest.text}")
        return
    terminal.print(_table(list(found.options[:10])))
    terminal.print("\nno other is faster with as little memory:")
    terminal.print(_table(list(found.front[:6])))
    terminal.print(f"\n{found.explain()}")


def _print_varied(vary: str, scaling: str, rows: list[tuple[dict[str, Any], "Found", float]]) -> None:
    key = vary.partition("=")[0]
    terminal = display.console()
    if key == "devices":
        terminal.print(f"{scaling} scaling: the batch {'grows with the devices' if scaling == 'weak' else 'stays'}\n")
    table = Table(box=None, pad_edge=False)
    for title in (key, "batch", "step", "sequences/s", "a device", "", "layout"):
        table.add_column(title, justify="left" if title == "layout" else "right", no_wrap=True)
    for value, found, _ in rows:
        if not found.options:
            table.add_row(f"{value[key]}", f"{value['batch']}", "", "", "", "", "nothing fits")
            continue
        best = found.options[0]
        rate = value["batch"] / best.estimate.step_s
        per_device = best.estimate.model_flops_per_s / best.setup.world_size
        table.add_row(
            f"{value[key]}", f"{value['batch']}", f"{best.estimate.step_s:.4g} s", f"{rate:.4g}",
            f"{rate / best.setup.world_size:.3g}", f"{per_device / 1e12:.0f} TFLOP/s", best.text,
        )  # fmt: skip
    terminal.print(table)


def _table(options: "list[Option]") -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("step", "memory", "", "a device", "layout"):
        table.add_column(title, justify="left" if title in ("layout", "") else "right", no_wrap=True)
    for one in options:
        table.add_row(
            f"{one.estimate.step_s:.4g} s", f"{one.memory.peak_bytes / 2**30:.1f} GiB", one.verdict,
            f"{one.estimate.model_flops_per_s / one.setup.world_size / 1e12:.0f} TFLOP/s", one.text,
        )  # fmt: skip
    return table
