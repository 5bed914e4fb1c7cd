"""``meshwright calibrate``: measure this machine, without a model, so that predictions hold for it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.api import Cluster

EPILOG = display.examples(
    "meshwright calibrate",
    "meshwright calibrate --output machine.toml",
    "meshwright calibrate --if-stale --json",
    "torchrun --nnodes 2 ... --no-python meshwright calibrate --output cluster.toml",
    "mpirun -n 4 meshwright calibrate --output machine.toml",
    note="The file is a cluster file: `meshwright clusters FILE` shows it, and --cluster FILE plans for it.",
)


def calibrate(
    output: Path | None = typer.Option(None, help="Where to write the cluster file; default: the user's cache."),
    if_stale: bool = typer.Option(False, "--if-stale", help="Only where the last one no longer holds."),
    as_json: bool = display.JSON,
) -> None:
    """Measure this machine's cores and the links between them, in less than a minute. Best while nothing else runs."""
    from meshwright import api

    with display.cursor_kept():
        cluster = api.calibrate(output, again=not if_stale, measured_by=measure_rank)
    if api.launched_rank() > 0:
        return
    if as_json:
        display.print_json(cluster)
        return
    _print(cluster)
    display.console().print(f"\nwritten to {output or api.calibration_file()}")


def calibrate_once() -> None:
    """Measure this machine if it has no calibration, or one that no longer holds."""
    from meshwright import api

    if api.calibrated() is None:
        display.console().print("measuring this machine, once (meshwright calibrate)")
        with display.cursor_kept():
            api.calibrate(measured_by=measure_rank)


def measure_rank() -> "Cluster | None":
    """Measure on this rank. Every rank of a calibration calls this function."""
    from meshwright import api

    return display.on_rank(api.measure_machine)


def _print(cluster: "Cluster") -> None:
    from meshwright import api

    terminal, device = display.console(), cluster.device
    peaks = ", ".join(f"{peak / 1e9:.1f} GFLOP/s {dtype}" for dtype, peak in device.peak_flops_per_s.items())
    cores = "1 core" if cluster.num_devices == 1 else f"{cluster.num_devices} cores"
    terminal.print(f"{device.name}: {cores} of {peaks}")
    conditions = [f"{c.threads} threads" if c.ranks == 1 else f"{c.ranks} at once" for c in device.conditions]
    first = "best of the peak"
    table = display.table((first, "alone", *conditions), left=(first,), wrapped=("alone", *conditions))
    curves = [device.efficiency, *(c.efficiency for c in device.conditions)]
    for kind in device.efficiency:
        table.add_row(kind, *(f"{max(fraction for _, fraction in curve[kind]):.0%}" for curve in curves))
    terminal.print(table)
    for level in cluster.levels:
        rate = 1 / level.beta_s_per_byte / 1e9
        what = "cores" if level is cluster.levels[0] and level.name == "box" else "boxes"
        terminal.print(f"messages between {what}: {level.alpha_s * 1e6:.0f} us and {rate:.2f} GB/s")
    calibration = cluster.calibration
    if calibration is not None:
        drift = f"{calibration.drift:.0%} (standard deviation)"
        terminal.print(f"the same call differed by {drift} from sweep to sweep: predictions may be off by as much")
    if calibration is not None and api.is_busy(calibration):
        terminal.print(
            f"\nwarning: this machine is busy: calls took {calibration.spread:.0%} longer by the clock than they had "
            "the processor. Compute was measured all the same; what is between cores may come out slow: "
            "calibrate again when it is idle"
        )
