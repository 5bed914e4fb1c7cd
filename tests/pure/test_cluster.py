"""The cluster: which level joins which ranks, sizes that must fit together, and files."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ClusterError, FileFormatError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.device import Device
from meshwright.ir.level import Level, LevelMembers

CHIP = Device(
    name="chip",
    kind="gpu",
    memory_bytes=16_000_000_000,
    memory_bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"float32": 1e13},
)
SLOW = msgspec.structs.replace(CHIP, name="slow", peak_flops_per_s={"float32": 1e12})


def level(name: str, fan_out: int, **changes: object) -> Level:
    fields: dict[str, object] = {"name": name, "fan_out": fan_out, "alpha_s": 1e-6, "beta_s_per_byte": 1e-11}
    return Level(**(fields | changes))  # type: ignore[arg-type]


def cluster(*levels: Level, num_devices: int, **changes: object) -> Cluster:
    fields: dict[str, object] = {"name": "test", "num_devices": num_devices, "device": CHIP, "levels": levels}
    return Cluster(**(fields | changes))  # type: ignore[arg-type]


# rack:            0                 1                     A box of 4 devices beside two boxes of 2 slow ones:
# box:       0           1     2           3               pod:     0          1      2
# rank:   0  1  2  3  4  5  6  7  8  9  10  11             rank: 0 1 2 3      4 5    6 7
RACKS = cluster(level("box", 3), level("rack", 2), level("pod", 2), num_devices=12)
MIXED = cluster(
    level(
        "pod",
        3,
        members=(
            LevelMembers(levels=(level("box", 4),)),
            LevelMembers(count=2, device=SLOW, levels=(level("box", 2, alpha_s=5e-6),)),
        ),
    ),
    num_devices=8,
)

TOML = """\
name = "two-boxes"
num_devices = 8

[device]
name = "chip"
kind = "gpu"
memory_bytes = 16e9
memory_bandwidth_bytes_per_s = 1e12
peak_flops_per_s = { float32 = 1e13 }

[[levels]]
name = "box"
fan_out = 4
alpha_s = 3e-6
beta_s_per_byte = 4e-12

[[levels]]
name = "pod"
fan_out = 2
alpha_s = 1e-5
beta_s_per_byte = 5e-11
links = 4

