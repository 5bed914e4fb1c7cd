"""The seconds of a step in closed form, from the passes of a layer, the pipeline's schedule and the optimizer."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.cost.exchange import data_group, exchange_s
from meshwright.cost.host import launched_s
from meshwright.cost.kernels import Rates
from meshwright.cost.layer import Pass, PassCost, Summed, embedding_pass, head_pass, layer_pass
from meshwright.cost.setup import Setup
from meshwright.ir.cluster import Cluster
from meshwright.ir.software import Software


class StepEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step and of its parts, which add up to ``step_s``.

    ``compute_s``: kernels of the slowest stage. ``tensor_comm_s``: waiting of this stage for collectives inside layers.
    ``host_s``: time added by launching kernels. ``bubble_s``: waiting for other stages. ``pipeline_comm_s``: messages
    between stages. ``data_comm_s``: exposed collectives of gradients and parameters over dp. ``optimizer_s``: the
    optimizer's update. ``other_s``: time that does not depend on micro-batches (``Software.step_s``).
    """

    step_s: float
    compute_s: float
    tensor_comm_s: float
    host_s: float
    bubble_s: float
    pipeline_comm_s: float
    data_comm_s: float
    optimizer_s: float
    other_s: float
    model_flops_per_s: float
    """FLOP/s of all devices together. Only the model's own FLOPs count, without recomputation."""


def estimate_step(setup: Setup, cluster: Cluster, known: "KnownCosts | None" = None) -> StepEstimate:
    """Estimate the step of ``setup`` on ``cluster``, which has (at least) ``setup.world_size`` devices. ``known``:
    costs on this cluster that are kept for the next estimate.

    Each of the m micro-batches passes every stage forward and backward, and the slowest stage sets the pace:

        step = m * slowest + bubble of the other stages / chunks + data-parallel communication + optimizer + other
    """
    known = known or KnownCosts(cluster)
    rates, network = known.rates, known.network
    stages = _stages(setup, known)
    send_s = _send_s(setup, network)
    slowest = _slowest(stages)
    pace = stages[slowest]
    both = pace.forward + pace.backward
    bubbles = _for_each(stages, partial(_bubble_s, setup))
    others_s = sum(bubbles) - bubbles[slowest]
    waits = 0 if setup.schedule == "zb-h2" else setup.pp - 1
    bubble_s = (others_s + waits * send_s) / setup.chunks
    sends_s = setup.microbatches * setup.chunks * send_s * _exposed(setup, rates.software)
    after = _after(setup, rates, network, slowest, pace)
    busy_s = setup.microbatches * pace.total_s
    step_s = busy_s + bubble_s + sends_s + sum(after) + rates.software.step_s
    return StepEstimate(
        step_s=step_s,
        compute_s=setup.microbatches * both.device_s,
        tensor_comm_s=setup.microbatches * both.comm_s,
        host_s=setup.microbatches * both.host_s,
        bubble_s=bubble_s,
        pipeline_comm_s=sends_s,
        data_comm_s=after[0],
        optimizer_s=after[1],
        other_s=rates.software.step_s,
        model_flops_per_s=setup.model.step_flops(setup.global_batch) / step_s,
    )


