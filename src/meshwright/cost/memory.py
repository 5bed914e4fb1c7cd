"""Memory: the bytes that one rank of each stage holds at its peak, part by part, and whether they fit the device."""

from typing import NamedTuple

import msgspec

from meshwright.cost.coded import coded_item_bytes
from meshwright.cost.occupancy import Occupancy, box_of, memory_verdict, num_peers
from meshwright.cost.setup import Setup
from meshwright.cost.step import stage_parameters
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.software import Software
from meshwright.schedules.message_driven import most_in_flight

EAGER_NORM_BYTES = 4
"""Bytes per element that an RMS norm made of PyTorch's own operations keeps in addition to a fused norm: its input in
float32 instead of 16 bits, and the normalised input before it is scaled."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak; the parts add up to ``peak_bytes``.

    ``activations_bytes``: saved by layers for backward, for all micro-batches in flight. ``ends_bytes``: added by
    embedding, vocabulary head and loss. ``workspace_bytes``: needed only during one layer's pass (gradients of
    activations, recomputed activations, gathered parameters). ``buffers_bytes``: buckets of gradients.
    ``residuals_bytes``: kept by codecs. ``context_bytes``: taken outside of the framework's tensors. ``peers_bytes``:
    buffers of collectives. ``fragmentation_bytes``: taken by the allocator but unused. ``moment`` says at which moment
    the peak occurs.
    """

    stage: int
    moment: str
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    ends_bytes: float
    workspace_bytes: float
    buffers_bytes: float
    context_bytes: float
    peers_bytes: float
    fragmentation_bytes: float
    residuals_bytes: float = 0.0

    @property
    def allocated_bytes(self) -> float:
        """Bytes of the framework's live tensors: all parts but context, buffers of collectives and fragmentation."""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        kept = self.buffers_bytes + self.residuals_bytes
        return states + self.activations_bytes + self.ends_bytes + self.workspace_bytes + kept

    @property
    def peak_bytes(self) -> float:
        """The sum of all parts."""
        return self.reserved_bytes + self.context_bytes + self.peers_bytes

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the framework's allocator takes: live tensors and fragmentation."""
        return self.allocated_bytes + self.fragmentation_bytes


def estimate_memory(setup: Setup, cluster: Cluster) -> Memory:
    """The memory of the rank with the highest peak."""
    layers, layer = setup.stage_layers, _LayerMemory.of(setup, cluster.software)
    ends = sorted({0, setup.pp - 1, max(range(setup.pp), key=layers.__getitem__)})
    memories = [_stage_memory(setup, stage, cluster, layer) for stage in ends]
    return max(memories, key=lambda memory: memory.peak_bytes)


def stage_memory(setup: Setup, stage: int, cluster: Cluster) -> Memory:
    """The memory of a rank of pipeline stage ``stage`` at its peak."""
    return _stage_memory(setup, stage, cluster, _LayerMemory.of(setup, cluster.software))


class _LayerMemory(NamedTuple):
    """The parts of the memory that are the same on all stages, in bytes: what a layer saves, what recomputing a layer
    adds, the gradients of its widest activations, and the logits of a loss."""

    saved: float
    recomputed: float
    gradients: float
    loss: float

    @classmethod
    def of(cls, setup: Setup, software: Software) -> "_LayerMemory":
        saved = layer_activation_bytes(setup, software)
        working = _layer_bytes(setup, software, setup.recompute == "full") if setup.recompute != "none" else 0.0
        loss = setup.tokens * setup.model.vocabulary / setup.tp * logit_bytes(setup, software)
        return cls(saved, max(0.0, working - saved), _gradient_workspace_bytes(setup, software), loss)


