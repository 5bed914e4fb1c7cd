"""Exports layouts of models that are described by their sizes, with predictions in closed form."""

import msgspec

from meshwright.catalog import with_software
from meshwright.cost.memory import estimate_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.cost.uncertainty import step_interval
from meshwright.errors import LayoutError
from meshwright.export import targets
from meshwright.export.exported import Exported
from meshwright.export.form import Form
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Prediction
from meshwright.ir.transformer import Transformer
from meshwright.planner.layout_words import setup_of
from meshwright.planner.search import search


def export_sizes(
    name: str, model: Transformer, machine: Cluster, *, global_batch: int, layout: str = "", base: str = ""
) -> Exported:
    """Export a layout of a model to the target ``name``. ``layout`` is text such as ``dp=4,tp=8,zero=1``; empty: the
    planner's best on all devices of ``machine``.

    Raises:
        LayoutError: the layout does not fit model, batch or devices; or nothing fits in memory; or the target is
            unknown or needs a captured model.
    """
    if name == targets.FSDP2:
        remedy = "give a plan file and its run file, or take another target"
        raise LayoutError("fsdp2 is code for a module, and this model has sizes only", where="--to", remedy=remedy)
    setup = _given(layout, model, machine, global_batch) if layout else _best(model, machine, global_batch)
    form = Form.of_setup(setup)
    exported = targets.write(name, form, machine.box_size, base)
    nearest = exported.form.setup()
    own = with_software(machine, targets.target(name).SOFTWARE)
    return msgspec.structs.replace(
        exported, planned=predicted(setup, machine), predicted=predicted(nearest, machine),
        software=machine.software.name, own_software=own.software.name, own_predicted=predicted(nearest, own),
    )  # fmt: skip


def predicted(setup: Setup, machine: Cluster) -> Prediction:
    """The predicted step time and peak memory of a setup."""
    estimate = estimate_step(setup, machine)
    return Prediction(
        step_s=estimate.step_s, peak_memory_bytes=round(estimate_memory(setup, machine).peak_bytes),
        interval_s=step_interval(estimate, machine.software),
    )  # fmt: skip


def _best(model: Transformer, machine: Cluster, global_batch: int) -> Setup:
    options = search(model, machine, global_batch=global_batch).options
    if not options:
        raise LayoutError(
            f"no layout of {model.name} fits {machine.num_devices} devices of {machine.name}", where="--ranks",
            remedy="take more or larger devices, or a smaller batch",
        )  # fmt: skip
    return options[0].setup


def _given(text: str, model: Transformer, machine: Cluster, global_batch: int) -> Setup:
    setup = setup_of(text, model, global_batch, machine.num_devices, machine.device)
    if setup.grid:
        grid = "x".join(map(str, setup.grid))
        raise LayoutError(f"tp={grid} is a grid", where="--layout", remedy="give tp as one number")
    if setup.world_size > machine.num_devices:
        raise LayoutError(
            f"{setup.world_size} ranks, {machine.name} has {machine.num_devices} devices", where="--layout",
            remedy="take a smaller layout, or more --ranks",
        )  # fmt: skip
    return setup
