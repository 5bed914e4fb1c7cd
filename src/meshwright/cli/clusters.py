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

    found = [api.load_cluster(name)] if name else [api.load_cluster(one) for one in api.cluster_names()]
    if as_json:
        display.print_json(found[0] if name else found)
        return
    terminal = display.console()
    titles = ("cluster", "devices", "device", "memory", "peak")
    table = display.table(titles, left=("cluster", "device", "peak"))
    for one in found:
        peak = max(one.device.peak_flops_per_s.items(), key=lambda item: item[1])
        size = f"{one.num_devices}{'+' if one.open_ended else ''}"
        memory = f"{one.device.memory_bytes / 1e9:.0f} GB"
        table.add_row(one.name, size, one.device.name, memory, f"{peak[1] / 1e12:.4g} TFLOP/s {peak[0]}")
    terminal.print(table)
    if not name:
        terminal.print("\n+: grows to as many devices as are asked for. Other names are read as DEVICE-BOX-FABRIC.")
        return
    if found[0].device.usd_per_hour is not None:
        terminal.print(f"\n$ {found[0].device.usd_per_hour:.2f} a device and hour  ({found[0].device.price_source})")
    terminal.print(f"\ndevice: {found[0].device.origin}  ({found[0].device.source})")
    for level in found[0].levels:
        rate = 1 / level.beta_s_per_byte / 1e9
        terminal.print(
            f"{level.name}: {level.fan_out} together, {level.alpha_s * 1e6:.3g} us a message, {rate:.3g} GB/s"
            f"{f' x {level.links} links' if level.links > 1 else ''}: {level.origin}  ({level.source})"
        )
