"""Worked numbers that need a planner: AlexNet's two halves, weak scaling, and large runs."""

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_network, make_model
from meshwright.cost.setup import Setup
from meshwright.cost.step import StepEstimate, estimate_step
from meshwright.ir.cluster import Cluster
from meshwright.ir.transformer import Transformer
from meshwright.planner.layerwise import divide_layers
from meshwright.planner.search import Option, search
from meshwright.planner.validate import executed_flops
from meshwright.worked.line import Line, compared, held, predicted

POINTS = 5.0
"""Percentage points by which a prediction may differ from a measurement and still agree."""


def alexnet() -> Iterator[Line]:
    """The two halves of AlexNet: their shares of computation and parameters, and the way in which each is split."""
    net = load_network("alexnet")
    flops, parameters = net.share("convolution")
    division = divide_layers(net, load_cluster("v100-dgx1-edr100x4", 8), images=1024)
    ways = [choice.way == "data" for choice in division.choices]
    assert division.all_data_s is not None
    yield held(
        "convolutions: 90-95 % of the computation",
        f"{flops:.1%}",
        0.9 < flops < 0.95,
        "multiply-adds of the layers' products; torchvision's variant",
    )
    yield compared("and 5 % of the parameters", 5, 100 * parameters, "{:.1f}%", "5 % by rounding up", exact=0.3)
    yield held(
        "so data parallel for these, tensor parallel for the dense layers",
        " ".join("data" if is_data else "tensor" for is_data in ways),
        ways == [True] * 5 + [False] * 3,
        f"chosen layer by layer, nothing pinned, for 8 V100 and 1,024 images: {1e3 * division.step_s:.1f} ms; with "
        f"all layers data parallel {1e3 * division.all_data_s:.1f} ms",
    )


MEGATRON = {1: (40, 1536, 16), 2: (54, 1920, 20), 4: (64, 2304, 24), 8: (72, 3072, 32)}
"""Layers, hidden size and heads of the models of Shoeybi et al. 2019, table 1, by tensor-parallel size."""


def megatron_scaling() -> Iterator[Line]:
    """Weak scaling on DGX-2H, with only tensor parallelism and with 64-way data parallelism in addition."""

    def rate(tp: int, dp: int) -> tuple[float, StepEstimate]:
        setup = Setup(
            model=_gpt(*MEGATRON[tp]), tp=tp, dp=dp, micro_batch=8, global_batch=8 * dp, recompute="full", flash=False,
            precision="fp16",
        )  # fmt: skip
        estimate = estimate_step(setup, load_cluster("v100-dgx2h-edr100x8", tp * dp))
        return estimate.model_flops_per_s / (tp * dp), estimate

    alone = rate(1, 1)[0]
    for dp, published in ((1, (100, 95, 82, 77)), (64, (96, 83, 79, 74))):
        for tp, measured in zip(MEGATRON, published, strict=True):
            each, estimate = rate(tp, dp)
            hidden = 100 * each / alone * estimate.step_s / (estimate.step_s - estimate.data_comm_s)
            why = "nothing was fitted to V100"
            if dp > 1:
                why = f"gradients over dp are not overlapped in the model; were all hidden, {hidden:.1f} %"
            claim = f"{tp * dp} V100, tp = {tp}: {measured} %"
            yield predicted(claim, measured, 100 * each / alone, POINTS, why)


AXONN = (
    ("AxoNN 40 B, 4,096 A100: 49 %", 49.0, (38, 9216, 72), "a100-40gb-box4-ss200x4", 4096),
    ("AxoNN 160 B, 16,384 GCDs: 26 %", 26.0, (84, 12288, 96), "mi250x-box8-ss200x4", 16384),
)
"""Claim, percent of peak, (layers, hidden, heads), cluster, devices. A step has 8,192 sequences of 2,048 tokens."""


def large_runs() -> Iterator[Line]:
    """Predictions of AxoNN's two runs, on the fastest grid of the search, with whole layers recomputed."""
    for claim, percent, sizes, name, devices in AXONN:
        cluster = load_cluster(name, devices)
        found = search(_gpt(*sizes, sequence=2048), cluster, global_batch=8192, grids="only").options
        best, *others = sorted((_recomputing(option, cluster) for option in found), key=lambda option: option.step_s)
        other = next(option for option in others if option.setup.grid[:2] != best.setup.grid[:2])
        software = msgspec.structs.replace(cluster.software, hidden=0.0)
        alone = estimate_step(best.setup, msgspec.structs.replace(cluster, software=software)).step_s
        at_peak_s = executed_flops(best.setup) / (devices * cluster.device.peak("bfloat16"))
        yield predicted(
            claim,
            percent,
            100 * at_peak_s / best.step_s,
            POINTS,
            f"{best.text}, recomputed FLOPs counted as there; with other divisions of features, {other.text} is the "
            f"next: {other.slower_than(best)}; if gathers of weights overlapped nothing, "
            f"{100 * at_peak_s / alone:.1f} %; no run on {cluster.device.name} was compared before",
        )


def _recomputing(option: Option, cluster: Cluster) -> Option:
    """The option with whole layers recomputed."""
    setup = msgspec.structs.replace(option.setup, recompute="full")
    return msgspec.structs.replace(option, setup=setup, estimate=estimate_step(setup, cluster), rehearsed_s=None)


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> Transformer:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": 51200, "sequence": 1024}
    return make_model("gpt", **(sizes | more))
