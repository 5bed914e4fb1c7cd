"""Means over replicas by letters: the same bits everywhere, the bytes of the formula, whoever dies and joins."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.mailbox import Mailbox, replica_name
from meshwright.consistency.coded import decoded, encoded
from meshwright.consistency.mean import Mean
from meshwright.ir.codec import codec_of
from tests.tries import tries
from tests.virtual_mailbox import VirtualNetwork


def values(replica: int, number: int, lengths: Sequence[int] = (7,)) -> list[Tensor]:
    """Small whole numbers: their sums are exact."""
    generator = torch.Generator().manual_seed(1000 * number + replica)
    return [torch.randint(-50, 50, (length,), generator=generator).double() for length in lengths]


def body(replica: int, rounds: int, in_flight: int = 1, codec: str = "", lengths: Sequence[int] = (7,)) -> Any:
    """Begin rounds, so many at a time; return the means and the mailbox."""

    def run(box: Mailbox) -> Any:
        mean, results, begun, finished_members = Mean(box, replica, codec), [], [], set[str]()

        def take(letter: Any) -> None:
            if not mean.take(letter):
                finished_members.add(letter.sender)

        for number in range(rounds):
            begun.append(mean.start(values(replica, number, lengths)))
            while len(begun) >= in_flight or (number == rounds - 1 and begun):
                first = begun.pop(0)
                box.receive_until(lambda first=first: mean.is_finished(first), take, "a mean")  # type: ignore[misc]
                result = mean.claim(first)
                results.append((result.members, result.num_contributors, [tensor.clone() for tensor in result.tensors]))
        for member in box.view.members:
            if member != box.name:
                box.send(member, "over")

        def all_over() -> bool:
            mean.look()
            return all(member in finished_members or member == box.name for member in box.view.members)

        box.receive_until(all_over, take, "the others")
        return results, box.sent_bytes, mean

    return run


def run(
    count: int, rounds: int, choose: Callable[[int], int], kills: Mapping[int, str] | None = None, **options: Any
) -> Any:
    network = VirtualNetwork(choose, kills)
    bodies = {replica_name(replica): body(replica, rounds, **options) for replica in range(count)}
    return network.run(bodies), network


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("length", [0, 1, 7, 24, 840])
def test_the_mean_and_its_bytes(count: int, length: int) -> None:
    """In all, replicas send 2 (P - 1) n elements: 2 (P - 1) / P n each, to a few elements if P does not divide n."""
    done, _ = run(count, 1, random.Random(0).randrange, lengths=(length, 3))
    columns = zip(*(values(replica, 0, (length, 3)) for replica in range(count)), strict=True)
    expected = [torch.stack(column).sum(0) / count for column in columns]
    for results, _, _ in done.values():
        (members, contributors, means), *_ = results
        assert (members, contributors) == (tuple(range(count)), count)
        assert all(torch.equal(mean, each) for mean, each in zip(means, expected, strict=True))
    sent = [num_bytes for _, num_bytes, _ in done.values()]
    assert sum(sent) == 2 * (count - 1) * (length + 3) * 8
    share = 2 * (count - 1) / count * (length + 3) * 8
    assert all(abs(each - share) <= 2 * 8 * max(1, count - 2) for each in sent)
    if length % count == 0 and count == 3:
        assert set(sent) == {share}


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.product)])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_survivors_end_with_one_mean_whoever_dies_when(in_flight: int, every: int) -> None:
    _, network = run(3, 3, random.Random(1).randrange, in_flight=in_flight)
    for turn in range(1, network.turn + 1, every):
        for victim in ("replica 0", "replica 2"):
            done, _ = run(3, 3, random.Random(turn).randrange, {turn: victim}, in_flight=in_flight)
            check_equal(done, 3)


@tries(40)
@given(
    st.integers(2, 5), st.integers(1, 3), st.randoms(use_true_random=False),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 4)), max_size=3),
)  # fmt: skip
def test_orders_and_deaths(count: int, in_flight: int, choices: random.Random, deaths: list[tuple[int, int]]) -> None:
    kills = {turn: replica_name(victim) for turn, victim in deaths if 0 < victim < count}
    done, _ = run(count, 4, choices.randrange, kills, in_flight=in_flight)
    check_equal(done, 4)


def check_equal(done: Mapping[str, Any], rounds: int) -> None:
    """All that lived to the end have the same means, each of values of replicas that were members."""
    assert done
    first, *others = [results for results, _, _ in done.values()]
    assert len(first) == rounds
    for number, (members, contributors, means) in enumerate(first):
        terms = [values(member, number)[0] for member in members]
        assert contributors == len(members)
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        assert torch.equal(means[0], total / len(members)), number
        for other in others:
            assert other[number][:2] == (members, contributors)
            assert torch.equal(other[number][2][0], means[0])
    for _, _, mean in done.values():
        assert not mean._rounds
        assert not mean._early


@pytest.mark.parametrize(
    "codec", ["fp16", "qsgd(4, feedback=on)", "onebit", "topk(20%)", "topk(20%)+qsgd(4)", "lossless"]
)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_coded_means_lose_nothing(codec: str, count: int) -> None:
    """count * mean + new residuals = values + old residuals, with the same bits at all replicas."""
    if "lossless" in codec:
        pytest.importorskip("zstandard")
    lengths, rounds = (1000,), 3
    done, _ = run(count, rounds, random.Random(2).randrange, codec=codec, lengths=lengths)
    first = next(iter(done.values()))[0]
    received = sum(count * means[0] for _, _, means in first)
    for results, _, _ in done.values():
        assert all(torch.equal(result[2][0], theirs[2][0]) for result, theirs in zip(results, first, strict=True))
    given_ = sum(values(replica, number, lengths)[0] for replica in range(count) for number in range(rounds))
    left = sum(mean._residuals[0][0] for _, _, mean in done.values() if mean._residuals)
    if codec_of(codec).feedback:
        torch.testing.assert_close(received + left, given_, rtol=0, atol=1e-9)
    elif not codec_of(codec).is_lossy:
        torch.testing.assert_close(received, given_, rtol=0, atol=1e-9)
    else:
        assert float(torch.as_tensor(received - given_).abs().max()) < 0.1 * 50 * rounds * count


def test_coded_means_send_fewer_bytes() -> None:
    done, _ = run(4, 1, random.Random(3).randrange, codec="qsgd(4)", lengths=(8192,))
    assert all(num_bytes < 2 * 0.75 * 8192 * 8 / 15 for _, num_bytes, _ in done.values())


@given(
    st.sampled_from(["fp16", "qsgd(8)", "onebit", "topk(10%)", "threshold(0.5)+bf16"]),
    st.integers(0, 600),
    st.booleans(),
)
@tries(15)
def test_parts_in_coded_form(text: str, length: int, select: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    codec, vector = codec_of(text), torch.randn(length, generator=generator, dtype=torch.float64)
    message, known = encoded(vector, codec, 5, select=select)
    assert torch.equal(decoded(message, codec, length, torch.float64), known)


def test_rounds_go_on_from_a_saved_state() -> None:
    """A run that stops with two rounds under way, and goes on from what was saved, ends like a run that does not."""

    def until(box: Mailbox, mean: Mean, numbers: Sequence[int]) -> list[Tensor]:
        results = []
        for number in numbers:
            box.receive_until(lambda: mean.is_finished(number), mean.take, "a mean")  # noqa: B023
            results.append(mean.claim(number).tensors[0].clone())
        return results

    def first(replica: int) -> Callable[[Mailbox], Any]:
        def run(box: Mailbox) -> Any:
            mean = Mean(box, replica, "onebit")
            mean.start(values(replica, 0))
            until(box, mean, [0])
            mean.start(values(replica, 1))
            mean.start(values(replica, 2), slot=1)
            state = mean.state()
            over = list[bool]()
            if replica == 1:
                box.receive_until(lambda: mean.is_finished(1), mean.take, "a mean")
                box.send("replica 0", "over")
                return mean.state()
            box.receive_until(lambda: False in over, lambda letter: over.append(mean.take(letter)), "the other")
            return state

        return run

    def second(replica: int, state: dict[str, Tensor]) -> Callable[[Mailbox], Any]:
        def run(box: Mailbox) -> Any:
            mean = Mean(box, replica, "onebit")
            mean.load_state(state)
            return until(box, mean, [1, 2])

        return run

    def whole(replica: int) -> Callable[[Mailbox], Any]:
        def run(box: Mailbox) -> Any:
            mean = Mean(box, replica, "onebit")
            numbers = [mean.start(values(replica, 0))]
            until(box, mean, numbers)
            numbers = [mean.start(values(replica, 1)), mean.start(values(replica, 2), slot=1)]
            return until(box, mean, numbers)

        return run

    names = [replica_name(replica) for replica in range(2)]
    states = VirtualNetwork(random.Random(4).randrange).run({name: first(r) for r, name in enumerate(names)})
    loaded = VirtualNetwork(random.Random(5).randrange).run({n: second(r, states[n]) for r, n in enumerate(names)})
    expected = VirtualNetwork(random.Random(6).randrange).run({n: whole(r) for r, n in enumerate(names)})
    for name in names:
        assert all(
            torch.equal(tensor, other) for tensor, other in zip(loaded[name], expected["replica 0"], strict=True)
        )
