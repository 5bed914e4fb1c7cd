"""Eager collectives: rounds that close without the late, whose gradients count later."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.consistency import round_state
from meshwright.consistency.copies import server_name
from meshwright.consistency.range_state import Operation, RangeState, Reply
from meshwright.consistency.round_state import RoundState
from meshwright.errors import LostRankError
from meshwright.ir.consistency import Partial
from tests.pure.test_servers import OPTIMIZERS, SEEDS, quadratic, units
from tests.tries import tries
from tests.virtual_mailbox import VirtualNetwork
from tests.virtual_servers import Chaos, Training

FEW, MANY = tries(5), tries(15)


def push(replica: int, number: int, value: float) -> Operation:
    return Operation("push", replica, number, (torch.tensor([value]),))


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_late_gradients_count_in_the_next_round() -> None:
    state = RoundState(Partial("majority"), 3)
    assert state.apply(push(0, 1, 3.0)) == []
    first, second = state.apply(push(1, 1, 6.0))
    assert (first.replica, second.replica) == (0, 1)
    assert [tensor.tolist() for tensor in first.tensors] == [[3.0]], "the mean over all three"
    (late,) = state.apply(push(2, 1, 9.0))
    assert (late.replica, [tensor.tolist() for tensor in late.tensors]) == (2, [[3.0]]), "it does not wait"
    assert state.pending.keys() == {2}
    assert state.apply(push(0, 2, 3.0)) == [], "a late gradient is not one for this round"
    replies = state.apply(push(1, 2, 0.0))
    assert [(reply.replica, reply.tensors[0].item()) for reply in replies] == [(0, 4.0), (1, 4.0)]
    state.apply(push(0, 3, 3.0))
    state.apply(push(1, 3, 3.0))
    (late,) = state.apply(push(2, 2, 9.0))
    assert [tensor.item() for tensor in late.tensors] == [4.0, 2.0], "all rounds that have closed, in order"
    assert late.numbers[1:] == (2, 2, 3, 0, 3, 1, 3, 2, 2)


def test_solo_waits_for_nobody_and_the_dead_are_not_awaited() -> None:
    state = RoundState(Partial("solo"), 2)
    for number in (1, 2, 3):
        assert len(state.apply(push(0, number, 2.0))) == 1
    state = RoundState(Partial("2"), 2)
    assert state.apply(push(0, 1, 2.0)) == []
    (reply,) = state.apply(Operation("gone", 1, 0))
    assert reply.tensors[0].item() == 1.0
    assert state.apply(push(1, 1, 8.0)) == [], "what it pushed before it died comes late"
    (reply,) = state.apply(push(0, 2, 2.0))
    assert reply.tensors[0].item() == 5.0


def test_rounds_are_kept_for_the_slowest_and_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_state, "MOST_ROUNDS", 3)
    state = RoundState(Partial("solo"), 2)
    for number in (1, 2):
        assert len(state.apply(push(0, number, 2.0))) == 1
    assert state.rounds.keys() == {1, 2}
    assert state.apply(push(0, 3, 2.0)) == [], "replica 1 has applied none of 2 rounds"
    replies = state.apply(push(1, 1, 2.0))
    assert [(reply.replica, len(reply.tensors)) for reply in replies] == [(0, 1), (1, 3)]
    assert state.rounds.keys() == {1, 2, 3}, "replica 1 may ask again"


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@FEW
@given(seed=SEEDS, copies=st.integers(1, 2))
def test_partial_of_all_is_synchronous_training_bit_for_bit(optimizer: str, seed: int, copies: int) -> None:
    start = torch.randn(37, generator=torch.Generator().manual_seed(seed))
    names = [("w", 20), ("b", 7), ("v", 10)]
    training = Training(
        Partial("3", copies), 3, 4, start, quadratic(seed, 3, 37), OPTIMIZERS[optimizer], names=names,
        lr=lambda step: 0.1 * 0.5**step,
    )  # fmt: skip
    results = VirtualNetwork(random.Random(seed).randrange).run(training.bodies())
    for replica in range(3):
        assert torch.equal(results[f"replica {replica}"], training.synchronous())


@MANY
@given(seed=SEEDS, count=st.sampled_from(["solo", "majority", "3"]), num=st.integers(3, 4), copies=st.integers(2, 3))
def test_what_was_contributed_and_what_is_pending_is_what_was_produced(
    seed: int, count: str, num: int, copies: int
) -> None:
    rule = Partial(count, copies)
    start, gradient = units(rule, num, 5, 1)
    books: dict[int, tuple[Tensor, Tensor, set[int]]] = {}

    def pending(state: RoundState) -> Tensor:
        return sum((gradients[0] for gradients in state.pending.values()), torch.zeros_like(start))

    def loaded(state: RangeState) -> None:
        assert isinstance(state, RoundState)
        books[id(state)] = (pending(state), torch.zeros_like(start), set(state.rounds))

    def watch(state: RangeState, operation: Operation, _: list[Reply]) -> None:
        assert isinstance(state, RoundState)
        produced, contributed, closed = books.setdefault(id(state), (start.clone(), start.clone(), set()))
        if operation.kind == "push":
            assert operation.number <= state.version + 1
            produced += operation.tensors[0]
        for number in state.rounds.keys() - closed:
            closed.add(number)
            contributed += num * state.rounds[number][0]
        assert torch.equal(contributed + pending(state), produced)

    training = Training(rule, num, 5, start, gradient, watch=watch, loaded=loaded)
    network = Chaos(seed, training, 25, 3, restart=False)
    network.run(training.bodies())
    check(training, network)


def check(training: Training, network: VirtualNetwork) -> None:
    """All lives of all replicas walk the same track; updates count at most once, and the pushed ones are in a round or
    pending."""
    track: dict[int, Tensor] = {}
    for lived in training.tracks.values():
        for number, x in lived.items():
            assert torch.equal(track.setdefault(number, x), x)
    (state,) = training.last_states(network)
    assert isinstance(state, RoundState)
    num = training.num_replicas
    counts = -track[max(track)]
    for number, result in state.rounds.items():
        if number > max(track):
            counts = counts + result[0]
    for gradients in state.pending.values():
        counts = counts + gradients[0] / num
    assert set(counts.tolist()) <= {0.0, 1.0}
    for replica, life, step in training.done:
        assert counts[(life * num + replica) * training.num_steps + step] == 1
    assert counts.sum() <= len(training.pushed)


@MANY
@given(seed=SEEDS, count=st.sampled_from(["solo", "majority", "3"]), copies=st.integers(2, 3))
def test_replicas_and_servers_die_and_join_again(seed: int, count: str, copies: int) -> None:
    rule = Partial(count, copies)
    start, gradient = units(rule, 3, 4, 40)
    training = Training(rule, 3, 4, start, gradient)
    network = Chaos(seed, training, 12, 12)
    network.run(training.bodies())
    check(training, network)


def test_a_hundred_kills_lose_no_gradient() -> None:
    rule = Partial("majority", 3)
    start, gradient = units(rule, 4, 60, 120)
    training = Training(rule, 4, 60, start, gradient)
    network = Chaos(27, training, 12, 100)
    network.run(training.bodies())
    check(training, network)
    assert len(network.killed) == 100


def test_the_server_is_lost_with_its_last_copy() -> None:
    rule = Partial("majority", 1)
    start, gradient = units(rule, 2, 50, 1)
    with pytest.raises(LostRankError, match=r"its only copy has died") as caught:
        VirtualNetwork(random.Random(0).randrange, {60: server_name(0, 0)}).run(
            Training(rule, 2, 50, start, gradient).bodies()
        )
    assert "copies=2" in str(caught.value)