class Busy(Summed, frozen=True):
    """Seconds of a stage in one direction: kernels (``device_s``), collectives inside layers (``comm_s``) and waiting
    for the host (``host_s``). ``weight_s`` is the part of their sum that computes gradients of parameters."""

    device_s: float = 0.0
    comm_s: float = 0.0
    host_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Kernels, collectives and waiting together."""
        return self.device_s + self.comm_s + self.host_s


class StageSeconds(Summed, frozen=True):
    """Seconds of one micro-batch on one stage."""

    forward: Busy = Busy()
    backward: Busy = Busy()

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward.total_s + self.backward.total_s


class StepTimes(msgspec.Struct, frozen=True):
    """The times that make up a step. ``stages``: one micro-batch on every stage, where each chunk is a stage;
    ``send_s``: a message to the next stage and the message back; ``after_s``: the time after the last backward."""

    stages: tuple[StageSeconds, ...]
    send_s: float
    after_s: float


class KnownCosts:
    """The costs of kernels and collectives on one cluster, and the passes that setups have in common: of a layer, the
    embedding and the head. A search passes one object to the estimates of all of its setups; their results are the same
    as without it."""

    def __init__(self, cluster: Cluster) -> None:
        self.rates, self.network = Rates(cluster.device, cluster.software), Network(cluster)
        self._passes: dict[tuple[Any, ...], tuple[StageSeconds, StageSeconds, StageSeconds]] = {}

    def passes(self, setup: Setup) -> tuple[StageSeconds, StageSeconds, StageSeconds]:
        """One micro-batch in a layer, in the embedding and in the head."""
        key = (
            setup.model, setup.micro_batch, setup.tp, setup.cp, setup.ep, setup.grid, setup.sequence_parallel,
            setup.microbatches > 1, setup.zero == 3, setup.recompute, setup.precision, setup.flash, setup.compiled,
            setup.overlap, setup.data_stride if setup.ep > 1 else 0,
        )  # fmt: skip
        if key not in self._passes:
            rates, network = self.rates, self.network
            ends = (embedding_pass(setup, rates, network), head_pass(setup, rates, network))
            embedding, head = (StageSeconds(_timed(each.forward, rates), _timed(each.backward, rates)) for each in ends)
            self._passes[key] = _layer(setup, rates, network), embedding, head
        return self._passes[key]


def step_pieces(setup: Setup, cluster: Cluster, known: KnownCosts | None = None) -> StepTimes:
    """The times that ``estimate_step`` adds up in closed form, for callers that need them separately."""
    known = known or KnownCosts(cluster)
    rates, network = known.rates, known.network
    stages = _stages(setup, known)
    slowest = _slowest(stages)
    after_s = sum(_after(setup, rates, network, slowest, stages[slowest])) + rates.software.step_s
    chunked = _stages(setup, known, setup.chunks) if setup.chunks > 1 else stages
    return StepTimes(tuple(chunked), _send_s(setup, network), after_s)


def stage_parameters(setup: Setup, stage: int) -> float:
    """The number of parameters that one rank of a stage holds, before ZeRO divides them."""
    model = setup.model
    own = setup.stage_layers[stage]
    layers = own * (1 + model.cross / model.layers)
    experts = model.expert_layers / model.layers * own
    dense = own - experts
    shared = layers * model.attention_parameters + dense * model.mlp_parameters
    shared += experts * (model.shared_experts * model.expert_parameters + model.hidden * model.experts)
    if stage == 0:
        shared += model.embedding_parameters
    if stage == setup.pipeline.last_rank:
        tied_copy = model.hidden * model.vocabulary if model.tied and stage > 0 else 0
        shared += model.head_parameters + tied_copy
    return (shared + experts * model.experts / setup.ep * model.expert_parameters) / setup.tp


def _layer(setup: Setup, rates: Rates, network: Network) -> StageSeconds:
    """One micro-batch in a layer: the mean of the layers with experts and those without. Host and device times are
    combined for each layer, not for the whole stage, because the device may limit the head while the host limits the
    layers. The host cannot launch far ahead, because losses are read and stages wait."""
    model = setup.model
    share = model.expert_layers / model.layers
    layer = StageSeconds()
    for part, experts in ((1 - share, False), (share, True)):
        if part:
            passes = layer_pass(setup, rates, network, experts=experts)
            back = passes.backward + _recomputed(setup, passes)
            exposed = _exposed(setup, rates.software)
            both = StageSeconds(_timed(passes.forward, rates, exposed), _timed(back, rates, exposed))
            layer += both * (part * (1 + model.cross / model.layers / 2))  # cross-attention is about half a layer
    return layer


def _stages(setup: Setup, known: KnownCosts, chunks: int = 1) -> list[StageSeconds]:
    """The times of one micro-batch on each stage, with ``chunks`` stages per rank."""
    layer, embedding, head = known.passes(setup)
    places, each = setup.pipeline, setup.stage_layers
    passes_of = {count: layer * (count / chunks) for count in set(each)}
    stages = [passes_of[each[places.rank_of(stage)]] for stage in range(setup.pp * chunks)]
    last = places.last_rank if chunks == 1 else places.num_stages - 1
    stages[0] += embedding
    stages[last] += head
    return stages


def _slowest(stages: Sequence[StageSeconds]) -> int:
    """The first of the stages whose micro-batch takes longest."""
    return max(range(len(stages)), key=_for_each(stages, attrgetter("total_s")).__getitem__)


def _for_each(stages: Sequence[StageSeconds], seconds: Callable[[StageSeconds], float]) -> list[float]:
    """``seconds`` of each stage. Stages with equal layers are one object, for which they are computed once."""
    distinct = {id(stage): stage for stage in stages}
    known = {key: seconds(stage) for key, stage in distinct.items()}
    return [known[id(stage)] for stage in stages]


def _bubble_s(setup: Setup, stage: StageSeconds) -> float:
    """Seconds for which a rank is idle because of another stage (Qi et al. 2023, table 1): the time of one micro-batch
    on that stage. Zero-bubble schedules fill a part of it with two or three times the time for gradients of parameters.
    Under ``zb-h2``, ranks begin the next step immediately, as in the paper. Under ``zb-v``, they wait for their first
    forward."""
    if setup.schedule == "zb-v":
        return stage.forward.total_s
    filled = {"zb-h1": 2, "zb-h2": 3, "dualpipe-v": 2}.get(setup.schedule, 0)
    return max(0.0, stage.total_s - filled * stage.backward.weight_s)


def _after(setup: Setup, rates: Rates, network: Network, slowest: int, pace: StageSeconds) -> tuple[float, float]:
    """Seconds after the last backward, as a pair: communication over dp and for tied weights; and the optimizer's
    update."""
    parameters = stage_parameters(setup, slowest)
    data_s = _data_comm_s(setup, network, rates.software.hidden, parameters, pace.total_s) + _tied_s(setup, network)
    return data_s, _optimizer_s(setup, rates, parameters)


def _recomputed(setup: Setup, layer: Pass) -> PassCost:
    if setup.recompute == "full":
        return layer.forward
    if setup.alternate:
        return layer.rest * 0.5
    return layer.core if setup.recompute == "selective" else PassCost()


def _exposed(setup: Setup, software: Software) -> float:
    """The fraction of communication inside and between stages that the device waits for."""
    return 1 - software.hidden if setup.overlap == "all" else 1.0


def _timed(span: PassCost, rates: Rates, exposed: float = 1.0) -> Busy:
    comm_s = max(exposed * span.comm_s, span.comm_s - span.device_s)
    busy_s = span.device_s + comm_s
    total_s = launched_s(busy_s, span.kernels * rates.launch_s)
    weight_s = span.weight_s * total_s / busy_s if busy_s else 0.0
    return Busy(span.device_s, comm_s, total_s - busy_s, weight_s)


def _send_s(setup: Setup, network: Network) -> float:
    """Seconds to send activations to the next stage and gradients back. With tp, each rank sends only its part
    (scatter-gather). Without sequence parallelism, the receivers then gather the parts."""
    if setup.pp < 2:
        return 0.0
    moved = setup.tokens * setup.model.hidden * setup.element_bytes / setup.tp
    gathered = 0.0
    if setup.output_ranks > 1 and not setup.sequence_parallel:
        group = Group(setup.output_ranks, setup.input_ranks)
        gathered = network.collective_s("all_gather", moved * setup.output_ranks, group)
    return 2 * (network.send_s(moved, setup.stage_stride) + gathered)


def _data_comm_s(setup: Setup, network: Network, hidden: float, parameters: float, microbatch_s: float) -> float:
    """Exposed seconds of the collectives of gradients (and of sharded parameters) over dp x cp."""
    data, moved = data_group(setup), parameters * setup.element_bytes

    def exposed_s(seconds: float) -> float:
        return max((1 - hidden) * seconds, seconds - hidden * microbatch_s)

    depth_s = setup.microbatches * exposed_s(_depth_comm_s(setup, network, moved)) if setup.depth > 1 else 0.0
    if data.size < 2:
        return depth_s
    moved /= setup.depth
    sums_s, gather_s = exchange_s(setup, network, moved), network.collective_s("all_gather", moved, data)
    if setup.resharded:
        # Every micro-batch gathers parameters for forward and again for backward, while other layers compute.
        each_s = 2 * gather_s + sums_s
        return setup.microbatches * exposed_s(each_s)
    once_s = sums_s + gather_s if setup.zero else sums_s
    # Gradients overlap with the backward of the last micro-batch, and parameters with the forward of the next step.
    return depth_s + (once_s if setup.overlap == "none" else exposed_s(once_s))


def _depth_comm_s(setup: Setup, network: Network, moved: float) -> float:
    """Seconds in which the ranks along the depth of a grid gather the ``moved`` bytes of a stage's parameters, layer by
    layer, for forward and again for backward, and reduce-scatter their gradients."""
    layers, depth = max(setup.stage_layers), Group(setup.depth, setup.data_stride)
    gather_s = network.collective_s("all_gather", moved / layers, depth)
    return layers * (2 * gather_s + network.collective_s("reduce_scatter", moved / layers, depth))


def _tied_s(setup: Setup, network: Network) -> float:
    """Seconds to all-reduce the tied embedding's gradient between the first and the last stage, if they are on
    different ranks."""
    model = setup.model
    if setup.pipeline.last_rank == 0 or not model.tied:
        return 0.0
    ends = Group(2, setup.stage_stride * (setup.pp - 1))
    return network.collective_s("all_reduce", model.hidden * model.vocabulary / setup.tp * setup.element_bytes, ends)


def _optimizer_s(setup: Setup, rates: Rates, parameters: float) -> float:
    updated = parameters / (setup.dp * setup.cp if setup.zero else setup.depth)
    return rates.memory_bound("update", updated * rates.software.optimizer_bytes).seconds
