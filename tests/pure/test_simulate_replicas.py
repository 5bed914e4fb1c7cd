"""Simulated replicas: closed forms, recurrences that do without events, bytes, deaths and joins."""

import math
from itertools import islice

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import ASYNC, Consistency, Gossip, Local, Server, Sync, consistency_of
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.schedules.clocks import awaited, least_clock
from meshwright.simulate.faults import Faults, ReplicaFaults
from meshwright.simulate.letters import ReplicaStep
from meshwright.simulate.replicas import ReplicaTimes, simulate_replicas
from meshwright.simulate.spans import COMPUTE
from meshwright.worked.servers import full_at, throughputs
from tests.tries import tries

DEVICE = Device(
    name="x", kind="cpu", memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"float32": 1e9}
)
ALPHA_S, BETA = 1e-3, 1e-9
NUM_BYTES = 1e8
SILENT = ReplicaStep(step_s=1.0)
STEP = ReplicaStep(step_s=1.0, parts={0: NUM_BYTES})
RULES = (
    "sync", "server(sync)", "server(ssp=3)", "server(async)", "server(ssp=1, servers=2, copies=2)",
    "server(ssp=2, servers=2, place=own)", "gossip(ring)", "gossip(torus)", "gossip(exponential)", "gossip(one-peer)",
    "gossip(random)", "gossip(complete)", "gossip(ring, staleness=2)", "gossip(ring, staleness=any)",
    "gossip(one-peer, staleness=2)", "gossip(one-peer, push=on)", "gossip(one-peer, staleness=1, push=on)",
    "easgd(0.1)", "easgd(0.1, every=3)", "easgd(0.1, every=3, mode=async)", "local(1)", "local(4)", "diloco(6)",
    "diloco(6, fragments=3, delay=1)", "diloco(6, delay=5)", "partial(solo)", "partial(majority)", "partial(3)",
    "ensemble",
)  # fmt: skip
SEEDS = st.integers(0, 10**6)


def network(num_ranks: int) -> Cluster:
    level = Level(name="network", fan_out=num_ranks, alpha_s=ALPHA_S, beta_s_per_byte=BETA)
    return Cluster(name="c", num_devices=num_ranks, device=DEVICE, levels=(level,))


def play(
    rule: str | Consistency, num_replicas: int = 4, step: ReplicaStep = SILENT, steps: int = 20,
    faults: ReplicaFaults | None = None,
) -> ReplicaTimes:  # fmt: skip
    known = consistency_of(rule) if isinstance(rule, str) else rule
    return simulate_replicas(known, num_replicas, step, network(num_replicas + 8), steps=steps, faults=faults)


def random_faults(seed: int) -> ReplicaFaults:
    return ReplicaFaults(each=Faults(jitter=0.2, slow={1: 1.3}, seed=seed), sometimes=((2.0, 0.25),))


def begins(times: ReplicaTimes, replica: int) -> list[float]:
    return [span.start_s for span in times.trace.spans if span.rank == replica and span.stream == COMPUTE]


def factors(faults: ReplicaFaults, num_replicas: int, steps: int) -> list[list[float]]:
    return [list(islice(faults.factors(replica, num_replicas), steps)) for replica in range(num_replicas)]


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_with_equal_speeds_and_without_letters_every_rule_takes_one_replicas_step(rule: str) -> None:
    times = play(rule)
    assert times.step_s == pytest.approx(1.0)
    assert times.steps == (20,) * 4
    assert sum(times.waited_s) == pytest.approx(0.0)


@pytest.mark.parametrize("rule", ["sync", "server(sync)", "gossip(complete)", "local(1)", "diloco(1)", "partial(4)"])
def test_synchronous_rules_take_the_slowest_of_each_step(rule: str) -> None:
    faults = random_faults(7)
    drawn = factors(faults, 4, 20)
    assert play(rule, faults=faults).end_s == pytest.approx(sum(max(row[step] for row in drawn) for step in range(20)))


