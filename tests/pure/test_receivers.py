"""The ranks of a stage that receive together: the cheapest of all together, per box, and each for itself."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.crossing import Crossed, crossing
from meshwright.cost.fabric import Fabric
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import load_device
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Shard
from meshwright.planner.receivers import cheapest, crossing_s

CPU = load_device("generic-cpu")
INSIDE = Level(name="box", fan_out=4, alpha_s=1e-6, beta_s_per_byte=1e-10, links=4)
BETWEEN = Level(name="network", fan_out=3, alpha_s=1e-5, beta_s_per_byte=1e-9)


def cluster(*levels: Level) -> Cluster:
    devices = math.prod(level.fan_out for level in levels)
    return Cluster(name="boxes", num_devices=devices, device=CPU, levels=levels)


THREE_BOXES = cluster(INSIDE, BETWEEN)
# Ranks 0 to 3 send from one box to ranks 4 to 11 of two other boxes, which hold equal values.
MESH = Mesh.of_stages(({"tp": 4}, {"tp": 8}))


def values(num_bytes: int) -> Crossed:
    return Crossed("values", (num_bytes,), 1, {}, {})


def test_many_bytes_are_received_once_per_box() -> None:
    fabric, tensor = Fabric(THREE_BOXES, MESH), values(2**20)
    receivers, cheapest_crossing = cheapest(fabric, 0, 1, [tensor])
    assert receivers == (4, 4)
    assert cheapest_crossing.sent_bytes == 2 * 2**20 / 4, "four ranks send it to two boxes"
    (gather,) = cheapest_crossing.gathers
    assert (gather.axis, gather.part, gather.bytes) == ("tp", 4, 2**20)
    # Three messages of a quarter to the other ranks of the box.
    assert fabric.collective_s(gather, 1) == pytest.approx(3 * (1e-6 + 2**20 / 4 * 1e-10))


def test_few_bytes_are_received_by_each_rank_for_itself() -> None:
    """A gather takes three latencies more than it saves."""
    receivers, cheapest_crossing = cheapest(Fabric(THREE_BOXES, MESH), 0, 1, [values(8)])
    assert (receivers, cheapest_crossing.gathers) == ((1,) * 8, ())


def test_boxes_that_are_joined_quickly_receive_together() -> None:
    """One slow sender: what leaves it counts, and not what the ranks of the other boxes exchange."""
    mesh = Mesh.of_stages(({"dp": 1}, {"tp": 8}))
    near = Level(name="rack", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-10, links=4)
    far = Level(name="network", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-7, members=(
        LevelMembers(count=1), LevelMembers(count=1, levels=(INSIDE, near)),
    ))  # fmt: skip
    unlike = Cluster(name="behind a slow link", num_devices=9, device=CPU, levels=(far,))
    receivers, cheapest_crossing = cheapest(Fabric(unlike, mesh), 0, 1, [values(2**20)])
    assert (receivers, cheapest_crossing.sent_bytes) == ((8,), 2**20)


def test_ranks_that_need_different_parts_do_not_gather() -> None:
    tensor = Crossed("batch", (64, 2**14), 4, {}, {"dp": Shard(0)})
    receivers, cheapest_crossing = cheapest(Fabric(THREE_BOXES, Mesh.of_stages(({"tp": 4}, {"dp": 8}))), 0, 1, [tensor])
    assert (receivers, cheapest_crossing.gathers) == ((8,), ()), "what a plan need not name"
    tensor = Crossed("batch", (64, 2**14), 4, {"dp": Shard(0)}, {"dp": Shard(0)})
    receivers, cheapest_crossing = cheapest(Fabric(THREE_BOXES, Mesh.of(pp=3, dp=4)), 0, 1, [tensor])
    assert (receivers, cheapest_crossing.gathers) == ((1,) * 4, ()), "with equal stages, this is to receive for itself"


@given(st.integers(1, 2**24), st.sampled_from([1e-12, 1e-10, 1e-9, 1e-7]), st.sampled_from([1, 2, 4]))
def test_no_other_form_is_faster(size: int, beta: float, senders: int) -> None:
    slower = msgspec.structs.replace(BETWEEN, beta_s_per_byte=beta)
    fabric = Fabric(cluster(INSIDE, slower), Mesh.of_stages(({"tp": senders}, {"tp": 12 - senders})))
    tensors = [values(size * 12 * 11)]
    chosen, cheapest_crossing = cheapest(fabric, 0, 1, tensors)
    boxes = (4 - senders, 4, 4) if senders < 4 else (4, 4)
    for form in ((12 - senders,), boxes, (1,) * (12 - senders)):
        other = crossing(tensors, fabric.mesh.submesh(0), fabric.mesh.submesh(1), form)
        assert crossing_s(fabric, 0, 1, cheapest_crossing) <= crossing_s(fabric, 0, 1, other)
    assert chosen in ((12 - senders,), boxes, (1,) * (12 - senders))
