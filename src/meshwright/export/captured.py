"""Exports plans of captured models, with predictions of the plan itself and of the exported form."""

import msgspec
import torch

from meshwright import api, build
from meshwright.api.machine import known_cluster
from meshwright.api.planned_runs import cluster_of, planned
from meshwright.errors import LayoutError
from meshwright.export import fsdp2, targets
from meshwright.export.exported import Exported
from meshwright.export.form import Form
from meshwright.ir.plan import Plan
from meshwright.ir.run import Run
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell

CPU = torch.device("cpu")


def export_run(name: str, run: Run, ranks: int = 0, base: str = "") -> Exported:
    """Export the plan of a RUN.toml (its plan file, or the plan of its layout) to the target ``name``, for ``ranks``
    ranks (0: the number in its layout or cluster).

    Raises:
        LayoutError: the layout does not fit the model or the batch, or the target is unknown.
    """
    targets.check(name, base)
    graph, plan, optimizer = planned(run, ranks)
    known = cluster_of(run, CPU, plan.mesh.world_size)
    clips = run.train.max_grad_norm > 0
    if name == targets.FSDP2:
        return fsdp2.export(
            build.model(run), build.loss_function(run), build.example_batch(run), plan, cluster=known,
            optimizer=optimizer, clips=clips,
        )  # fmt: skip
    exported = targets.write(name, Form.of_plan(plan), known.box_size, base)
    before = foretell(PlanLowering(graph), plan, known, optimizer=optimizer, clips=clips).prediction
    nearest = plan
    if plan.layout.replicas > 1:  # ``graph`` is the graph of one replica's part of the batch
        model, loss_fn, batch = build.model(run), build.loss_function(run), build.example_batch(run)
        graph = api.capture(model, loss_fn, batch, precision=plan.precision)
    if exported.gaps:
        layout = exported.form.layout
        known = known_cluster(known, CPU, layout.num_ranks)
        ask = Ask(optimizer=optimizer, lower=PlanLowering(graph), by_rule=True)  # other trainers split by this rule
        nearest = plan_layout(graph, layout, world_size=layout.num_ranks, cluster=known, ask=ask)
    after = foretell(PlanLowering(graph), nearest, known, optimizer=optimizer, clips=clips).prediction
    return msgspec.structs.replace(exported, planned=before, predicted=after, software=known.software.name)


def export_plan(name: str, plan: Plan, base: str = "") -> Exported:
    """Export a plan alone, without its model: the exported form is not predicted if it differs from the plan.

    Raises:
        LayoutError: the target needs the model, or is unknown.
    """
    if name == targets.FSDP2:
        raise LayoutError(
            "fsdp2 is code for a module, and a plan file has no module", where="--to",
            remedy="name the run file of the model too: meshwright export plan.json RUN.toml --to fsdp2",
        )  # fmt: skip
    cluster = known_cluster(None, CPU, plan.mesh.world_size)
    exported = targets.write(name, Form.of_plan(plan), cluster.box_size, base)
    predicted = None if exported.gaps else plan.prediction
    return msgspec.structs.replace(exported, planned=plan.prediction, predicted=predicted)
