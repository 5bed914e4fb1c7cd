"""Worked numbers that need a planner: AlexNet's two halves, weak scaling, and large runs."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import truediv
from typing import Any, NamedTuple

import msgspec

from meshwright.catalog import load_cluster, with_software
from meshwright.catalog.models import load_network, make_model
from meshwright.cost.setup import Overlap, Setup
from meshwright.cost.step import StepEstimate, estimate_step
from meshwright.ir.cluster import Cluster
from meshwright.ir.convnet import ConvNet
from meshwright.ir.transformer import Transformer
from meshwright.planner.layerwise import choice_of, divide_layers
from meshwright.planner.search import SetupOption, search
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
        "multiply-adds of torchvision's variant",
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
MEGATRON_PERCENT = ((1, 100, 96), (2, 95, 83), (4, 82, 79), (8, 77, 74))
"""Tensor-parallel size; then the published percentages of linear scaling (figure 5): of one replica, and of 64
replicas."""


def megatron_scaling() -> Iterator[Line]:
    """Weak scaling on DGX-2H, with only tensor parallelism and with 64-way data parallelism in addition. PyTorch's
    DistributedDataParallel overlaps the sums of gradients with backward, as the GPT-2 script of that release has it
    (``USE_TORCH_DDP``; kept in microsoft/DeepSpeedExamples, Megatron-LM/pretrain_gpt2.py)."""

    def estimate(tp: int, dp: int, overlap: Overlap = "dp") -> StepEstimate:
        setup = Setup(
            model=_gpt(*MEGATRON[tp]), tp=tp, dp=dp, micro_batch=8, global_batch=8 * dp, recompute="full", flash=False,
            precision="fp16", overlap=overlap,
        )  # fmt: skip
        return estimate_step(setup, load_cluster("v100-dgx2h-edr100x8", tp * dp))

    def percent(step: StepEstimate, devices: int) -> float:
        return 100 * step.model_flops_per_s / devices / single.model_flops_per_s

    single = estimate(1, 1)
    for tp, alone, _ in MEGATRON_PERCENT:
        ours = percent(estimate(tp, 1), tp)
        yield predicted(f"{tp} V100, tp = {tp}: {alone} %", alone, ours, POINTS, "nothing was fitted to V100")
    for tp, alone, measured in MEGATRON_PERCENT:
        devices, plain = 64 * tp, estimate(tp, 64, "none")
        dropped_s = estimate(tp, 1).step_s * (alone / measured - 1)
        why = (
            f"the published drop from {alone} % is {1e3 * dropped_s:.0f} ms of the predicted step; all-reducing the "
            f"gradients takes {1e3 * plain.data_comm_s:.0f} ms, partly during backward (without overlap "
            f"{percent(plain, devices):.1f} %)"
        )
        if dropped_s > 1.1 * plain.data_comm_s:
            why += "; so the sums of gradients do not explain the drop, and at more devices it is smaller again"
        ours = percent(estimate(tp, 64), devices)
        yield predicted(f"{devices} V100, tp = {tp}: {measured} %", measured, ours, POINTS, why)


IMAGES, EPOCHS, BATCH = 1_200_000, 90, 128
"""The training of AlexNet (Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", NIPS 2012, section 5): images, epochs, and images of a step."""
WEEK_DAYS, OWN_DAYS = 7.0, (5.0, 6.0)
"""Days of the training according to the lecture, and according to the paper (section 1)."""
GPUS, FACTOR = "gtx-580-box2", 2.0
"""The two GPUs, and the factor within which the prediction must lie."""


def alexnet_on_two_gpus() -> Iterator[Line]:
    """AlexNet with two towers, trained for 90 epochs on two GPUs of 3 GB."""
    net, cluster = load_network("alexnet-2012"), load_cluster(GPUS, 2)
    free = divide_layers(net, cluster, images=BATCH, precision="fp32")
    alone = divide_layers(net, load_cluster("gtx-580-box1", 1), images=BATCH, precision="fp32")
    steps_a_day = 86400 / (IMAGES / BATCH * EPOCHS)
    days, free_days, alone_days = (
        step_s / steps_a_day for step_s in (towers_s(net, cluster), free.step_s, alone.step_s)
    )
    flops = sum(6 * layer.pixels_out * layer.outputs * layer.depth for layer in net.layers)
    at_peak_days = flops * IMAGES * EPOCHS / (2 * cluster.device.peak("float32")) / 86400
    yield Line(
        claim="half of the filters on each of two GTX 580: a week",
        ours=f"{days:.1f} days",
        verdict="agrees" if WEEK_DAYS / FACTOR <= days <= WEEK_DAYS * FACTOR else "we differ",
        why=f"limit: a factor of {FACTOR:g}. At the peak it takes {at_peak_days:.1f} days. So the lecture's week is "
        f"{at_peak_days / WEEK_DAYS:.0%} of the peak, the paper's {OWN_DAYS[0]:g} to {OWN_DAYS[1]:g} days are "
        f"{at_peak_days / OWN_DAYS[1]:.0%} to {at_peak_days / OWN_DAYS[0]:.0%}, and ours {at_peak_days / days:.0%}. "
        "We assume convolutions as fast as that GPU's CUBLAS; the convolutions of 2012 were slower. We leave out "
        "reading images and testing",
    )
    yield held(
        "two GPUs of 3 GB hold it",
        f"{free.peak_bytes / 2**30:.2f} of {cluster.device.memory_bytes / 2**30:.0f} GiB",
        free.peak_bytes < cluster.device.memory_bytes,
        f"weights, gradients, momentum, activations of {BATCH} images, and what today's software takes beside them; a "
        f"single GPU would need {alone.peak_bytes / 2**30:.2f} GiB and {alone_days:.1f} days",
    )
    yield held(
        "images divided at convolutions, features at dense layers: faster than towers (Krizhevsky 2014)",
        f"{free_days:.2f} instead of {days:.2f} days",
        free_days < days and [each.way == "data" for each in free.choices] == [True] * 5 + [False] * 3,
        "unpinned, the planner chooses " + ", ".join(f"{each.layer} {each.way}" for each in free.choices),
    )


def towers_s(net: ConvNet, cluster: Cluster) -> float:
    """Seconds of a step if each of two GPUs has half of the filters of every layer. Layers with two groups read only
    their own GPU's half of the inputs; all other layers read both halves."""
    total_s = cluster.software.step_s
    for number, layer in enumerate(net.layers):
        if layer.groups == 2:
            half = msgspec.structs.replace(layer, groups=1, inputs=layer.inputs // 2, outputs=layer.outputs // 2)
            tower = choice_of(half, "data", "images", 2 * BATCH, cluster, "fp32")  # every GPU computes all images
            total_s += tower.compute_s + tower.optimizer_s
        else:
            total_s += choice_of(layer, "outputs", "features" if number else None, BATCH, cluster, "fp32").total_s
    return total_s


AXONN = (
    ("AxoNN 40 B, 4,096 A100: 49 %", 49.0, (38, 9216, 72), "a100-40gb-box4-ss200x4", 4096),
    ("AxoNN 160 B, 16,384 GCDs: 26 %", 26.0, (84, 12288, 96), "mi250x-box8-ss200x4", 16384),
)
"""Claim, percent of peak, (layers, hidden, heads), cluster, devices. A step has 8,192 sequences of 2,048 tokens."""


def large_runs() -> Iterator[Line]:
    """Predictions of AxoNN's two runs, on the fastest grid of the search, with whole layers recomputed."""
    for claim, percent, sizes, name, devices in AXONN:
        cluster = load_cluster(name, devices)
        best, *others = _on_grids(sizes, cluster)
        other = next(option for option in others if option.setup.grid[:2] != best.setup.grid[:2])
        step = published_step(best.setup, cluster, percent)
        also = "; the paper's own table has 1,019.9 PF, 32.5 %" if name == GCD else ""
        yield predicted(
            claim,
            percent,
            step.percent,
            POINTS,
            f"{best.text}, recomputed FLOPs counted as there; with other divisions of features, {other.text} is the "
            f"next: {other.slower_than(best)}; {step.why}{also}",
        )


class PublishedStep(NamedTuple):
    """A published step beside its prediction. ``at_peak_s``: seconds of its FLOPs at the peak; ``published_s``,
    ``predicted_s``: seconds of the step; ``kernels_s``: the predicted seconds without collectives; ``collectives_s``:
    the predicted seconds of collectives if gathers of weights overlap nothing; ``usual``: the fraction of a gather that
    the model hides."""

    at_peak_s: float
    published_s: float
    predicted_s: float
    kernels_s: float
    collectives_s: float
    usual: float

    @property
    def percent(self) -> float:
        """The predicted percentage of the peak."""
        return 100 * self.at_peak_s / self.predicted_s

    @property
    def hidden(self) -> float:
        """The fraction of the collectives that must be hidden to give the published step. It is negative if the step is
        longer than kernels and collectives one after the other."""
        return 1 - (self.published_s - self.kernels_s) / self.collectives_s

    @property
    def why(self) -> str:
        """The difference from the published step, explained by kernels and collectives."""
        parts = f"{self.kernels_s:.2f} s of kernels, {self.collectives_s:.2f} s of collectives"
        steps = f"the published step takes {self.published_s:.2f} s, ours {self.predicted_s:.2f} ({parts})"
        slower = (self.published_s - self.collectives_s) / self.kernels_s - 1
        if slower > 0.01:
            return f"{steps}: even if nothing overlapped, kernels must have been {slower:.0%} slower"
        hidden = max(0.0, self.hidden)
        return f"{steps}: it follows if collectives were {hidden:.0%} hidden; we hide {self.usual:.0%} of gathers"


def published_step(setup: Setup, cluster: Cluster, percent: float) -> PublishedStep:
    """The prediction of a setup whose step was published as a percentage of the cluster's peak."""
    at_peak_s = executed_flops(setup) / (cluster.num_devices * cluster.device.peak("bfloat16"))
    predicted_s, exposed = (
        estimate_step(setup, cluster).step_s,
        estimate_step(setup, with_software(cluster, msgspec.structs.replace(cluster.software, hidden=0.0))),
    )
    kernels_s = exposed.step_s - exposed.tensor_comm_s - exposed.data_comm_s
    return PublishedStep(
        at_peak_s=at_peak_s, published_s=100 * at_peak_s / percent, predicted_s=predicted_s, kernels_s=kernels_s,
        collectives_s=exposed.step_s - kernels_s, usual=cluster.software.hidden,
    )  # fmt: skip


A100, GCD = "a100-40gb-box4-ss200x4", "mi250x-box8-ss200x4"
WEAK_SCALING: Mapping[str, tuple[tuple[int, str, tuple[int, int, int], float], ...]] = {
    A100: (
        (512, "5 B", (24, 4096, 32), 80.8),
        (1024, "10 B", (32, 5120, 40), 197.8),
        (2048, "20 B", (32, 7168, 56), 352.5),
        (4096, "40 B", (38, 9216, 72), 620.1),
    ),
    GCD: (
        (512, "5 B", (24, 4096, 32), 40.4),
        (1024, "10 B", (32, 5120, 40), 77.3),
        (2048, "20 B", (32, 7168, 56), 145.7),
        (4096, "40 B", (38, 9216, 72), 295.9),
        (8192, "80 B", (42, 12288, 96), 571.4),
        (16384, "160 B", (84, 12288, 96), 1019.9),
    ),
}
"""Weak scaling of AxoNN: for each cluster the devices, the model with its (layers, hidden, heads), and the petaflops
(Singh et al., "Democratizing AI: Open-source Scalable LLM Training on GPU-based Supercomputers", SC 2024,
arXiv:2502.08145, tables 2 and 3)."""


ALIKE = ("deepspeed", "llm-foundry")
"""Profiles of software that, as AxoNN, runs PyTorch's kernels and gathers divided weights."""


def weak_scaling() -> Iterator[Line]:
    """Weak scaling of a GPT on AxoNN's grids of ranks, up to 4,096 A100 and 16,384 GCDs of MI250X: published
    percentages of the peak beside the predicted curve."""
    for name, points in WEAK_SCALING.items():
        published: list[float] = []
        by_profile: dict[str, list[float]] = {profile: [] for profile in ("", *ALIKE)}
        for devices, model, sizes, petaflops in points:
            cluster = load_cluster(name, devices)
            options = _on_grids(sizes, cluster)
            percent = 100 * petaflops * 1e15 / (devices * cluster.device.peak("bfloat16"))
            step = published_step(options[0].setup, cluster, percent)
            published.append(percent)
            by_profile[""].append(step.percent)
            for profile in ALIKE:
                alike = with_software(cluster, profile)
                step_s = min(estimate_step(option.setup, alike).step_s for option in options)
                by_profile[profile].append(100 * step.at_peak_s / step_s)
            also = "; the lecture prints 815.7 PF, 26 %" if (name, devices) == (GCD, 16384) else ""
            yield predicted(
                f"{model} on {devices:,} {cluster.device.name}: {petaflops:,g} PF, {percent:.1f} %",
                percent,
                step.percent,
                POINTS,
                f"{options[0].text}, recomputed FLOPs counted as there; {step.why}{also}",
            )
        factor = statistics.median(map(truediv, published, by_profile[""]))
        off = _points_off(published, [factor * ours for ours in by_profile[""]])
        others = (
            f"{profile} {statistics.median(each):.1f} points off, {max(each):.1f} at most"
            for profile in ALIKE
            for each in [_points_off(published, by_profile[profile])]
        )
        yield Line(
            claim=f"the curve on {load_cluster(name, points[0][0]).device.name}, with one factor for AxoNN's software",
            ours=f"{statistics.median(off):.1f} points off (median), {max(off):.1f} at most",
            verdict="agrees" if max(off) <= POINTS else "we differ",
            why=f"factor {factor:.2f}, the median of published over predicted. Nothing was fitted to AxoNN; with the "
            f"profiles of other software that runs PyTorch's kernels and gathers divided weights: {', '.join(others)}",
        )


def _points_off(published: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [
        abs(published_percent - our_percent) for published_percent, our_percent in zip(published, ours, strict=True)
    ]


def _on_grids(sizes: tuple[int, int, int], cluster: Cluster) -> list[SetupOption]:
    """The options of a step of 8,192 sequences of 2,048 tokens on grids of ranks, whole layers recomputed, the fastest
    first."""
    options = search(_gpt(*sizes, sequence=2048), cluster, global_batch=8192, grids="only").options
    return sorted((_recomputing(option, cluster) for option in options), key=lambda option: option.step_s)


def _recomputing(option: SetupOption, cluster: Cluster) -> SetupOption:
    """The option with whole layers recomputed."""
    setup = msgspec.structs.replace(option.setup, recompute="full")
    return msgspec.structs.replace(option, setup=setup, estimate=estimate_step(setup, cluster), rehearsed_s=None)


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> Transformer:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": 51200, "sequence": 1024}
    return make_model("gpt", **(sizes | more))
