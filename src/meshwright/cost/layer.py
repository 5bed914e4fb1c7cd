"""The seconds and kernels of a transformer layer, the embedding and the vocabulary head on one rank."""

import math
from operator import add
from typing import Self

import msgspec
from msgspec.structs import astuple

from meshwright.cost.collective import Group, Network
from meshwright.cost.kernels import Rates
from meshwright.cost.setup import Setup

CAST_BYTES = 5.0
"""Bytes per element that the cast of an operand to float8 reads and writes, with dynamic scaling: one pass finds the
maximum, and another rounds. Megatron-LM's kernels need no such passes: they round when they write results, with scales
from the maxima of earlier steps."""

EAGER_SOFTMAX = 14
"""The number of times that eager code reads or writes the scores between attention's two products, in 16-bit elements:
scale 2, mask 2, cast to float32 3, softmax 4, cast back 3. Its backward moves the same number of elements."""

EXPERT_SPREAD = 1.1
"""Tokens of the busiest expert, relative to the mean of all experts."""


class Summed(msgspec.Struct, frozen=True):
    """A struct of numbers that is added and scaled field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(quantity * factor for quantity in astuple(self)))


class PassCost(Summed, frozen=True):
    """The cost of a part of the model in one direction (forward or backward). ``device_s``: seconds of the device's
    kernels. ``comm_s``: seconds in which the device waits for communication. ``kernels``: the number of kernels to
    launch. ``weight_s``: the part of ``device_s`` in which gradients of parameters are computed."""

    device_s: float = 0.0
    comm_s: float = 0.0
    kernels: float = 0.0
    weight_s: float = 0.0


class Pass(msgspec.Struct, frozen=True):
    """Forward and backward of a part of the model. ``core`` is the part of forward in the attention core, which
    selective recomputation repeats; ``rest`` is the remaining forward."""

    forward: PassCost
    backward: PassCost
    core: PassCost = PassCost()
    rest: PassCost = PassCost()


class _Tally:
    """Adds up the kernels of one direction, forward or backward."""

    def __init__(self, setup: Setup, rates: Rates, dtype: str = "", cast_bytes: float = 0.0) -> None:
        self._rates, self._dtype, self._cast = rates, dtype or setup.dtype, cast_bytes
        self.eager = setup.eager(rates.software)
        self.device_s, self.comm_s, self.kernels, self.weight_s = 0.0, 0.0, 0.0, 0.0

    def matmul(self, m: float, n: float, k: float, batch: float = 1) -> None:
        self.device_s += self._rates.matmul_s(m, n, k, batch=batch, dtype=self._dtype)
        self.kernels += 1
        if self._cast:
            self.memory_bound(self._cast * batch * (m * k + k * n), 4)

    def backward_matmul(self, m: float, n: float, k: float, batch: float = 1, *, weights: bool = True) -> float:
        """Add the backward pass of a product. It consists of two products, which compute the gradients of the operands.
        Return the seconds of the second operand's gradient. ``weights``: this operand holds parameters, not
        activations."""
        self.matmul(m, k, n, batch)
        before_s = self.device_s
        self.matmul(k, n, m, batch)
        self.weight_s += (self.device_s - before_s) * weights
        return self.device_s - before_s

    def memory_bound(
        self, moved_bytes: float, kernels: int = 1, *, weights: bool = False, kind: str = "pointwise"
    ) -> None:
        seconds = self._rates.memory_bound(kind, moved_bytes, kernels).seconds
        self.device_s += seconds
        self.weight_s += seconds * weights
        self.kernels += kernels

    def attention(self, kind: str, flops: float, moved_bytes: float) -> None:
        dtype = "bfloat16" if self._dtype == "float8" else self._dtype  # no framework rounds attention to float8
        self.device_s += self._rates.seconds(kind, dtype, flops, moved_bytes)
        self.kernels += 1

    def wait(self, seconds: float, collectives: int = 1, hidden_s: float = 0.0) -> None:
        """Add collectives. The device computes during ``hidden_s`` seconds of them."""
        self.comm_s += max(0.0, seconds - hidden_s)
        self.kernels += collectives

    def span(self) -> PassCost:
        return PassCost(self.device_s, self.comm_s, self.kernels, self.weight_s)


def layer_pass(setup: Setup, rates: Rates, network: Network, *, experts: bool = False) -> Pass:
    """One layer on one micro-batch: attention and MLP with their norms, residuals and tensor-parallel collectives.

    The kernels are those of Megatron-LM. It fuses bias, activation, dropout and addition, and it fuses softmax with its
    scale and mask. Without ``flash`` the attention scores are written to memory. In eager code (``Setup.eager``), each
    operation of the norm, the rotary embedding and the gate is a separate kernel, as in Llama's PyTorch code.
    """
    core, core_back = _attention_core(setup, rates, network)
    profile_bytes = rates.software.float8_bytes
    cast = profile_bytes if profile_bytes is not None else CAST_BYTES if setup.zero == 3 else 0.0
    cast = cast if setup.precision == "fp8" else 0.0
    forward, backward = (_Tally(setup, rates, cast_bytes=cast) for _ in range(2))
    _attention_rest(setup, network, forward, backward)
    if experts:
        _experts(setup, network, forward, backward)
    else:
        _mlp(setup, network, forward, backward)
    return Pass(forward.span() + core, backward.span() + core_back, core, forward.span())


def embedding_pass(setup: Setup, rates: Rates, network: Network) -> Pass:
    """The embedding on one micro-batch: lookup of tokens and positions, their sum and its dropout."""
    model, element = setup.model, setup.element_bytes
    forward, backward = _Tally(setup, rates), _Tally(setup, rates)
    width = setup.tokens * model.hidden / setup.input_ranks * element
    forward.memory_bound(width * (4 if model.dropout else 2), 4, kind="gather")
    backward.memory_bound(width * 4 + model.hidden * model.vocabulary / setup.tp * element, 4)
    _tensor_collective(setup, network, forward)
    return Pass(forward.span(), backward.span())


def head_pass(setup: Setup, rates: Rates, network: Network) -> Pass:
    """The head on one micro-batch: last norm, vocabulary head, and cross-entropy over the vocabulary's shards."""
    model, element = setup.model, setup.element_bytes
    dtype = "bfloat16" if setup.precision == "fp8" else setup.dtype  # no framework rounds the head to float8
    forward, backward = _Tally(setup, rates, dtype), _Tally(setup, rates, dtype)
    if not model.vocabulary:
        return Pass(PassCost(), PassCost())
    columns = model.vocabulary / setup.tp
    loss_bytes = setup.tokens * columns * rates.software.loss_bytes
    forward.memory_bound(2 * setup.local_tokens * model.hidden * element, kind="norm")
    forward.matmul(setup.tokens, columns, model.hidden)
    forward.memory_bound(0.65 * loss_bytes, 12)
    backward.memory_bound(0.35 * loss_bytes, 8)
    backward.backward_matmul(setup.tokens, columns, model.hidden)
    backward.memory_bound(4 * setup.local_tokens * model.hidden * element, 2)
    _tensor_collective(setup, network, backward)
    if setup.input_ranks > 1:  # all tp ranks divide the vocabulary, and need all features
        hidden = float(setup.tokens * model.hidden * element)
        forward.wait(network.collective_s("all_gather", hidden, _along_inputs(setup)))
        backward.wait(network.collective_s("reduce_scatter", hidden, _along_inputs(setup)))
    if setup.tp > 1:
        tensor = Group(setup.tp)
        forward.wait(3 * network.collective_s("all_reduce", 4.0 * setup.tokens, tensor), 3)
    return Pass(forward.span(), backward.span())


