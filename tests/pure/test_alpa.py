"""The evaluation of Alpa as data: its table, its count of FLOPs, its search spaces, and how predictions are judged."""

import pytest

from meshwright.ir.layout import Layout
from meshwright.worked.alpa import (
    KINDS,
    PAIRS,
    AlpaPair,
    Compared,
    Family,
    Kind,
    PlannerResult,
    Published,
    Sizes,
    best_of,
    factors_of,
    lines_of,
    pairs_of,
    space_of,
    summary_of,
)


def compared(predicted: dict[Kind, float], published: Published, devices: int = 8) -> Compared:
    """A pair whose predicted throughputs are given; planners that are left out find nothing."""
    pair = AlpaPair("gpt", "tiny", Sizes(2, 64, 2), devices, published)
    each = pair.flops / devices / 1e12
    results = {
        kind: PlannerResult(layout="dp8", step_s=each / predicted[kind])
        if kind in predicted
        else PlannerResult(problem="too large")
        for kind in KINDS
    }
    return Compared(pair, results)


def test_the_table_has_84_runs_of_which_7_were_out_of_memory() -> None:
    assert len(PAIRS) == 21
    assert [len(pairs_of(family)) for family in ("gpt", "moe", "wresnet")] == [7, 7, 7]
    lost = [(pair.name, kind) for pair in PAIRS for kind, rate in zip(KINDS, pair.published, strict=True) if not rate]
    assert lost == [
        ("27B", "inter"), ("70B", "manual"), ("70B", "inter"), ("6.8B", "manual"), ("6.8B", "inter"),
        ("13B", "manual"), ("13B", "inter"),
    ]  # fmt: skip
    assert [pair.devices for pair in pairs_of("moe")] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("place", "tflops", "step_s"),
    [
        (0, 46.2003, 71.0564),
        (4, 59.6848, 60.3089),
        (10, 39.7964, 15.6869),
        (14, 8.3738, 44.0269),
        (18, 4.7175, 77.7287),
    ],
)
def test_flops_are_the_published_throughput_times_the_published_time(place: int, tflops: float, step_s: float) -> None:
    pair = PAIRS[place]
    assert pair.flops == pytest.approx(tflops * 1e12 * pair.devices * step_s, rel=1.5e-3)


def test_spaces_are_those_of_the_systems() -> None:
    def taken(family: Family, kind: Kind, layout: Layout) -> bool:
        only, space = space_of(family, kind)
        return space.has(layout, only)

    assert taken("gpt", "manual", Layout(dp=2, tp=2, pp=2))
    assert not taken("moe", "manual", Layout(dp=2, tp=2))
    assert not taken("moe", "manual", Layout(dp=2, pp=2))
    assert taken("moe", "manual", Layout(dp=4, ep=4))
    assert taken("wresnet", "manual", Layout(dp=2, pp=2))
    assert not taken("wresnet", "manual", Layout(tp=2, pp=2))
    assert not taken("gpt", "intra", Layout(dp=2, pp=2))
    families: tuple[Family, ...] = ("gpt", "moe")
    for family in families:
        for kind in KINDS:
            assert space_of(family, kind)[1].recompute == ("full",)
            assert space_of(family, kind)[1].schedules == ("1f1b",)
    assert space_of("wresnet", "both")[1].batch_statistics == "microbatch"


def test_nearly_equal_throughputs_share_the_first_place() -> None:
    rates: dict[Kind, float | None] = {"manual": 50.0, "intra": 48.9, "inter": None, "both": 40.0}
    assert best_of(rates, 0.02) == {"manual"}
    assert best_of(rates, 0.03) == {"manual", "intra"}
    assert best_of({"manual": None}, 0.5) == set()


def test_a_winner_is_right_if_it_was_measured_as_the_fastest() -> None:
    rates: dict[Kind, float] = {"manual": 50.0, "intra": 60.0, "inter": 40.0, "both": 60.5}
    assert compared(rates, (50.0, 61.0, 40.0, 55.0)).winner_is_right
    assert not compared(rates, (70.0, 61.0, 40.0, 55.0)).winner_is_right
    assert not compared({"manual": 50.0, "both": 60.0}, (50.0, 61.0, 40.0, 50.0)).winner_is_right


def test_the_summary_counts_errors_memory_winners_and_order() -> None:
    small = compared({"manual": 50.0, "intra": 60.0, "inter": 40.0, "both": 60.0}, (40.0, 50.0, 40.0, 50.0))
    large = compared({"manual": 55.0, "inter": 33.0, "both": 66.0}, (50.0, None, None, 60.0), devices=16)
    summary = summary_of([small, large])
    # errors: 25, 20, 0, 20 %, and 10, 10 % (nothing is known of inter, which was out of memory)
    assert summary.median == pytest.approx(0.15)
    assert summary.one_box == pytest.approx(0.2)
    assert factors_of([small]) == {"gpt": pytest.approx(1 / 1.2)}
    assert summary.scaled == pytest.approx(1 - 1.1 / 1.2)
    assert (summary.memory, summary.runs, summary.winners) == (7, 8, 2)
    # of small: manual-intra, manual-both, intra-inter, inter-both; manual-inter and intra-both are equal
    assert (summary.ordered, summary.orders) == (4 + 5, 4 + 5)
    assert summary.joint_ratio == pytest.approx(1.0)


def test_a_joint_plan_below_another_is_told() -> None:
    worse = compared({"manual": 50.0, "intra": 60.0, "inter": 40.0, "both": 54.0}, (50.0, 60.0, 40.0, 60.0))
    assert summary_of([worse]).joint_ratio == pytest.approx(0.9)
    joint = next(line for line in lines_of([worse]) if "joint" in line.claim)
    assert (joint.verdict, joint.ours) == ("claim wrong", "at least 0.900 times the better")


def test_lines_show_predicted_beside_published() -> None:
    result = compared({"manual": 50.0, "intra": 60.0, "both": 60.0}, (40.0, 50.0, None, 51.0))
    first, *_ = lines_of([result])
    assert first.claim == "GPT tiny on 8 V100: intra = both fastest"
    assert first.ours == "manual 50 (40), intra 60 (50), inter out of memory (out of memory), both 60 (51)"
    assert first.verdict == "agrees"
    assert "manual: dp8" in first.why
    assert "inter: too large" in first.why
