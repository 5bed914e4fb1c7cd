"""The planning functions that need no torch: predict, search, validate. The command line calls them."""

from typing import Any

import msgspec

from meshwright.catalog import load_cluster, load_software, software_names, with_software
from meshwright.catalog.models import family_names, load_model, load_network, model_names, network_names
from meshwright.cost.collective import Network
from meshwright.cost.exchange import GradientExchange, data_group, gradient_exchange
from meshwright.cost.memory import Memory, estimate_memory, verdict
from meshwright.cost.occupancy import Occupancy, fit_chance
from meshwright.cost.setup import Setup, precision_on
from meshwright.cost.step import StepEstimate, estimate_step, stage_parameters
from meshwright.cost.uncertainty import memory_interval, step_interval
from meshwright.errors import ClusterError, refuse
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import cluster_names
from meshwright.ir.device import quantity_problems
from meshwright.ir.interval import Interval
from meshwright.ir.software import Software
from meshwright.ir.transformer import Transformer
from meshwright.planner.cases import COLUMNS, OPTIONAL, read_cases
from meshwright.planner.layerwise import divide_layers
from meshwright.planner.layout_words import layout_words, predict_command, setup_of, setup_with
from meshwright.planner.rehearse import rehearsed_trace
from meshwright.planner.remedy import Change, smallest_change
from meshwright.planner.search import PARTS, SearchResult, SetupOption, front, weigh
from meshwright.planner.search import search as find_layouts
from meshwright.planner.size_codecs import with_codec
from meshwright.planner.trials import Choices, Trials, choose, learning_trials
from meshwright.planner.validate import Validation, compare, validate
from meshwright.planner.what_if import with_links
from meshwright.prediction.explain import explain, weighed_layout
from meshwright.prediction.learning import LearnedCluster, learn_step, learn_table
from meshwright.worked import CAPTURED, LECTURES, RESULTS, SEARCHED, Line, Worked, recompute, worked_names

__all__ = [
    "CAPTURED",
    "COLUMNS",
    "LECTURES",
    "OPTIONAL",
    "PARTS",
    "RESULTS",
    "SEARCHED",
    "Choices",
    "Forecast",
    "LearnedCluster",
    "Line",
    "SearchResult",
    "SetupOption",
    "Trials",
    "Validation",
    "Worked",
    "choose",
    "cluster_names",
    "compare",
    "divide_layers",
    "explain",
    "family_names",
    "find_layouts",
    "front",
    "layout_words",
    "learn_step",
    "learn_table",
    "learning_trials",
    "load_cluster",
    "load_model",
    "load_network",
    "load_software",
    "model_names",
    "network_names",
    "predict",
    "predict_command",
    "read_cases",
    "recompute",
    "rehearsed_trace",
    "setup_of",
    "software_names",
    "validate",
    "weigh",
    "weighed_layout",
    "with_links",
    "worked_names",
]  # fmt: skip


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction for a setup: its step, its memory, whether it fits, and the smallest change that would make it fit.
    ``interval_s`` and ``interval_bytes`` hold 80 % of the times and peaks of such runs; ``fit_chance`` is the chance
    that it fits."""

    setup: Setup
    cluster: str
    constants: str
    """The sources of the cluster's constants (``Cluster.constants``)."""
    software: Software
    estimate: StepEstimate
    memory: Memory
    verdict: Occupancy
    device_memory_bytes: float
    interval_s: Interval
    interval_bytes: Interval
    fit_chance: float
    mfu: float
    """Model FLOP/s of all devices, divided by their peak in the setup's precision."""
    change: Change | None = None
    exchange: GradientExchange | None = None
    """The exchange of the largest stage's gradients between data-parallel ranks; None without such ranks."""


def predict(
    model: Transformer | str,
    cluster: Cluster | str,
    *,
    devices: int | None = None,
    sequence: int = 0,
    memory_bytes: float | None = None,
    software: str | Software | None = None,
    **layout: Any,
) -> Forecast:
    """Predict a training step of ``model`` on ``cluster``, in closed form. ``software`` is a software profile or its
    name, which replaces the cluster's profile.

    ``layout`` holds fields of ``cost.setup.Setup``. With the codec ``auto``, the fastest codec is taken, or none.
    ``tp`` may also be a grid ``(x, y, z)``, as in ``Layout``. If ``dp`` is not given, it is ``devices`` divided by the
    sizes of the other axes. If ``precision`` is not given, it is bf16, or fp16 on devices without bfloat16.

    Raises:
        LayoutError: the model is unknown, the layout does not fit model, batch or devices, or the device does not
            compute in its precision.
        ClusterError: the cluster is unknown or too small.
    """
    if memory_bytes is not None:
        refuse(ClusterError, quantity_problems({"memory_bytes": memory_bytes}))
    known = load_model(model, sequence=sequence) if isinstance(model, str) else model
    codec = layout.pop("codec", "")
    setup = setup_with(layout, known, layout.pop("global_batch", 1), devices or 1, where="layout")
    if devices and setup.world_size != devices:
        raise ClusterError(
            f"the layout has {setup.world_size} ranks, not {devices}",
            where="devices",
            remedy="correct an axis, or leave dp out",
        )
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster, setup.world_size)
    machine = with_software(machine, software)
    if machine.num_devices < setup.world_size:
        raise ClusterError(
            f"it has {machine.num_devices} devices, the layout {setup.world_size} ranks",
            where=f"cluster {machine.name}",
            remedy="take a smaller layout or a larger cluster",
        )
    setup = msgspec.structs.replace(setup, precision=precision_on(machine.device, layout.get("precision")))
    setup = with_codec(setup, codec, machine)
    moved = max(stage_parameters(setup, stage) for stage in range(setup.pp)) * setup.element_bytes / setup.depth
    exchange = gradient_exchange(setup, Network(machine), moved) if data_group(setup).size > 1 else None
    estimate, memory = estimate_step(setup, machine), estimate_memory(setup, machine)
    peaks = machine.device.peak_flops_per_s
    peak = peaks.get(setup.dtype) or max(peaks.values())
    limit = memory_bytes or machine.device.memory_bytes
    return Forecast(
        setup=setup,
        cluster=machine.name,
        constants=machine.constants,
        software=machine.software,
        interval_s=step_interval(estimate, machine.software),
        interval_bytes=memory_interval(memory, machine.software),
        fit_chance=fit_chance(memory.peak_bytes, limit, machine.software.spread.memory),
        estimate=estimate,
        memory=memory,
        verdict=verdict(memory, machine, memory_bytes),
        device_memory_bytes=limit,
        mfu=estimate.model_flops_per_s / (setup.world_size * peak),
        change=smallest_change(setup, machine, memory_bytes),
        exchange=exchange,
    )
