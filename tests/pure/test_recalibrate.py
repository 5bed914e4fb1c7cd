"""Factors of computing and communication: a run that took k times as long gives k, and levels are slowed by it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.cost.recalibrate import MOST, Corrections, factors, with_slower_levels
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.device import Device, Kernels
from meshwright.ir.ledger import Ledger, RankEntry
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.summary import RankTimes

CORE = Device(
    name="core", kind="cpu", memory_bytes=2**32, memory_bandwidth_bytes_per_s=1e10, peak_flops_per_s={"float32": 1e11},
    efficiency={"matmul": ((1e6, 0.2), (1e9, 0.8)), "pointwise": ((1e3, 0.1),)},
    kernels=Kernels(processors=1, kernel_s=3e-6, launch_s=1e-5),
)  # fmt: skip
CLUSTER = Cluster(
    name="two-boxes",
    num_devices=4,
    source="measured",
    device=CORE,
    levels=(
        Level(name="box", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-10),
        Level(name="rack", fan_out=2, alpha_s=5e-5, beta_s_per_byte=1e-9),
    ),
    collectives=tuple(
        CollectiveTiming(operation="all_reduce", algorithm="native", level=level, ranks=2, bytes=1024, time_s=1e-3)
        for level in ("box", "rack")
    ),
)


def times(rank: int, compute_s: float, exposed_s: float, hidden_s: float, bubble_s: float) -> RankTimes:
    return RankTimes(
        rank=rank, step_s=compute_s + exposed_s + bubble_s, compute_s=compute_s, exposed_s=exposed_s,
        hidden_s=hidden_s, bubble_s=bubble_s, peak_bytes=0,
    )  # fmt: skip


def ledger(*ranks: tuple[RankTimes, RankTimes], levels: tuple[str, ...] = ("box",)) -> Ledger:
    return Ledger(
        model="GPT", layout="dp2", cluster="two-boxes", plan="0" * 16, levels=levels, predicted_by="simulated",
        measured_by="measured", num_steps=5,
        ranks=tuple(RankEntry(rank=a.rank, stage=0, predicted=a, measured=b) for a, b in ranks),
    )  # fmt: skip


PARTS = st.tuples(st.floats(1.0, 9.0), st.floats(0.5, 9.0), st.floats(0.0, 9.0), st.floats(0.0, 9.0))
FACTORS = st.floats(1.01 / MOST, 0.99 * MOST)


@given(st.lists(PARTS, min_size=1, max_size=4), FACTORS)
def test_a_run_that_takes_k_times_as_long_gives_k(parts: list[tuple[float, float, float, float]], k: float) -> None:
    pairs = [(times(rank, *part), times(rank, *(k * seconds for seconds in part))) for rank, part in enumerate(parts)]
    corrections = factors(ledger(*pairs))
    assert (corrections.compute, corrections.communication) == pytest.approx((k, k))


@given(st.floats(1.0, 9.0), st.floats(1.0, 9.0), st.floats(0.0, 4.0), st.floats(0.8, 1.2), st.floats(1.2, 4.0))
def test_computing_and_communication_are_told_apart(
    compute_s: float, exposed_s: float, hidden_s: float, k: float, slower: float
) -> None:
    """Communication that takes longer shows for what computing, at its own factor, does not hide."""
    hidden_s = min(hidden_s, compute_s)
    shows_s = slower * (exposed_s + hidden_s) - k * hidden_s
    corrections = factors(
        ledger((times(0, compute_s, exposed_s, hidden_s, 0.0), times(0, k * compute_s, shows_s, hidden_s, 0.0)))
    )
    assert (corrections.compute, corrections.communication) == pytest.approx((k, slower))


def test_waiting_for_a_rank_that_comes_late_is_no_communication() -> None:
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    late = msgspec.structs.replace(before, rank=1)
    corrections = factors(ledger((before, times(0, 8.0, 6.0, 0.0, 0.0)), (late, times(1, 12.0, 2.0, 0.0, 0.0))))
    assert corrections == Corrections(compute=1.25, communication=1.0)


def test_what_is_too_little_to_tell_from_changes_nothing() -> None:
    corrections = factors(ledger((times(0, 8.0, 0.0, 1.0, 0.0), times(0, 8.0, 3.0, 0.0, 0.0))))
    assert corrections == Corrections(compute=1.0, communication=None)


def test_a_slower_level_slows_its_links_and_its_measured_collectives() -> None:
    slower = with_slower_levels(CLUSTER, {"box": 3.0})
    for num_bytes in (100, 10**6):
        expected = 3 * Network(CLUSTER).collective_s("all_reduce", num_bytes, Group(2))
        assert Network(slower).collective_s("all_reduce", num_bytes, Group(2)) == pytest.approx(expected)
    assert [row.time_s for row in slower.collectives] == [pytest.approx(3e-3), 1e-3]
    assert (slower.levels[1], slower.device) == (CLUSTER.levels[1], CLUSTER.device)
    assert with_slower_levels(CLUSTER, {"box": 1.0}) == CLUSTER


def test_levels_of_members_are_slowed_too() -> None:
    inner = Level(name="box", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-10)
    members = (LevelMembers(levels=(inner,)), LevelMembers(device=CORE, levels=(inner,)))
    unlike = Cluster(
        name="two-boxes", num_devices=4, device=CORE,
        levels=(Level(name="rack", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-10, members=members),),
    )  # fmt: skip
    slower = with_slower_levels(unlike, {"box": 2.0})
    assert slower.levels[0].alpha_s == 1e-5
    assert [member.levels[0].alpha_s for member in slower.levels[0].members] == [2e-5, 2e-5]


def test_what_no_constant_explains_is_refused() -> None:
    same = times(0, 8.0, 2.0, 0.0, 0.0)
    with pytest.raises(
        ClusterError, match=r"cluster two-boxes: computing took 10 times as long as predicted, which no"
    ):
        factors(ledger((same, times(0, 80.0, 2.0, 0.0, 0.0))))
