"""``meshwright plan RUN.toml --vary``: the best plans of a captured model for several numbers of devices, or several
clusters."""

from typing import TYPE_CHECKING

from meshwright.cli import display
from meshwright.cli.layouts import varied
from meshwright.errors import LayoutError
from meshwright.ir.run import Run

if TYPE_CHECKING:
    from meshwright.api import PlanSize


def show_sweep(
    run: Run, ranks: int, memory_bytes: float | None, vary: str, scaling: str, fresh: bool, as_json: bool
) -> int:
    """Search a plan for each value in ``vary``, and print the plans. Ctrl-C ends the sweep and prints the plans so far.
    Returns the exit code: 1 if a value has no plan, 130 after Ctrl-C.

    Raises:
        LayoutError: a captured model does not allow this ``vary`` or ``scaling``.
    """
    from meshwright import api

    key = vary.partition("=")[0]
    values = varied(vary, {"cluster": run.layout.cluster, "devices": ranks})
    if key in ("batch", "seq"):
        raise LayoutError(
            f"the {'batch' if key == 'batch' else 'sequence length'} of a captured model is the run's",
            where="--vary", remedy="vary devices or cluster; the run has data.batch_size and data.sequence_length",
        )  # fmt: skip
    if scaling != "strong":
        raise LayoutError(
            f"{scaling} scaling needs a batch that grows, and that of a captured model is the run's", where="--scaling",
            remedy="leave it out: strong scaling; or plan each size by itself, with --data.batch_size",
        )  # fmt: skip
    rows: list[PlanSize] = []
    code = 0
    with display.progress("capturing", len(values)) as bars:
        sizes = [(str(value["cluster"]), int(value["devices"])) for value in values]

        def say(what: str) -> None:
            bars.say(f"{key} {values[len(rows)][key]}: {what}")

        try:
            for row in api.sweep_run(run, sizes, memory_bytes, fresh=fresh, progress=say):
                rows.append(row)
                bars.advance()
        except KeyboardInterrupt:
            code = display.INTERRUPTED
    if as_json:
        display.print_json(rows)
    else:
        _print(rows, key, len(values))
    return code or (1 if any(row.problem for row in rows) else 0)


def _print(rows: "list[PlanSize]", key: str, asked: int) -> None:
    terminal = display.console()
    titles = (key, "ms a step", "samples/s", "efficiency", "GiB a rank", "search s", "layout")
    table = display.table(titles, left=("layout",), wrapped=("layout",))
    for row in rows:
        value = row.cluster if key == "cluster" else f"{row.devices}"
        numbers = (row.step_s * 1e3, row.samples_per_s, row.peak_memory_bytes / 2**30)
        step, rate, memory = (f"{number:.4g}" if row.layout else "" for number in numbers)
        efficiency = f"{row.efficiency:.0%}" if row.layout else ""
        table.add_row(value, step, rate, efficiency, memory, f"{row.search_s:.1f}", row.layout or "no plan")
    terminal.print(table)
    for row in rows:
        value = row.cluster if key == "cluster" else f"{row.devices} device{'s' if row.devices > 1 else ''}"
        if row.problem:
            terminal.print(f"  {value}: {row.problem}\n    -> {row.remedy}")
        for limit in row.limits:
            by = "nothing limits data parallelism" if limit.kind == "none" else f"{limit.kind} limits data parallelism"
            terminal.print(f"  {value}: {by}: {limit.text}")
    if any(row.layout for row in rows):
        terminal.print(
            "  strong scaling: the batch stays. Whether a larger batch would train as well for each sample (a "
            "statistical limit) is not known here: `meshwright bench batch-size` measures it."
        )
    if len(rows) < asked:
        terminal.print(f"  stopped: {len(rows)} of {asked} were planned")