def _along_inputs(setup: Setup) -> Group:
    """The ranks over which the first product of a pair splits input features. These ranks are neighbours."""
    return Group(setup.input_ranks)


def _sum_over_inputs(setup: Setup, network: Network, tally: _Tally, width: float, hidden_s: float = 0.0) -> None:
    """Add the all-reduce of the inner features of a pair of products. It runs over the ranks that split the input
    features of the first product. ``width``: the number of inner features on a rank. ``hidden_s``: seconds of a product
    that runs at the same time."""
    if setup.input_ranks > 1:
        summed = float(setup.tokens * width * setup.element_bytes)
        tally.wait(network.collective_s("all_reduce", summed, _along_inputs(setup)), hidden_s=hidden_s)


def _norm_sums(setup: Setup, network: Network, *tallies: _Tally) -> None:
    """If a grid splits the features of a norm, add the all-reduce of the norm's two sums, in float32."""
    if setup.input_ranks > 1:
        for tally in tallies:
            tally.wait(network.collective_s("all_reduce", 8.0 * setup.tokens, _along_inputs(setup)))


def _tensor_collective(setup: Setup, network: Network, *tallies: _Tally, hidden_s: float = 0.0) -> None:
    """Add one all-reduce of the activations over the ranks that split output features (without a grid: tp). With
    sequence parallelism, a reduce-scatter and an all-gather replace it. ``hidden_s``: seconds of a product that
    overlaps with the all-reduce."""
    if setup.output_ranks < 2:
        return
    tensor = Group(setup.output_ranks, setup.input_ranks)
    width = float(setup.tokens * setup.model.hidden / setup.input_ranks * setup.element_bytes)
    for tally in tallies:
        if setup.sequence_parallel:
            tally.wait(
                network.collective_s("reduce_scatter", width, tensor)
                + network.collective_s("all_gather", width, tensor),
                2,
            )
        else:
            tally.wait(network.collective_s("all_reduce", width, tensor), hidden_s=hidden_s)