@given(
    seed=SEEDS,
    rule=st.sampled_from([Sync(), Server(0), Server(1), Server(3), Server(ASYNC), Gossip("ring"), Gossip("one-peer"),
                          Gossip("ring", 1), Gossip("torus", 2), Local(3)]),
    num_replicas=st.integers(2, 5),
)  # fmt: skip
@tries(15)
def test_steps_begin_when_a_recurrence_says(seed: int, rule: Consistency, num_replicas: int) -> None:
    """Without letters, a step begins when the replica's last step has ended and the awaited replicas have ended enough
    of theirs: E_i(c + 1) = max(E_i(c), max_j E_j(least clock)) + the time of the step. This needs no events. Under
    stale gossip, replicas send their parameters when they begin the next step, not when they have ended the last."""
    faults, members, steps = random_faults(seed), range(num_replicas), 12
    drawn = factors(faults, num_replicas, 3 * steps)
    ends = [[0.0] for _ in members]
    wanted: list[list[float]] = [[] for _ in members]
    for clock in range(3 * steps):
        for member in members:
            least = least_clock(rule, clock)
            handed = wanted if isinstance(rule, Gossip) and rule.staleness else ends
            others = [handed[peer][least] for peer in awaited(rule, members, member, clock) if least > 0]
            wanted[member].append(max([ends[member][clock], *others]))
        for member in members:
            ends[member].append(wanted[member][clock] + drawn[member][clock])
    times = play(rule, num_replicas, steps=steps, faults=faults)
    for member in members:
        begun = begins(times, member)
        assert begun == pytest.approx(wanted[member][: len(begun)])


@given(seed=SEEDS)
@tries(8)
def test_stale_synchronous_parallel_with_a_large_bound_is_asynchronous(seed: int) -> None:
    bound, free = (play(rule, step=STEP, faults=random_faults(seed)) for rule in ("server(ssp=99)", "server(async)"))
    assert msgspec.structs.replace(bound, rule="", trace=free.trace) == msgspec.structs.replace(free, rule="")


@given(
    seed=SEEDS, bound=st.integers(0, 4), servers=st.integers(1, 2), num_bytes=st.sampled_from([0.0, 1e7, 1e9]),
    death_s=st.sampled_from([0.5, 3.7, 100.0]), join_s=st.sampled_from([0.0, 2.0, 5.5, 100.0]),
)  # fmt: skip
@tries(20)
def test_no_step_begins_more_than_the_bound_ahead_of_the_slowest(
    seed: int, bound: int, servers: int, num_bytes: float, death_s: float, join_s: float
) -> None:
    each = Faults(jitter=0.5, slow={1: 2.0}, seed=seed, deaths_s={3: death_s})
    faults = ReplicaFaults(each=each, sometimes=((2.0, 0.25),), joins_s={2: join_s})
    step = ReplicaStep(step_s=1.0, parts={0: num_bytes} if num_bytes else {})
    times = play(Server(bound, servers, copies=3), step=step, faults=faults)
    assert max(times.staleness) <= bound


def test_one_of_four_replicas_slow_forever_holds_all_back_unless_nobody_waits() -> None:
    faults = ReplicaFaults(each=Faults(slow={1: 2.0}))
    seconds = {
        rule: play(rule, steps=200, faults=faults).step_s
        for rule in ("sync", "server(ssp=3)", "partial(2)", "local(8)")
    }
    assert seconds["sync"] == pytest.approx(2.0)
    assert seconds["server(ssp=3)"] == pytest.approx(2.0, rel=0.02)
    assert seconds["local(8)"] == pytest.approx(2.0, rel=0.02)
    assert seconds["partial(2)"] == pytest.approx(4 / 3.5, rel=0.01)  # three replicas make 1 step a second, one 0.5


def test_a_straggler_in_turns_costs_synchronous_steps_a_factor_of_two() -> None:
    """Each step, one of 4 is twice as slow: sync takes 2, on average a replica takes 1.25."""
    faults = ReplicaFaults(in_turn=(2.0,))
    assert play("sync", faults=faults).step_s == pytest.approx(2.0)
    drawn = factors(faults, 4, 400)
    assert all(sum(row[step] for row in drawn) == 5.0 for step in range(400))
    assert play("server(async)", steps=400, faults=faults).step_s == pytest.approx(1.25, rel=0.02)


# --- letters ---------------------------------------------------------------------------------------------------------


def test_a_server_is_reached_over_its_one_link() -> None:
    """All push at once: the link takes P N b; then it gives as much."""
    times = play("server(sync, place=own)", step=STEP)
    assert times.step_s == pytest.approx(1.0 + 2 * (ALPHA_S + 4 * NUM_BYTES * BETA))
    alone = play("server(sync, servers=4, place=own)", step=STEP)
    assert alone.step_s == pytest.approx(1.0 + 2 * (ALPHA_S + NUM_BYTES * BETA))


