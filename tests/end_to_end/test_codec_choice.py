"""The planner's choice of codecs: never slower than none, none where nothing is gained; what the plan says of it."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

import meshwright as mw
from benchmarks.enumeration import every_layout
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import ADAMW
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.cluster import Cluster, CodecTiming
from meshwright.ir.codec import CANDIDATES, codec_of
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Coding, Plan
from meshwright.ir.plan_check import check_fits
from meshwright.ir.run import RunLayout
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.planner.codecs import GAIN, BucketCodecs
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import REFUSALS
from meshwright.planner.inter_op.pipelines import ALIKE, Pipelines


@cache
def graph() -> Graph:
    config = GPTConfig(layers=2, width=128, heads=4, vocabulary=512, sequence_length=64)
    with torch.device("meta"):
        model = GPT(config)
    words = torch.zeros(16, 64, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": words, "targets": words})


def boxes(beta: float) -> Cluster:
    """Boxes of two CPU ranks, joined by a network of this many seconds per byte."""
    here = load_cluster("cpu-local")
    inner = msgspec.structs.replace(here.levels[0], name="box", fan_out=2)
    network = msgspec.structs.replace(inner, name="network", fan_out=2, alpha_s=1e-4, beta_s_per_byte=beta)
    return msgspec.structs.replace(here, name="boxes", num_devices=4, levels=(inner, network), collectives=())


def planned(cluster: Cluster, codec: str, **sizes: Any) -> Plan:
    return mw.plan(graph(), cluster, layout=mw.Layout(dp=4, codec=codec, **sizes))


def codecs_of(plan: Plan) -> set[str]:
    return {coding.codec for bucket in plan.buckets for coding in bucket.codings}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("gbit", [0.1, 1.0, 10.0, 100.0])
def test_auto_is_never_predicted_slower_than_no_codec(gbit: float, zero: int) -> None:
    cluster = boxes(8e-9 / gbit)
    dense, auto = (planned(cluster, codec, zero=zero) for codec in ("", "auto"))
    seconds = [foretell(PlanLowering(graph()), plan, cluster).prediction.step_s for plan in (dense, auto)]
    assert seconds[1] <= seconds[0] * 1.001, (codecs_of(auto), auto.explain())
    if gbit == 0.1:
        assert seconds[1] < 0.6 * seconds[0]
        assert codecs_of(auto)


def test_auto_declines_in_shared_memory_and_says_so() -> None:
    plan = planned(load_cluster("cpu-local"), "auto")
    assert not codecs_of(plan)
    assert "no codec" in plan.explain()


def test_auto_says_what_rates_it_assumed() -> None:
    cluster = boxes(8e-9)
    bandwidth = cluster.device.memory_bandwidth_bytes_per_s
    words = planned(cluster, "auto").explain()
    assert f"qsgd(4) {bandwidth / 4 / 1e9:.3g} and {bandwidth / 2 / 1e9:.3g} GB/s" in words
    assert "`meshwright calibrate` has not measured" in words
    known = planned(with_rates(cluster, **dict.fromkeys(CANDIDATES, 1e-10)), "auto").explain()
    assert "assumed" not in known
    assert "assumed" not in planned(cluster, "qsgd(4)").explain()
    assert "assumed" not in planned(cluster, "").explain()


def test_auto_says_why_nothing_is_chosen() -> None:
    unknown = plan_layout(graph(), mw.Layout(dp=4, codec="auto"), world_size=4)
    assert not codecs_of(unknown)
    assert "without a cluster" in unknown.explain()
    unlike = mw.Layout(pp=2, microbatches=2, codec="auto", stage_sizes=({"dp": 2}, {"dp": 1}))
    assert "planned one by one" in mw.plan(graph(), boxes(8e-9), devices=3, layout=unlike).explain()


def test_auto_takes_no_codec_whose_memory_does_not_fit() -> None:
    cluster = boxes(8e-8)
    dense = foretell(PlanLowering(graph()), planned(cluster, ""), cluster).prediction.peak_memory_bytes
    parameters = sum(graph().tensors[name].num_bytes for name in graph().parameters)
    roomy, tight = (
        mw.plan(graph(), cluster, layout=mw.Layout(dp=4, codec="auto"), memory_bytes=room)
        for room in (4 * dense, dense + parameters)
    )
    assert any(codec_of(text).feedback for text in codecs_of(roomy)), "a residual is worth its memory"
    assert codecs_of(tight)
    assert not any(codec_of(text).feedback for text in codecs_of(tight))


def test_the_plan_says_what_is_coded_and_is_read_again() -> None:
    plan = planned(boxes(8e-9), "qsgd(4)")
    assert "over dp coded with qsgd(4) (star+" in plan.explain(), "plain inside a box, coded between boxes"
    assert decode(encode_json(plan), Plan, where="plan") == plan
    check_fits(plan, graph())


def test_codings_of_edited_plans_are_checked() -> None:
    plan = planned(boxes(8e-9), "qsgd(4)")
    (first, *rest) = plan.buckets

    def with_coding(coding: Coding) -> Plan:
        return msgspec.structs.replace(plan, buckets=(msgspec.structs.replace(first, codings=(coding,)), *rest))

    for coding, words in (
        (Coding("tp", "qsgd(4)", "ring"), "'tp', which it does not cross"),
        (Coding("dp", "qsgd(4)", "native"), "own collectives"),
        (Coding("dp", "qsgd(5)", "ring"), "5 bits"),
    ):
        with pytest.raises(PlanError, match=words):
            check_fits(with_coding(coding), graph())
    for coding, words in (
        (Coding("dp", "qsgd(4)", "butterfly"), "same sum"),
        (Coding("dp", "qsgd(4)", "nonsense"), "nonsense"),
    ):
        with pytest.raises(ScheduleError, match=words):
            PlanLowering(graph())(with_coding(coding))


@pytest.mark.parametrize("codec", ["qsgd(4)", "topk(1%)", "powersgd(2)", "onebit"])
def test_memory_counts_what_codecs_keep(codec: str) -> None:
    cluster = boxes(8e-9)
    dense, coded = (planned(cluster, text, microbatches=2) for text in ("", codec))
    peaks = [foretell(PlanLowering(graph()), plan, cluster).prediction.peak_memory_bytes for plan in (dense, coded)]
    parameters = sum(graph().tensors[name].num_bytes for name in graph().parameters)
    kept = 2 * parameters if codec_of(codec).feedback else 0  # before and after a step that may be skipped
    assert kept <= peaks[1] - peaks[0] <= 1.5 * kept + 2**16


# --- beside the layout -----------------------------------------------------------------------------------------------


@cache
def mlp() -> Graph:
    with torch.device("meta"):
        model = MLP((256, 256, 256, 256, 16))
    batch = {"inputs": torch.zeros(1024, 256), "label": torch.zeros(1024, dtype=torch.int64)}
    return mw.capture(model, classification_loss, batch)


def wire(gbit: float) -> Cluster:
    """Two CPU ranks, each in a box of its own."""
    here = load_cluster("cpu-local")
    network = msgspec.structs.replace(
        here.levels[0], name="network", fan_out=2, alpha_s=1e-4, beta_s_per_byte=8e-9 / gbit
    )
    return msgspec.structs.replace(here, name="wire", num_devices=2, levels=(network,), collectives=())


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.product)])
def test_no_layout_with_any_codec_is_faster_than_what_the_search_finds(every: bool) -> None:
    """All layouts of two ranks, each with every codec; or those that compute nothing again, and each codec with plain
    data parallelism. Without codecs, data parallelism is not the fastest."""
    graph, cluster = mlp(), wire(0.1)
    lower = PlanLowering(graph)
    ask = Ask(explains=False, lower=lower)
    seconds: dict[tuple[str, str], float] = {}
    for layout in every_layout(graph, 2):
        if not (every or (layout.recompute == "none" and layout.schedule == "1f1b" and layout.microbatches < 4)):
            continue
        for codec in ("", *CANDIDATES) if layout.dp > 1 and (every or not layout.zero) else ("",):
            asked = msgspec.structs.replace(layout, codec=codec)
            with suppress(*REFUSALS):
                plan = plan_layout(graph, asked, world_size=2, cluster=cluster, ask=ask)
                seconds[layout_text(layout), codec] = foretell(lower, plan, cluster).played.step_s
    dense, auto = (mw.plan(graph, cluster, devices=2, codec=codec, fresh=True) for codec in ("", "auto"))
    assert dense.layout.dp == 1
    assert auto.layout.dp == 2
    assert codecs_of(auto)
    assert dense.prediction is not None
    assert auto.prediction is not None
    assert auto.prediction.step_s <= (1 + ALIKE) * min(seconds.values()), min(seconds, key=seconds.__getitem__)
    assert dense.prediction.step_s <= (1 + ALIKE) * min(s for (_, codec), s in seconds.items() if not codec)
    assert auto.prediction.step_s < 0.7 * dense.prediction.step_s


@pytest.mark.parametrize("microbatches", [1, 2])
def test_bounds_of_layouts_with_codecs_are_bounds(microbatches: int) -> None:
    graph, cluster = mlp(), wire(0.1)
    lower = PlanLowering(graph)
    prices = LayerPrices(chain_of(graph, cluster, 2), cluster, lower, ADAMW, False, 2, codec="auto")
    pipelines, layout = Pipelines(prices, math.inf), mw.Layout(dp=2, microbatches=microbatches)
    bound_s = pipelines.bound_s(layout)
    estimated_s = pipelines.option(layout, ("none",)).step_s
    planned = plan_layout(
        graph, msgspec.structs.replace(layout, codec="auto"), world_size=2, cluster=cluster, ask=Ask(lower=lower)
    )
    real_s = foretell(lower, planned, cluster).played.step_s
    assert bound_s <= min(estimated_s, real_s)
    assert estimated_s == pytest.approx(real_s, rel=0.1)


def test_a_search_weighs_all_codecs_or_none() -> None:
    with pytest.raises(LayoutError, match="compares all codecs"):
        mw.plan(mlp(), wire(1.0), codec="qsgd(4)")
    with pytest.raises(LayoutError, match="together with a plan or layout"):
        mw.plan(mlp(), wire(1.0), codec="auto", layout=mw.Layout(dp=2))
    assert RunLayout(plan="auto", codec="auto").searched
    assert not RunLayout(plan="auto", codec="qsgd(4)").searched


# --- bucket by bucket, and exact codecs ------------------------------------------------------------------------------


def with_rates(cluster: Cluster, **seconds_per_byte: float) -> Cluster:
    """The cluster, on which codecs are measured to encode and to decode a byte in so many seconds."""
    rows = (
        CodecTiming(codec=text, encode_s_per_byte=seconds, decode_s_per_byte=seconds)
        for text, seconds in seconds_per_byte.items()
    )
    return msgspec.structs.replace(cluster, codecs=tuple(rows))


def test_buckets_choose_their_codecs_as_brute_force_does() -> None:
    """Gradients that tp splits, and those that it does not, have buckets of their own: the small one stays dense."""
    cluster, lower = boxes(8e-9), PlanLowering(graph())
    plan = mw.plan(graph(), cluster, layout=mw.Layout(dp=2, tp=2, codec="auto"))
    small, *_, large = sorted(plan.buckets, key=lambda bucket: bucket.num_bytes)
    assert not small.codings
    assert large.codings
    assert f"in {sum(bool(bucket.codings) for bucket in plan.buckets)} of {len(plan.buckets)} buckets" in plan.explain()
    codecs = BucketCodecs(plan.mesh, cluster)
    bare = [msgspec.structs.replace(bucket, codings=()) for bucket in plan.buckets]
    seconds = {}
    for texts in itertools.product(("", "bf16", "qsgd(4)", "topk(1%)", "topk(1%)+qsgd(4)"), repeat=len(bare)):
        buckets = tuple(codecs.reduced(bucket, text, cut=False) for bucket, text in zip(bare, texts, strict=True))
        assigned = msgspec.structs.replace(plan, buckets=buckets)
        seconds[texts] = foretell(lower, assigned, cluster).played.step_s
    least, found_s = min(seconds.values()), foretell(lower, plan, cluster).played.step_s
    assert len(seconds) >= 25
    assert found_s <= (1 + GAIN) * least, seconds


def test_lossless_needs_no_leave_but_measured_rates_and_a_gain() -> None:
    slow, fast = boxes(8e-8), boxes(8e-10)
    for cluster, codec, taken in (
        (with_rates(slow, lossless=1e-9), "", {"lossless"}),
        (with_rates(slow, lossless=1e-6), "", set()),
        (with_rates(fast, lossless=1e-9), "", set()),
        (with_rates(load_cluster("cpu-local"), lossless=1e-9), "", set()),
        (with_rates(slow, bf16=1e-10), "", set()),
        (slow, "", set()),
        (with_rates(slow, lossless=1e-9), "none", set()),
    ):
        plan = planned(cluster, codec)
        assert codecs_of(plan) == taken
        assert plan.layout.codec == codec
        if not taken:
            assert plan.notes == planned(msgspec.structs.replace(cluster, codecs=()), "").notes
        check_fits(plan, graph())
    plan = planned(with_rates(slow, lossless=1e-9), "")
    assert "no codec" in plan.explain(), "the plan says what computing would wait without"


def test_auto_gathers_factors_where_that_is_faster() -> None:
    with torch.device("meta"):
        model = MLP((256, 256, 256, 256, 16))
    batch = {"inputs": torch.zeros(8, 256), "label": torch.zeros(8, dtype=torch.int64)}
    small = mw.capture(model, classification_loss, batch)
    slow_codecs = with_rates(wire(0.1), **dict.fromkeys(CANDIDATES, 1e-6))
    plans = {
        codec: mw.plan(small, slow_codecs, layout=mw.Layout(dp=2, codec=codec)) for codec in ("", "factors", "auto")
    }
    lower = PlanLowering(small)
    seconds = {codec: foretell(lower, plan, slow_codecs).played.step_s for codec, plan in plans.items()}
    assert "ranks gather the operands" in plans["auto"].explain()
    assert seconds["auto"] == pytest.approx(seconds["factors"], rel=0.01)
    assert seconds["auto"] < 0.5 * seconds[""]
    twice = mw.plan(small, slow_codecs, layout=mw.Layout(dp=2, codec="auto", microbatches=2))
    assert "ranks gather the operands" not in twice.explain(), (
        "a rank's rows of several micro-batches are no neighbours"
    )
