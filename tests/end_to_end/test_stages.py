"""Cuts of captured graphs: whatever the cut points, values flow up, gradients down, and nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.capture.builder import capture
from meshwright.errors import PlanError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.stages import Cut, cut, forward_operators
from meshwright.models import UNet, segmentation_loss
from tests.distributed import oracle
from tests.tries import tries


@cache
def graph_of(model: str) -> Graph:
    torch.manual_seed(0)
    subject = SUBJECTS[model]()
    return capture(subject.model, subject.loss_fn, subject.batches[0]).graph


def unet(norm: str) -> oracle.Subject:
    batch = {"image": torch.zeros(2, 1, 4, 4), "label": torch.zeros(2, 4, 4, dtype=torch.int64)}
    return oracle.Subject(UNet(depth=2, width=2, image_channels=1, norm=norm), segmentation_loss, [batch])


SUBJECTS: dict[str, Callable[[], oracle.Subject]] = {
    "GPT": lambda: oracle.gpt(True),
    "T5": lambda: oracle.hugging_face_t5(True),
    "U-Net": lambda: unet("batch"),
}


def names_at(graph: Graph, places: Sequence[float]) -> list[str]:
    """The forward operators (but the first) at these fractions of the graph, in order, each once."""
    forward = forward_operators(graph)
    positions = sorted({1 + int(place * (len(forward) - 1)) for place in places})
    return [forward[position].name for position in positions]


CUTS = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=7)


@pytest.mark.parametrize("model", SUBJECTS)
@tries(12)
@given(places=CUTS)
def test_every_operator_finds_its_inputs_in_its_stage(model: str, places: list[float]) -> None:
    """Made there, received from one of the two neighbours, or of the whole step (parameters, batch, prologue)."""
    graph = graph_of(model)
    divided = cut(graph, names_at(graph, places))
    outputs = outputs_by_stage(graph, divided)
    producers = graph.producers()
    for operator in graph.operators:
        stage = divided.stage_of.get(operator.name)
        if stage is None:
            continue
        from_below, from_above = divided.received(stage)
        for name in operator.inputs:
            maker = producers.get(name)
            if maker is None:
                assert name not in divided.owners or stage in divided.owners[name]
            elif not maker.prologue:
                assert name in outputs[stage] or name in from_below or name in from_above, (operator.name, name)
    for name in (graph.loss, *graph.metrics.values()):
        assert producers[name].prologue or name in outputs[-1] or name in divided.received(divided.num_stages - 1)[0]


@pytest.mark.parametrize("model", SUBJECTS)
@tries(12)
@given(places=CUTS)
def test_values_go_up_and_gradients_down(model: str, places: list[float]) -> None:
    """What a stage sends it has made or received from the other side, once; forward values go down only for a
    backward that reads them."""
    graph = graph_of(model)
    divided = cut(graph, names_at(graph, places))
    outputs, producers = outputs_by_stage(graph, divided), graph.producers()
    for stage in range(divided.num_stages):
        from_below, from_above = divided.received(stage)
        up, down = divided.sent(stage)
        assert len(set(up)) == len(up)
        assert len(set(down)) == len(down)
        assert set(up) <= outputs[stage] | set(from_below)
        assert set(down) <= outputs[stage] | set(from_above)
        assert not any(producers[name].name in divided.late for name in up)
    for operator in graph.operators:
        for name in operator.inputs:
            maker = producers.get(name)
            if maker is None or not {maker.name, operator.name} <= divided.stage_of.keys():
                continue
            rise = divided.stage_of[operator.name] - divided.stage_of[maker.name]
            if maker.name in divided.late:
                assert rise <= 0, f"gradient {name} of {maker.name} goes up to {operator.name}"
            elif operator.name not in divided.late:
                assert rise >= 0, f"{name} goes down to {operator.name}"


@pytest.mark.parametrize("model", SUBJECTS)
@tries(12)
@given(places=CUTS)
def test_each_parameter_has_its_gradient_in_terms_of_its_owners(model: str, places: list[float]) -> None:
    """Adding up the terms of all stages is all that the operators without a stage did."""
    graph = graph_of(model)
    divided = cut(graph, names_at(graph, places))
    outputs, producers = outputs_by_stage(graph, divided), graph.producers()
    left_out = {operator.name for operator in graph.operators if not operator.prologue} - divided.stage_of.keys()
    for entry in graph.gradients:
        assert entry.gradient is not None
        by_stage = divided.terms[entry.parameter]
        assert set(by_stage) <= set(divided.owners[entry.parameter])
        for stage, names in by_stage.items():
            assert set(names) <= outputs[stage]
        if len(by_stage) == 1:
            continue
        terms, pending = [], [entry.gradient]
        while pending:
            maker = producers[pending[-1]]
            if maker.name in left_out:
                left_out.remove(maker.name)
                assert maker.target == "aten.add.Tensor"
                pending[-1:] = maker.inputs
            else:
                terms.append(pending.pop())
        assert sorted(terms) == sorted(name for names in by_stage.values() for name in names)
    assert not left_out, "only additions of one gradient's terms belong to no stage"


def outputs_by_stage(graph: Graph, divided: Cut) -> list[set[str]]:
    outputs: list[set[str]] = [set() for _ in range(divided.num_stages)]
    for operator in graph.operators:
        if operator.name in divided.stage_of:
            outputs[divided.stage_of[operator.name]].update(operator.outputs)
    return outputs


def test_a_tied_head_has_a_term_on_both_ends() -> None:
    graph = graph_of("GPT")
    middle = next(operator for operator in forward_operators(graph) if operator.module == "blocks.1.attention_norm")
    divided = cut(graph, [middle.name])
    assert divided.owners["token_embedding.weight"] == (0, 1)
    assert {stage: len(names) for stage, names in divided.terms["token_embedding.weight"].items()} == {0: 1, 1: 1}
    tied = {name for name, by_stage in divided.terms.items() if len(by_stage) > 1}
    assert tied == {"token_embedding.weight"}
    assert divided.owners["blocks.0.mlp.up.weight"] == (0,)
    assert divided.owners["blocks.1.mlp.up.weight"] == (1,)
    assert [len(names) for names in (*divided.up, *divided.down)] == [1, 1], "one activation up, its gradient down"


def test_t5s_embedding_has_terms_in_three_stages_and_its_encoder_is_sent_through_the_decoder() -> None:
    graph = graph_of("T5")
    forward = forward_operators(graph)
    firsts = [
        next(operator.name for operator in forward if operator.module.startswith(module))
        for module in ("encoder.block.1", "decoder.block.0.layer.1", "decoder.block.1")
    ]
    divided = cut(graph, firsts)
    assert set(divided.terms["shared.weight"]) == {0, 1, 3}
    encoded = next(name for name in divided.up[1] if name.startswith("encoder."))
    assert encoded in divided.up[2], "the second decoder block reads it too"
    assert len(divided.up[2]) > 1


def test_skips_of_a_unet_are_carried_through_the_stages_between() -> None:
    graph = graph_of("U-Net")
    forward = forward_operators(graph)
    firsts = [
        next(operator.name for operator in forward if operator.module.startswith(name))
        for name in ("down.1", "down.2", "enlarge.1")
    ]
    divided = cut(graph, firsts)
    skip = next(name for name in divided.up[0] if name.startswith("down.0"))
    assert skip in divided.up[1]
    assert skip in divided.up[2]
    assert all(len(names) >= 2 for names in divided.up[1:])


# --- what is refused -------------------------------------------------------------------------------------------------


def test_cut_before_what_is_no_forward_operator() -> None:
    graph = graph_of("GPT")
    backward = next(operator.name for operator in graph.operators if operator.backward)
    for name in ("nothing", backward):
        with pytest.raises(PlanError) as refusal:
            cut(graph, [name])
        assert str(refusal.value) == (
            f"stages[1].first: there is no forward operator '{name}'\n  -> name one of the graph"
        )


def test_cut_out_of_order() -> None:
    graph = graph_of("GPT")
    first, second = (forward_operators(graph)[index].name for index in (5, 9))
    for firsts, place in (([second, first], 2), ([first, first], 2), ([forward_operators(graph)[0].name], 1)):
        with pytest.raises(PlanError) as refusal:
            cut(graph, firsts)
        assert str(refusal.value) == (
            f"stages[{place}].first: {firsts[-1]!r} does not come after the first operator of the stage before\n"
            "  -> name the stages' first operators in the order of the graph"
        )


class Remembers(nn.Module):
    """Notes a mean in a buffer, which is read again behind a layer that comes after."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean
        x = self.first(x)
        self.mean = x.detach().mean(0)
        return self.second(x) + before