def test_asynchronous_throughput_flattens_where_the_servers_link_is_full() -> None:
    """The link takes 10 times the parameters in a second. Replicas in step use its two directions in turn; others,
    which come at different times, fill it."""
    in_step = {num: _throughput(num, 0.0) for num in (1, 4, 16)}
    assert in_step == pytest.approx({num: num / (1 + 2 * (ALPHA_S + num * NUM_BYTES * BETA)) for num in in_step})
    full, letters_s = 1 / (NUM_BYTES * BETA), 2 * (ALPHA_S + NUM_BYTES * BETA)
    spread = {num: _throughput(num, 0.3) for num in (2, 4, 20, 28)}
    assert spread[2] == pytest.approx(2 / (1 + letters_s), rel=0.05)
    assert spread[4] == pytest.approx(4 / (1 + letters_s), rel=0.08)
    assert 0.85 * full < spread[20] < spread[28] < full


def test_the_worked_example_of_a_server_can_be_scaled_down() -> None:
    """A server whose link is full at 10 workers: throughput grows with the workers at first, and then stays; with two
    servers it goes on."""
    assert full_at(1.0, 1e6, 1e7) == pytest.approx(10.0)
    one_server, two_servers = (
        throughputs((2, 4, 24), Server(ASYNC, servers=servers, place="own"), rate=1.0, num_bytes=1e6, nic=1e7, steps=30)
        for servers in (1, 2)
    )
    assert [one_server[2], one_server[4]] == pytest.approx([2.0, 4.0], rel=0.15)
    assert one_server[24] == pytest.approx(10.0, rel=0.1)
    assert two_servers[24] > 1.5 * one_server[24]


def _throughput(num_replicas: int, jitter: float) -> float:
    faults = ReplicaFaults(each=Faults(jitter=jitter))
    rule = Server(ASYNC, place="own")
    return num_replicas / simulate_replicas(rule, num_replicas, STEP, network(65), steps=60, faults=faults).step_s


@pytest.mark.parametrize(("rule", "every"), [("local(4)", 4), ("diloco(10)", 10), ("sync", 1)])
def test_a_mean_takes_two_rounds_of_letters(rule: str, every: int) -> None:
    assert play(rule, step=STEP).step_s == pytest.approx(1.0 + 2 * (ALPHA_S + 3 / 4 * NUM_BYTES * BETA) / every)


@pytest.mark.parametrize(
    "rule", ["gossip(ring, staleness=1)", "easgd(0.1, every=2)", "diloco(10, delay=1)", "easgd(0.1, mode=async)"]
)
def test_rules_hide_letters_behind_the_next_step(rule: str) -> None:
    assert play(rule, step=STEP).step_s == pytest.approx(1.0)


def test_synchronous_replicas_can_take_the_known_time_of_their_all_reduce() -> None:
    assert play("sync", step=msgspec.structs.replace(STEP, exposed_s=0.25)).step_s == pytest.approx(1.25)


