"""Consistency rules as texts, the clocks that say who may proceed, and the ranks of replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.ir.consistency import (
    ASYNC,
    Consistency,
    DiLoCo,
    ElasticAverage,
    Ensemble,
    Gossip,
    Local,
    Partial,
    Server,
    Sync,
    consistency_of,
)
from meshwright.ir.layout import Layout
from meshwright.schedules.clocks import awaited, fragment_due, least_clock, may_proceed
from meshwright.schedules.replicas import all_ranks, num_ranks, of_replica, server_ranks

TEXTS = [
    "sync", "server(sync)", "server(async)", "server(ssp=3)", "server(ssp=1, servers=2, copies=2, place=own)",
    "gossip(ring)", "gossip(torus, staleness=2)", "gossip(one-peer, staleness=any, push=on)",
    "gossip(edges=0-1 1-2:0.25)", "easgd(0.1)", "easgd(0.25, every=10, mode=async)", "local(16)", "diloco(50)",
    "diloco(60, lr=1, momentum=0, fragments=4, delay=5, merge=0.5, codec=qsgd(4, bucket=1024))", "partial(solo)",
    "partial(majority)", "partial(3)", "ensemble",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_rule_is_written_as_it_is_read(text: str) -> None:
    rule = consistency_of(text)
    assert consistency_of(str(rule)) == rule
    assert str(rule) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write sync"),
        ("paxos(3)", "there is no rule 'paxos'"),
        ("server", "server(sync) or server(async)"),
        ("server(ssp=-1)", "at least 0"),
        ("server(sync, servers=0)", "at least 1"),
        ("server(sync, speed=3)", "options are"),
        ("local(0)", "at least 1"),
        ("local", "local without a number"),
        ("diloco(50, fragments=3)", "divisor"),
        ("diloco(50, codec=powersgd(4))", "does not code changes"),
        ("diloco(50, codec=topk(1%, momentum=0.9))", "does not code changes"),
        ("diloco(50, delay=50)", "less than 50"),
        ("diloco(50, momentum=1)", "at most"),
        ("gossip", "gossip(ring)"),
        ("gossip(star)", "gossip(ring)"),
        ("gossip(edges=0-x)", "pairs of replicas"),
        ("gossip(ring, staleness=-1)", "a number of steps, or any"),
        ("easgd(2)", "at most 1"),
        ("easgd(0.1, every=2, every=3)", "twice"),
        ("partial(0)", "at least 1"),
        ("partial(most)", "partial(solo) or partial(majority)"),
        ("ensemble(3)", "no options"),
    ],
)
def test_malformed_rules(text: str, message: str) -> None:
    with pytest.raises(MeshwrightError, match="consistency") as caught:
        consistency_of(text)
    assert message in str(caught.value)


def rules() -> st.SearchStrategy[Consistency]:
    staleness = st.integers(0, 4) | st.just(ASYNC)
    return st.one_of(
        st.just(Sync()),
        st.builds(Server, staleness),
        st.builds(
            Gossip, st.sampled_from(["ring", "torus", "exponential", "one-peer", "random", "complete"]), staleness
        ),
        st.builds(ElasticAverage, st.just(0.1), st.integers(1, 4), st.booleans()),
        st.builds(Local, st.integers(1, 4)),
        st.sampled_from([DiLoCo(4), DiLoCo(4, fragments=2, delay=1), DiLoCo(1)]),
        st.builds(Partial, st.sampled_from(["solo", "majority", "2"])),
        st.just(Ensemble()),
    )


@given(rules(), st.integers(2, 6), st.data())
def test_some_replica_may_always_proceed(rule: Consistency, count: int, data: st.DataObject) -> None:
    """From any clocks that a run can reach, the slowest replica may go on: no rule hangs."""
    clocks = dict.fromkeys(range(count), 0)
    for _ in range(40):
        ready = [clock for clock in clocks if may_proceed(rule, clocks, clock)]
        slowest = min(clocks, key=clocks.__getitem__)
        assert slowest in ready or isinstance(rule, Partial)
        assert ready
        clocks[data.draw(st.sampled_from(ready))] += 1


@given(st.integers(0, 5), st.integers(2, 6), st.data())
def test_stale_synchronous_parallel_bounds_the_clocks(bound: int, count: int, data: st.DataObject) -> None:
    rule = Server(bound)
    clocks = dict.fromkeys(range(count), 0)
    for _ in range(60):
        ready = [clock for clock in clocks if may_proceed(rule, clocks, clock)]
        replica = data.draw(st.sampled_from(ready))
        assert clocks[replica] - min(clocks.values()) <= bound, "at every read"
        clocks[replica] += 1
    assert max(clocks.values()) - min(clocks.values()) <= bound + 1, "a blocked replica has finished one more step"


def test_who_waits_for_whom() -> None:
    everybody = (0, 1, 2, 3)
    assert awaited(Server(2), everybody, 1, 5) == (0, 2, 3)
    assert awaited(Gossip("ring"), everybody, 0, 5) == (1, 3)
    assert awaited(Gossip("ring"), everybody, 0, 0) == ()
    assert awaited(Ensemble(), everybody, 0, 5) == ()
    assert awaited(Gossip("ring"), (0, 2, 3), 2, 5) == (0, 3), "of those that live"
    assert not may_proceed(Sync(), {0: 1, 1: 0}, 0)
    assert may_proceed(Server(ASYNC), {0: 99, 1: 0}, 0)
    assert may_proceed(Local(4), {0: 3, 1: 0}, 0)
    assert not may_proceed(Local(4), {0: 4, 1: 3}, 0)
    assert may_proceed(Partial("majority"), {0: 1, 1: 1, 2: 0, 3: 0}, 0)
    assert not may_proceed(Partial("majority"), {0: 1, 1: 0, 2: 0, 3: 0}, 0)
    assert may_proceed(Partial("solo"), {0: 1, 1: 0, 2: 0, 3: 0}, 0)


def test_fragments_take_turns() -> None:
    rule = DiLoCo(12, fragments=3, delay=2)
    assert [fragment_due(rule, clock) for clock in range(1, 25)] == [
        None, None, None, 0, None, None, None, 1, None, None, None, 2,
        None, None, None, 0, None, None, None, 1, None, None, None, 2,
    ]  # fmt: skip
    assert [least_clock(rule, clock) for clock in (4, 5, 6, 7, 10)] == [0, 0, 4, 0, 8], "applied two steps later"


def test_ranks_of_replicas() -> None:
    local = Layout(replicas=4, consistency="local(8)", tp=2, dp=-1)
    assert of_replica(local, 16) == (local, 4)
    assert of_replica(Layout(replicas=4, dp=2, tp=2), 16) == (Layout(dp=8, tp=2), 16), "sync is data parallelism"
    own = Layout(replicas=3, consistency="server(ssp=2, servers=2, place=own)")
    assert (server_ranks(own), num_ranks(own), all_ranks(own, 1)) == (2, 5, 5)
    assert of_replica(own, 5) == (own, 1)


@pytest.mark.parametrize(
    ("layout", "count", "message"),
    [
        (Layout(replicas=0), 4, "give 1 or more"),
        (Layout(consistency="local(8)"), 4, "2 or more replicas"),
        (Layout(replicas=3, consistency="local(8)"), 4, "do not divide"),
        (Layout(replicas=2, consistency="server(sync, copies=3)"), 4, "at most 2"),
        (Layout(replicas=4, consistency="gossip(edges=0-1 2-3)"), 4, "not connected"),
        (Layout(replicas=3, consistency="gossip(edges=0-1:0.8 1-2:0.8)"), 3, "doubly stochastic"),
        (Layout(replicas=2, consistency="gossip(edges=0-5)"), 2, "does not join two"),
        (Layout(replicas=2, consistency="partial(3)"), 2, "at most 2"),
        (Layout(replicas=4, consistency="easgd(0.3)"), 4, "at most 1/4"),
        (Layout(replicas=2, consistency="server(sync, place=own)"), 2, "do not divide"),
    ],
)
def test_replicas_that_do_not_fit(layout: Layout, count: int, message: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        of_replica(layout, count)
    assert message in str(caught.value)