def _stage_memory(setup: Setup, stage: int, cluster: Cluster, layer: _LayerMemory) -> Memory:
    data, software = setup.dp * setup.cp, cluster.software
    parameters, element = stage_parameters(setup, stage), setup.element_bytes
    mixed = element == 2
    # Megatron-LM accumulates gradients in float32; ZeRO's optimizers keep them in the parameters' dtype until they are
    # reduced to the shard that this rank updates.
    gradient = float(element) if setup.zero in (1, 2) else 4.0
    gradient = gradient if software.gradient_bytes is None else software.gradient_bytes
    states = 12.0 if mixed else 8.0  # Adam's two moments, and with 16-bit parameters their float32 copy
    layers = setup.stage_layers[stage]
    if setup.resharded or setup.depth > 1:
        # The shards belong to the float32 copy; two layers are gathered at a time.
        parameters_bytes, gathered = 0.0, 2 * parameters / layers * element
    else:
        parameters_bytes, gathered = parameters * element, 0.0
    # A pipeline accumulates whole gradients over its micro-batches, and reduces them to shards once.
    shards = data if setup.zero >= 2 and setup.pp == 1 else setup.depth
    workspace = gathered + layer.recomputed + layer.gradients
    loss = layer.loss if stage == setup.pipeline.last_rank else 0.0
    # The loss comes before the first layer's backward, so the two workspaces are not needed at the same time.
    in_loss, backward = loss > workspace, "the first backward with all micro-batches in flight"
    outside = float(cluster.device.kind != "cpu")
    groups = {"dp": data // setup.depth, "cp": setup.cp, "pp": setup.pp, "ep": setup.ep, "tz": setup.depth,
              "ty": setup.output_ranks, "tx": setup.input_ranks}  # fmt: skip
    memory = Memory(
        stage=stage,
        moment="the loss of the first micro-batch" if in_loss else backward,
        parameters_bytes=parameters_bytes,
        gradients_bytes=parameters * gradient / shards,
        optimizer_bytes=parameters * states / (data if setup.zero else setup.depth),
        activations_bytes=layers * layer.saved * in_flight(setup, stage),
        ends_bytes=_ends_bytes(setup, stage) + (loss if in_loss else 0.0),
        workspace_bytes=0.0 if in_loss else workspace,
        buffers_bytes=min(software.bucket_bytes, parameters * gradient) if data > 1 else 0.0,
        context_bytes=outside * software.context_bytes,
        peers_bytes=outside * num_peers(groups, box_of(cluster)) * software.peer_bytes,
        fragmentation_bytes=0.0,
        residuals_bytes=_residuals_bytes(setup, parameters) if data > 1 else 0.0,
    )
    return msgspec.structs.replace(memory, fragmentation_bytes=software.fragmentation * memory.allocated_bytes)


def _residuals_bytes(setup: Setup, parameters: float) -> float:
    """The bytes that the codec of gradients keeps between steps. It keeps two vectors of the length of the gradients,
    from before and after a step, because a step may be skipped."""
    if not setup.codec:
        return 0.0
    lengths = codec_of(setup.codec).state_lengths([(round(parameters),)])
    return 2 * sum(lengths.values()) * coded_item_bytes(setup.element_bytes)


def verdict(memory: Memory, cluster: Cluster, memory_bytes: float | None = None) -> Occupancy:
    """Whether ``memory`` fits the device, or the limit ``memory_bytes`` if it is given."""
    limit = memory_bytes or cluster.device.memory_bytes
    return memory_verdict(memory.peak_bytes, limit, cluster.software.spread.memory)


def in_flight(setup: Setup, stage: int) -> float:
    """The number of micro-batches whose activations a rank holds at once. A chunk, of v chunks per rank, counts as 1/v
    of a micro-batch."""
    rest, chunks = setup.pp - stage, setup.chunks
    match setup.schedule:
        case "gpipe":
            held: float = setup.microbatches
        case "1f1b":
            held = rest
        case "interleaved":
            held = (2 * (rest - 1) + (chunks - 1) * setup.pp + 1) / chunks
        case "zb-h1" | "zb-v":  # every rank keeps the activations that its delayed parameter gradients still need
            held = setup.pp
        case "zb-h2":
            held = 2 * setup.pp - 1
        case "dualpipe-v":
            held = setup.pp + 0.5
        case _:  # message-driven
            held = most_in_flight(setup.pp) if rest > 1 else 1
    return min(float(setup.microbatches), held)


