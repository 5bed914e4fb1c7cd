"""Parts of clusters: the devices and links that the ranks of a stage use, and what they take."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.catalog import load_cluster
from meshwright.cost.collective import Group, Network
from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import load_device
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.mesh import Mesh
from meshwright.ir.part import memory_of, part_of, pools_of, stage_cluster

A100, V100 = load_device("a100-80gb"), load_device("v100")
NVLINK = Level(name="box", fan_out=8, alpha_s=3e-6, beta_s_per_byte=1 / 200e9)
SLOW_NVLINK = msgspec.structs.replace(NVLINK, beta_s_per_byte=1 / 100e9)
ALIKE = Cluster(
    name="alike",
    num_devices=16,
    device=A100,
    levels=(NVLINK, Level(name="network", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1 / 20e9, links=4)),
)


def unlike(*members: LevelMembers, links: int = 4) -> Cluster:
    count = sum(member.count for member in members)
    network = Level(name="network", fan_out=count, alpha_s=1e-5, beta_s_per_byte=1 / 20e9, links=links, members=members)
    return Cluster(name="unlike", num_devices=8 * count, device=A100, levels=(network,))


MIXED = unlike(LevelMembers(count=2, levels=(NVLINK,)), LevelMembers(count=1, device=V100, levels=(SLOW_NVLINK,)))


def test_ranks_in_whole_boxes_see_the_cluster_itself() -> None:
    for ranks in (range(4), range(8, 16), range(16), range(9, 12)):
        assert part_of(ALIKE, ranks) is ALIKE


def test_ranks_of_two_boxes_that_fill_neither_see_boxes_of_as_many() -> None:
    part = part_of(ALIKE, range(6, 9))
    assert [(level.name, level.fan_out) for level in part.levels] == [("box", 2), ("network", 2)]


def test_a_stage_sees_its_own_devices_and_links() -> None:
    fast, slow, both = (part_of(MIXED, ranks) for ranks in (range(4), range(16, 24), range(8, 24)))
    assert (fast.device, fast.levels) == (A100, (NVLINK,))
    assert (slow.device, slow.levels) == (V100, (SLOW_NVLINK,))
    assert both.device == V100, "ranks wait for the slowest"
    assert [(level.name, level.fan_out) for level in both.levels] == [("box", 8), ("network", 2)]
    assert both.levels[0].beta_s_per_byte == SLOW_NVLINK.beta_s_per_byte
    assert part_of(MIXED, range(16)).device == A100
    assert part_of(MIXED, range(7, 8)).levels == (NVLINK,)


def test_memory_is_that_of_the_smallest_device() -> None:
    assert [memory_of(MIXED, ranks) for ranks in (range(16), range(16, 24), range(24))] == [
        A100.memory_bytes, V100.memory_bytes, V100.memory_bytes,
    ]  # fmt: skip


def test_boxes_of_a_kind_that_follow_one_another_are_a_pool() -> None:
    assert pools_of(ALIKE) == (range(16),)
    assert pools_of(MIXED) == (range(16), range(16, 24))


def test_unlike_members_without_unlike_numbers_cost_what_equal_boxes_cost() -> None:
    """The same machine, said with and without members."""
    with_members = unlike(LevelMembers(count=1, levels=(NVLINK,)), LevelMembers(count=1, levels=(NVLINK,)))
    for mesh in (Mesh.of(pp=2, dp=8), Mesh.of(pp=2, dp=4, tp=2), Mesh.of(pp=1, dp=16)):
        plain, other = Fabric(ALIKE, mesh), Fabric(with_members, mesh)
        for axis in ("dp", "tp"):
            for stage in range(mesh.size("pp")):
                piece = Communicate("sum", "all_reduce", axis, 10**8)
                assert other.size(axis, stage) == plain.size(axis, stage)
                if mesh.has(axis) and mesh.size(axis) > 1:
                    assert other.collective_s(piece, stage) == pytest.approx(plain.collective_s(piece, stage))
        if mesh.size("pp") == 2:
            assert other.send_s(10**6, 0, 1) == pytest.approx(plain.send_s(10**6, 0, 1))
            piece = Communicate("loss", "broadcast", "pp", 64)
            assert other.collective_s(piece, 0) == pytest.approx(plain.collective_s(piece, 0))


def test_collectives_of_a_stage_take_the_times_of_its_links() -> None:
    mesh = Mesh.of_stages(({"dp": 16}, {"dp": 4, "tp": 2}))
    fabric = Fabric(MIXED, mesh)
    piece = Communicate("sum", "all_reduce", "dp", 10**8)
    boxes, box = (Network(part_of(MIXED, ranks)) for ranks in (range(16), range(16, 24)))
    assert fabric.collective_s(piece, 0) == boxes.collective_s("all_reduce", 10**8, Group(16))
    assert fabric.collective_s(piece, 1) == box.collective_s("all_reduce", 10**8, Group(4, 2))
    assert fabric.size("tp", 0) == 1
    assert fabric.size("tp", 1) == 2
    assert stage_cluster(MIXED, mesh, 1).device == V100


def test_senders_in_one_box_share_its_links() -> None:
    """One rank sends alone; eight ranks share four links."""
    lone_sender = Fabric(ALIKE, Mesh.of_stages(({"dp": 1}, {"dp": 8})))
    assert lone_sender.send_s(10**6, 0, 1) == pytest.approx(1e-5 + 10**6 / 20e9), "rank 8 is in the other box"
    eight = Fabric(ALIKE, Mesh.of_stages(({"dp": 8}, {"dp": 4})))
    assert eight.send_s(10**6, 0, 1) == pytest.approx(1e-5 + 2 * 10**6 / 20e9)
    inside = Fabric(ALIKE, Mesh.of_stages(({"dp": 1}, {"dp": 3})))
    assert inside.send_s(10**6, 0, 1) == pytest.approx(3e-6 + 10**6 / 200e9)


def test_the_unit_below_a_level_holds_the_rank() -> None:
    cluster = load_cluster("a100-80gb-dgx-hdr200x8", 16)
    assert cluster.unit_below(cluster.levels[-1].name, 9) == range(8, 16)
    assert cluster.unit_below(cluster.levels[0].name, 9) == range(9, 10)
    assert MIXED.unit_below("network", 20) == range(16, 24)