def test_replicas_of_a_box_share_its_link() -> None:
    """Two replicas in each of two boxes: neighbours in the other box are reached over one link of a box."""
    levels = (
        Level(name="box", fan_out=2, alpha_s=0.0, beta_s_per_byte=1e-12),
        Level(name="network", fan_out=2, alpha_s=0.0, beta_s_per_byte=BETA),
    )
    cluster = Cluster(name="c", num_devices=4, device=DEVICE, levels=levels)
    times = simulate_replicas(consistency_of("gossip(edges=0-2 1-3 0-1)"), 4, STEP, cluster, steps=10)
    assert times.step_s == pytest.approx(1.0 + 2 * NUM_BYTES * BETA, rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "sent"),
    [
        ("server(sync, place=own)", 1.0), ("server(async, servers=2, place=own)", 1.0),
        ("gossip(ring)", 2.0), ("gossip(torus)", 2.0), ("gossip(exponential)", 2.0), ("gossip(one-peer)", 1.0),
        ("gossip(complete)", 3.0), ("gossip(one-peer, push=on)", 1.0), ("gossip(random, push=on)", 1.0),
        ("local(4)", 2 * 3 / 4 / 4), ("diloco(10)", 2 * 3 / 4 / 10), ("diloco(10, fragments=5)", 2 * 3 / 4 / 10),
        ("diloco(10, codec=fp16)", 3 / 4 / 10), ("ensemble", 0.0),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_formulas(rule: str, sent: float) -> None:
    times = play(rule, step=STEP)
    assert times.bytes_per_step == pytest.approx(sent * NUM_BYTES, rel=1e-3)
    received = sum(times.received_bytes) / times.num_steps
    assert received == pytest.approx(sent * NUM_BYTES, rel=1e-3)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_each_server_sends_and_gets_2_p_n_b_over_s(servers: int) -> None:
    times = play(f"server(sync, servers={servers}, place=own)", step=STEP)
    assert len(times.server_bytes) == servers
    per_step = [size / times.num_steps * 4 for size in times.server_bytes]
    assert per_step == pytest.approx([2 * 4 * NUM_BYTES / servers] * servers)


def test_a_server_beside_a_replica_costs_this_replica_no_letters() -> None:
    times = play("server(sync)", step=STEP)
    assert times.sent_bytes == pytest.approx([0.0, *[20 * NUM_BYTES] * 3])


def test_ranks_of_equal_index_exchange_their_parts_side_by_side() -> None:
    """Two ranks a replica, each with half of the parameters and a link of its own, take half of the time."""
    step = ReplicaStep(step_s=1.0, parts={0: NUM_BYTES / 2, 1: NUM_BYTES / 2}, num_ranks=2)
    times = simulate_replicas(consistency_of("local(1)"), 4, step, network(8), steps=5)
    assert times.step_s == pytest.approx(1.0 + 2 * (ALPHA_S + 3 / 4 * NUM_BYTES / 2 * BETA))


# --- deaths and joins ------------------------------------------------------------------------------------------------


@given(seed=SEEDS, rule=st.sampled_from(RULES), death_s=st.floats(0.0, 15.0), join_s=st.floats(0.0, 15.0))
@example(seed=1, rule="diloco(6, fragments=3, delay=1)", death_s=0.0, join_s=2.0)
@tries(40)
def test_the_others_go_on_when_a_replica_dies_or_joins(seed: int, rule: str, death_s: float, join_s: float) -> None:
    each = Faults(jitter=0.3, seed=seed, deaths_s={3: death_s})
    times = play(rule, step=STEP, faults=ReplicaFaults(each=each, joins_s={1: join_s}))
    assert sum(times.steps) == times.num_steps == 80
    assert math.isfinite(times.end_s)


def test_a_replica_that_joins_goes_on_from_the_clock_of_another() -> None:
    step = msgspec.structs.replace(STEP, state_bytes=2 * NUM_BYTES)
    times = play("gossip(ring)", step=step, faults=ReplicaFaults(joins_s={3: 5.2}))
    first = begins(times, 3)[0]
    assert first in begins(times, 0)
    assert first >= 5.2 + ALPHA_S + 3 * NUM_BYTES * BETA
    assert max(times.staleness) <= 2


def test_a_replica_that_died_may_join_again() -> None:
    faults = ReplicaFaults(each=Faults(deaths_s={2: 4.5}), joins_s={2: 9.0})
    begun = begins(play("local(2)", faults=faults), 2)
    assert [start_s for start_s in begun if 4.5 < start_s < 9.0] == []
    assert len([start_s for start_s in begun if start_s >= 9.0]) >= 8


def test_a_range_whose_copies_have_all_died_is_refused() -> None:
    faults = ReplicaFaults(each=Faults(deaths_s={0: 3.5}))
    with pytest.raises(LayoutError, match="all copies of range 0 have died"):
        play("server(async)", faults=faults)
    assert play("server(async, copies=2)", faults=faults).steps[0] == 3


def test_replicas_that_all_die_are_refused() -> None:
    faults = ReplicaFaults(each=Faults(deaths_s=dict.fromkeys(range(4), 3.5)))
    with pytest.raises(LayoutError, match="all replicas have died"):
        play("gossip(ring)", faults=faults)


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"each": Faults(slow={4: 2.0})}, "no replica 4"), ({"joins_s": {9: 1.0}}, "no replica 9"),
        ({"sometimes": ((2.0, 1.5),)}, "probability is 1.5"), ({"sometimes": ((0.0, 0.5),)}, "factor is 0"),
        ({"in_turn": (-1.0,)}, "factor is -1"), ({"joins_s": {1: -1.0}}, "joins at -1"),
    ],
)  # fmt: skip
def test_impossible_faults_are_refused(faults: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        play("sync", faults=ReplicaFaults(**faults))  # type: ignore[arg-type]


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(LayoutError, match="it takes 0 s"):
        ReplicaStep(step_s=0.0)
