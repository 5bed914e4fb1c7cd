"""Passes over lowered graphs change no value, and never write into memory that is still read."""

import operator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from meshwright.ir.recomputation import Recomputation
from meshwright.lower.function import boxed_function
from meshwright.lower.fuse import fuse, reuse_memory, write_into_buckets
from meshwright.lower.prefetch import join_returned
from meshwright.lower.propagate import propagate
from meshwright.ops import collectives
from tests.tries import tries

aten = torch.ops.aten
SHAPE = (4, 4)
UNARY = [aten.exp.default, aten.neg.default, aten.t.default, aten.clone.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.mm.default, aten.tanh_backward.default]


def _targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@tries(15)
@given(st.data())
def test_random_graphs_give_the_same_values(data: st.DataObject) -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder("a"), graph.placeholder("b")]
    for _ in range(data.draw(st.integers(1, 14))):
        pick = st.sampled_from(nodes)
        if data.draw(st.booleans()):
            nodes.append(graph.call_function(data.draw(st.sampled_from(UNARY)), (data.draw(pick),)))
        else:
            nodes.append(graph.call_function(data.draw(st.sampled_from(BINARY)), (data.draw(pick), data.draw(pick))))
    graph.output([nodes[-1], data.draw(st.sampled_from(nodes))])
    values = [torch.rand(SHAPE, dtype=torch.float64) * 0.1 for _ in range(2)]
    plain = boxed_function(_copy(graph), {})([value.clone() for value in values])
    fuse(graph, Recomputation((), {}))
    _propagate(graph, [(SHAPE, torch.float64)] * 2)
    reuse_memory(graph)
    given_values = [value.clone() for value in values]
    result = boxed_function(graph, {})(list(given_values))
    for plain_value, fused_value in zip(plain, result, strict=True):
        torch.testing.assert_close(plain_value, fused_value, rtol=1e-12, atol=1e-12, equal_nan=True)
    for before, after in zip(values, given_values, strict=True):
        assert torch.equal(before, after), "an input of the step was written"


def test_a_copy_is_made_once() -> None:
    """As where several products read what was gathered along its columns."""

    def build(graph: fx.Graph, value: fx.Node) -> list[fx.Node]:
        turned = graph.call_function(aten.t.default, (value,))
        copies = [graph.call_function(aten.reshape.default, (turned, shape)) for shape in ([16], [16], [2, 8], [16])]
        copies[3].meta["backward"] = True  # is computed again
        return [graph.call_function(aten.exp.default, (copy,)) for copy in copies]

    graph = _traced(build)
    fuse(graph, Recomputation((), {}))
    assert _targets(graph).count(aten.reshape.default) == 3
    value = torch.rand(SHAPE, dtype=torch.float64)
    for result, shape in zip(boxed_function(graph, {})([value]), ([16], [16], [2, 8], [16]), strict=True):
        assert torch.equal(result, value.t().reshape(shape).exp())


def _propagate(graph: fx.Graph, given: list[Any]) -> None:
    for node, (shape, dtype) in zip(graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta.update(local_shape=shape, dtype=dtype)
    propagate(graph)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _traced(build: Any) -> fx.Graph:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("a")))
    _propagate(graph, [(SHAPE, torch.float64)])
    reuse_memory(graph)
    return graph


def test_a_dead_input_is_written_into() -> None:
    def build(graph: fx.Graph, a: fx.Node) -> list[fx.Node]:
        return [graph.call_function(aten.exp.default, (graph.call_function(aten.neg.default, (a,)),))]

    assert _targets(_traced(build)) == [aten.neg.default, aten.exp.out]


def test_relu_writes_into_an_input_that_nobody_reads_again() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    product = graph.call_function(aten.mm.default, (a, a))
    read = graph.call_function(aten.relu.default, (product,))
    graph.output([graph.call_function(aten.relu.default, (graph.call_function(aten.neg.default, (product,)),)), read])
    fuse(graph, Recomputation((), {}))
    _propagate(graph, [(SHAPE, torch.float64)])
    reuse_memory(graph)
    assert _targets(graph) == [aten.mm.default, aten.clamp_min.default, aten.neg.out, aten.clamp_min.out]
    value = torch.randn(SHAPE, dtype=torch.float64)
    first, second = boxed_function(graph, {})([value.clone()])
    assert torch.equal(first, (-(value @ value)).relu())
    assert torch.equal(second, (value @ value).relu())


