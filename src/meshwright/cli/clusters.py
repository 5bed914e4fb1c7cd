"""``meshwright clusters``: list the clusters of the catalog."""

import msgspec
import typer

from meshwright.cli import display
from meshwright.errors import ClusterError

EPILOG = display.examples(
    "meshwright clusters",
    "meshwright clusters a100-80gb-dgx-hdr200x8",
    "meshwright clusters cpu-local --json",
    "meshwright clusters --software",
)


def clusters(
    name: str = typer.Argument("", help="One cluster: a name, DEVICE-BOX-FABRIC, or a .toml file."),
    software: bool = typer.Option(False, "--software", help="List the software profiles instead."),
    as_json: bool = display.JSON,
) -> None:
    """List the clusters of the catalog, or show one. With --software, list the profiles of software."""
    if software:
        if name:
            raise ClusterError("profiles of software are listed", where=name, remedy="leave it out")
        _list_software(as_json)
        return
    from meshwright import api

    listed = [api.load_cluster(name)] if name else [api.load_cluster(key) for key in api.cluster_names()]
    if as_json:
        display.print_json(listed[0] if name else listed)
        return
    terminal = display.console()
    titles = ("cluster", "devices", "device", "memory", "peak")
    table = display.table(titles, left=("cluster", "device", "peak"))
    for cluster in listed:
        peak = max(cluster.device.peak_flops_per_s.items(), key=lambda item: item[1])
        size = f"{cluster.num_devices}{'+' if cluster.open_ended else ''}"
        memory = f"{cluster.device.memory_bytes / 1e9:.0f} GB"
        table.add_row(cluster.name, size, cluster.device.name, memory, f"{peak[1] / 1e12:.4g} TFLOP/s {peak[0]}")
    terminal.print(table)
    if not name:
        terminal.print("\n+: grows to as many devices as are asked for. Other names are read as DEVICE-BOX-FABRIC.")
        return
    profile = listed[0].software
    numbers = msgspec.to_builtins(profile)  # only the numbers that differ from the defaults
    told = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in numbers.items()
        if key not in ("name", "source", "spread")
    )
    terminal.print(f"\nsoftware: {profile.name}{f': {told}' if told else ''}  {profile.source}".rstrip())
    if listed[0].device.usd_per_hour is not None:
        terminal.print(f"\n$ {listed[0].device.usd_per_hour:.2f} a device and hour  ({listed[0].device.price_source})")
    terminal.print(f"\ndevice: {listed[0].device.origin}  ({listed[0].device.source})")
    for level in listed[0].levels:
        rate = 1 / level.beta_s_per_byte / 1e9
        terminal.print(
            f"{level.name}: {level.fan_out} together, {level.alpha_s * 1e6:.3g} us a message, {rate:.3g} GB/s"
            f"{f' x {level.links} links' if level.links > 1 else ''}: {level.origin}  ({level.source})"
        )


def _list_software(as_json: bool) -> None:
    from meshwright import prediction

    profiles = [prediction.load_software(name) for name in prediction.software_names()]
    if as_json:
        display.print_json(profiles)
        return
    titles = ("software", "steps deviate", "peaks deviate", "source")
    table = display.table(titles, left=("software", "source"), wrapped=("source",))
    for profile in profiles:
        spread = profile.spread
        table.add_row(profile.name, f"{spread.step:.0%}", f"{spread.memory:.0%}", profile.source)
    display.console().print(table)
    display.console().print("\nGive one with --software, or learn one: meshwright calibrate --from RUNS.csv")
