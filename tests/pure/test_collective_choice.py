"""The algorithm of a collective is read from a plan's text, and chosen from what a cluster's file has measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.errors import PlanError
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.schedules.collectives.choice import NATIVE, chosen, parsed, written
from meshwright.schedules.collectives.operations import ALGORITHMS

RANGES = st.dictionaries(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.lists(st.integers(1, 2**30), max_size=3, unique=True).map(sorted),
    min_size=1,
)


@given(sizes=RANGES, data=st.data())
def test_what_is_written_is_read(sizes: dict[str, list[int]], data: st.DataObject) -> None:
    ranges = {
        operation: [(least, data.draw(st.sampled_from((NATIVE, *ALGORITHMS[operation])))) for least in (0, *each)]
        for operation, each in sizes.items()
    }
    text = written(ranges)
    if text != NATIVE:
        assert parsed(text) == ranges
    for operation, each in ranges.items():
        for least, name in each:
            assert chosen(text, operation, least) == name


def test_one_word_is_for_all() -> None:
    assert chosen("native", "all_gather", 10) == "native"
    assert chosen("ring", "all_gather", 10) == "ring"
    assert [chosen("exchange", operation, 8) for operation in ("all_reduce", "all_gather")] == ["butterfly", "star"]
    text = "all_reduce butterfly, 4096 ring"
    assert [chosen(text, "all_reduce", size) for size in (0, 4095, 4096)] == ["butterfly", "butterfly", "ring"]
    assert chosen(text, "all_gather", 4096) == "native", "what is not named"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign", "there is no algorithm 'rign' of all_reduce"),
        ("all_reduce rign", "there is no algorithm 'rign' of all_reduce"),
        ("all_sum ring", "there is no operation 'all_sum'"),
        ("all_reduce ring, butterfly", "'butterfly' is not a size and an algorithm"),
        ("all_reduce ring, 1e3 butterfly", "'1e3 butterfly' is not a size and an algorithm"),
    ],
)
def test_what_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        chosen(text, "all_reduce", 1)
    assert message in str(error.value)


def _measured(*rows: tuple[str, str, int, float]) -> Cluster:
    device = Device(
        name="d", kind="cpu", peak_flops_per_s={"float32": 1e10}, memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e10
    )
    level = Level(name="box", fan_out=4, alpha_s=1e-6, beta_s_per_byte=1e-10)
    return Cluster(
        name="c", num_devices=4, device=device, levels=(level,),
        collectives=tuple(
            CollectiveTiming(operation=operation, algorithm=name, level="box", ranks=2, bytes=size, time_s=seconds)  # type: ignore[arg-type]
            for operation, name, size, seconds in rows
        ),
    )  # fmt: skip


def test_the_fastest_that_was_measured_is_chosen_by_size() -> None:
    times = {"native": (3e-4, 1e-3, 4e-3), "butterfly": (1e-5, 6e-4, 9e-3)}
    rows = [
        ("all_reduce", name, size, seconds)
        for name, each in times.items()
        for size, seconds in zip((64, 2**20, 2**24), each, strict=True)
    ]
    rows += [("all_gather", "star", 64, 1e-5), ("all_gather", "native", 64, 1e-4), ("broadcast", "native", 64, 1e-9)]
    cluster = _measured(*rows)
    network = Network(cluster)
    text = network.algorithms(Group(2))
    assert text == f"all_reduce butterfly, {2**22} native; all_gather star"
    assert chosen(text, "all_reduce", 2**20) == "butterfly"
    assert network.collective_s("all_reduce", 2**24, Group(2)) == 4e-3, "what is predicted is what is chosen"
    assert network.algorithms(Group(3)) == "", "nothing was measured"
    assert Network(_measured()).algorithms(Group(2)) == ""
    assert Network(_measured(("all_reduce", "somebody's", 64, 1e-9))).algorithms(Group(2)) == "", "cannot be run"


def test_nothing_is_foretold_of_sizes_at_which_an_algorithm_was_given_up() -> None:
    network = Network(_measured(*(
        ("all_reduce", name, size, size * each)
        for name, each, sizes in (("ring", 1e-9, (2**10, 2**24)), ("star", 4e-9, (2**10, 2**20)))
        for size in sizes
    )))  # fmt: skip
    assert network.measured_s("all_reduce", "star", 2**20, Group(2)) == pytest.approx(2**20 * 4e-9)
    assert network.measured_s("all_reduce", "star", 2**21, Group(2)) is None
    assert network.measured_s("all_reduce", "ring", 2**26, Group(2)) == pytest.approx(2**26 * 1e-9), "at its last rate"
    assert network.measured_s("all_reduce", "butterfly", 2**10, Group(2)) is None