def test_the_gradient_of_a_squared_error_writes_into_an_output_that_nobody_reads_again() -> None:
    graph = fx.Graph()
    a, target, grad = (graph.placeholder(name) for name in ("a", "target", "grad"))
    negative = graph.call_function(aten.neg.default, (a,))
    loss = graph.call_function(aten.mse_loss.default, (negative, target, 0))
    graph.output([loss, graph.call_function(aten.mse_loss_backward.default, (grad, negative, target, 1))])
    _propagate(graph, [(SHAPE, torch.float64), (SHAPE, torch.float64), ((), torch.float64)])
    reuse_memory(graph)
    assert _targets(graph) == [aten.neg.default, aten.mse_loss.default, aten.mse_loss_backward.grad_input]
    given = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(2)]
    total = torch.randn((), dtype=torch.float64)
    error = -given[0] - given[1]
    loss, gradient = boxed_function(graph, {})([*given, total])
    torch.testing.assert_close(loss, error**2)
    torch.testing.assert_close(gradient, 2 * total * error / error.numel())


def test_memory_that_a_collective_still_reads_is_left_alone() -> None:
    def build(graph: fx.Graph, a: fx.Node) -> list[fx.Node]:
        fresh = graph.call_function(aten.neg.default, (a,))
        started = graph.call_function(collectives.ALL_GATHER, (fresh, "0", 2, "native"))
        other = graph.call_function(aten.exp.default, (fresh,))
        waited = graph.call_function(collectives.WAIT, (started,))
        return [other, waited]

    assert aten.exp.out not in _targets(_traced(build))


def test_views_keep_their_memory_alive() -> None:
    def build(graph: fx.Graph, a: fx.Node) -> list[fx.Node]:
        fresh = graph.call_function(aten.neg.default, (a,))
        parts = graph.call_function(aten.split.Tensor, (fresh, 2))
        changed = graph.call_function(aten.exp.default, (fresh,))
        return [changed, graph.call_function(operator.getitem, (parts, 0))]

    assert aten.exp.out not in _targets(_traced(build))


def test_parts_of_a_split_are_memory_of_the_input() -> None:
    def build(graph: fx.Graph, a: fx.Node) -> fx.Node:
        parts = graph.call_function(aten.split.Tensor, (a, 2))
        return graph.call_function(aten.exp.default, (graph.call_function(operator.getitem, (parts, 0)),))

    assert aten.exp.out not in _targets(_traced(build))


def test_outputs_of_one_operator_are_apart() -> None:
    def build(graph: fx.Graph, a: fx.Node) -> list[fx.Node]:
        extremes = graph.call_function(aten.max.dim, (a, 0))
        value, index = (graph.call_function(operator.getitem, (extremes, position)) for position in (0, 1))
        return [graph.call_function(aten.exp.default, (value,)), index]

    assert aten.exp.out in _targets(_traced(build))


def test_a_product_and_its_bias_become_one_operator() -> None:
    graph = fx.Graph()
    a, b, bias = (graph.placeholder(name) for name in "abc")
    bias.meta["local_shape"] = (4,)
    graph.output([graph.call_function(aten.add.Tensor, (graph.call_function(aten.mm.default, (a, b)), bias))])
    fuse(graph, Recomputation((), {}))
    assert _targets(graph) == [aten.addmm.default]
    values: list[Tensor] = [torch.rand(4, 4), torch.rand(4, 4), torch.rand(4)]
    (result,) = boxed_function(graph, {})(list(values))
    torch.testing.assert_close(result, torch.addmm(values[2], values[0], values[1]))


def test_a_bias_of_another_dtype_is_added_apart() -> None:
    """``x @ w + torch.arange(4)``: addmm does not promote."""
    graph = fx.Graph()
    left, right, bias = (graph.placeholder(name) for name in "abc")
    bias.meta.update(local_shape=(4,), dtype=torch.int64)
    product = graph.call_function(aten.mm.default, (left, right))
    product.meta.update(dtype=torch.float64)
    graph.output([graph.call_function(aten.add.Tensor, (product, bias))])
    fuse(graph, Recomputation((), {}))
    assert _targets(graph) == [aten.mm.default, aten.add.Tensor]


def test_gradients_are_computed_into_their_bucket() -> None:
    def bucket() -> fx.Graph:
        graph = fx.Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        product = graph.call_function(aten.mm.default, (a, b))
        other = graph.call_function(aten.exp.default, (a,))
        flat = [graph.call_function(aten.reshape.default, (node, [-1])) for node in (product, other)]
        joined = graph.call_function(aten.cat.default, (flat,))
        joined.meta["device"] = torch.device("cpu")
        started = graph.call_function(collectives.ALL_REDUCE, (joined, "sum", "0", "native"))
        graph.output([started])
        _propagate(graph, [(SHAPE, torch.float64)] * 2)
        return graph

    graph = bucket()
    write_into_buckets(graph)
    reuse_memory(graph)
    graph.lint()
    targets = _targets(graph)
    assert aten.mm.out in targets
    assert aten.cat.default not in targets
    started = next(node for node in graph.nodes if node.target is collectives.ALL_REDUCE)
    started.replace_all_uses_with(started.args[0])
    graph.erase_node(started)
    a, b = torch.rand(SHAPE, dtype=torch.float64), torch.rand(SHAPE, dtype=torch.float64)
    (flat,) = boxed_function(graph, {})([a, b])
    assert torch.equal(flat, torch.cat([(a @ b).flatten(), a.exp().flatten()]))


