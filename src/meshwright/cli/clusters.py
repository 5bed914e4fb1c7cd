"""``meshwright clusters``: list the clusters of the catalog."""

import typer

from meshwright.cli import display

EPILOG = display.examples(
    "meshwright clusters",
    "meshwright clusters a100-80gb-dgx-hdr200x8",
    "meshwright clusters cpu-local --json",
)


def clusters(
    name: str = typer.Argument("", help="One cluster: a name, DEVICE-BOX-FABRIC, or a .toml file."),
    as_json: bool = display.JSON,
) -> None:
    """List the clusters of the catalog, or show one."""
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
    if listed[0].device.usd_per_hour is not None:
        terminal.print(f"\n$ {listed[0].device.usd_per_hour:.2f} a device and hour  ({listed[0].device.price_source})")
    terminal.print(f"\ndevice: {listed[0].device.origin}  ({listed[0].device.source})")
    for level in listed[0].levels:
        rate = 1 / level.beta_s_per_byte / 1e9
        terminal.print(
            f"{level.name}: {level.fan_out} together, {level.alpha_s * 1e6:.3g} us a message, {rate:.3g} GB/s"
            f"{f' x {level.links} links' if level.links > 1 else ''}: {level.origin}  ({level.source})"
        )
