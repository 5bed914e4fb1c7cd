"""A Python file that trains a model as a plan does, by FSDP2 and tensor parallelism of PyTorch, without Meshwright."""

from collections.abc import Callable, Iterable, Mapping
from pprint import pformat
from typing import Any

import msgspec
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from meshwright import api
from meshwright.api.machine import known_cluster
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError
from meshwright.export.exported import Exported, launch
from meshwright.export.form import Form
from meshwright.export.local_check import LossFunction, pins_for_code
from meshwright.export.modules import Kind, Split, splits
from meshwright.export.narrowing import Gap, Narrowing
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Plan, starred
from meshwright.ir.plan_check import check_fits
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import adapt_plan
from meshwright.planner.foretell import foretell
from meshwright.torch_private import BatchNorm

NAME = "fsdp2"
TRIES = 12
"""The largest number of plans that are tried. Each plan pins more modules than the plan before it."""


class _Fitted(msgspec.Struct, frozen=True):
    """A plan that PyTorch's modules can run, with their splits, and the parameters whose gradients ranks add up."""

    plan: Plan
    modules: dict[str, Split]
    summed: tuple[str, ...]
    pins: dict[str, str]


def express(form: Form) -> Narrowing:
    """The nearest form that FSDP2 and ``parallelize_module`` can run: without pipelines, cp and ep."""
    narrow = Narrowing(form)
    narrow.common(keeps_pins=True)
    for axis in ("pp", "cp"):
        narrow.without(axis)
    narrow.without_experts()
    narrow.without_sequence_parallel()
    narrow.without_offload()
    narrow.recomputes(("none", "full"))
    if narrow.layout.zero and narrow.layout.dp > 1:
        narrow.zeros((2, 3))
    if narrow.layout.batch_statistics != "global":
        narrow.replace("batch statistics of parts", "those of each rank's samples", batch_statistics="global")
    return narrow


def export(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    plan: Plan,
    *,
    cluster: Cluster | str | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
) -> Exported:
    """The file for ``plan``, with predictions of the plan and of the exported form.

    ``model``, ``loss_fn`` and ``batch`` are those that were captured for the plan. ``cluster``, ``optimizer`` and
    ``clips`` are as in ``mw.plan``; predictions are for them.

    Raises:
        LayoutError: the batch does not divide over the data-parallel ranks of the nearest form; or the plan has
            replicas.
        PlanError: the plan is not of this model.
    """
    if plan.layout.replicas > 1:
        raise LayoutError(
            f"{plan.layout.replicas} replicas under {plan.consistency}, and the file has one process group",
            where="export", remedy="plan it with replicas=1, and export that plan",
        )  # fmt: skip
    graph = api.capture(model, loss_fn, batch, precision=plan.precision)
    check_fits(plan, graph)
    if plan.batch_size != graph.batch_size:
        plan = adapt_plan(plan, graph)
    known = known_cluster(cluster, torch.device("cpu"), plan.mesh.world_size)
    lower = PlanLowering(graph)
    narrow = express(Form.of_plan(plan))
    layout = narrow.layout

    def planned(layout: Layout) -> Plan:
        return api.plan(graph, known, devices=layout.num_ranks, layout=layout, optimizer=optimizer, clips=clips)

    start = planned(layout) if narrow.gaps else plan
    fitted = _fit(start, planned, graph, model, loss_fn, batch)
    gaps = [*narrow.gaps, *_gaps(fitted, start, layout)]
    exported = fitted.plan if gaps else plan
    now, before = (
        foretell(lower, each, known, optimizer=optimizer, clips=clips).prediction for each in (exported, plan)
    )
    form = msgspec.structs.replace(narrow.form, layout=exported.layout)
    name = f"{plan.model.lower()}_fsdp2.py"
    text = file_text(form, plan, fitted, _blocks(graph), gaps, _shapes(graph, fitted.modules))
    return Exported(
        target=NAME, form=form, files={name: text}, command=launch(form.num_ranks, known.box_size, "train.py"),
        gaps=tuple(gaps), in_code=in_code(name, form), assumptions=_assumptions(model, form),
        planned=before, predicted=now, software=known.software.name,
    )  # fmt: skip


def in_code(name: str, form: Form) -> tuple[str, ...]:
    """The lines of the user's program that use the file."""
    return (
        f"from {name.removesuffix('.py')} import parallelize, train_step",
        "model = parallelize(model)  # equal on all ranks before; then make the optimizer",
        f"loss = train_step(model, batch, loss_fn)  # the same batch of {form.global_batch} on every rank",
    )