[[collectives]]
operation = "all_reduce"
algorithm = "ring"
level = "box"
ranks = 4
bytes = 1048576
time_s = 1e-4
"""


def refused(text: str) -> str:
    with pytest.raises((ClusterError, FileFormatError)) as caught:
        files.decode(text.encode(), Cluster, where="two.toml", toml=True)
    return str(caught.value)


def test_ranks_meet_at_the_innermost_level_that_joins_them() -> None:
    assert RACKS.level_of(0, 2).name == "box"
    assert RACKS.level_of(2, 3).name == "rack"
    assert RACKS.level_of(5, 6).name == "pod"
    assert RACKS.level_of(11, 0).name == "pod"
    assert RACKS.level_of(3, 4, 5).name == "box"
    assert RACKS.level_of(0, 1, 3).name == "rack"


def test_a_level_is_made_of_units() -> None:
    assert RACKS.units("box") == (range(3), range(3, 6), range(6, 9), range(9, 12))
    assert RACKS.units("rack") == (range(6), range(6, 12))
    assert RACKS.units("pod") == (range(12),)
    assert [RACKS.ranks_per(name) for name in ("box", "rack", "pod")] == [3, 6, 12]
    assert RACKS.level_names == ("pod", "rack", "box")


def test_unlike_members_have_their_own_devices_and_levels() -> None:
    assert not MIXED.homogeneous
    assert MIXED.units("box") == (range(4), range(4, 6), range(6, 8))
    assert [MIXED.device_of(rank).name for rank in range(8)] == ["chip"] * 4 + ["slow"] * 4
    assert MIXED.level_of(0, 3).alpha_s == 1e-6
    assert MIXED.level_of(4, 5).alpha_s == 5e-6
    assert MIXED.level_of(5, 6).name == "pod"
    with pytest.raises(ClusterError) as caught:
        MIXED.ranks_per("box")
    assert str(caught.value) == (
        "cluster test: units of level 'box' hold 2 or 4 ranks\n  -> ask units() for the ranks of each"
    )


def test_unlike_members_may_hold_unlike_members() -> None:
    half = LevelMembers(
        count=2,
        levels=(level("row", 2, members=(LevelMembers(), LevelMembers(device=SLOW, levels=(level("box", 2),)))),),
    )
    nested = cluster(level("pod", 2, members=(half,)), num_devices=6)
    assert [nested.device_of(rank).name for rank in range(6)] == ["chip", "slow", "slow"] * 2
    assert [nested.level_of(rank, rank + 1).name for rank in range(5)] == ["row", "box", "pod", "row", "box"]


def test_devices_of_one_unit_share_its_links() -> None:
    pod = level("pod", 2, links=4, contention=1.5, beta_s_per_byte=1e-10)
    assert pod.shared_beta_s_per_byte(1) == pytest.approx(1.5e-10)
    assert pod.shared_beta_s_per_byte(4) == pytest.approx(1.5e-10)
    assert pod.shared_beta_s_per_byte(8) == pytest.approx(3e-10)


def test_one_device_needs_no_level() -> None:
    alone = cluster(num_devices=1)
    assert alone.device_of(0) == CHIP
    with pytest.raises(ClusterError, match="no level joins rank 0 and rank 0: they are one device"):
        alone.level_of(0, 0)


# Any nesting: plain levels, and at most innermost a level of unlike members, which are nestings themselves.
def nestings(depth: int) -> st.SearchStrategy[tuple[Level, ...]]:
    def named(sizes: list[int], members: tuple[LevelMembers, ...]) -> tuple[Level, ...]:
        inner = (level(f"mixed{depth}", sum(member.count for member in members), members=members),) if members else ()
        return (*inner, *(level(f"plain{depth}.{index}", size) for index, size in enumerate(sizes)))

    members: st.SearchStrategy[tuple[LevelMembers, ...]] = st.just(())
    if depth:
        level_members = st.builds(
            lambda count, slow, levels: LevelMembers(count=count, device=SLOW if slow else None, levels=levels),
            st.integers(1, 2),
            st.booleans(),
            nestings(depth - 1),
        )
        members = st.lists(level_members, max_size=2).map(lambda drawn: tuple(drawn))
    return st.builds(named, st.lists(st.integers(1, 3), max_size=2), members)


def count(levels: tuple[Level, ...]) -> int:
    product = 1
    for level in levels:
        product *= sum(member.count * count(member.levels) for member in level.members) or level.fan_out
    return product


CLUSTERS = nestings(2).map(lambda levels: cluster(*levels, num_devices=count(levels)))


@given(CLUSTERS)
def test_a_cluster_survives_toml_and_json(cluster: Cluster) -> None:
    toml = msgspec.toml.encode(cluster)
    assert files.decode(toml, Cluster, where="c.toml", toml=True) == cluster
    assert files.decode(files.encode_json(cluster), Cluster, where="c.json") == cluster


@given(CLUSTERS, st.data())
def test_the_level_of_two_ranks_is_the_smallest_unit_that_holds_both(cluster: Cluster, data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, cluster.num_devices - 1)) for _ in range(2))
    units = [
        (len(unit), name)
        for name in cluster.level_names
        for unit in cluster.units(name)
        if first in unit and second in unit
    ]
    if first != second:
        common_level = cluster.level_of(first, second)
        assert common_level == cluster.level_of(second, first)
        assert common_level.name in {name for size, name in units if size == min(units)[0]}


@given(CLUSTERS)
def test_units_of_the_outermost_level_hold_every_rank(cluster: Cluster) -> None:
    for name in cluster.level_names[:1]:
        assert cluster.units(name) == (range(cluster.num_devices),)
    for name in cluster.level_names:
        ranks = [rank for unit in cluster.units(name) for rank in unit]
        assert len(ranks) == len(set(ranks))


def test_a_cluster_file_is_loaded_by_path(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    two = Cluster.load(tmp_path / "two.toml")
    assert (two.name, two.num_devices, two.ranks_per("box")) == ("two-boxes", 8, 4)
    assert two.device.memory_bytes == 16_000_000_000
    assert two.collectives[0] == CollectiveTiming(
        operation="all_reduce", algorithm="ring", level="box", ranks=4, bytes=1 << 20, time_s=1e-4
    )
    files.save(two, tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text().startswith("version = 1\n")
    assert Cluster.load(str(tmp_path / "again.toml"), num_devices=4).num_devices == 4
    assert Cluster.load(tmp_path / "again.toml") == two


def test_part_of_a_cluster_is_whole_units_or_part_of_one() -> None:
    assert RACKS.resized(12) is RACKS
    assert [level.fan_out for level in RACKS.resized(6).levels] == [3, 2, 1]
    assert [level.fan_out for level in RACKS.resized(3).levels] == [3, 1, 1]
    assert [level.fan_out for level in RACKS.resized(2).levels] == [2, 1, 1]
    assert RACKS.resized(2).num_devices == 2


def test_an_open_ended_cluster_grows_at_its_outermost_level() -> None:
    kind = msgspec.structs.replace(RACKS, open_ended=True)
    assert [level.fan_out for level in kind.resized(60).levels] == [3, 2, 10]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 200))
def test_resizing_gives_what_was_asked_for_or_says_what_fits(box: int, rack: int, devices: int) -> None:
    kind = cluster(level("box", box), level("rack", rack), level("pod", 1), num_devices=box * rack, open_ended=True)
    fits = devices <= box or (devices % box == 0 and (devices <= box * rack or devices % (box * rack) == 0))
    if fits:
        assert kind.resized(devices).num_devices == devices
    else:
        with pytest.raises(ClusterError, match="ask for a multiple of"):
            kind.resized(devices)


@pytest.mark.parametrize(
    ("cluster", "num_devices", "message"),
    [
        (RACKS, 24, "cluster test: it cannot have 24 devices\n  -> ask for 1 to 12"),
        (RACKS, 0, "cluster test: it cannot have 0 devices\n  -> ask for 1 to 12"),
        (
            RACKS,
            4,
            (
                "cluster test: 4 devices do not fill whole units of level 'box', which hold 3\n"
                "  -> ask for a multiple of 3, or for a part of one"
            ),
        ),
        (
            RACKS,
            9,
            (
                "cluster test: 9 devices do not fill whole units of level 'rack', which hold 6\n"
                "  -> ask for a multiple of 6, or for a part of one"
            ),
        ),
        (
            MIXED,
            4,
            (
                "cluster test: its unlike members cannot be cut down to 4 devices\n"
                "  -> use all 8, or describe the part in a file of its own"
            ),
        ),
    ],
)
def test_a_size_that_does_not_fit_is_refused(cluster: Cluster, num_devices: int, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster.resized(num_devices)
    assert str(caught.value) == message


def test_ranks_and_levels_that_do_not_exist_are_named() -> None:
    with pytest.raises(ClusterError) as rank:
        RACKS.device_of(12)
    assert str(rank.value) == "cluster test: there is no rank 12\n  -> its ranks are 0 to 11"
    with pytest.raises(ClusterError) as name:
        RACKS.units("row")
    assert str(name.value) == "cluster test: there is no level 'row'\n  -> its levels are pod, rack, box"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "num_devices = 8",
            "num_devices = 16",
            (
                "two.toml: num_devices: num_devices is 16, but the levels hold 4 x 2 = 8\n"
                "  -> correct num_devices or a fan_out"
            ),
        ),
        (
            "alpha_s = 3e-6",
            "alpha_us = 3.0",
            (
                "two.toml: levels[0]: Object contains unknown field `alpha_us`\n"
                "  -> did you mean `alpha_s`? known keys: name, fan_out, alpha_s, beta_s_per_byte, links, contention, "
                "rings, source, origin, members"
            ),
        ),
        (
            "alpha_s = 3e-6",
            "alpha_s = 3",
            "two.toml: levels[0].alpha_s: 3 is not between 0 and 1\n  -> give seconds: 5 microseconds are 5e-6",
        ),
        (
            "beta_s_per_byte = 5e-11",
            "beta_s_per_byte = 20e9",
            (
                "two.toml: levels[1].beta_s_per_byte: 2e+10 is not between 0 and 0.001\n"
                "  -> give seconds per byte: 25 GB/s are 4e-11"
            ),
        ),
        (
            "beta_s_per_byte = 5e-11",
            "beta_s_per_byte = nan",
            (
                "two.toml: levels[1].beta_s_per_byte: nan is not between 0 and 0.001\n"
                "  -> give seconds per byte: 25 GB/s are 4e-11"
            ),
        ),
        (
            "beta_s_per_byte = 5e-11",
            'beta_s_per_byte = "20 GB/s"',
            "two.toml: levels[1].beta_s_per_byte: Expected `float`, got `str`\n  -> correct that key",
        ),
        ("fan_out = 4", "fan_out = 0", "two.toml: levels[0].fan_out: 0 is less than 1\n  -> give a whole number"),
        ("links = 4", "links = -1", "two.toml: levels[1].links: -1 is less than 1\n  -> give a whole number"),
        (
            'name = "pod"',
            'name = "box"',
            (
                "two.toml: levels[1].name: two levels around one device are called 'box'\n"
                "  -> give every level its own name"
            ),
        ),
        (
            "{ float32 = 1e13 }",
            "{ float23 = 1e13 }",
            (
                "two.toml: device.peak_flops_per_s: unknown dtype 'float23'\n"
                "  -> did you mean `float32` or `tfloat32` or `float8`? "
                "known dtypes: float64, float32, tfloat32, bfloat16, float16, float8, int8"
            ),
        ),
        (
            "16e9",
            "16",
            "two.toml: device.memory_bytes: 16 is not between 1e+06 and 1e+16\n  -> give bytes: 80 GB are 80e9",
        ),
        (
            'level = "box"',
            'level = "rack"',
            "two.toml: collectives[0].level: there is no level 'rack'\n  -> the levels are pod, box",
        ),
        (
            "time_s = 1e-4",
            "time_s = 0",
            (
                "two.toml: collectives[0].time_s: 0 is not between 1e-09 and 1e+06\n"
                "  -> give seconds: 5 microseconds are 5e-6"
            ),
        ),
        (
            "bytes = 1048576",
            "bytes = -1",
            "two.toml: collectives[0].bytes: -1 is less than 0\n  -> give a whole number",
        ),
        (
            '"all_reduce"',
            '"all_reduced"',
            "two.toml: collectives[0].operation: Invalid enum value 'all_reduced'\n  -> correct that key",
        ),
    ],
)
def test_a_wrong_cluster_file_is_named_with_key_and_remedy(old: str, new: str, message: str) -> None:
    assert TOML.count(old) == 1
    assert refused(TOML.replace(old, new)) == message


def test_members_must_fit_their_level() -> None:
    member = LevelMembers(levels=(level("box", 2),))
    with pytest.raises(ClusterError) as wrong_count:
        cluster(level("pod", 3, members=(member,)), num_devices=2)
    assert str(wrong_count.value) == (
        "levels[0].fan_out: fan_out is 3, but the members count 1\n  -> correct fan_out or a count"
    )
    with pytest.raises(ClusterError) as below:
        cluster(level("box", 2), level("pod", 1, members=(member,)), num_devices=2)
    assert str(below.value) == (
        "levels[1].members: a level with members has levels below it\n"
        "  -> move the lower levels into each member's levels"
    )
    with pytest.raises(ClusterError) as same_name:
        cluster(level("box", 1, members=(member,)), num_devices=2)
    assert str(same_name.value) == (
        "levels[0].members[0].levels[0].name: two levels around one device are called 'box'\n"
        "  -> give every level its own name"
    )
    with pytest.raises(ClusterError) as size:
        cluster(level("pod", 1, members=(member,)), num_devices=3)
    assert str(size.value) == (
        "num_devices: num_devices is 3, but the levels hold 2\n  -> correct num_devices or a fan_out"
    )
