"""Unlike devices and unequal stages: prices beside programs, plans by hand, and what the search finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_software
from meshwright.cost.closed_form import predict_step
from meshwright.cost.fabric import Fabric
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import step_work
from meshwright.cost.work import Compute, StageWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import load_device
from meshwright.ir.device import Device
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.part import part_of, stage_cluster
from meshwright.ir.program import Program
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.candidates import Space
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.chunked import ChunkedStages
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods
from meshwright.planner.inter_op.stage_homes import StageHomes, with_transfers
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.planner.unlike_stages import UnlikeStages
from meshwright.schedules.pipeline import schedule_of

pytestmark = pytest.mark.usefixtures("without_workers")

FAST = load_device("a100-80gb")
BOX = Level(name="box", fan_out=4, alpha_s=3e-6, beta_s_per_byte=1 / 200e9)
PAIR = msgspec.structs.replace(BOX, fan_out=2)
NETWORK = Level(name="network", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1 / 20e9, links=4)


def scaled(device: Device, factor: float) -> Device:
    """The device with ``factor`` times the speed of arithmetic, memory and launches."""
    kernels = device.kernels
    if kernels is not None:
        kernels = msgspec.structs.replace(
            kernels, launch_s=kernels.launch_s / factor, kernel_s=kernels.kernel_s / factor
        )
    return msgspec.structs.replace(
        device,
        name=f"{device.name} at {factor:g}",
        peak_flops_per_s={dtype: peak * factor for dtype, peak in device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor,
        kernels=kernels,
    )


def boxes(*devices: Device, links: Level = NETWORK, box: Level | None = BOX) -> Cluster:
    """Boxes of equal devices each; without ``box``, single devices."""
    members = tuple(LevelMembers(count=1, device=device, levels=(box,) if box else ()) for device in devices)
    network = msgspec.structs.replace(links, fan_out=len(devices), members=members)
    return Cluster(
        name="boxes", num_devices=(box.fan_out if box else 1) * len(devices), device=devices[0], levels=(network,),
        software=load_software("meshwright"),
    )  # fmt: skip


ALIKE, SLOW_BOX = boxes(FAST, FAST), boxes(FAST, scaled(FAST, 0.5))
CPU = mw.Cluster.load("cpu-local", 8)
BATCH = 16


@cache
def gpt(layers: int = 9, tied: bool = False, width: int = 128) -> Graph:
    config = GPTConfig(layers=layers, width=width, heads=4, vocabulary=512, sequence_length=32, tied_head=tied)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(BATCH, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


@cache
def lowering(tied: bool = False) -> PlanLowering:
    return PlanLowering(gpt(tied=tied))


@cache
def program_of(tied: bool, plan: bytes) -> tuple[Program, ...]:
    """The program of a plan in which no cluster is named: some stages are planned alike for several."""
    return lowering(tied)(decode(plan, mw.Plan, where="the plan"))


# --- prices of unequal stages ----------------------------------------------------------------------------------------

STAGES = [
    mw.Layout(pp=3, stage_sizes=({"dp": 2}, {"dp": 2}, {"dp": 4})),
    mw.Layout(pp=3, stage_sizes=({"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2})),
    mw.Layout(pp=4, stage_sizes=({"dp": 1}, {"dp": 2}, {"tp": 4}, {"dp": 1})),
    mw.Layout(pp=2, stage_sizes=({"dp": 4}, {"dp": 2, "tp": 2}), schedule="zb-v", chunks=2),
    mw.Layout(pp=2, stage_sizes=({"tp": 2}, {"dp": 2}), schedule="interleaved", chunks=3),
]


def priced() -> Iterator[object]:
    """Layouts, clusters and heads. All pairs of them meet."""
    clusters = {"cpu": CPU, "alike": ALIKE, "slow box": SLOW_BOX}
    for number, layout in enumerate(STAGES):
        for index, (name, cluster) in enumerate(clusters.items()):
            for tied in (False, True):
                marks = () if (number + index) % 2 == tied else (pytest.mark.product,)
                head = "tied" if tied else "own head"
                yield pytest.param(layout, cluster, tied, marks=marks, id=f"{head}, {name}, {layout_text(layout)}")


@pytest.mark.parametrize(("layout", "cluster", "tied"), list(priced()))
def test_assembled_unequal_stages_cost_what_the_program_of_the_model_costs(
    layout: mw.Layout, cluster: Cluster, tied: bool
) -> None:
    graph, cluster = gpt(tied=tied), cluster.without_graphs()
    layout = msgspec.structs.replace(layout, microbatches=4)
    mesh, stages = layout.mesh(), layout.pipeline.num_stages
    chain = chain_of(graph, part_of(cluster, range(8)), 8)
    count, lower = len(chain.layers), PlanLowering(chain.graph)
    ranges = [range(number * count // stages, (number + 1) * count // stages) for number in range(stages)]
    prices = [
        LayerPrices(chain, stage_cluster(cluster, mesh, rank), lower, ADAMW, False, 8)
        for rank in range(mesh.num_stages)
    ]
    works = [prices[rank].of(layout.of_stage(rank)) for rank in map(layout.pipeline.rank_of, range(stages))]
    assembled = assemble(works, chain.priced(ranges), layout.pipeline, ADAMW, accumulates=True)
    facts = [[of.facts[layer] for layer in layers] for of, layers in zip(works, chain.priced(ranges), strict=True)]
    assembled = with_transfers(
        assembled, Fabric(cluster, mesh), layout.pipeline,
        [each[-1].up_bytes for each in facts], [each[0].down_bytes for each in facts],
    )  # fmt: skip

    whole = lowering(tied)
    ask = Ask(explains=False, lower=whole, fits_buckets=False, firsts=chain.firsts_of(ranges))
    plan = plan_layout(graph, layout, world_size=layout.num_ranks, cluster=cluster, ask=ask)
    text = encode_json(msgspec.structs.replace(plan, cluster="any", links={}, notes=()))
    real = step_work(program_of(tied, text), plan, cluster, optimizer=ADAMW)
    for stage, real_stage in zip(assembled.stages, real.stages, strict=True):
        assert (stage.sent_up_bytes, stage.sent_down_bytes) == (real_stage.sent_up_bytes, real_stage.sent_down_bytes)
    schedule = schedule_of(plan)
    expected, estimate = (predict_step(work, schedule, plan.mesh, cluster) for work in (real, assembled))
    assert estimate.step_s == pytest.approx(expected.step_s, rel=0.05)
    played = [foretell(whole, plan, cluster, work=work).played.step_s for work in (real, assembled)]
    assert played[1] == pytest.approx(played[0], rel=0.08)
    peaks = [[rank.peak_bytes for rank in peak_memory(work, schedule)] for work in (real, assembled)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


# --- plans by hand on unlike devices ---------------------------------------------------------------------------------


def computing_s(stage: StageWork) -> float:
    every = [*stage.before, *stage.after, *(piece for pieces in stage.pieces.values() for piece in pieces)]
    return sum(piece.seconds for piece in every if isinstance(piece, Compute))


@pytest.mark.parametrize(
    "layout",
    [mw.Layout(dp=4, pp=2, microbatches=4), mw.Layout(pp=2, microbatches=4, stage_sizes=({"tp": 4}, {"dp": 4}))],
    ids=layout_text,
)
def test_a_stage_takes_the_times_of_its_own_devices(layout: mw.Layout) -> None:
    """The same plan: the stage in the slow box computes twice as long, the other one as long as before."""
    graph, lower = gpt(), lowering()
    ask = Ask(explains=False, lower=lower, fits_buckets=False)
    plan = plan_layout(graph, layout, world_size=8, cluster=ALIKE, ask=ask)
    alike, unlike = (step_work(lower(plan), plan, cluster, optimizer=ADAMW) for cluster in (ALIKE, SLOW_BOX))
    first, second = (
        computing_s(slow) / computing_s(fast) for fast, slow in zip(alike.stages, unlike.stages, strict=True)
    )
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(2.0, rel=0.01)
    steps = [foretell(lower, plan, cluster).prediction.step_s for cluster in (ALIKE, SLOW_BOX)]
    assert 1.3 < steps[1] / steps[0] < 2.01


def test_one_stage_over_unlike_devices_waits_for_the_slowest() -> None:
    graph, lower = gpt(), lowering()
    ask = Ask(explains=False, lower=lower, fits_buckets=False)
    plan = plan_layout(graph, mw.Layout(dp=8), world_size=8, cluster=SLOW_BOX, ask=ask)
    slowest = boxes(scaled(FAST, 0.5), scaled(FAST, 0.5))
    steps = [foretell(lower, plan, cluster).prediction.step_s for cluster in (SLOW_BOX, slowest)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_boxes_behind_a_slow_link_send_slowly() -> None:
    graph, lower = gpt(), lowering()
    ask = Ask(explains=False, lower=lower, fits_buckets=False)
    layout = mw.Layout(pp=2, microbatches=4, stage_sizes=({"dp": 4}, {"dp": 2, "tp": 2}))
    slow_link = boxes(FAST, FAST, links=msgspec.structs.replace(NETWORK, beta_s_per_byte=1e-6))
    plan = plan_layout(graph, layout, world_size=8, cluster=slow_link, ask=ask)
    work = step_work(lower(plan), plan, slow_link)
    played = foretell(lower, plan, slow_link).trace().spans
    sends = [span for span in played if span.stream == "communication" and "SEND_F" in span.what and span.rank == 0]
    assert sends
    for span in sends:
        assert span.end_s - span.start_s == pytest.approx(1e-5 + work.stages[0].sent_up_bytes * 1e-6)


def test_memory_is_limited_by_the_device_of_each_stage() -> None:
    graph, lower = gpt(), lowering()
    small = msgspec.structs.replace(FAST, memory_bytes=10**7)
    layout = mw.Layout(dp=4, pp=2, microbatches=4)
    ask = Ask(explains=False, lower=lower, fits_buckets=False)
    plan = plan_layout(graph, layout, world_size=8, cluster=ALIKE, ask=ask)
    foretold = foretell(lower, plan, boxes(FAST, small))
    assert foretold.device_bytes == (FAST.memory_bytes, 10**7)
    fullest, limit = foretold.fullest()
    assert (fullest.rank, limit) == (1, 10**7)
    assert foretold.fits() is (fullest.peak_bytes <= 10**7)
    assert foretell(lower, plan, ALIKE).fits()
    assert not foretell(lower, plan, ALIKE).fits(10**6)


# --- the search ------------------------------------------------------------------------------------------------------


@cache
def large() -> Graph:
    config = GPTConfig(layers=8, width=1024, heads=8, vocabulary=1024, sequence_length=512, tied_head=False)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(64, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def layers_of(plan: mw.Plan, graph: Graph, ranks: range) -> int:
    """The number of blocks that the stages on these ranks hold."""
    held = 0
    for index, stage in enumerate(plan.stages):
        if plan.mesh.stage_ranks(plan.pipeline.rank_of(index)).start in ranks:
            held += len({name.split(".")[1] for name in stage.storage if name.startswith("blocks.")})
    return held


@cache
def at_half_speed(box: Level | None) -> mw.Plan:
    """The plan for the same number of devices, all at the speed of the slowest."""
    slow = scaled(FAST, 0.5)
    cluster = boxes(slow, slow, box=box)
    return mw.plan(large(), cluster, devices=cluster.num_devices)


@pytest.mark.parametrize("slow_first", [False, pytest.param(True, marks=pytest.mark.product)])
@pytest.mark.parametrize("box", [None, pytest.param(PAIR, marks=pytest.mark.product)], ids=["single", "pairs"])
def test_the_search_gives_the_faster_box_more_layers(box: Level | None, slow_first: bool) -> None:
    graph = large()
    devices = [FAST, scaled(FAST, 0.5)]
    cluster = boxes(*(reversed(devices) if slow_first else devices), box=box)
    each = cluster.num_devices // 2
    plan = mw.plan(graph, cluster, devices=2 * each)
    lower = PlanLowering(graph)
    assert plan.prediction is not None
    assert foretell(lower, plan, cluster).prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
    fast, slow = (range(each, 2 * each), range(each)) if slow_first else (range(each), range(each, 2 * each))
    assert layers_of(plan, graph, fast) > layers_of(plan, graph, slow) > 0
    uniform = at_half_speed(box).prediction
    assert uniform is not None
    assert plan.prediction.step_s < 0.9 * uniform.step_s


@pytest.mark.parametrize("box", [None, pytest.param(PAIR, marks=pytest.mark.product)], ids=["single", "pairs"])
def test_a_search_on_equal_boxes_that_are_given_as_members_finds_what_it_finds_without(box: Level | None) -> None:
    graph, members = gpt(6), boxes(FAST, FAST, box=box)
    levels = (box, NETWORK) if box else (NETWORK,)
    plain = Cluster(name="plain", num_devices=members.num_devices, device=FAST, levels=levels)
    member_plan, plain_plan = (mw.plan(graph, cluster, devices=cluster.num_devices) for cluster in (members, plain))
    assert member_plan.prediction is not None
    assert plain_plan.prediction is not None
    # cuts are searched before phases become graphs
    assert member_plan.prediction.step_s <= plain_plan.prediction.step_s * 1.03


def test_equal_stages_are_cut_for_the_devices_where_they_lie() -> None:
    """The search estimates as if both boxes were slow. Cut anew, plans of the whole model take less time, also under
    schedules with two chunks for each rank, and as long as is estimated."""
    graph, clock = gpt(width=512), TimeLimit(None, lambda what: None)
    cluster = boxes(FAST, scaled(FAST, 0.5), box=PAIR)
    space = Space(schedules=("1f1b", "zb-v"), holds=lambda shape: shape.pp == 2 and shape.tp == 1)
    search = Search(graph, 4, cluster, PlanLowering, ADAMW, False, math.inf, "both", False, clock, space=space)
    search.run()
    before = {option.name: option for option in search.options}
    unlike = UnlikeStages(cluster, 4, search.lighter, search.of_chain, search.most_tp, "both", None, clock)
    fastest = sorted(search.options, key=lambda option: option.step_s)
    ratios: dict[str, list[float]] = {"1f1b": [], "zb-v": []}
    for option in unlike._cut_for_devices(fastest):
        old = before.get(option.name)
        if old is not None and old.firsts != option.firsts:
            seconds = [search.model.planned(each, explains=False)[1].played.step_s for each in (old, option)]
            assert option.step_s == pytest.approx(seconds[1], rel=0.1)
            ratios[option.layout.schedule].append(seconds[1] / seconds[0])
    assert all(each and max(each) < 1 for each in ratios.values()), ratios
    assert min(ratios["1f1b"]) < 0.92


# --- several chunks for each rank ------------------------------------------------------------------------------------


def pairs_at_two_speeds() -> tuple[Cluster, Graph]:
    """Two fast and two slow devices, and a model of twelve blocks."""
    config = GPTConfig(layers=12, width=1024, heads=8, vocabulary=1024, sequence_length=512, tied_head=False)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(BATCH, config.sequence_length, dtype=torch.int64)
    graph = mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})
    return boxes(FAST, scaled(FAST, 0.5), box=PAIR).without_graphs(), graph


def test_unequal_stages_with_two_chunks_for_each_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, graph = pairs_at_two_speeds()
    space = Space(
        schedules=("zb-h2", "zb-v"), recompute=("none",), zero=(0,), fewest=4, holds=lambda shape: shape.pp == 2
    )
    clock = TimeLimit(None, lambda what: None)
    search = Search(graph, 4, cluster, PlanLowering, ADAMW, False, math.inf, "both", False, clock, space=space)
    search.run()
    plan = search.best()
    assert plan.layout.stage_sizes
    assert (plan.layout.schedule, plan.layout.chunks) == ("zb-v", 2)
    monkeypatch.setattr(ChunkedStages, "options", lambda self, fastest: [])
    without = search.best()
    assert plan.prediction is not None
    assert without.prediction is not None
    assert plan.prediction.step_s < 0.99 * without.prediction.step_s


def chunked_on(cluster: Cluster, memory_bytes: float, clock: TimeLimit) -> ChunkedStages:
    ranks = cluster.num_devices
    slowest = part_of(cluster, range(ranks))
    chain = chain_of(gpt(), slowest, ranks)
    prices = LayerPrices(chain, slowest, lower := PlanLowering(chain.graph), ADAMW, False, ranks)
    homes = StageHomes(cluster, ranks, Pipelines(prices, memory_bytes), lower, memory_bytes)
    return ChunkedStages(homes, BATCH, Space(), clock)


V_OF_TWO = mw.Layout(pp=2, stage_sizes=({"dp": 2}, {"tp": 2}), microbatches=4, schedule="zb-v", chunks=2)
IN_A_CIRCLE = msgspec.structs.replace(V_OF_TWO, schedule="interleaved")
TWO_SPEEDS = boxes(FAST, scaled(FAST, 0.5), box=PAIR)


@pytest.mark.parametrize("layout", [V_OF_TWO, IN_A_CIRCLE], ids=layout_text)
def test_borders_are_moved_until_the_step_is_nearly_the_shortest_of_all_cuts(layout: mw.Layout) -> None:
    chunked = chunked_on(TWO_SPEEDS, math.inf, TimeLimit(None, lambda what: None))
    even = chunked._placed(layout, math.inf)
    assert even is not None
    placed = chunked._improved(even)
    count, steps = len(chunked.homes.of_all.chain.layers), []
    for cut in itertools.combinations(range(1, count), 3):
        stages = [range(first, end) for first, end in itertools.pairwise([0, *cut, count])]
        other = chunked.homes.placed(layout, stages, placed.recompute)
        assert other is not None
        steps.append(other.step_s)
    assert placed.step_s <= even.step_s
    assert placed.step_s < 1.02 * min(steps)
    assert chunked._placed(layout, 0.5 * min(steps)) is None, "a rank is busy for longer"


def test_both_chunks_of_a_rank_recompute_where_memory_is_short() -> None:
    clock = TimeLimit(None, lambda what: None)
    roomy = chunked_on(TWO_SPEEDS, math.inf, clock)._placed(V_OF_TWO, math.inf)
    assert roomy is not None
    full = max(rank.peak_bytes for rank in peak_memory(roomy.work, periods(V_OF_TWO)[0]))
    chunked = chunked_on(TWO_SPEEDS, full - 1, clock)
    placed = chunked.homes.lightest(V_OF_TWO, roomy.stages)
    assert placed is not None
    assert set(placed.recompute) != {"none"}
    least = chunked_on(TWO_SPEEDS, 1.0, clock)
    assert least.homes.lightest(V_OF_TWO, roomy.stages) is None


def test_no_chunks_are_simulated_when_time_is_over_or_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    over = chunked_on(TWO_SPEEDS, math.inf, TimeLimit(None, lambda what: None, lambda: True))
    assert over._placed(V_OF_TWO, math.inf) is None
    chunked = chunked_on(TWO_SPEEDS, math.inf, TimeLimit(None, lambda what: None))
    even = chunked._placed(V_OF_TWO, math.inf)
    assert even is not None
    monkeypatch.setattr("meshwright.planner.inter_op.chunked.MOST_SIMULATED", 1)
    assert chunked._improved(even) is even