IMAGE, WEIGHT = (2, 3, 5, 5), (4, 3, 3, 3)
SETTINGS = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _gradients_of_a_convolution(*, sent: bool) -> fx.Graph:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("grad", "image", "weight")]
    input_call, weight_call = (
        graph.call_function(aten.convolution_backward.default, (*given, *SETTINGS, mask))
        for mask in ([True, False, False], [False, True, False])
    )
    first = graph.call_function(operator.getitem, (input_call, 0))
    if sent:
        first = graph.call_function(collectives.ALL_REDUCE, (first, "sum", "0", "native"))
    graph.output([first, graph.call_function(operator.getitem, (weight_call, 1))])
    return graph


def test_both_gradients_of_a_convolution_are_computed_together() -> None:
    graph = _gradients_of_a_convolution(sent=False)
    values = [torch.rand(2, 4, 5, 5), torch.rand(IMAGE), torch.rand(WEIGHT)]
    plain = boxed_function(_copy(graph), {})(list(values))
    fuse(graph, Recomputation((), {}))
    assert _targets(graph).count(aten.convolution_backward.default) == 1
    for plain_value, fused_value in zip(plain, boxed_function(graph, {})(list(values)), strict=True):
        torch.testing.assert_close(plain_value, fused_value)


def test_the_gradient_of_a_weight_is_computed_while_that_of_the_input_travels() -> None:
    graph = _gradients_of_a_convolution(sent=True)
    fuse(graph, Recomputation((), {}))
    assert _targets(graph).count(aten.convolution_backward.default) == 2


def test_sums_that_are_only_returned_are_made_together() -> None:
    """Three that nobody reads, of which one is a scalar; not one that is read, a maximum, or a gradient."""
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")

    def summed(value: fx.Node, shape: tuple[int, ...], op: str = "sum") -> fx.Node:
        start = graph.call_function(collectives.ALL_REDUCE, (value, op, "0", "native"), {"label": value.name})
        wait = graph.call_function(collectives.WAIT, (start,))
        wait.meta.update(local_shape=shape, dtype=torch.float64)
        return wait

    doubled, read = graph.call_function(aten.mul.Tensor, (a, 2)), summed(b, SHAPE)
    first, second = summed(graph.call_function(aten.clone.default, (doubled,)), SHAPE), summed(c, ())
    third = summed(graph.call_function(aten.exp.default, (read,)), SHAPE)
    gradient = summed(graph.call_function(aten.neg.default, (a,)), SHAPE)
    graph.output([first, second, third, summed(doubled, SHAPE, "max"), gradient])
    join_returned(graph, [first, second, third], torch.device("cpu"))
    graph.eliminate_dead_code()
    graph.lint()
    assert _targets(graph).count(collectives.ALL_REDUCE) == 4
    joined = next(n for n in graph.nodes if n.target is collectives.ALL_REDUCE and "together" in n.kwargs["label"])
    assert joined.kwargs["label"] == "clone_default to exp_default, 3 together"
    for node in list(graph.nodes):  # on one rank, a sum is its only term
        if node.target in (collectives.ALL_REDUCE, collectives.WAIT):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    value_a, value_b, value_c = torch.rand(SHAPE), torch.rand(SHAPE), torch.rand(())
    results = boxed_function(graph, {})([value_a, value_b, value_c])
    for result, expected in zip(results, (value_a * 2, value_c, value_b.exp(), value_a * 2, -value_a), strict=True):
        torch.testing.assert_close(result, expected)


@tries(15)
@given(st.data())
def test_the_largest_is_found_where_argmax_finds_it(data: st.DataObject) -> None:
    """Also of several that are largest, and of what is not a number."""
    numbers = data.draw(
        st.lists(st.sampled_from([-1.0, 0.0, 2.0, float("inf"), float("nan")]), min_size=24, max_size=24)
    )
    value, dim, keeps = torch.tensor(numbers).view(2, 3, 4), data.draw(st.integers(-3, 2)), data.draw(st.booleans())
    graph = fx.Graph()
    graph.output([graph.call_function(aten.argmax.default, (graph.placeholder("a"), dim, keeps))])
    fuse(graph, Recomputation((), {}))
    assert _targets(graph) == [aten.max.dim, operator.getitem]
    (index,) = boxed_function(graph, {})([value])
    assert torch.equal(index, value.argmax(dim, keeps))


def test_argmax_over_all_dims_stays() -> None:
    graph = fx.Graph()
    graph.output([graph.call_function(aten.argmax.default, (graph.placeholder("a"),))])
    fuse(graph, Recomputation((), {}))
    assert _targets(graph) == [aten.argmax.default]