def _fit(
    plan: Plan, planned: Callable[[Layout], Plan], graph: Graph, model: nn.Module, loss_fn: LossFunction, batch: Any
) -> _Fitted:
    """Pin modules until ``parallelize_module`` can run the plan."""
    kinds = module_kinds(model)
    pins: dict[str, str] = {}
    for _ in range(TRIES):
        split = splits(graph, plan, kinds)
        if not split.pins and split.modules:
            ranks, precision = plan.mesh.sizes["tp"], plan.precision
            split.pins = pins_for_code(graph, model, loss_fn, batch, split, ranks, precision)
        if not split.pins:
            return _Fitted(plan, split.modules, split.summed, pins)
        pins |= split.pins
        layout = msgspec.structs.replace(plan.layout, pin={**plan.layout.pin, **split.pins})
        plan = planned(layout)
    raise LayoutError(
        f"no tensor parallelism of modules was found for {plan.model}", where="export",
        remedy="plan it with tp=1, and export that plan",
    )  # fmt: skip


def _gaps(fitted: _Fitted, plan: Plan, layout: Layout) -> list[Gap]:
    """The gaps that the pins cause, each with the split that the module has in ``plan``."""
    notes = {starred(note.module): note.split for note in plan.notes}
    gaps = []
    for glob in fitted.pins:
        had = notes.get(glob, "")
        if glob in layout.pin or had.startswith("none@"):
            continue
        if glob:
            gaps.append(Gap(f"{glob} split {had or 'over tp'}", "whole on every tp rank"))
        else:
            gathered = [starred(path) for path, split in fitted.modules.items() if split.gathered]
            nearest = f"the output of {', '.join(dict.fromkeys(gathered)) or 'modules'} is gathered"
            gaps.append(Gap("operators of the model itself, such as the loss, on parts of tensors", nearest))
    return gaps


def module_kinds(model: nn.Module) -> dict[str, Kind]:
    """Maps the path of each module that has parameters of its own to its kind."""
    kinds: dict[str, Kind] = {}
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            kinds[path] = "linear" if type(module) is nn.Linear else "embedding" if type(module) is nn.Embedding else ""
    return kinds


def _blocks(graph: Graph) -> tuple[str, ...]:
    """The paths of repeated blocks, with ``*`` for their indices, outermost first."""
    globs = dict.fromkeys(operator.repeat for operator in graph.operators if "*" in operator.repeat)
    outer = dict.fromkeys(glob[: glob.index("*") + 1] for glob in globs)
    return tuple(outer)


def _shapes(graph: Graph, modules: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of split modules, by which the file recognizes its model."""
    return {f"{path}.weight": graph.tensors[f"{path}.weight"].shape for path in modules}


def _assumptions(model: nn.Module, form: Form) -> tuple[str, ...]:
    assumptions = []
    if form.layout.dp > 1:
        assumptions.append("all samples have equally many labels: the loss is the mean of the ranks' mean losses")
    if any(isinstance(module, BatchNorm) for module in model.modules()) and form.layout.dp > 1:
        assumptions.append("batch norm uses the statistics of each rank's samples")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        assumptions.append("dropout masks differ from those of one process")
    return tuple(assumptions)


# --- the file --------------------------------------------------------------------------------------------------------


def file_text(
    form: Form, plan: Plan, fitted: _Fitted, blocks: tuple[str, ...], gaps: Iterable[Gap],
    shapes: Mapping[str, tuple[int, ...]],
) -> str:  # fmt: skip
    """The text of the file."""
    layout = form.layout
    shard = form.sharding_ranks
    styles = {_quoted(glob): _style(split) for glob, split in _starred(fitted.modules).items()}
    template = Environment(
        loader=PackageLoader("meshwright.export"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    ).get_template("fsdp2.py.j2")  # fmt: skip
    return template.render(
        model=plan.model, layout=layout_text(plan.layout), exported=layout_text(layout), gaps=list(gaps),
        replicate=layout.dp // shard, shard=shard, tp=layout.tp, microbatches=layout.microbatches,
        batch=form.global_batch, blocks=pformat(blocks), styles=styles, reshards=layout.zero == 3,
        reduces_each=layout.zero >= 2, recompute=layout.recompute == "full", ranks=form.num_ranks,
        precision=f"torch.{layout.precision}" if layout.precision in ("bfloat16", "float16") else "None",
        scaled=layout.precision == "float16", shapes=shapes, summed=fitted.summed,
    )  # fmt: skip


def _starred(modules: Mapping[str, Split]) -> dict[str, Split]:
    """The modules, those of repeated blocks together under one name with ``*``, if all blocks are split alike.

    Only names with one ``*`` are joined: two may name further modules of the model."""
    groups: dict[str, list[str]] = {}
    for path in modules:
        groups.setdefault(starred(path), []).append(path)
    result: dict[str, Split] = {}
    for glob, paths in groups.items():
        alike = len({repr(modules[path]) for path in paths}) == 1
        result |= {glob: modules[paths[0]]} if alike and glob.count("*") == 1 else {p: modules[p] for p in paths}
    return result


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _style(split: Split) -> str:
    if split.style == "column":
        return "ColwiseParallel(output_layouts=Replicate())" if split.gathered else "ColwiseParallel()"
    whole = split.whole_input or split.kind == "embedding"
    return "RowwiseParallel(input_layouts=Replicate())" if whole else "RowwiseParallel()"
