"""A search result as a report for a reader who did not run the search: the chosen layout, its cost, and the reasons."""

from collections.abc import Sequence

import msgspec

from meshwright import __version__
from meshwright.cost.memory import Memory
from meshwright.cost.setup import Setup
from meshwright.ir.cluster import Cluster
from meshwright.planner.layout_words import layout_words
from meshwright.planner.rehearse import rehearsed_trace
from meshwright.planner.search import PARTS, SearchResult, SetupOption
from meshwright.report import PageContent, StepShare, SweepPoint, WeighedLayout

MEANINGS = {
    "compute_s": "kernels of the slowest stage",
    "tensor_comm_s": "waiting for all-reduces (or reduce-scatters and all-gathers) inside layers",
    "host_s": "the device waits for the host to issue the next kernel",
    "bubble_s": "stages wait for each other while the pipeline fills and drains",
    "pipeline_comm_s": "activations to the next stage, gradients back",
    "data_comm_s": "gradients (and sharded parameters) between replicas, without the hidden part",
    "optimizer_s": "Adam's update of this device's parameters",
    "other_s": "reading data, logging: time that belongs to no micro-batch",
    "parameters_bytes": "weights in the precision of the products",
    "gradients_bytes": "of all weights, or of this device's shard",
    "optimizer_bytes": "Adam's two moments and the weights in 32 bit",
    "activations_bytes": "activations kept for the backward pass, of all micro-batches in flight",
    "ends_bytes": "embedding, vocabulary head and loss",
    "workspace_bytes": "inside one layer's pass: gradients of activations, recomputed and gathered tensors",
    "buffers_bytes": "buckets of gradients that are being reduced",
    "residuals_bytes": "the state of the codec of gradients between steps",
    "context_bytes": "the device's context and libraries",
    "peers_bytes": "buffers of the communicators, for each neighbour",
    "fragmentation_bytes": "reserved by the allocator, but not used",
}
"""Descriptions of the parts of an estimate and of the memory."""

LAYOUT = {
    "dp": "replicas of the model, which share the batch",
    "tp": "devices that share every layer",
    "grid": "devices that split input features, output features and samples; the last share one copy",
    "pp": "pipeline stages, each with some of the layers",
    "cp": "devices that share every sequence",
    "ep": "devices that share the experts",
    "inner": "whether replicas or stages have devices that are nearer to each other",
    "micro_batch": "sequences that pass through the pipeline together",
    "microbatches": "micro-batches of each replica in a step",
    "schedule": "the order of forwards and backwards",
    "chunks": "separate groups of layers on each stage",
    "recompute": "activations that are computed again instead of kept",
    "sequence_parallel": "between the split parts of a layer, tp splits the sequence",
    "zero": "state that replicas shard: optimizer (1), also gradients (2), also parameters (3)",
    "precision": "of the matrix products",
    "overlap": "communication that overlaps with computing",
}

NOTES = (
    (
        "Nothing was run. Step times are added up from a model of kernels, collectives and the host, with a few "
        "parameters for each device; on published runs they are off by a few percent where the device was calibrated "
        "(A100) and by 10 to 20 % elsewhere, more at the edge of memory and for fully sharded data parallelism across "
        "boxes."
    ),
    "Memory is called marginal where the chance that the layout fits is better than even, but below 90 %.",
    (
        "The timeline is the schedule's real actions, timed one by one with each stage's own cost; messages take the "
        "time of the network without other traffic."
    ),
)


def explain(
    result: SearchResult,
    cluster: Cluster,
    *,
    memory_bytes: float | None = None,
    scaling: Sequence[tuple[int, SearchResult]] = (),
    command: str = "",
    chosen: SetupOption | None = None,
) -> PageContent | None:
    """The report on a layout of a search on ``cluster``: ``chosen``, or the best. If nothing fits, the best is the
    layout that exceeds the memory the least. None if there is no layout. ``scaling``: the results of searches on other
    numbers of devices."""
    first = result.options[0] if result.options else result.nearest
    best = chosen or first
    if best is None:
        return None
    setup, memory = best.setup, best.memory
    limit = memory_bytes or cluster.device.memory_bytes
    # the next fastest options, then options of the front that need less memory or money
    others = [*result.options[1:7], *[option for option in result.front if option not in result.options[:7]][:4]]
    return PageContent(
        model=setup.model.name,
        cluster=cluster.name,
        devices=setup.world_size,
        verdict=best.verdict,
        sentence=_sentence(best, limit, result) if best is first else _compared(best, first, limit),
        facts=_facts(best, cluster),
        layout=_layout(setup),
        time=tuple(
            StepShare(name=name, size=getattr(best.estimate, key), meaning=MEANINGS[key]) for key, name in PARTS.items()
        ),
        memory=tuple(
            StepShare(name=key.removesuffix("_bytes"), size=getattr(memory, key), meaning=MEANINGS[key])
            for key in Memory.__struct_fields__
            if key.endswith("_bytes")
        ),
        memory_limit_bytes=limit,
        trace=rehearsed_trace(setup, cluster) if setup.pp > 1 else None,
        scaling=tuple(_point(devices, other) for devices, other in scaling),
        alternatives=tuple(weighed_layout(option, best) for option in others),
        front=tuple(weighed_layout(option, best) for option in result.front),
        words=layout_words(setup),
        notes=(*NOTES, f"Meshwright {__version__}. {cluster.device.source}."),
        command=command,
    )