def layer_activation_bytes(setup: Setup, software: Software) -> float:
    """Bytes that one layer saves for one micro-batch on one rank (Korthikanti et al. 2022, table 2, for any layer).

    For GPT in 16 bit it is sbh (10 + 24/t + 5as/ht), or sbh (34/t + 5as/ht) with sequence parallelism, in the paper's
    letters. Selective recomputation or fused attention removes the last term. Full recomputation saves only 2 sbh, or 2
    sbh/t with sequence parallelism. ``Software.activations`` multiplies all of these terms except those of full
    recomputation. In eager code, norms and rotary embeddings keep additional copies.
    """
    if setup.recompute == "full":
        return setup.tokens * setup.model.hidden * setup.element_bytes / setup.outer_parts
    if setup.alternate:
        return software.activations * _alternate_bytes(setup)
    return _layer_bytes(setup, software, scores=setup.recompute == "none")


def _alternate_bytes(setup: Setup) -> float:
    """Bytes that a layer saves if it keeps its input, attention's output and the output of every other matrix product:
    queries, values, the first and the last product of the MLP."""
    model, shared = setup.model, setup.outer_parts
    split = (2 * model.query_width + model.ffn) / setup.output_ranks + setup.key_width
    return setup.tokens * setup.element_bytes * (2 * model.hidden / shared + split)


def _layer_bytes(setup: Setup, software: Software, scores: bool) -> float:
    model, element, tp = setup.model, setup.element_bytes, setup.output_ranks
    width = model.hidden
    whole = 4 * width * element + (2 * width if model.dropout else 0)  # inputs of norms and of first products; masks
    parallel = 2 * element * model.query_width / tp + 2 * element * setup.key_width
    if model.gated and setup.eager(software):
        whole += 2 * EAGER_NORM_BYTES * width
        parallel += 2 * element * (model.query_width / tp + setup.key_width)  # queries, keys: transposed in two steps
    kept = (2 * model.mlp_matrices - 2) * element  # before and after the activation; with a gate, also the product
    dense = kept * model.ffn / tp
    share = model.expert_layers / model.layers
    if share:
        visits = model.experts_per_token + model.shared_experts
        routed = visits * (kept * (model.expert_ffn or model.ffn) / tp + 2 * element * width)
        dense = (1 - share) * dense + share * routed
    attention = 0.0
    if not setup.flash and scores:
        held = element * (2 if model.dropout else 1) + (1 if model.dropout else 0)
        attention = (held if software.score_bytes is None else software.score_bytes) * model.heads / tp * model.sequence
    elif setup.flash:
        attention = 4 * model.heads / tp  # the softmax's log-sum-exp
    crossed = 1 + model.cross / model.layers / 2
    return software.activations * setup.tokens * crossed * (whole / setup.outer_parts + parallel + dense + attention)


def _ends_bytes(setup: Setup, stage: int) -> float:
    model = setup.model
    local = setup.tokens * model.hidden / setup.outer_parts
    saved = 0.0
    if stage == 0:
        saved += local * (1 if model.dropout else 0) * in_flight(setup, 0)
    if stage == setup.pipeline.last_rank and model.vocabulary:
        saved += 2 * local * setup.element_bytes
    return saved


def logit_bytes(setup: Setup, software: Software) -> float:
    """Bytes per logit at the peak of the loss: of the logits and of their gradient, in the model's dtype and in
    float32. Megatron-LM's cross-entropy works in place: the float32 gradient overwrites the float32 logits. Llama's
    PyTorch code, used with ZeRO 3, keeps both the log-softmax and its gradient in float32."""
    if software.logit_bytes is not None:
        return software.logit_bytes
    return 2 * setup.element_bytes + (8 if setup.zero == 3 and setup.model.gated else 4)


def _gradient_workspace_bytes(setup: Setup, software: Software) -> float:
    """Bytes of the gradients of a layer's widest activations: those of the MLP, or the attention scores."""
    model, element = setup.model, setup.element_bytes
    outer = 2 * model.hidden / setup.input_ranks
    mlp = setup.tokens * element * (model.mlp_matrices * model.ffn / setup.output_ranks + outer)
    if setup.flash:
        return mlp
    scores = 2 * element if software.score_bytes is None else software.score_bytes
    return max(mlp, scores * setup.tokens * model.heads / setup.output_ranks * model.sequence)
