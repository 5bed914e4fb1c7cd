"""``meshwright plan`` for a convolutional network: how each layer is divided."""

from itertools import groupby

from meshwright.cli import display
from meshwright.errors import LayoutError

WAYS = {
    "data": "data parallel: each rank has part of the images",
    "outputs": "tensor parallel: each rank has part of the outputs",
    "inputs": "tensor parallel: each rank has part of the inputs",
}
"""Descriptions of the ways in which a layer can be divided."""


def show_network(name: str, cluster: str, devices: int, images: int, vary: str, software: str, as_json: bool) -> int:
    """Divide the layers of a network over devices, and print the choices. ``software``: a profile that replaces the
    cluster's. Returns the exit code: 1 if the network does not fit."""
    from meshwright import prediction

    if vary:
        raise LayoutError(
            "convolutional networks are planned for one case at a time",
            where="--vary",
            remedy="leave it out, and give --cluster, --ranks and --batch",
        )
    machine = prediction.load_cluster(cluster, devices or None, software or None)
    plan = prediction.divide_layers(name, machine, images=images)
    code = 1 if plan.verdict == "does not fit" else 0
    if as_json:
        display.print_json(plan)
        return code
    terminal = display.console()
    alone = "" if plan.all_data_s is None else f"   all layers data parallel: {plan.all_data_s * 1e3:.4g} ms"
    terminal.print(f"{plan.network} on {plan.ranks} devices of {cluster}, {plan.images} images a step, fp16")
    terminal.print(f"constants of the cluster: {machine.constants}; software {machine.software.name}\n")
    between = f"{plan.interval_s.low * 1e3:.3g} to {plan.interval_s.high * 1e3:.3g} in 80 % of runs"
    terminal.print(f"step {plan.step_s * 1e3:.4g} ms ({between})   {plan.images / plan.step_s:,.0f} images/s{alone}")
    terminal.print(f"memory {plan.peak_bytes / 2**30:.1f} GiB: {plan.verdict}, chance {plan.fit_chance:.0%}\n")
    table = display.table(("layers", "", "compute", "moving", "gradients", "optimizer"), left=("layers", ""))
    for way, group in groupby(plan.choices, key=lambda choice: choice.way):
        chosen = list(group)
        names = [chosen[0].layer] if len(chosen) == 1 else [chosen[0].layer, chosen[-1].layer]
        parts = ("compute_s", "moving_s", "gradients_s", "optimizer_s")
        sums = [f"{1e3 * sum(getattr(choice, part) for choice in chosen):.3g} ms" for part in parts]
        table.add_row(" to ".join(names), WAYS[way], *sums)
    terminal.print(table)
    return code
