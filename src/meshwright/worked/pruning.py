"""Worked numbers of the search for stages: how much of it two bounds leave out, by the search's own counters."""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from meshwright.catalog import load_cluster
from meshwright.catalog.models import make_model
from meshwright.cost.setup import Setup
from meshwright.cost.step import step_pieces
from meshwright.ir.transformer import Transformer
from meshwright.planner.inter_op.stage_prices import Assignment, StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.worked import alpa
from meshwright.worked.line import Line, held

MICROBATCHES = 64
"""The micro-batches of a step."""
MODELS = ("2.6B", "15B")
"""The GPTs of Alpa's evaluation whose stages are searched."""
UNLIMITED = 10**6
"""More stages than a pipeline has: memory limits no stage."""
SAME = 1e-12
"""The largest relative difference of two optima that count as equal."""


def pruning() -> Iterator[Line]:
    """The dynamic program that cuts a model into stages and gives each its devices, with bounds and without (Zheng et
    al., "Alpa", OSDI 2022, section 5.2, which stops early where a stage is slower than the best step)."""
    for pair in alpa.PAIRS:
        if pair.family == "gpt" and pair.name in MODELS:
            whole, pruned = both(prices_of(pair), pair.devices)
            saved = 1 - pruned.entries / whole.entries
            stages = f"{len(pruned.stages)} stage{'s' * (len(pruned.stages) > 1)}"
            is_same = abs(pruned.step_s / whole.step_s - 1) <= SAME
            yield held(
                f"{pair.title}: pruning halves the search at least, and keeps its result",
                f"{pruned.entries:,} of {whole.entries:,} table entries, {saved:.2%} less",
                saved >= 0.5 and is_same,
                f"{pruned.tables} of {whole.tables} tables, one for each limit on the slowest stage; the optimum is "
                f"{'equal' if is_same else 'another'}: {stages}, {pruned.step_s:.3f} s",
            )


def both(prices: StagePrices, devices: int, microbatches: int = MICROBATCHES) -> tuple[Assignment, Assignment]:
    """The result of the search without its two bounds, and with them."""
    whole = assign_stages(prices, (devices,), microbatches, prunes=False)
    pruned = assign_stages(prices, (devices,), microbatches)
    assert whole is not None
    assert pruned is not None
    return whole, pruned


def prices_of(pair: alpa.AlpaPair) -> StagePrices:
    """The seconds of all stages of a GPT of Alpa's evaluation, by the cost model: any run of layers on 1, 2, 4, ...
    devices, in every division of these into dp and tp. Memory is not limited, and work once a step is left out."""
    layers, width, heads = pair.sizes[:3]
    sizes = {"layers": layers, "hidden": width, "heads": heads, "vocabulary": alpa.VOCABULARY["gpt"]}
    model = make_model("gpt", sequence=alpa.SEQUENCE, tied=False, **sizes)
    counts = [2**power for power in range(pair.devices.bit_length())]
    each = [_variants(model, devices, pair.batch // MICROBATCHES) for devices in counts]
    seconds = np.full((layers, layers, len(counts), max(map(len, each))), inf)
    for submesh, variants in enumerate(each):
        for number, (first_s, layer_s, last_s) in enumerate(variants):
            for first in range(layers):
                lengths = np.arange(1, layers - first + 1)
                seconds[first, first:, submesh, number] = lengths * layer_s + first_s * (first == 0)
            seconds[:, -1, submesh, number] += last_s
    submeshes = tuple(Submesh.of(0, devices) for devices in counts)
    return StagePrices(submeshes, seconds, np.full(seconds.shape, UNLIMITED, dtype=np.int64))


def _variants(model: Transformer, devices: int, samples: int) -> Sequence[tuple[float, float, float]]:
    """For each division of the devices into dp and tp: seconds of the embedding, of a layer, and of the head."""
    result = []
    for tp in (size for size in (1, 2, 4, 8) if devices % size == 0 and samples % (devices // size) == 0):
        dp = devices // tp
        setup = Setup(
            model=model, dp=dp, tp=tp, pp=model.layers, micro_batch=samples // dp, global_batch=samples * MICROBATCHES,
            recompute="full", flash=False, precision="fp16",
        )  # fmt: skip
        first, layer, *_, last = step_pieces(setup, load_cluster(alpa.CLUSTER, setup.world_size)).stages
        result.append((first.total_s - layer.total_s, layer.total_s, last.total_s - layer.total_s))
    return result
