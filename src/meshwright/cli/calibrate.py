"""``meshwright calibrate``: measure this machine, or learn from runs, so that predictions hold."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.errors import ClusterError, FileFormatError
from meshwright.ir import files

if TYPE_CHECKING:
    from meshwright.api import Cluster
    from meshwright.prediction import LearnedCluster

EPILOG = display.examples(
    "meshwright calibrate",
    "meshwright calibrate --output machine.toml",
    "meshwright calibrate --if-stale --json",
    "torchrun --nnodes 2 ... --no-python meshwright calibrate --output cluster.toml",
    "mpirun -n 4 meshwright calibrate --output machine.toml",
    "meshwright calibrate --from RUNS.csv --software torchtitan --output mine.toml",
    "meshwright calibrate --from runs/gpt --from runs/gpt-tp2",
    note="The file is a cluster file: `meshwright clusters FILE` shows it, and --cluster FILE plans for it.",
)


def calibrate(
    output: Path | None = typer.Option(
        None, help="Where to write the cluster file; default: the user's cache, for this machine."
    ),
    if_stale: bool = typer.Option(False, "--if-stale", help="Measure only if the last calibration no longer holds."),
    device: str = typer.Option("", help="What to measure: cuda or cpu; default: cuda if there are GPUs."),
    learn: list[Path] = typer.Option(
        [], "--from", metavar="RUNS.csv|RUN_DIR", help="Learn from a table of runs, or from runs of `meshwright train`."
    ),
    cluster: str = typer.Option("", help="With --from: the cluster to correct; default: the cluster of the runs."),
    software: str = typer.Option("", help="With --from a table: the software profile of rows without a profile."),
    as_json: bool = display.JSON,
) -> None:
    """Measure this machine's GPUs or cores and the links between them, in less than a minute, best while nothing else
    runs. With --from, learn from runs instead: how their software differs."""
    if learn:
        if if_stale:
            raise ClusterError("runs do not become stale", where="--if-stale", remedy="leave it out")
        _learn(learn, cluster, software, output, as_json)
        return
    for option, value in (("--cluster", cluster), ("--software", software)):
        if value:
            raise ClusterError("this machine is measured", where=option, remedy="give --from too, or leave it out")
    from meshwright import api

    with display.cursor_kept():
        kind = api.measured_kind(device)
        measure = measure_rank if kind == "cpu" else measure_rank_gpus
        measured = api.calibrate(output, again=not if_stale, measured_by=measure, device=kind)
    if api.launched_rank() > 0:
        return
    if as_json:
        display.print_json(measured)
        return
    _print(measured)
    display.console().print(f"\nwritten to {output or api.calibration_file(kind)}")


def calibrate_once() -> None:
    """Measure this machine if it has no calibration, or a calibration that no longer holds."""
    from meshwright import api

    if api.calibrated() is None:
        display.console().print("measuring this machine, once (meshwright calibrate)")
        with display.cursor_kept():
            api.calibrate(measured_by=measure_rank, device="cpu")


def measure_rank() -> "Cluster | None":
    """Measure on this rank. Every rank of a calibration calls this function."""
    from meshwright import api

    return display.on_rank(api.measure_machine)


def measure_rank_gpus() -> "Cluster | None":
    """Measure this rank's GPU. Every rank of a calibration calls this function."""
    from meshwright import api

    return display.on_rank(api.measure_gpus)


def _learn(paths: list[Path], cluster: str, software: str, output: Path | None, as_json: bool) -> None:
    """Learn from a table or from directories of runs; write the cluster file and print what was learned."""
    tables = [path for path in paths if path.suffix == ".csv"]
    if tables and len(paths) > 1:
        raise FileFormatError(
            f"{len(paths)} sources are given, and one is a table", where="--from",
            remedy="give one table, or directories of runs",
        )  # fmt: skip
    if not tables:
        if software:
            remedy = "leave it out: runs of `meshwright train` correct the profile of their own cluster"
            raise ClusterError("the runs are ours", where="--software", remedy=remedy)
        from meshwright import api

        learned, target = api.learn_from_runs(paths, cluster, output)
        if as_json:
            display.print_json(learned)
            return
        print_learned(learned)
        display.console().print(f"\n{learned.cluster.source}\nwritten to {target}")
        return
    if output is None:
        raise FileFormatError(
            "a table says nothing of this machine", where="--output", remedy="name the cluster file to write: mine.toml"
        )
    from meshwright import prediction

    from_table = prediction.learn_table(tables[0], cluster=cluster, software=software)
    display.write(display.toml_path(output, "--output"), files.encode_toml(from_table.cluster))
    for row in from_table.left_out:
        typer.echo(f"left out: {row.case} (line {row.line}): {row.reason}", err=True)
    if as_json:
        display.print_json(from_table)
        return
    print_learned(from_table)
    display.console().print(f"\nwritten to {output}: use it with --cluster {output}, or --software {output}")


def print_learned(profile: "LearnedCluster") -> None:
    """Print the numbers of a profile: first the numbers that were learned from runs, then the unchanged numbers."""
    terminal, learned = display.console(), profile.learned
    table = display.table(("number", "before", "learned", "uncertain by", ""), left=("number", ""))
    for number in learned.numbers:
        deviation = f"{number.deviation_before:.0%} -> {number.deviation:.0%}"
        table.add_row(
            number.name, f"{number.before:.4g}", f"{number.value:.4g}", deviation,
            "" if number.is_learned else "the runs tell little",
        )  # fmt: skip
    if learned.numbers:
        terminal.print(table)
        terminal.print()
    if learned.error is not None:
        runs = "1 run" if learned.runs == 1 else f"{learned.runs} runs"
        terminal.print(
            f"{runs}: mean error of their times {learned.error_before:.1f} % before, {learned.error:.1f} % now (on "
            "these very runs)"
        )
    for note in learned.notes:
        terminal.print(f"note: {note}")


def _print(cluster: "Cluster") -> None:
    from meshwright import api

    terminal, device = display.console(), cluster.device
    unit, name = (1e9, "GFLOP/s") if device.kind == "cpu" else (1e12, "TFLOP/s")
    peaks = ", ".join(f"{peak / unit:.1f} {name} {dtype}" for dtype, peak in device.peak_flops_per_s.items())
    what = "core" if device.kind == "cpu" else "GPU"
    cores = f"1 {what}" if cluster.num_devices == 1 else f"{cluster.num_devices} {what}s"
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
        joined = f"{what}s" if level is cluster.levels[0] and level.name == "box" else "boxes"
        terminal.print(f"messages between {joined}: {level.alpha_s * 1e6:.0f} us and {rate:.2f} GB/s")
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
