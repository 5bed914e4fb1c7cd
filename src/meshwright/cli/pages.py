"""Write the report of a plan: ``meshwright plan MODEL ... --report FILE.html``."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from meshwright.cli import display
from meshwright.errors import ClusterError, FileFormatError, LayoutError
from meshwright.ir.layout import Recompute

FACTORS = (0.25, 0.5, 2, 4)
"""Multiples of the number of devices that the scaling curve also shows."""


def write_report(
    path: Path, model: str, cluster: str, devices: int, batch: int, sequence: int, price: float, software: str,
    recompute: Recompute | Literal["any"], command: str,
) -> int:  # fmt: skip
    """Search layouts, also for fewer and for more devices, and write the page. Returns the exit code: 1 if no layout
    fits.

    Raises:
        FileFormatError: the file cannot be written.
    """
    from meshwright import prediction, report

    if not path.parent.is_dir():  # checked before the search, which takes time
        raise FileFormatError(
            f"there is no folder {path.parent}", where=str(path), remedy="make it, or give another path"
        )

    def found_on(size: int) -> "prediction.SearchResult":
        sized = prediction.load_cluster(cluster, size or None, software or None)
        return prediction.find_layouts(
            model, sized, global_batch=batch, sequence=sequence, usd_per_hour=price or None, recompute=recompute
        )

    with display.progress("weighing layouts", 1 + len(FACTORS)) as bars:
        machine = prediction.load_cluster(cluster, devices or None, software or None)
        result = found_on(machine.num_devices)
        bars.advance()
        scaling = {machine.num_devices: result}
        for size in (int(machine.num_devices * factor) for factor in FACTORS):
            with suppress(ClusterError, LayoutError):  # the cluster has too few devices, or the batch cannot be divided
                if size:
                    scaling[size] = found_on(size)
            bars.advance()
        page = prediction.explain(result, machine, scaling=sorted(scaling.items()), command=command)
    if page is None:
        raise LayoutError("there is no layout to report of", where=model, remedy="take more devices")
    display.write(path, report.render(page).encode())
    display.console().print(f"{page.verdict}: {page.sentence}\n-> {path}")
    return 0 if result.options else 1
