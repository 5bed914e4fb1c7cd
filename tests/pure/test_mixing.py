"""Mixing matrices of gossip against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.ir.consistency import Gossip, consistency_of
from meshwright.schedules.mixing import check_topology, incoming, matrix, outgoing, push_weight, weights

TOPOLOGIES = ("ring", "torus", "exponential", "one-peer", "random", "complete")


def gossip(words: str) -> Gossip:
    rule = consistency_of(f"gossip({words})")
    assert isinstance(rule, Gossip)
    return rule


def mixing(words: str, count: int, step: int = 0) -> np.ndarray:
    return np.array(matrix(gossip(words), count, step))


@given(st.sampled_from(TOPOLOGIES), st.integers(1, 17), st.integers(0, 9))
def test_matrices_are_doubly_stochastic(topology: str, count: int, step: int) -> None:
    matrix = mixing(topology, count, step)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
    if topology in ("ring", "torus", "complete"):
        np.testing.assert_array_equal(matrix, matrix.T)


@given(st.sampled_from(TOPOLOGIES), st.sets(st.integers(0, 9), min_size=1), st.integers(0, 5))
def test_replicas_that_live_mix(topology: str, living: set[int], step: int) -> None:
    """Of any members, those that send to a replica are those of its row, and rows and columns sum up to 1."""
    rule, members = gossip(topology), sorted(living)
    rows = {member: weights(rule, members, member, step) for member in members}
    for replica, row in rows.items():
        assert {peer for peer in row if peer != replica} == set(incoming(rule, members, replica, step))
        assert all(replica in outgoing(rule, members, peer, step) for peer in row if peer != replica)
        assert math.isclose(sum(row.values()), 1)
        assert math.isclose(sum(rows[peer].get(replica, 0.0) for peer in members), 1)
        sent = 1 + len(outgoing(rule, members, replica, step))
        assert math.isclose(push_weight(rule, members, replica, step) * sent, 1)


@pytest.mark.parametrize(("count", "printed"), [(4, 0.333), (8, 0.805), (16, 0.949), (32, 0.987)])
def test_the_second_eigenvalue_of_a_ring(count: int, printed: float) -> None:
    """1/3 + 2/3 cos(2 pi / P)."""
    values = np.sort(np.linalg.eigvalsh(mixing("ring", count)))
    assert math.isclose(values[-2], 1 / 3 + 2 / 3 * math.cos(2 * math.pi / count), rel_tol=1e-12)
    assert abs(values[-2] - printed) < 1e-3


@pytest.mark.parametrize("count", [4, 6, 8, 16, 32])
def test_the_spectral_gap_of_the_exponential_graph(count: int) -> None:
    """2 / (1 + ceil(lg P)) for even P (Ying et al. 2021)."""
    values = np.sort(np.abs(np.linalg.eigvals(mixing("exponential", count))))
    assert math.isclose(1 - values[-2], 2 / (1 + math.ceil(math.log2(count))), rel_tol=1e-9)


@pytest.mark.parametrize("power", range(1, 6))
def test_one_peer_gossip_is_the_exact_mean_after_lg_p_rounds(power: int) -> None:
    count = 2**power
    product = np.eye(count)
    for step in range(power):
        product = mixing("one-peer", count, step) @ product
    np.testing.assert_array_equal(product, np.full((count, count), 1 / count))


@given(st.sampled_from(TOPOLOGIES), st.integers(2, 12))
def test_topologies_are_connected(topology: str, count: int) -> None:
    """Over some steps, something of every replica reaches every other."""
    reach = np.eye(count)
    for step in range(60):
        reach = np.minimum(1, (mixing(topology, count, step) > 0) @ reach)
    assert (reach > 0).all()


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_delayed_mixing_is_stable(staleness: int) -> None:
    """x' = x + (l - 1) x_d / (2 d + 1), d = staleness - 1, decays for every l that W may have as eigenvalue, but 1."""
    delay = staleness - 1
    for radius in (0.3, 0.9, 0.999):
        for angle in np.linspace(0, np.pi, 37):
            value = radius * np.exp(1j * angle)
            companion = np.eye(delay + 1, k=-1, dtype=complex)
            companion[0, 0] += 1
            companion[0, delay] += (value - 1) / (2 * delay + 1)
            assert np.abs(np.linalg.eigvals(companion)).max() < 1


def test_a_torus_of_twelve() -> None:
    """3 rows of 4."""
    assert set(outgoing(gossip("torus"), range(12), 5, 0)) == {1, 9, 4, 6}
    assert set(outgoing(gossip("torus"), range(7), 3, 0)) == {2, 4}, "a prime: a ring"


@given(st.sets(st.integers(0, 4)))
def test_edges_have_metropolis_weights(dead: set[int]) -> None:
    """Of the whole graph, so that rows sum up to 1 whoever dies."""
    rule = gossip("edges=0-1 1-2 2-3 3-0 0-2 4-0:0.05")
    members = [each for each in range(5) if each not in dead]
    for member in members:
        row = weights(rule, members, member, 0)
        assert min(row.values()) >= 0
        assert all(row[peer] == weights(rule, members, peer, 0)[member] for peer in row)
        assert math.isclose(sum(row.values()), 1)


@pytest.mark.parametrize(("edges", "count", "message"), [
    ("0-1 2-3", 4, "not connected"), ("0-1 1-1", 2, "does not join two"), ("0-1 1-2", 2, "does not join two"),
    ("0-1:0.6 1-2:0.6", 3, "not doubly stochastic"), ("0-1:-0.5", 2, "above 0"), ("0-1 1-0:0.2", 2, "twice"),
])  # fmt: skip
def test_topologies_that_do_not_mix(edges: str, count: int, message: str) -> None:
    with pytest.raises(PlanError, match="here") as caught:
        check_topology(gossip(f"edges={edges}"), count, "here")
    assert message in str(caught.value)
