"""``meshwright plan`` for a model that is described by its sizes: the best layouts, and comparisons (``--vary``)."""

import math
import time
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from meshwright.cli import display
from meshwright.errors import LayoutError
from meshwright.ir.layout import RECOMPUTE, Recompute

if TYPE_CHECKING:
    from meshwright.prediction import SearchResult, SetupOption

SHOWN = 15
"""The largest number of rows of a Pareto front that are printed."""

VARIED = ("cluster", "devices", "seq", "batch")


def show_layouts(
    model: str, cluster: str, devices: int, batch: int, sequence: int, vary: str, scaling: str, price: float,
    software: str, codec: str, recompute: Recompute | Literal["any"], as_json: bool,
) -> int:  # fmt: skip
    """Search layouts and print them; with ``vary``, print the best layout for each value. ``price``: US dollars per
    device and hour; 0: the catalog's price. ``software``: a profile that replaces the cluster's. ``codec``: the codec
    of gradients. ``recompute``: the only recomputation to consider, or ``any``. Returns the exit code: 1 if a search
    found no layout that fits."""
    from meshwright import prediction

    asked: dict[str, Any] = {"cluster": cluster, "devices": devices, "seq": sequence, "batch": batch}
    values = varied(vary, asked) if vary else [asked]
    rows = []
    with display.progress("weighing layouts", len(values) if vary else 0) as bars:
        for value in values:
            if vary.startswith("devices") and scaling == "weak":
                value["batch"] = max(1, batch * int(value["devices"]) // int(values[0]["devices"]))
            started = time.perf_counter()
            machine = prediction.load_cluster(value["cluster"], value["devices"] or None, software or None)
            result = prediction.find_layouts(
                model,
                machine,
                global_batch=value["batch"],
                sequence=value["seq"],
                usd_per_hour=price or None,
                codec=codec,
                recompute=recompute,
            )
            rows.append((value, result, time.perf_counter() - started))
            bars.advance()
    if as_json:
        answers = [
            {**value, "considered": result.considered, "options": result.options, "front": result.front}
            for value, result, _ in rows
        ]
        if vary and not vary.startswith("seq"):  # not comparable: sequences of different lengths are different work
            joint = prediction.front(option for _, result, _ in rows for option in result.front)
            for answer in answers:
                answer["joint_front"] = [option for option in answer["front"] if option in joint]
        display.print_json(answers if vary else answers[0])
    elif vary:
        _print_varied(vary, scaling, rows)
    else:
        _print(model, software, *rows[0])
    return 0 if all(result.options for _, result, _ in rows) else 1


def recomputation(text: str) -> Recompute | Literal["any"]:
    """The kind of recomputation that ``--recompute`` names; ``any`` without it.

    Raises:
        LayoutError: there is no such kind.
    """
    known: dict[str, Recompute | Literal["any"]] = {"": "any", **{kind: kind for kind in RECOMPUTE}}
    if text not in known:
        raise LayoutError(
            f"unknown recomputation {text!r}", where="--recompute", remedy=f"write one of {', '.join(RECOMPUTE)}"
        )
    return known[text]


def varied(vary: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that ``vary`` describes: a copy of ``asked`` for each value. ``vary`` is a key with values, such as
    ``cluster=a,b``, ``seq=2048,8192``, or ``devices=64..512`` (64, 128, 256, 512).

    Raises:
        LayoutError: the key is unknown, or a value is not a number of 1 or more.
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
        numbers = [int(low)] if dots else [int(number) for number in text.split(",")]
        while dots and 0 < numbers[-1] * 2 <= int(high):
            numbers.append(numbers[-1] * 2)
    except ValueError:
        raise LayoutError(f"{text!r} are no numbers", where="--vary", remedy="write 64,128 or 64..512") from None
    if dots and int(high) < numbers[0]:
        raise LayoutError(f"{text} runs backwards", where="--vary", remedy="write the smaller number first: 64..512")
    if min(numbers) < 1:
        raise LayoutError(f"{min(numbers)} is less than 1", where="--vary", remedy="give 1 or more")
    return [asked | {key: number} for number in numbers]


def _print(model: str, software: str, value: dict[str, Any], result: "SearchResult", seconds: float) -> None:
    from meshwright.prediction import load_cluster

    terminal = display.console()
    terminal.print(f"{model} on {value['cluster']}: {result.considered} setups weighed in {seconds:.2f} s")
    machine = load_cluster(value["cluster"], software=software or None)
    terminal.print(f"constants of the cluster: {machine.constants}; software {machine.software.name}\n")
    if not result.options:
        terminal.print("nothing fits", end="")
        if result.nearest is not None:
            lacking = result.nearest.memory.peak_bytes / 2**30
            terminal.print(f"; nearest, with {lacking:.1f} GiB a device: {result.nearest.text}")
        return
    terminal.print(_table([(option, "") for option in result.options[:10]]))
    terminal.print("\nno other is faster with as little memory and money:")
    terminal.print(_table([(option, "") for option in result.front[:6]]))
    between = result.options[0].interval_s
    terminal.print(f"\nin 80 % of runs a step takes {between.low:.3g} to {between.high:.3g} s")
    terminal.print(f"{result.explain()}{_unpriced([(value, result, seconds)])}")


def _print_varied(vary: str, scaling: str, rows: list[tuple[dict[str, Any], "SearchResult", float]]) -> None:
    from meshwright import prediction

    key = vary.partition("=")[0]
    terminal = display.console()
    if key == "devices":
        terminal.print(f"{scaling} scaling: the batch {'grows with the devices' if scaling == 'weak' else 'stays'}\n")
    titles = (key, "batch", "step", "sequences/s", "a device", "", "1,000 sequences", "layout")
    table = display.table(titles, left=("layout",), wrapped=("layout",))
    for value, result, _ in rows:
        if not result.options:
            table.add_row(f"{value[key]}", f"{value['batch']}", "", "", "", "", "", "nothing fits")
            continue
        best = result.options[0]
        rate = value["batch"] / best.step_s
        per_device = best.flops_per_s / best.setup.world_size
        table.add_row(
            f"{value[key]}", f"{value['batch']}", f"{best.step_s:.4g} s", f"{rate:.4g}",
            f"{rate / best.setup.world_size:.3g}", f"{per_device / 1e12:.0f} TFLOP/s",
            _dollars(best), best.text,
        )  # fmt: skip
    terminal.print(table)
    if missing := _unpriced(rows):
        terminal.print(missing)
    if key == "seq":
        return  # not comparable: sequences of different lengths are different work
    where = {id(option): str(value[key]) for value, result, _ in rows for option in result.front}
    joint = prediction.front(option for _, result, _ in rows for option in result.front)
    if joint:
        terminal.print(f"\nno other {key} and layout takes as little time, memory and money for a sequence:")
        each = max(1, math.ceil(len(joint) / SHOWN))
        terminal.print(_table([(option, where[id(option)]) for option in joint[::each]], key))
        if each > 1:
            terminal.print(f"every {each} of {len(joint)}: --json has all")


def _table(options: "list[tuple[SetupOption, str]]", key: str = "") -> Table:
    """A table with a row for each option. With ``key``, it also has a column ``key`` with the second items of the
    pairs."""
    priced = any(option.usd is not None for option, _ in options)
    titles = [
        *filter(None, [key]),
        "step",
        "memory",
        "",
        "a device",
        *(["1,000 sequences"] if priced else []),
        "layout",
    ]
    table = display.table(titles, left=("layout", ""), wrapped=("layout",))
    for option, value in options:
        rate = option.flops_per_s / option.setup.world_size / 1e12
        fits = f"{option.verdict} ({option.fit_chance:.0%})"
        cells = [f"{option.step_s:.4g} s", f"{option.memory.peak_bytes / 2**30:.1f} GiB", fits]
        cells += [f"{rate:.0f} TFLOP/s", *([_dollars(option)] if priced else []), option.text]
        table.add_row(*([value] if key else []), *cells)
    return table


def _dollars(option: "SetupOption") -> str:
    """The price of 1,000 sequences as text; empty if it is unknown."""
    return "" if option.sequence_usd is None else f"$ {1000 * option.sequence_usd:,.3g}"


def _unpriced(rows: list[tuple[dict[str, Any], "SearchResult", float]]) -> str:
    """A hint that names the clusters without a known price; empty if there are none."""
    best = {str(value["cluster"]): option for value, result, _ in rows for option in result.options[:1]}
    missing = sorted(name for name, option in best.items() if option.usd is None)
    return f"\nno price is known of {', '.join(missing)}: give one with --price" if missing else ""
