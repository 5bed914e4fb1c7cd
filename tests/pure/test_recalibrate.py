"""Recalibration: a run that took k times as long corrects the constants by k, and nothing else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.cost.kernels import Rates
from meshwright.cost.recalibrate import MOST, Corrections, factors, recalibrate
from meshwright.errors import ClusterError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster, CollectiveTiming, Level, Member
from meshwright.ir.device import Device, Kernels
from meshwright.ir.ledger import Ledger, RankEntry
from meshwright.ir.software import Software
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
    pairs = [(times(rank, *one), times(rank, *(k * seconds for seconds in one))) for rank, one in enumerate(parts)]
    found = factors(ledger(*pairs))
    assert (found.compute, found.communication) == pytest.approx((k, k))


@given(st.floats(1.0, 9.0), st.floats(1.0, 9.0), st.floats(0.0, 4.0), st.floats(0.8, 1.2), st.floats(1.2, 4.0))
def test_computing_and_communication_are_told_apart(
    compute_s: float, exposed_s: float, hidden_s: float, k: float, slower: float
) -> None:
    """Communication that takes longer shows for what computing, at its own factor, does not hide."""
    hidden_s = min(hidden_s, compute_s)
    shows_s = slower * (exposed_s + hidden_s) - k * hidden_s
    found = factors(
        ledger((times(0, compute_s, exposed_s, hidden_s, 0.0), times(0, k * compute_s, shows_s, hidden_s, 0.0)))
    )
    assert (found.compute, found.communication) == pytest.approx((k, slower))


def test_waiting_for_a_rank_that_comes_late_is_no_communication() -> None:
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    late = msgspec.structs.replace(before, rank=1)
    found = factors(ledger((before, times(0, 8.0, 6.0, 0.0, 0.0)), (late, times(1, 12.0, 2.0, 0.0, 0.0))))
    assert found == Corrections(compute=1.25, communication=1.0)


def test_what_is_too_little_to_tell_from_changes_nothing() -> None:
    found = factors(ledger((times(0, 8.0, 0.0, 1.0, 0.0), times(0, 8.0, 3.0, 0.0, 0.0))))
    assert found == Corrections(compute=1.0, communication=None)


def test_the_corrected_cluster_foretells_the_run() -> None:
    slower = ledger((times(0, 8.0, 2.0, 0.0, 0.0), times(0, 10.0, 6.0, 0.0, 0.0)))
    found = recalibrate(CLUSTER, slower)
    before, after = (Rates(cluster.device, cluster.software) for cluster in (CLUSTER, found))
    for kind, size in (("matmul", 1e5), ("matmul", 1e10), ("pointwise", 1e4), ("softmax", 1e4)):
        expected = 1.25 * before.seconds(kind, "float32", size, size)
        assert after.seconds(kind, "float32", size, size) == pytest.approx(expected)
    assert after.kernel_s == pytest.approx(1.25 * before.kernel_s)
    for num_bytes in (100, 10**6):
        expected = 3 * Network(CLUSTER).collective_s("all_reduce", num_bytes, Group(2))
        assert Network(found).collective_s("all_reduce", num_bytes, Group(2)) == pytest.approx(expected)
    assert [row.time_s for row in found.collectives] == [pytest.approx(3e-3), 1e-3]
    assert (found.levels[1], found.device) == (CLUSTER.levels[1], CLUSTER.device)
    assert found.software == Software(pace=1.25, runs=1)


def test_several_runs_correct_by_their_geometric_mean() -> None:
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    runs = [ledger((before, times(0, 8.0 * k, 2.0 * k, 0.0, 0.0))) for k in (1.0, 4.0)]
    found = recalibrate(CLUSTER, *runs)
    assert found.software.pace == pytest.approx(2.0)
    assert found.software.runs == 2
    assert found.levels[0].alpha_s == pytest.approx(2e-5)


def test_a_run_teaches_a_cluster_only_once() -> None:
    before, slower = times(0, 8.0, 2.0, 0.0, 0.0), times(0, 10.0, 6.0, 0.0, 0.0)
    told = msgspec.structs.replace(ledger((before, slower)), pace=1.0, beta_s_per_byte=(1e-10,))
    once = recalibrate(CLUSTER, told)
    again = recalibrate(once, told)
    assert again.software.pace == pytest.approx(once.software.pace) == pytest.approx(1.25)
    assert again.levels[0].alpha_s == pytest.approx(once.levels[0].alpha_s)
    assert [row.time_s for row in again.collectives] == pytest.approx([row.time_s for row in once.collectives])


def test_a_run_that_does_not_tell_does_not_dilute_the_others() -> None:
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    slower = ledger((before, times(0, 8.0, 8.0, 0.0, 0.0)))
    silent = ledger((times(0, 8.0, 0.0, 0.0, 0.0), times(0, 8.0, 0.0, 0.0, 0.0)))
    assert recalibrate(CLUSTER, slower, silent).levels[0].alpha_s == pytest.approx(4e-5)


def test_a_level_is_corrected_by_the_runs_that_cross_it() -> None:
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    inside = ledger((before, times(0, 8.0, 4.0, 0.0, 0.0)))
    across = ledger((before, times(0, 8.0, 8.0, 0.0, 0.0)), levels=("box", "rack"))
    found = recalibrate(CLUSTER, inside, across)
    assert [level.alpha_s for level in found.levels] == pytest.approx([1e-5 * 8**0.5, 2e-4])


def test_a_run_as_predicted_leaves_the_cluster_and_says_so() -> None:
    same = times(0, 8.0, 2.0, 0.0, 0.0)
    found = recalibrate(CLUSTER, ledger((same, same)))
    assert msgspec.structs.replace(found, source="measured", software=Software()) == CLUSTER
    assert found.source == (
        "measured; corrected by a run of GPT as dp2: computing takes 1.000 times as long, communication over box 1.000 "
        "times"
    )
    again = recalibrate(found, ledger((same, same)))
    assert again.source == found.source
    assert files.decode(msgspec.toml.encode(found), Cluster, where="c.toml", toml=True) == found


def test_devices_of_members_are_corrected_too() -> None:
    unlike = Cluster(
        name="two-boxes", num_devices=2, device=CORE,
        levels=(
            Level(name="box", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-10, members=(Member(), Member(device=CORE))),
        ),
    )  # fmt: skip
    found = recalibrate(unlike, ledger((times(0, 8.0, 2.0, 0.0, 0.0), times(0, 16.0, 4.0, 0.0, 0.0))))
    assert found.software.pace == 2.0
    assert found.levels[0].alpha_s == 2e-5


def test_what_cannot_be_corrected_is_refused() -> None:
    same = times(0, 8.0, 2.0, 0.0, 0.0)
    off = ledger((same, times(0, 80.0, 2.0, 0.0, 0.0)))
    with pytest.raises(
        ClusterError, match=r"cluster two-boxes: computing took 10 times as long as predicted, which no"
    ):
        recalibrate(CLUSTER, off)
    with pytest.raises(ClusterError, match=r"cluster other: the ledger is of a run on 'two-boxes'"):
        recalibrate(msgspec.structs.replace(CLUSTER, name="other"), ledger((same, same)))
