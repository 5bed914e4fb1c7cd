"""Learning from ledgers: planted factors are found, priors hold what a run does not tell, a run teaches once."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.ledger import Ledger, RankEntry
from meshwright.ir.software import Software, Spread
from meshwright.planner.learn_ledgers import learn_ledgers
from tests.pure.test_recalibrate import CLUSTER, ledger, times

GPU = msgspec.structs.replace(
    CLUSTER,
    device=msgspec.structs.replace(CLUSTER.device, kind="gpu", memory_bytes=2**36),
    software=Software(fragmentation=0.03),
)


def run(
    compute: float = 1.0, communication: float = 1.0, *, levels: tuple[str, ...] = ("box",), pace: float = 1.0,
    seed: int = 0, layout: str = "dp2",
) -> Ledger:  # fmt: skip
    """A run that computed and communicated for so many times as long as predicted, with some noise if it has a seed."""
    draw = random.Random(seed)
    noise = [draw.gauss(0.0, 0.02) if seed else 0.0 for _ in range(2)]
    before = times(0, 8.0, 2.0, 0.0, 0.0)
    after = times(0, 8.0 * compute * (1 + noise[0]), 2.0 * communication * (1 + noise[1]), 0.0, 0.0)
    base_ledger = ledger((before, after), levels=levels)
    betas = tuple(level.beta_s_per_byte for level in CLUSTER.levels if level.name in levels)
    return msgspec.structs.replace(base_ledger, pace=pace, beta_s_per_byte=betas, layout=layout)


def slowness(cluster: Cluster) -> list[float]:
    """By how much the levels are slower than in ``CLUSTER``."""
    return [now.alpha_s / then.alpha_s for now, then in zip(cluster.levels, CLUSTER.levels, strict=True)]


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "communication"), [(1.25, 1.0), (1.0, 2.0), (0.8, 1.5)])
def test_planted_factors_are_found_from_some_runs(compute: float, communication: float) -> None:
    learned = learn_ledgers([run(compute, communication, seed=seed) for seed in range(1, 13)], CLUSTER)
    assert learned.cluster.software.pace == pytest.approx(compute, rel=0.02)
    assert slowness(learned.cluster) == [pytest.approx(communication, rel=0.05), 1.0]
    assert learned.learned.error_before is not None
    assert learned.learned.error is not None
    assert learned.learned.error < 0.25 * learned.learned.error_before
    assert {number.name for number in learned.learned.numbers if number.is_learned} == {
        "pace",
        "communication over box",
    }


@given(st.floats(0.4, 2.5), st.floats(0.4, 2.5))
def test_one_run_goes_part_of_the_way_and_more_runs_go_further(compute: float, communication: float) -> None:
    paces, links = [1.0], [1.0]
    for number in (1, 3, 9):
        cluster = learn_ledgers([run(compute, communication, layout=f"dp{k}") for k in range(number)], CLUSTER).cluster
        paces.append(cluster.software.pace)
        links.append(slowness(cluster)[0])
    for way, end in ((paces, compute), (links, communication)):
        left = [abs(value / end - 1) for value in way]
        assert all(after <= before + 1e-6 for before, after in itertools.pairwise(left))
        assert left[1] < 0.7 * left[0] + 1e-6
        assert left[-1] < 0.1


def test_a_surer_profile_moves_less() -> None:
    sure = msgspec.structs.replace(CLUSTER, software=Software(spread=Spread(step=0.03)))
    moved = [learn_ledgers([run(1.3)], cluster).cluster.software.pace for cluster in (sure, CLUSTER)]
    assert 1.0 < moved[0] < moved[1] < 1.3


def test_assumed_rates_follow_one_run_and_are_no_assumption_afterwards() -> None:
    levels = tuple(msgspec.structs.replace(level, origin="default") for level in CLUSTER.levels)
    device = msgspec.structs.replace(CLUSTER.device, origin="default")
    assumed = msgspec.structs.replace(CLUSTER, device=device, levels=levels)
    once = learn_ledgers([run(6.0, 5.0)], assumed).cluster
    assert once.software.pace == pytest.approx(6.0, rel=0.3)
    assert slowness(once)[0] == pytest.approx(5.0, rel=0.35)
    assert learn_ledgers([run(6.0, 5.0)], CLUSTER).cluster.software.pace < 2.0
    twice = learn_ledgers([run(1.0, 1.0, layout="tp2")], once).cluster
    assert twice.software.pace > 3.0, "what runs taught is held as firmly as what was measured"


def test_a_run_that_was_disturbed_does_not_move_the_others() -> None:
    quiet = [run(1.1, seed=seed) for seed in range(1, 9)]
    learned = learn_ledgers([*quiet, run(5.0)], CLUSTER)
    assert learned.cluster.software.pace == pytest.approx(1.1, rel=0.05)


def test_what_a_run_does_not_tell_stays() -> None:
    alone = ledger((times(0, 8.0, 0.0, 0.0, 0.0), times(0, 10.0, 0.0, 0.0, 0.0)))
    learned = learn_ledgers([alone], CLUSTER)
    assert [number.name for number in learned.learned.numbers] == ["pace"]
    assert learned.cluster.levels == CLUSTER.levels
    others = msgspec.structs.replace(learned.cluster.software, pace=1.0, runs=0, taught=(), spread=Spread())
    assert others == CLUSTER.software


def test_a_level_learns_from_the_runs_that_cross_it() -> None:
    inside = [run(communication=2.0, layout=f"{k}") for k in range(4)]
    across = [run(communication=4.0, levels=("box", "rack"), layout=f"{k}") for k in range(4)]
    box, rack = slowness(learn_ledgers([*inside, *across], CLUSTER).cluster)
    assert 2.0 < box < rack < 4.0


def test_a_run_as_predicted_leaves_the_numbers_and_says_so() -> None:
    learned = learn_ledgers([run()], CLUSTER)
    assert learned.cluster.software.pace == pytest.approx(1.0)
    assert slowness(learned.cluster) == pytest.approx([1.0, 1.0])
    assert learned.cluster.source == "measured; corrected by a run of GPT as dp2"
    assert learned.cluster.software.spread.step < Spread().step, "runs make predictions surer"
    assert files.decode(msgspec.toml.encode(learned.cluster), Cluster, where="c.toml", toml=True) == learned.cluster


# --- once ------------------------------------------------------------------------------------------------------------


def test_a_run_teaches_a_cluster_only_once() -> None:
    first, second = run(1.25, 3.0), run(1.2, 2.0, layout="tp2")
    once = learn_ledgers([first], CLUSTER)
    again = learn_ledgers([first], once.cluster)
    assert again.cluster == once.cluster
    assert again.learned.numbers == ()
    assert again.learned.notes == ("1 of 1 runs have taught this cluster before",)
    both = learn_ledgers([first, second], once.cluster)
    assert both.learned.runs == 1
    assert both.cluster.software.runs == 2
    assert both.cluster.software == learn_ledgers([second], once.cluster).cluster.software
    assert learn_ledgers([first, first], CLUSTER).cluster == once.cluster


def test_what_a_run_teaches_does_not_depend_on_when_it_was_predicted() -> None:
    """A run that computes at the pace 1.25 says so whether its prediction was right or too short."""
    slow = msgspec.structs.replace(CLUSTER, software=Software(pace=1.25))
    paces = [learn_ledgers([each], slow).cluster.software.pace for each in (run(1.25), run(1.0, pace=1.25))]
    assert paces == [pytest.approx(1.25)] * 2


# --- memory ----------------------------------------------------------------------------------------------------------


def peaks(predicted: int, measured: int, number: int = 0, **entry: int) -> Ledger:
    base_ledger = run(layout=f"dp{number}")
    (rank,) = base_ledger.ranks
    before, after = (
        msgspec.structs.replace(each, peak_bytes=size)
        for each, size in ((rank.predicted, predicted), (rank.measured, measured))
    )
    ranks: tuple[RankEntry, ...] = (msgspec.structs.replace(rank, predicted=before, measured=after, **entry),)
    return msgspec.structs.replace(base_ledger, ranks=ranks, heap=1.15)


def test_peaks_on_a_cpu_teach_what_the_heap_takes() -> None:
    held, varies = 10**9, 2 * 10**9
    predicted, measured = held + round(1.15 * varies), held + round(1.4 * varies)
    runs = [peaks(predicted, measured, number, held_bytes=held) for number in range(8)]
    software = learn_ledgers(runs, CLUSTER).cluster.software
    assert software.heap == pytest.approx(1.4, rel=0.03)
    assert software.spread.memory < Spread().memory
    assert CLUSTER.software.heap < learn_ledgers(runs[:1], CLUSTER).cluster.software.heap < software.heap
    unknown = [msgspec.structs.replace(each, heap=0.0) for each in runs]
    assert learn_ledgers(unknown, CLUSTER).cluster.software.heap == CLUSTER.software.heap


def test_peaks_on_a_gpu_teach_fragmentation_and_context() -> None:
    live, reserved = 20 * 2**30, 24 * 2**30
    taken = {"reserved_bytes": reserved, "device_bytes": reserved + 3 * 2**30}
    software = learn_ledgers([peaks(live, live, number, **taken) for number in range(8)], GPU).cluster.software
    assert software.fragmentation == pytest.approx(0.2, abs=0.02)
    assert software.context_bytes == pytest.approx(3 * 2**30, rel=0.03)
    assert software.heap == GPU.software.heap
    runs = [
        msgspec.structs.replace(
            peaks(live, live, peers, reserved_bytes=reserved, device_bytes=reserved + more), peers=peers
        )
        for peers in (1, 2, 3, 1, 2, 3)
        for more in [2**30 + peers * 2**29]
    ]
    software = learn_ledgers(runs, GPU).cluster.software
    assert software.context_bytes + 2 * software.peer_bytes == pytest.approx(2 * 2**30, rel=0.03)
    assert software.peer_bytes > 1.3 * GPU.software.peer_bytes
    blind = learn_ledgers([peaks(live, live)], GPU).cluster.software
    assert (blind.fragmentation, blind.context_bytes) == (GPU.software.fragmentation, GPU.software.context_bytes)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"cluster two-boxes: computing took 10 times as long as predicted, which no"
    ):
        learn_ledgers([run(10.0)], CLUSTER)
    with pytest.raises(ClusterError, match=r"cluster other: the ledger is of a run on 'two-boxes'"):
        learn_ledgers([run()], msgspec.structs.replace(CLUSTER, name="other"))