def _attention_core(setup: Setup, rates: Rates, network: Network) -> tuple[PassCost, PassCost]:
    """Forward and backward of the attention core: from queries, keys and values to the heads' outputs."""
    model, element = setup.model, setup.element_bytes
    forward, backward = _Tally(setup, rates), _Tally(setup, rates)
    heads = model.heads / setup.output_ranks
    query = setup.tokens * model.query_width / setup.output_ranks * element
    keys = 2 * setup.tokens * setup.key_width * element
    keyed = model.sequence  # the ring brings the keys of all cp ranks
    rows = model.sequence / setup.cp
    batch = setup.micro_batch * heads
    if setup.flash:
        flops = 4 * batch * rows * keyed * model.head_width * (0.5 if model.causal else 1.0)
        forward.attention("attention", flops, 2 * query + keys)
        backward.attention("attention_backward", 2.5 * flops, 4 * query + 3 * keys)
        backward.memory_bound(2 * query)
    else:
        scores = batch * rows * keyed
        mask = scores if model.dropout else 0.0
        forward.matmul(rows, keyed, model.head_width, batch)
        # Eager code uses separate kernels to scale, mask, cast to float32, normalise and cast back.
        passes, kernels = (EAGER_SOFTMAX, 5) if forward.eager else (2, 1)
        forward.memory_bound(passes * scores * element, kernels, kind="softmax")
        if model.dropout:
            forward.memory_bound(2 * scores * element + mask)
        forward.matmul(rows, model.head_width, keyed, batch)
        forward.memory_bound(2 * query)
        backward.backward_matmul(rows, model.head_width, keyed, batch, weights=False)
        if model.dropout:
            backward.memory_bound(2 * scores * element + mask)
        passes, kernels = (EAGER_SOFTMAX, 5) if backward.eager else (3, 1)
        backward.memory_bound(passes * scores * element, kernels, kind="softmax")
        backward.backward_matmul(rows, keyed, model.head_width, batch, weights=False)
        backward.memory_bound(3 * query, 2)
    if setup.cp > 1:
        # The ring passes keys and values on cp - 1 times, hidden by the attention of the previous block.
        step = network.send_s(keys, setup.tp)
        forward.comm_s += max(0.0, (setup.cp - 1) * step - forward.device_s)
        backward.comm_s += max(0.0, 2 * (setup.cp - 1) * step - backward.device_s)
    return forward.span(), backward.span()


def _attention_rest(setup: Setup, network: Network, forward: _Tally, backward: _Tally) -> None:
    """Add the norm, projections and residual around the attention core."""
    model, element, query = setup.model, setup.element_bytes, setup.model.query_width / setup.output_ranks
    tokens, local, width = setup.tokens, setup.local_tokens * model.hidden * element, model.hidden / setup.input_ranks
    columns = query + 2 * setup.key_width
    _norm(setup, forward, backward)
    _norm_sums(setup, network, forward, backward)
    forward.matmul(tokens, columns, width)
    into_s = backward.backward_matmul(tokens, columns, width)
    if model.rotary:
        turned = tokens * (query + setup.key_width) * element
        passes, kernels = (10, 6) if forward.eager else (2, 2)
        forward.memory_bound(passes * turned, kernels)
        backward.memory_bound(passes * turned, kernels)
    forward.matmul(tokens, width, query)
    out_s = backward.backward_matmul(tokens, width, query)
    weights = width * (columns + query)
    _residual(setup, forward, backward, local)
    if model.bias:
        backward.memory_bound(tokens * (columns + width) * element, 2, weights=True)
    _accumulate(setup, backward, weights, 2)
    _grid_collectives(setup, network, forward, backward, (columns, query), (into_s, out_s))


def _mlp(setup: Setup, network: Network, forward: _Tally, backward: _Tally) -> None:
    model, element = setup.model, setup.element_bytes
    width, inputs, outer = model.ffn / setup.output_ranks, 2 if model.gated else 1, model.hidden / setup.input_ranks
    _norm(setup, forward, backward)
    _norm_sums(setup, network, forward, backward)
    weights_s = _feed_forward(setup, forward, backward, setup.tokens, width, 1)
    if model.bias:
        backward.memory_bound(setup.tokens * (inputs * width + outer) * element, 2, weights=True)
    _accumulate(setup, backward, (inputs + 1) * outer * width, 2)
    _residual(setup, forward, backward, setup.local_tokens * model.hidden * element)
    _grid_collectives(setup, network, forward, backward, (inputs * width, width), weights_s)


