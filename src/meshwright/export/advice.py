"""Reads a configuration of another trainer, predicts it, and finds faster layouts."""

from collections.abc import Iterator

import msgspec

from meshwright.catalog import with_software
from meshwright.cost.memory import estimate_memory, verdict
from meshwright.cost.occupancy import Occupancy
from meshwright.cost.setup import Setup
from meshwright.errors import LayoutError
from meshwright.export import targets, torchtitan
from meshwright.export.by_sizes import predicted
from meshwright.export.exported import Exported, Imported
from meshwright.export.form import Form, microbatches_of
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan import Prediction
from meshwright.ir.transformer import Transformer
from meshwright.planner.search import search
from meshwright.report.plan_difference import Difference, PlanDifference


class Better(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that is faster than the layout of a configuration.

    ``verdict`` says whether it fits in the devices' memory. ``changes`` are the settings that differ, and ``export`` is
    the layout as a configuration of the same trainer."""

    setup: Setup
    prediction: Prediction
    verdict: Occupancy
    changes: PlanDifference
    export: Exported


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of a configuration, and faster layouts for its model, batch and devices.

    ``software`` is the software profile of the predictions. ``best`` is the fastest layout that the configuration's
    trainer can run; None if nothing is faster. ``beyond`` is the fastest layout of all, if the trainer cannot run it.
    """

    imported: Imported
    setup: Setup
    prediction: Prediction
    verdict: Occupancy
    software: str
    best: Better | None = None
    beyond: Better | None = None


def advise(
    text: str,
    where: str,
    machine: Cluster,
    *,
    num_ranks: int = 0,
    model: Transformer | None = None,
    source: str = "",
    global_batch: int = 0,
    software: str = "",
) -> Advice:
    """Read the configuration ``text`` of the file ``where``, predict its step on ``machine``, and find better layouts.

    ``num_ranks``: the number of ranks (0: all devices of ``machine``). ``model``: the sizes of the model, if the
    configuration does not have them. ``source``: the trainer (empty: by the file's name). ``global_batch`` replaces the
    batch of the configuration, if it is not 0. ``software``: a software profile (empty: that of the trainer).

    Raises:
        FileFormatError, LayoutError: the configuration cannot be read, or its layout is impossible.
    """
    name = source or targets.guessed(text, where)
    imported = targets.read(text, where, num_ranks or machine.num_devices, model, name)
    if global_batch:
        imported = _with_batch(imported, global_batch)
    if imported.form.sizes is None:
        raise LayoutError(
            "the configuration has no sizes of its model", where=where,
            remedy="name the model: --model llama3-8b, or the path of a Hugging Face config.json",
        )  # fmt: skip
    try:
        setup = imported.form.setup()
    except LayoutError as error:
        raise error.within(where) from None
    if setup.world_size > machine.num_devices:
        raise LayoutError(
            f"{setup.world_size} ranks, {machine.name} has {machine.num_devices} devices", where=where,
            remedy="name a larger cluster, or fewer --ranks",
        )  # fmt: skip
    machine = with_software(machine.resized(setup.world_size), software or targets.target(name).SOFTWARE)
    fits = verdict(estimate_memory(setup, machine), machine, None)
    prediction = predicted(setup, machine)
    others = (_better(name, setup, other, machine) for other in _others(setup, machine))
    faster = sorted(
        (other for other in others if fits == "does not fit" or other.prediction.step_s < prediction.step_s),
        key=lambda other: other.prediction.step_s,
    )
    best = next((better for better in faster if not better.export.gaps), None)
    beyond = faster[0] if faster and faster[0] is not best else None
    return Advice(
        imported=imported, setup=setup, prediction=prediction, verdict=fits, software=machine.software.name, best=best,
        beyond=beyond,
    )  # fmt: skip


def _others(setup: Setup, machine: Cluster) -> Iterator[Setup]:
    """Yield layouts that surely fit, with the same model, batch, precision and kernels."""
    options = search(
        setup.model, machine, global_batch=setup.global_batch, precision=setup.precision, flash=setup.flash
    ).options
    for option in options:
        if option.verdict == "fits":
            yield msgspec.structs.replace(option.setup, overlap=setup.overlap, compiled=setup.compiled)


def _better(name: str, old: Setup, new: Setup, machine: Cluster) -> Better:
    export = targets.write(name, Form.of_setup(new), machine.box_size, _base(name, new))
    return Better(
        setup=new, prediction=predicted(new, machine), verdict=verdict(estimate_memory(new, machine), machine, None),
        changes=changes(old, new), export=export,
    )  # fmt: skip


def _base(name: str, setup: Setup) -> str:
    """A base for models that torchtitan does not know, so that their layouts can be written."""
    return "" if name != torchtitan.NAME or setup.model.name in torchtitan.MODELS else "MODULE:FUNCTION"


def changes(old: Setup, new: Setup) -> PlanDifference:
    """The settings that differ between two setups of a model."""
    names = [name for name in Setup.__struct_fields__ if name not in ("model", "grid", "inner")]
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    pairs.append(("micro-batches", old.microbatches, new.microbatches))
    if old.pp == new.pp == 1:
        pairs = [pair for pair in pairs if pair[0] not in ("schedule", "chunks")]
    return PlanDifference(tuple(Difference(what=name, old=f"{a}", new=f"{b}") for name, a, b in pairs if a != b))


def _with_batch(imported: Imported, global_batch: int) -> Imported:
    form = imported.form
    count = microbatches_of(global_batch, form.layout.dp, form.micro_batch)
    layout = msgspec.structs.replace(form.layout, microbatches=count)
    form = msgspec.structs.replace(form, layout=layout, global_batch=global_batch)
    kept = tuple(word for word in imported.assumptions if "batch" not in word)
    return msgspec.structs.replace(imported, form=form, assumptions=kept)
