"""Parameter servers: exact limits, bounded staleness, and updates that count once whoever dies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox
from meshwright.consistency.copies import server_name
from meshwright.consistency.range_state import KINDS, Operation, RangeState, Reply
from meshwright.consistency.ranges import check_servers, key_ranges, parts, pieces
from meshwright.consistency.server import ServerExchange
from meshwright.consistency.server_state import ServerState, hyperparameters, set_hyperparameters
from meshwright.errors import CheckpointError, LostRankError, MeshwrightError, OptimizerError
from meshwright.ir.consistency import ASYNC, Server, consistency_of
from tests.tries import tries
from tests.virtual_mailbox import VirtualNetwork
from tests.virtual_servers import Chaos, Training, plain_sgd

SEEDS = st.integers(0, 2**32 - 1)
FEW, MANY = tries(5), tries(15)


def of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: kind([parameter for _, parameter in named], **options)


OPTIMIZERS = {
    "SGD": of(torch.optim.SGD, lr=0.1),
    "momentum": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": of(torch.optim.Adam, lr=0.01),
    "AdamW": of(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "RMSprop": of(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "Adagrad": of(torch.optim.Adagrad, lr=0.1),
}


def quadratic(seed: int, num_replicas: int, size: int) -> Callable[[int, int, int, Tensor], Tensor]:
    """Gradients that depend on the parameters, the replica and the step."""
    noise = torch.randn(num_replicas, 8, size, generator=torch.Generator().manual_seed(seed))
    return lambda replica, _, step, x: x * (replica + 1) + noise[replica, step % 8]


def units(rule: Any, num_replicas: int, num_steps: int, num_lives: int) -> tuple[Tensor, Any]:
    """Parameters and gradients for which lr 1 and plain SGD make the parameters say how often each update counts: each
    update has an element of its own in each range."""
    size = num_lives * num_replicas * num_steps

    def gradient(replica: int, life: int, step: int, _: Tensor) -> Tensor:
        unit = torch.zeros(size, dtype=torch.float64)
        unit[(life * num_replicas + replica) * num_steps + step] = num_replicas
        return unit.repeat(getattr(rule, "servers", 1))

    return torch.zeros(size * getattr(rule, "servers", 1), dtype=torch.float64), gradient


# --- exact limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@FEW
@given(seed=SEEDS, servers=st.integers(1, 3), copies=st.integers(1, 2))
def test_server_sync_is_synchronous_training_bit_for_bit(optimizer: str, seed: int, servers: int, copies: int) -> None:
    start = torch.randn(37, generator=torch.Generator().manual_seed(seed))
    for text in ("sync", "ssp=0"):
        rule = consistency_of(f"server({text}, servers={servers}, copies={copies})")
        assert isinstance(rule, Server)
        names = [("w", 20), ("b", 7), ("v", 10)]
        training = Training(rule, 3, 4, start, quadratic(seed, 3, 37), OPTIMIZERS[optimizer], names=names)
        results = VirtualNetwork(random.Random(seed).randrange).run(training.bodies())
        expected = training.synchronous()
        for replica in range(3):
            assert torch.equal(results[f"replica {replica}"], expected)
        for index in range(servers):
            states = [results[server_name(index, copy)] for copy in range(copies)]
            assert all(state.version == 4 for state in states), "one step for all pushes of a clock"
            for state in states:
                assert torch.equal(torch.cat(state.parameters), torch.cat(parts([expected], training.ranges[index])))


@FEW
@given(seed=SEEDS, copies=st.integers(1, 2))
def test_schedules_of_the_learning_rate_reach_the_servers(seed: int, copies: int) -> None:
    start = torch.randn(11, generator=torch.Generator().manual_seed(seed))
    rule = Server(0, 2, copies)
    training = Training(rule, 2, 5, start, quadratic(seed, 2, 11), OPTIMIZERS["momentum"], lr=lambda step: 0.5**step)
    results = VirtualNetwork(random.Random(seed).randrange).run(training.bodies())
    assert torch.equal(results["replica 0"], training.synchronous())


@MANY
@given(seed=SEEDS, count=st.integers(2, 4))
def test_under_async_every_push_makes_a_step(seed: int, count: int) -> None:
    rule = Server(ASYNC, 2)
    start, gradient = units(rule, count, 5, 1)
    results = VirtualNetwork(random.Random(seed).randrange).run(Training(rule, count, 5, start, gradient).bodies())
    for index in range(2):
        assert results[server_name(index, 0)].version == 5 * count
        assert results[server_name(index, 0)].parameters[0].tolist() == [-1.0] * 5 * count


# --- bounded staleness -----------------------------------------------------------------------------------------------


@MANY
@given(seed=SEEDS, bound=st.integers(0, 3), count=st.integers(2, 4))
def test_reads_are_at_most_so_many_steps_ahead(seed: int, bound: int, count: int) -> None:
    def watch(state: RangeState, _: Operation, replies: list[Reply]) -> None:
        if state.clocks:
            slowest = min(state.clocks.values())
            assert max(state.clocks.values()) - slowest <= bound + 1, "a blocked replica has pushed one more step"
            for reply in replies:
                assert reply.numbers[2] - slowest <= bound, "at every read"

    rule = Server(bound, 2, 2)
    start, gradient = units(rule, count, 6, 1)
    training = Training(rule, count, 6, start, gradient, watch=watch)
    network = Chaos(seed, training, 40, 1, restart=False)
    network.run(training.bodies())
    assert max(training.staleness) <= bound


def test_a_replica_sees_its_own_pushes() -> None:
    state, own = _state(Server(2), 2, 3)
    (reply,) = state.apply(_push(0, 1, [2.0, 0.0, 0.0]))
    assert reply.replica == 0
    assert own.tolist() == [-1.0, 0.0, 0.0]
    assert len(state.apply(_push(0, 2, [2.0, 0.0, 0.0]))) == 1, "2 steps ahead: it goes on"
    assert state.apply(_push(0, 3, [2.0, 0.0, 0.0])) == [], "3 steps ahead: it waits"
    replies = state.apply(_push(1, 1, [0.0, 2.0, 0.0]))
    assert [reply.replica for reply in replies] == [0, 1]
    assert own.tolist() == [-3.0, -1.0, 0.0]
    assert state.version == 3, "what waits makes one step"
    assert replies[0].numbers == (KINDS.index("push"), 3, 3, 3, 0, 3, 1, 1)


def _state(rule: Server, num_replicas: int, size: int) -> tuple[ServerState, Tensor]:
    own = torch.zeros(size)
    return ServerState(rule, num_replicas, [own], [("w", own)], plain_sgd), own


def _push(replica: int, clock: int, values: list[float]) -> Operation:
    return Operation("push", replica, clock, (torch.tensor(values),))


def test_the_dead_block_nobody_and_their_last_push_counts_once() -> None:
    state, own = _state(Server(0), 2, 2)
    assert state.apply(_push(0, 1, [2.0, 0.0])) == []
    (reply,) = state.apply(Operation("gone", 1, 0))
    assert (reply.replica, own.tolist()) == (0, [-1.0, 0.0])
    assert state.apply(_push(1, 1, [0.0, 2.0])) == [], "it was under way"
    assert state.apply(_push(1, 1, [0.0, 2.0])) == [], "and comes again"
    assert state.apply(Operation("join", 1, 5))[0].numbers == (KINDS.index("join"), 5, 1, 1, 0, 1, 1, 1)
    state.apply(_push(0, 2, [2.0, 0.0]))
    state.apply(_push(1, 2, [0.0, 4.0]))
    assert own.tolist() == [-2.0, -3.0]
    assert state.apply(Operation("gone", 1, 0)) == [], "that was its former life"
    assert 1 in state.clocks


# --- deaths ----------------------------------------------------------------------------------------------------------


def check_counts(training: Training, network: VirtualNetwork) -> None:
    """Every update counts at most once, and exactly once if its replica got the reply; the same in all ranges that the
    replica has reached."""
    num = training.num_replicas
    for state in training.last_states(network):
        assert isinstance(state, ServerState)
        counts = -state.parameters[0]
        for gradients in state._waiting.values():
            counts = counts + gradients[0] / num
        for replica, life, step in training.pushed:
            count = counts[(life * num + replica) * training.num_steps + step].item()
            assert count == 1 or (count == 0 and (replica, life, step) not in training.done)
        assert set(counts.tolist()) <= {0.0, 1.0}
        assert counts.sum() <= len(training.pushed)


def check_copies(training: Training, results: dict[str, Any]) -> None:
    """The copies of a range that survived went through the same versions bit for bit."""
    for index in range(training.num_ranges):
        seen: dict[int, bytes] = {}
        for state in (state for name, state in results.items() if name.startswith(f"server {index}.")):
            for version, values in state.history.items():
                assert seen.setdefault(version, values) == values


@MANY
@given(
    seed=SEEDS, bound=st.sampled_from([0, 1, 3, ASYNC]), count=st.integers(2, 4), servers=st.integers(1, 2),
    copies=st.integers(2, 3),
)  # fmt: skip
def test_every_update_counts_once_whoever_dies(seed: int, bound: int, count: int, servers: int, copies: int) -> None:
    rule = Server(bound, servers, copies)
    start, gradient = units(rule, count, 5, 1)
    training = Training(rule, count, 5, start, gradient)
    network = Chaos(seed, training, 25, 5, restart=False)
    results = network.run(training.bodies())
    check_counts(training, network)
    check_copies(training, results)


@MANY
@given(seed=SEEDS, bound=st.sampled_from([0, 2, ASYNC]), copies=st.integers(2, 3))
def test_the_dead_join_again(seed: int, bound: int, copies: int) -> None:
    rule = Server(bound, 2, copies)
    start, gradient = units(rule, 3, 4, 40)
    training = Training(rule, 3, 4, start, gradient)
    network = Chaos(seed, training, 12, 12)
    results = network.run(training.bodies())
    check_counts(training, network)
    check_copies(training, results)


def test_a_hundred_kills_lose_no_update() -> None:
    rule = Server(2, 2, 3)
    start, gradient = units(rule, 4, 60, 120)
    training = Training(rule, 4, 60, start, gradient)
    network = Chaos(27, training, 20, 100)
    network.run(training.bodies())
    check_counts(training, network)
    assert len(network.killed) == 100
    assert sum(name.startswith("server") for name in network.killed) > 30
    assert sum(name.startswith("replica") for name in network.killed) > 30


def test_without_copies_a_dead_server_is_an_error() -> None:
    rule = Server(0, 2)
    start, gradient = units(rule, 2, 50, 1)
    training = Training(rule, 2, 50, start, gradient)
    with pytest.raises(LostRankError, match=r"range 1 of the parameters is lost: its only copy has died") as caught:
        VirtualNetwork(random.Random(0).randrange, {60: "server 1.0"}).run(training.bodies())
    assert "copies=2 would have survived" in str(caught.value)


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Meeting(ServerExchange):
    others_have_loaded = False

    def take(self, letter: Letter) -> None:
        self.others_have_loaded |= letter.kind == "loaded"
        super().take(letter)


@FEW
@given(seed=SEEDS, optimizer=st.sampled_from(sorted(OPTIMIZERS)), copies=st.integers(1, 2))
def test_training_goes_on_from_saved_servers_bit_for_bit(seed: int, optimizer: str, copies: int) -> None:
    """Replica 1 has an older checkpoint; the newest is taken."""
    rule, make = Server(0, 2, copies), OPTIMIZERS[optimizer]
    start, gradient = torch.randn(9, generator=torch.Generator().manual_seed(seed)), quadratic(seed, 2, 9)
    saved: dict[int, dict[str, Tensor]] = {}

    def steps(exchange: ServerExchange, x: Tensor, which: range) -> Tensor:
        number = exchange.replica
        for step in which:
            exchange.begin([x])
            list(exchange.updates([gradient(number, 0, step, x)]))
            exchange.end([x])
            if (number, step) in ((0, 2), (1, 1)):
                saved[number] = exchange.state()
        exchange.begin([x])
        exchange.leave()
        return x

    def first(exchange: ServerExchange) -> Tensor:
        return steps(exchange, start.clone(), range(5))

    def again(exchange: Meeting) -> Tensor:
        exchange.load_state(saved[exchange.replica])
        exchange.tell("loaded")  # as replicas do that compare their checkpoints
        exchange.mailbox.receive_until(lambda: exchange.others_have_loaded, exchange.take, "the other replica")
        return steps(exchange, torch.full((9,), torch.nan), range(3, 5))

    training = Training(rule, 2, 5, start, gradient, make)
    for run in (first, again):
        bodies = training.bodies()
        for number in range(2):
            bodies[f"replica {number}"] = lambda box, run=run, number=number: run(Meeting(rule, box, number, 2))  # type: ignore[misc]
        results = VirtualNetwork(random.Random(seed).randrange).run(bodies)
        for number in range(2):
            assert torch.equal(results[f"replica {number}"], training.synchronous())


def test_a_checkpoint_of_another_number_of_servers_is_refused() -> None:
    saved = {"versions": torch.tensor([3]), "range 0": torch.zeros(1)}

    def replica(box: Mailbox) -> None:
        ServerExchange(Server(0, 2), box, 0, 2).load_state(saved)

    with pytest.raises(CheckpointError, match="the state of 1 servers, the plan has 2"):
        VirtualNetwork(random.Random(0).randrange).run({"replica 0": replica})


# --- ranges ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_ranges_have_equal_lengths_and_cover_everything(sizes: list[int], servers: int) -> None:
    flats = list(torch.arange(sum(sizes)).split(sizes))
    ranges = key_ranges(sizes, servers)
    lengths = [sum(end - begin for _, begin, end in spans) for spans in ranges]
    assert max(lengths) - min(lengths) <= 1
    values = [value for spans in ranges for part in parts(flats, spans) for value in part.tolist()]
    assert values == list(range(sum(sizes)))


def test_pieces_have_the_names_of_their_parameters() -> None:
    flats = [torch.arange(7), torch.arange(7, 10)]
    named = [[("a", 4), ("b", 3)], [("c", 3)]]
    named_pieces = [
        [(name, piece.tolist()) for name, piece in pieces(named, spans, parts(flats, spans))]
        for spans in key_ranges([7, 3], 2)
    ]
    assert named_pieces == [[("a", [0, 1, 2, 3]), ("b", [4])], [("b", [5, 6]), ("c", [7, 8, 9])]]


def test_more_servers_than_parameters() -> None:
    check_servers(4, 4)
    with pytest.raises(MeshwrightError, match="5 servers share 4 elements"):
        check_servers(5, 4)


# --- hyperparameters -------------------------------------------------------------------------------------------------


def test_hyperparameters_are_the_numbers_of_all_groups() -> None:
    def make() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [torch.nn.Parameter(torch.ones(1))]}]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))

    source, target = make(), make()
    source.param_groups[1] |= {"lr": torch.tensor(0.5), "betas": (0.5, 0.75), "weight_decay": 0.25}
    set_hyperparameters(target, hyperparameters(source))
    assert target.param_groups[0]["lr"] == 0.1
    assert [target.param_groups[1][key] for key in ("lr", "betas", "weight_decay")] == [0.5, (0.5, 0.75), 0.25]
    target.param_groups.pop()
    with pytest.raises(OptimizerError, match="1 parameter groups, that of replicas 2"):
        set_hyperparameters(target, hyperparameters(source))