def _experts(setup: Setup, network: Network, forward: _Tally, backward: _Tally) -> None:
    """Add the router, the dispatch of tokens over ep, the experts of this rank, and the return of the tokens."""
    model, element = setup.model, setup.element_bytes
    width = (model.expert_ffn or model.ffn) / setup.tp
    local = max(1, model.experts // setup.ep)
    visits = setup.tokens * model.experts_per_token
    moved = visits * model.hidden * element
    _norm(setup, forward, backward)
    forward.matmul(setup.tokens, model.experts, model.hidden)
    backward.backward_matmul(setup.tokens, model.experts, model.hidden)
    for tally in (forward, backward):
        tally.memory_bound(4 * moved, 8)
        if setup.ep > 1:
            tally.wait(2 * network.collective_s("all_to_all", moved, Group(setup.ep, setup.data_stride)), 2)
    busiest = visits / local * (EXPERT_SPREAD if setup.ep > 1 else 1.0)
    _feed_forward(setup, forward, backward, busiest, width, local)
    _accumulate(setup, backward, local * model.mlp_matrices * model.hidden * width, 2)
    if model.shared_experts:
        shared = model.shared_experts * width
        _feed_forward(setup, forward, backward, setup.tokens, shared, 1)
        _accumulate(setup, backward, model.mlp_matrices * model.hidden * shared, 2)
    _residual(setup, forward, backward, setup.local_tokens * model.hidden * element)
    _tensor_collective(setup, network, forward, backward)


def _grid_collectives(
    setup: Setup, network: Network, forward: _Tally, backward: _Tally, inner: tuple[float, float],
    weights_s: tuple[float, float],
) -> None:  # fmt: skip
    """Add the all-reduces of two consecutive products. ``inner``: the numbers of features on one rank that the first
    product writes and the second product reads. ``weights_s``: seconds to compute the gradients of their weights. On a
    grid, these gradients are computed while the gradients of inputs are summed, as in AxoNN."""
    into_s, out_s = weights_s if setup.grid else (0.0, 0.0)
    _tensor_collective(setup, network, forward)
    _tensor_collective(setup, network, backward, hidden_s=into_s)
    _sum_over_inputs(setup, network, forward, inner[0])
    _sum_over_inputs(setup, network, backward, inner[1], out_s)


def _feed_forward(
    setup: Setup, forward: _Tally, backward: _Tally, tokens: float, width: float, batch: int
) -> tuple[float, float]:
    """Add the products of an MLP. Returns the seconds to compute the gradients of the weights of its first and its last
    product."""
    model, element = setup.model, setup.element_bytes
    inputs, outer = 2 if model.gated else 1, model.hidden / setup.input_ranks
    tokens = math.ceil(tokens)
    forward.matmul(tokens, inputs * width, outer, batch)
    extra = 2 if model.gated and forward.eager else 0
    forward.memory_bound((inputs + 1 + extra) * batch * tokens * width * element, 1 + extra // 2)
    forward.matmul(tokens, outer, width, batch)
    out_s = backward.backward_matmul(tokens, outer, width, batch)
    backward.memory_bound((2 * inputs + 1 + 2 * extra) * batch * tokens * width * element, 1 + extra)
    return backward.backward_matmul(tokens, inputs * width, outer, batch), out_s


def _norm(setup: Setup, forward: _Tally, backward: _Tally) -> None:
    moved = setup.local_tokens * setup.model.hidden * setup.element_bytes
    if forward.eager and setup.model.gated:  # separate kernels: cast to float32, square, mean, product, cast back
        forward.memory_bound(18 * moved, 6)
        backward.memory_bound(35 * moved, 12)
        return
    forward.memory_bound(2 * moved, kind="norm")
    backward.memory_bound(5 * moved, 2, kind="norm_backward")  # input and parameters, in two kernels


def _residual(setup: Setup, forward: _Tally, backward: _Tally, moved: float) -> None:
    """Add a forward kernel that fuses bias, dropout and addition, and the backward of dropout and of the addition."""
    mask = moved / setup.element_bytes if setup.model.dropout else 0.0
    forward.memory_bound(3 * moved + mask)
    if setup.model.dropout:
        backward.memory_bound(2 * moved + mask)
    backward.memory_bound(3 * moved)


def _accumulate(setup: Setup, backward: _Tally, weights: float, tensors: int) -> None:
    """Add the accumulation of a micro-batch's gradients, if a step has several micro-batches."""
    if setup.microbatches > 1:
        backward.memory_bound(weights * 3 * setup.element_bytes, tensors, weights=True)
