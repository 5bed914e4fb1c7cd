"""Where models are cut in stages, and which counts of stages and micro-batches are refused."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.stages import cut as cut_graph
from meshwright.ir.stages import forward_operators
from meshwright.models import UNet, segmentation_loss
from meshwright.planner import cut
from tests.distributed import oracle


@cache
def gpt() -> Graph:
    subject = oracle.gpt(False, layers=4)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


@cache
def unet() -> Graph:
    batch = {"image": torch.zeros(4, 1, 8, 8), "label": torch.zeros(4, 8, 8, dtype=torch.int64)}
    return mw.capture(UNet(depth=2, width=4, image_channels=1, classes=3), segmentation_loss, batch)


@cache
def t5() -> Graph:
    subject = oracle.hugging_face_t5(False)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


GRAPHS = {"GPT": gpt, "U-Net": unet, "T5": t5}


def slowest_stage_s(graph: Graph, chosen: tuple[int, ...]) -> float:
    """What ``choose_cut`` makes small, said in the simplest way; ``chosen`` are numbers of points."""
    forward = forward_operators(graph)
    times, points = cut.operator_times(graph, forward, None), cut.cut_points(graph, forward, None)
    ends = [points[index] for index in chosen]
    worst, start, received = 0.0, 0, 0.0
    for end in ends:
        penalty = 1.0 if end.between_blocks else cut.INSIDE_A_BLOCK
        worst = max(worst, (sum(times[start : end.position]) + received + end.sent_s) * penalty)
        start, received = end.position, end.sent_s
    return max(worst, sum(times[start:]) + received)


@pytest.mark.parametrize(("model", "num_stages"), [("GPT", 2), ("GPT", 3), ("U-Net", 2), ("U-Net", 4), ("T5", 2)])
def test_no_other_cut_has_a_faster_slowest_stage(model: str, num_stages: int) -> None:
    graph = GRAPHS[model]()
    forward = forward_operators(graph)
    positions = [forward[point.position].name for point in cut.cut_points(graph, forward, None)]
    firsts = cut.choose_cut(graph, num_stages, None)
    chosen = tuple(positions.index(first) for first in firsts)
    best = min(slowest_stage_s(graph, some) for some in itertools.combinations(range(len(positions)), num_stages - 1))
    assert slowest_stage_s(graph, chosen) == pytest.approx(best)


def test_gradients_of_weights_cross_no_cut() -> None:
    """A dense layer in bfloat16 is a product and an addition, with one backward. Between them, few bytes are live."""
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = ViTForImageClassification(config).to(torch.bfloat16)
        batch = {
            "pixel_values": torch.zeros(4, 3, 16, 16, dtype=torch.bfloat16),
            "labels": torch.zeros(4, dtype=torch.int64),
        }
    graph = mw.capture(model, lambda net, given: net(**given).loss, batch)
    forward, producers = forward_operators(graph), graph.producers()
    points = cut.cut_points(graph, forward, None)
    assert points
    for point in points:
        divided = cut_graph(graph, (forward[point.position].name,))
        for entry in graph.gradients:
            operator = producers[entry.gradient or ""]
            while operator.target == "aten.t.default":
                stage = divided.stage_of[operator.name]
                operator = producers[operator.inputs[0]]
                assert divided.stage_of[operator.name] == stage


def test_a_gpt_is_cut_between_its_blocks() -> None:
    assert all(first.startswith("blocks.") for first in cut.choose_cut(gpt(), 2, None))
    modules = [first.partition(":")[0] for first in cut.choose_cut(gpt(), 4, None)]
    assert all(module.endswith("attention_norm") or module == "final_norm" for module in modules), modules


@pytest.mark.parametrize("model", GRAPHS)
def test_more_stages_than_places_to_cut(model: str) -> None:
    graph = GRAPHS[model]()
    places = len(cut.cut_points(graph, forward_operators(graph), None))
    layout = mw.Layout(pp=places + 2, microbatches=2)
    with pytest.raises(MeshwrightError) as caught:
        mw.plan(graph, devices=places + 2, layout=layout)
    assert str(caught.value) == (
        f"layout: pp: {places + 2} stages are asked for, but the model can be cut at {places} places only\n"
        f"  -> use pp x chunks of at most {places + 1}"
    )
    assert len(cut.choose_cut(graph, places + 1, None)) == places, "the remedy works"


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        (
            {"schedule": "interleaved", "chunks": 2, "microbatches": 1},
            "schedule interleaved: num_microbatches is 1, too few for 2 ranks",
            "use 2, or any multiple of 2; `1f1b` takes any number",
        ),
        (
            {"schedule": "zb-h1", "microbatches": 1},
            "schedule zb-h1: num_microbatches is 1, too few for 2 ranks",
            "use 2 or more; `1f1b` takes any number",
        ),
        (
            {"schedule": "zb-v", "microbatches": 4},
            "layout: chunks=1 with schedule 'zb-v' and pp=2",
            "give chunks=2: zb-v has two stages on every rank",
        ),
        (
            {"schedule": "dualpipe-v", "chunks": 2, "microbatches": 2},
            "schedule dualpipe-v: num_microbatches is 2, too few for 2 ranks",
            "use 4 or more; `1f1b` takes any number",
        ),
        (
            {"microbatches": 3},
            "batch: a global batch of 8 does not divide over 3 micro-batches",
            "use a batch of 6 or 9, or drop the ragged last batch",
        ),
        (
            {"chunks": 2, "microbatches": 4},
            "layout: chunks=2 with schedule '1f1b' and pp=2",
            "several chunks need pp of 2 or more and schedule='interleaved'",
        ),
    ],
)
def test_micro_batches_that_do_not_fit(options: dict[str, object], problem: str, remedy: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        mw.plan(gpt(), devices=2, layout=mw.Layout(pp=2, **options))  # type: ignore[arg-type]
    assert str(caught.value) == f"{problem}\n  -> {remedy}"


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(MeshwrightError) as caught:
        mw.Layout(pp=2, schedule="zb-h3")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "layout: schedule is 'zb-h3'\n"
        "  -> use 'gpipe' or '1f1b' or 'interleaved' or 'zb-h1' or 'zb-h2' or 'zb-v' or 'dualpipe-v' "
        "or 'message-driven'"
    )