def test_a_buffer_that_two_stages_need() -> None:
    graph = capture(Remembers(), lambda model, batch: model(batch).square().mean(), torch.zeros(4, 4)).graph
    second = next(operator for operator in forward_operators(graph) if operator.module == "second")
    with pytest.raises(PlanError) as refusal:
        cut(graph, [second.name])
    updater = graph.producers()[graph.buffer_updates["mean"]]
    assert str(refusal.value) == (
        f"{updater.name}: buffer 'mean' is updated in stage 0 and read in another\n  -> cut the graph elsewhere"
    )


def test_a_graph_in_which_a_value_would_go_down() -> None:
    """The order of the trace makes this impossible; a graph from a file may have any order."""
    graph = graph_of("GPT")
    forward = forward_operators(graph)
    first, second = (
        next(operator for operator in forward if operator.module == name)
        for name in ("blocks.0.mlp.up", "blocks.1.mlp.up")
    )
    wrong = msgspec.structs.replace(first, inputs=(*first.inputs, second.outputs[0]))
    operators = tuple(wrong if operator.name == first.name else operator for operator in graph.operators)
    with pytest.raises(PlanError) as refusal:
        cut(msgspec.structs.replace(graph, operators=operators), [boundary(forward, "blocks.1").name])
    assert str(refusal.value) == (
        f"{first.name}: {second.outputs[0]!r} of stage 1 is read in stage 0, an earlier one\n"
        "  -> cut the graph elsewhere"
    )


def boundary(forward: Sequence[Operator], module: str) -> Operator:
    return next(operator for operator in forward if operator.module.startswith(module))
