"""Simulated collectives: alone they take what closed forms say; on shared links never less than the links allow."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.alpha_beta import ALL_REDUCE_S
from meshwright.ir.cluster import Cluster, Level
from meshwright.ir.device import Device
from meshwright.schedules.collectives import ALGORITHMS, all_reduce, build
from meshwright.simulate.collectives import alone_s, gamma_s_per_byte, shared_s

ALPHA_S, BETA_S, GAMMA_S = 3e-6, 2e-9, 5e-10


@pytest.mark.parametrize("name", ALL_REDUCE_S)
@given(log=st.integers(1, 4), part=st.integers(1, 50))
def test_a_closed_form_is_the_simulation_without_contention(name: str, log: int, part: int) -> None:
    size = 2**log
    length = part * size
    steps = all_reduce(name, size, length, server=name == "star")
    found = alone_s(steps, lambda source, target: ("", ALPHA_S, BETA_S), GAMMA_S)
    assert found == pytest.approx(ALL_REDUCE_S[name](size, length, ALPHA_S, BETA_S, GAMMA_S), rel=1e-12)


def _cluster(boxes: int, devices: int, links: int = 1) -> Cluster:
    inner = Level(name="box", fan_out=devices, alpha_s=1e-6, beta_s_per_byte=1e-11)
    outer = Level(name="rack", fan_out=boxes, alpha_s=1e-5, beta_s_per_byte=1e-9, links=links)
    device = Device(
        name="d",
        kind="gpu",
        peak_flops_per_s={"float32": 1e13},
        memory_bytes=10**10,
        memory_bandwidth_bytes_per_s=1e12,
    )
    return Cluster(name="c", num_devices=boxes * devices, device=device, levels=(inner, outer))


@given(num_bytes=st.integers(1, 10**7))
def test_on_links_that_nobody_shares_the_two_agree(num_bytes: int) -> None:
    """A butterfly of two boxes of one device: each sends one message at a time."""
    cluster = _cluster(2, 1)
    steps = all_reduce("butterfly", 2, num_bytes)
    alone = alone_s(steps, lambda source, target: ("rack", 1e-5, 1e-9), gamma_s_per_byte(cluster))
    assert shared_s(steps, cluster) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("operation", ALGORITHMS)
@given(num_bytes=st.integers(0, 10**6))
def test_every_collective_ends(operation: str, num_bytes: int) -> None:
    for name in ALGORITHMS[operation]:
        assert shared_s(build(operation, name, 4, num_bytes), _cluster(2, 2)) >= 0


def test_what_shares_a_link_waits_for_it() -> None:
    """Four ranks of a box that send their quarters over one link take as long as one that sends all; over four links a
    quarter of it."""
    num_bytes, cluster = 10**8, _cluster(2, 4)
    steps = all_reduce("star+butterfly@4x2", 8, num_bytes)
    bound = num_bytes * 1e-9
    one, four = shared_s(steps, cluster), shared_s(steps, _cluster(2, 4, links=4))
    assert bound < one < 1.05 * bound
    assert bound / 4 < four < 1.15 * bound / 4


def test_levels_beat_a_ring_that_crosses_at_every_hop() -> None:
    """2 boxes of 2, 1 Gbit/s between boxes."""
    inner = Level(name="box", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-10)
    outer = Level(name="net", fan_out=2, alpha_s=5e-5, beta_s_per_byte=8e-9)
    cluster = Cluster(name="c", num_devices=4, device=_cluster(1, 1).device, levels=(inner, outer))
    num_bytes = 64 * 2**20
    levels = shared_s(all_reduce("star+butterfly@2x2", 4, num_bytes), cluster)
    crossing = all_reduce("ring", 4, num_bytes)
    order = (0, 2, 1, 3)  # a ring in this order crosses boxes at every hop
    moved = tuple(
        tuple(msgspec.structs.replace(one, source=order[one.source], target=order[one.target]) for one in moves)
        for moves in crossing.rounds
    )
    flat = shared_s(msgspec.structs.replace(crossing, rounds=moved), cluster)
    assert flat > 1.35 * levels
    assert levels < 1.1 * num_bytes * 8e-9, "within 10 % of the bound of the slow link"
    assert math.isclose(flat, 3 * num_bytes * 8e-9, rel_tol=0.05)