def _sentence(best: SetupOption, limit_bytes: float, result: SearchResult) -> str:
    peak, limit = best.memory.peak_bytes / 2**30, limit_bytes / 2**30
    held = (
        f"The fullest device holds {peak:.1f} of {limit:.1f} GiB (stage {best.memory.stage}, at {best.memory.moment})."
    )
    if best.verdict == "does not fit":
        why = f"None of {result.considered} layouts fits; this one lacks least."
        return f"{why} {held} More devices, or larger ones, would."
    return f"The fastest of {result.considered} layouts: a step takes {best.step_s:.4g} s. {held}"


def _compared(best: SetupOption, first: SetupOption | None, limit_bytes: float) -> str:
    """The sentence on a layout that was not found as the best one."""
    held = f"The fullest device holds {best.peak_bytes / 2**30:.1f} of {limit_bytes / 2**30:.1f} GiB."
    took = f"A step takes {best.step_s:.4g} s"
    if first is None or first.verdict == "does not fit":
        return f"{took}. {held}"
    if layout_words(best.setup) == layout_words(first.setup):
        return f"{took}: this is the fastest layout. {held}"
    if best.step_s < first.step_s:
        return f"{took}, {100 * (1 - best.step_s / first.step_s):.1f} % less than the fastest that fits. {held}"
    return f"{took}: {best.slower_than(first)}, beside the fastest. {held}"


def _facts(best: SetupOption, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    setup, device = best.setup, cluster.device
    rate = best.flops_per_s / setup.world_size
    peak = device.peak_flops_per_s.get(setup.dtype) or max(device.peak_flops_per_s.values())
    tokens = setup.global_batch * setup.model.sequence
    facts = [
        ("step", f"{best.step_s:.4g} s"),
        ("in 80 % of runs", f"{best.interval_s.low:.3g} to {best.interval_s.high:.3g} s"),
        ("chance to fit", f"{best.fit_chance:.0%}"),
        ("tokens a second", f"{tokens / best.step_s:,.0f}"),
        ("a device", f"{rate / 1e12:.0f} TFLOP/s"),
        ("of peak", f"{rate / peak:.1%}"),
        ("batch", f"{setup.global_batch:,} x {setup.model.sequence:,} tokens"),
        ("parameters", f"{setup.model.parameters / 1e9:.3g} B"),
    ]
    if best.usd is not None:
        facts.append(("a billion tokens", f"$ {best.usd / tokens * 1e9:,.0f}"))
    return tuple(facts)


def _layout(setup: Setup) -> tuple[tuple[str, str, str], ...]:
    rows = []
    usually = {field.name: field.default for field in msgspec.structs.fields(Setup)} | {"schedule": "", "inner": ""}
    for key, meaning in LAYOUT.items():
        value = setup.dp // setup.depth if key == "dp" else getattr(setup, key)
        alone = (key == "schedule" and setup.pp == 1) or (key == "inner" and 1 in (setup.dp, setup.pp))
        usual = alone or value == usually.get(key) or (key == "tp" and bool(setup.grid))
        value = "x".join(map(str, setup.grid)) if key == "grid" else value
        if key in ("dp", "micro_batch", "microbatches", "precision") or not usual:
            rows.append((key.replace("_", " "), "yes" if value is True else str(value), meaning))
    return tuple(rows)


def weighed_layout(option: SetupOption, best: SetupOption) -> WeighedLayout:
    """An option beside ``best``: its costs, and what speaks for or against it."""
    why = option.slower_than(best) if option.step_s > best.step_s else "as fast"
    less = 1 - option.memory.peak_bytes / best.memory.peak_bytes
    if less > 0.1:
        why += f"; {less:.0%} less memory"
    return WeighedLayout(
        layout=option.text, step_s=option.step_s, peak_bytes=option.memory.peak_bytes, verdict=option.verdict,
        usd=option.usd, why=why, words=layout_words(option.setup),
    )  # fmt: skip


def _point(devices: int, result: SearchResult) -> SweepPoint:
    if not result.options:
        return SweepPoint(devices=devices, step_s=0.0, sequences_per_s=0.0, usd_per_1000_sequences=None, layout="")
    best = result.options[0]
    each = best.sequence_usd
    return SweepPoint(
        devices=devices,
        step_s=best.step_s,
        sequences_per_s=1 / best.sequence_s,
        usd_per_1000_sequences=None if each is None else 1000 * each,
        layout=best.text,
    )
