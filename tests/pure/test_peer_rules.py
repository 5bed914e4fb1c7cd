"""Rules of equal replicas: their limits are synchronous training bit for bit, their invariants hold in every order of
events, and no death makes anybody wait for ever.

Gradients are a x - b with whole numbers a and b, learning rates are powers of two: float64 rounds nothing, so that any
wrong formula shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox, replica_name
from meshwright.consistency.base import Exchange
from meshwright.consistency.elastic_center import ElasticCenterExchange
from meshwright.consistency.ensemble import EnsembleExchange
from meshwright.consistency.local_steps import DiLoCoExchange
from meshwright.consistency.push_sum import PushSumExchange
from meshwright.consistency.rules import exchange_of
from meshwright.errors import MeshwrightError
from meshwright.ir.consistency import DiLoCo, consistency_of
from tests.tries import tries
from tests.virtual_mailbox import VirtualNetwork

LENGTHS = (5, 2)
LR = 0.25


def start(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 8, (length,), generator=generator).double() for length in LENGTHS]


def gradients(replica: int, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of 1/2 a x^2 - b x, where a and b are of the replica."""
    generator = torch.Generator().manual_seed(100 + replica)
    result = []
    for parameter in parameters:
        a, b = (torch.randint(low, 3, parameter.shape, generator=generator).double() for low in (0, -3))
        result.append(a * parameter - b)
    return result


class Run:
    """What became of a replica: its parameters before each step and after the last, and its exchange."""

    def __init__(self, parameters: list[Tensor], exchange: Exchange[Any]) -> None:
        self.parameters, self.exchange = parameters, exchange
        self.history: list[list[Tensor]] = []
        self.note()

    def note(self) -> None:
        self.history.append([parameter.clone() for parameter in self.parameters])


Watch = Callable[[int, Run], None]


def trained(
    text: str, replica: int, count: int, steps: int, *, lr: float = LR, seed: int | None = 0, watch: Watch | None = None
) -> Callable[[Mailbox], Run]:
    """A replica that makes steps of plain SGD under a rule. ``seed``: of initial values; None: the replica's own."""

    def body(box: Mailbox) -> Run:
        exchange = exchange_of(consistency_of(text), box, replica, count)
        run = Run(start(replica + 1 if seed is None else seed), exchange)
        for step in range(steps):
            exchange.begin(run.parameters)
            for each in exchange.updates(gradients(replica, run.parameters)):
                for parameter, gradient in zip(run.parameters, each, strict=True):
                    parameter.sub_(gradient, alpha=lr)
            exchange.end(run.parameters)
            run.note()
            if watch is not None:
                watch(step, run)
        exchange.leave()
        return run

    return body


def train(
    text: str, count: int, steps: int, choose: Callable[[int], int] | int = 0, kills: Mapping[int, str] | None = None,
    **options: Any,
) -> tuple[dict[int, Run], VirtualNetwork]:  # fmt: skip
    network = VirtualNetwork(random.Random(choose).randrange if isinstance(choose, int) else choose, kills)
    done = network.run({replica_name(r): trained(text, r, count, steps, **options) for r in range(count)})
    return {int(name.removeprefix("replica ")): run for name, run in done.items()}, network


def synchronous(count: int, steps: int, lr: float = LR) -> list[list[Tensor]]:
    """Synchronous SGD with the mean gradient."""
    parameters = start()
    history = [[parameter.clone() for parameter in parameters]]
    for _ in range(steps):
        each = [gradients(replica, parameters) for replica in range(count)]
        for index, parameter in enumerate(parameters):
            total = torch.stack([own[index] for own in each]).sum(0)
            parameter.sub_(total / count, alpha=lr)
        history.append([parameter.clone() for parameter in parameters])
    return history


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def mean_of(columns: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(column).sum(0) / len(column) for column in zip(*columns, strict=True)]


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", [
    "local(1)", "gossip(complete)", "gossip(complete, push=on)", "diloco(1, lr=1, momentum=0)",
])  # fmt: skip
def test_limits_are_synchronous_training(text: str, count: int, seed: int) -> None:
    done, _ = train(text, count, 6, seed)
    expected = synchronous(count, 6)
    for run in done.values():
        assert all(same(parameters, reference) for parameters, reference in zip(run.history, expected, strict=True))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("text", ["gossip(ring)", "gossip(one-peer)", "gossip(torus)", "gossip(exponential, push=on)",
                                  "gossip(ring, staleness=1)", "gossip(random)"])  # fmt: skip
def test_the_mean_of_gossip_follows_sgd(text: str, count: int) -> None:
    """The mean of all parameters changes by the mean of the replicas' own changes, in every step."""
    done, _ = train(text, count, 8, 1, lr=0.125)
    for step in range(8):
        before = mean_of([run.history[step] for run in done.values()])
        change = mean_of([gradients(replica, run.history[step]) for replica, run in done.items()])
        after = mean_of([run.history[step + 1] for run in done.values()])
        for old, gradient, new in zip(before, change, after, strict=True):
            torch.testing.assert_close(new, old - 0.125 * gradient, rtol=0, atol=1e-12)


def test_d_psgd_as_printed() -> None:
    """staleness=1: X^(k+1) = X^k W - eta G(X^k), bit for bit."""
    done, _ = train("gossip(one-peer, staleness=1)", 4, 6, 2)
    for step in range(6):
        xs = {replica: run.history[step] for replica, run in done.items()}
        for replica, run in done.items():
            peer = (replica - (1, 2)[step % 2]) % 4
            for index, new in enumerate(run.history[step + 1]):
                mixed = xs[replica][index] + (xs[peer][index] - xs[replica][index]) / 2
                assert torch.equal(new, mixed - LR * gradients(replica, xs[replica])[index])


@pytest.mark.parametrize("staleness", [2, 3])
def test_delayed_mixing(staleness: int) -> None:
    """The mean follows SGD, and replicas do not fly apart."""
    done, _ = train(f"gossip(ring, staleness={staleness})", 4, 40, 3, lr=0.125)
    for step in range(40):
        before, after = (mean_of([run.history[at] for run in done.values()]) for at in (step, step + 1))
        change = mean_of([gradients(replica, run.history[step]) for replica, run in done.items()])
        for old, gradient, new in zip(before, change, after, strict=True):
            torch.testing.assert_close(new, old - 0.125 * gradient, rtol=0, atol=1e-9)
    assert all(float(value.abs().max()) < 50 for run in done.values() for value in run.history[-1])


@pytest.mark.parametrize("push", ["", ", push=on"])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_one_peer_gossip_averages_exactly_after_lg_p_rounds(power: int, push: str) -> None:
    count = 2**power
    done, _ = train(f"gossip(one-peer{push})", count, power, 4, lr=0.0, seed=None)
    expected = mean_of([start(replica + 1) for replica in range(count)])
    assert all(same(run.parameters, expected) for run in done.values())


# --- local steps and outer optimizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("every", [1, 3])
def test_bytes_of_local_steps(count: int, every: int) -> None:
    """A replica sends 2 (P - 1) / P N b / H bytes a step; all together exactly P times that."""
    network = VirtualNetwork(random.Random(5).randrange)
    boxes: dict[int, Mailbox] = {}

    def body(replica: int) -> Callable[[Mailbox], Run]:
        def run(box: Mailbox) -> Run:
            boxes[replica] = box
            return trained(f"local({every})", replica, count, 6)(box)

        return run

    network.run({replica_name(replica): body(replica) for replica in range(count)})
    total = sum(box.sent_bytes for box in boxes.values())
    assert total * every == 2 * (count - 1) * sum(LENGTHS) * 8 * 6


def outer_sgd(rule: DiLoCo, count: int, steps: int) -> list[list[Tensor]]:
    """DiLoCo by torch.optim.SGD, with fragments and delays: the last replica's history."""
    olds = [[part.clone().requires_grad_() for part in fragments_of(rule, start(), f)] for f in range(rule.fragments)]
    outers = [torch.optim.SGD(old, lr=rule.lr, momentum=rule.momentum, nesterov=bool(rule.momentum)) for old in olds]
    replicas, history, sent = [start() for _ in range(count)], [], []
    for clock in range(1, steps + 1):
        for replica, parameters in enumerate(replicas):
            for parameter, gradient in zip(parameters, gradients(replica, parameters), strict=True):
                parameter.sub_(gradient, alpha=LR)
        part = rule.every // rule.fragments
        if clock % part == 0:
            fragment = (clock // part - 1) % rule.fragments
            changes = [
                [
                    old.detach() - own
                    for old, own in zip(olds[fragment], fragments_of(rule, each, fragment), strict=True)
                ]
                for each in replicas
            ]
            sent.append((clock + rule.delay, fragment, mean_of(changes)))
        while sent and sent[0][0] <= clock:
            _, fragment, means = sent.pop(0)
            for old, mean in zip(olds[fragment], means, strict=True):
                old.grad = mean
            outers[fragment].step()
            for each in replicas:
                for own, old in zip(fragments_of(rule, each, fragment), olds[fragment], strict=True):
                    own.copy_(rule.merge * own + (1 - rule.merge) * old.detach())
        history.append([parameter.clone() for parameter in replicas[-1]])
    return history


def fragments_of(rule: DiLoCo, flats: Sequence[Tensor], fragment: int) -> list[Tensor]:
    count = rule.fragments
    return [flat[fragment * len(flat) // count : (fragment + 1) * len(flat) // count] for flat in flats]


@pytest.mark.parametrize("text", [
    "diloco(2, lr=0.5, momentum=0.5)", "diloco(1, lr=1, momentum=0)", "diloco(2, lr=0.5, momentum=0.5, merge=0.5)",
    "diloco(4, lr=0.5, momentum=0.5, fragments=2)", "diloco(2, lr=0.5, momentum=0.5, delay=1)",
    "diloco(3, lr=0.5, momentum=0.5, fragments=3, delay=2, merge=0.25)",
])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_diloco_is_torch_sgd_with_nesterov(text: str, seed: int) -> None:
    """Signs, momentum, fragments in turn, several under way, delays and merges: bit for bit."""
    rule = consistency_of(text)
    assert isinstance(rule, DiLoCo)
    done, _ = train(text, 2, 7, seed)
    expected = outer_sgd(rule, 2, 7)
    for parameters, reference in zip(done[1].history[1:], expected, strict=True):
        assert same(parameters, reference)
    first, second = (done[replica].exchange for replica in (0, 1))
    assert isinstance(first, DiLoCoExchange)
    assert isinstance(second, DiLoCoExchange)
    assert same(first.old, second.old)
    assert same(first.momentum, second.momentum)


def test_the_first_outer_step_with_the_papers_numbers() -> None:
    """lr 0.7 and momentum 0.9: the first step is 0.7 (1 + 0.9) = 1.33 of the mean change."""
    done, _ = train("diloco(2)", 2, 2, 0)
    plain, _ = train("local(2)", 2, 2, 0)
    for value, mean, first in zip(done[0].parameters, plain[0].parameters, start(), strict=True):
        torch.testing.assert_close(value, first + 1.33 * (mean - first), rtol=1e-12, atol=1e-12)


@given(st.integers(1, 7), st.integers(0, 40))
def test_fragments_cover_every_element_once(fragments: int, length: int) -> None:
    network = VirtualNetwork(random.Random(0).randrange)
    rule = DiLoCo(fragments, fragments=fragments)

    def body(box: Mailbox) -> None:
        exchange = DiLoCoExchange(rule, box, 0, 2)
        flats = [torch.zeros(length), torch.zeros(3)]
        for fragment in range(fragments):
            for part in exchange._fragment(flats, fragment):
                part.add_(1)
        assert all(bool((flat == 1).all()) for flat in flats)

    network.run({"replica 0": body, "replica 1": lambda box: None})


def test_quantized_outer_gradients_leave_replicas_equal() -> None:
    done, _ = train("diloco(2, codec=qsgd(4, feedback=on), fragments=2, delay=1)", 3, 8, 6)
    exchanges = [run.exchange for run in done.values()]
    assert all(isinstance(each, DiLoCoExchange) for each in exchanges)
    for exchange in exchanges[1:]:
        assert same(exchange.old, exchanges[0].old)  # type: ignore[attr-defined]


# --- push-sum --------------------------------------------------------------------------------------------------------


@tries(12)
@given(st.sampled_from(["ring", "torus", "one-peer", "random", "edges=0-1 1-2", "exponential"]),
       st.sampled_from([0, 1, 3, "any"]), st.randoms(use_true_random=False))  # fmt: skip
def test_push_sum_weights_sum_up_to_the_number_of_replicas(
    topology: str, staleness: Any, choices: random.Random
) -> None:
    count, runs = 3, dict[int, Run]()
    network = VirtualNetwork(choices.randrange)

    def watch(_: int, run: Run) -> None:
        runs[run.exchange.replica] = run
        if len(runs) < count or len(network.views) > 1:  # shares for a replica that has left are lost
            return
        total, mass = 0.0, torch.zeros(LENGTHS[0], dtype=torch.float64)
        for each in runs.values():
            assert isinstance(each.exchange, PushSumExchange)
            total += each.exchange.weight
            mass += each.exchange.weight * each.parameters[0]
            shares = [tensors for *_, tensors in each.exchange._shares]
            shares += [
                letter.tensors
                for (_, to), wire in network.wires.items()
                if to == replica_name(each.exchange.replica)
                for letter in wire
                if letter.kind == "push"
            ]
            total += sum(float(tensors[-1]) for tensors in shares)
            mass += sum((tensors[0] for tensors in shares), torch.zeros(()))
        assert abs(total - count) < 1e-12
        expected = sum(start(replica + 1)[0] for replica in range(count))
        torch.testing.assert_close(mass, torch.as_tensor(expected), rtol=0, atol=1e-9)

    text = f"gossip({topology}, staleness={staleness}, push=on)"
    bodies = {replica_name(r): trained(text, r, count, 6, lr=0.0, seed=None, watch=watch) for r in range(count)}
    network.run(bodies)


# --- elastic averaging -----------------------------------------------------------------------------------------------


def test_elastic_averaging_as_the_formulas_say() -> None:
    """x_i <- x_i - eta g_i - alpha (x_i - c), c <- (1 - beta) c + beta mean x_i, beta = P alpha, bit for bit."""
    done, _ = train("easgd(0.125)", 4, 5, 7, seed=0)
    xs, center = [start() for _ in range(4)], start()
    for step in range(5):
        grads = [gradients(replica, x) for replica, x in enumerate(xs)]
        means = mean_of(xs)
        for x, grad in zip(xs, grads, strict=True):
            for index, each in enumerate(x):
                pull = 0.125 * (each - center[index]) if step else 0.0
                each.sub_(LR * grad[index] + pull)
        for index, each in enumerate(center):
            if step:
                each.copy_((1 - 0.5) * each + 0.5 * means[index])
        for replica, run in done.items():
            assert same(run.history[step + 1], xs[replica]), step
    for run in done.values():
        assert same(run.exchange.center, center)  # type: ignore[attr-defined]


@pytest.mark.parametrize("every", [1, 3])
def test_elastic_averaging_conserves_replicas_and_center(every: int) -> None:
    """The sum of all x and c changes by the optimizers' changes alone, in every step."""
    centers: dict[tuple[int, int], list[Tensor]] = {}

    def watch(step: int, run: Run) -> None:
        centers[run.exchange.replica, step + 1] = [each.clone() for each in run.exchange.center]  # type: ignore[attr-defined]

    done, _ = train(f"easgd(0.25, every={every})", 4, 8, 8, lr=0.125, watch=watch)
    for step in range(1, 8):
        grads = [gradients(replica, run.history[step]) for replica, run in done.items()]
        for index in range(len(LENGTHS)):
            old, new = (
                torch.stack([run.history[at][index] for run in done.values()]).sum(0) + centers[0, at][index]
                for at in (step, step + 1)
            )
            change = torch.stack([each[index] for each in grads]).sum(0)
            torch.testing.assert_close(new, old - 0.125 * change, rtol=0, atol=1e-12)
    assert all(same(centers[replica, 8], centers[0, 8]) for replica in done)
    assert not same(centers[0, 8], start())


@pytest.mark.parametrize(("alpha", "eta", "stable"), [
    (0.55, 1.2, True), (0.60, 1.2, False), (0.0, 1.9, True), (0.9, 0.3, True), (0.94, 0.3, False),
])  # fmt: skip
def test_stability_of_elastic_averaging(alpha: float, eta: float, stable: bool) -> None:
    """One worker and the center on x^2 / 2 are stable iff alpha <= (4 - 2 eta) / (4 - eta)."""
    assert (alpha <= (4 - 2 * eta) / (4 - eta)) == stable
    pair = torch.tensor([[1 - eta - alpha, alpha], [alpha, 1 - alpha]])
    assert (float(torch.linalg.eigvals(pair).abs().max()) <= 1) == stable


# --- the center of asynchronous elastic averaging --------------------------------------------------------------------


class Book(ElasticCenterExchange):
    """Writes down what this replica has lost to the center, and all changes that it knows."""

    def __init__(self, box: Mailbox, replica: int, count: int, changes: dict[tuple[int, int], list[Tensor]]) -> None:
        super().__init__(consistency_of("easgd(0.25, mode=async)"), box, replica, count)  # type: ignore[arg-type]
        self.lost, self.times, self.over, self.changes = torch.zeros(LENGTHS[0]).double(), 0, set[str](), changes
        self.center = start() if replica in self._keepers else []

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        before = parameters[0].clone()
        changed = super().mix(parameters)
        self.lost += before - parameters[0]
        self.times += changed
        return changed

    def take(self, letter: Letter) -> None:
        if letter.kind == "over":
            self.over.add(letter.sender)
        super().take(letter)

    def _pass_on(self, replica: int, serial: int, change: Sequence[Tensor]) -> None:
        self.changes.setdefault((replica, serial), []).append(change[0])
        super()._pass_on(replica, serial, change)

    def finish(self, parameters: Sequence[Tensor]) -> None:
        self._wait(lambda: self._request is None or self._answer_come is not None, "the last change")
        self.mix(parameters)
        self.tell("over")
        self._wait(lambda: all(m in self.over or m == self.mailbox.name for m in self.mailbox.view.members), "all")


Books = tuple[dict[int, Book], set[int], dict[tuple[int, int], list[Tensor]], VirtualNetwork]


def run_center(seed: int, kills: Mapping[int, str], count: int = 4, steps: int = 8) -> Books:
    """The books of all replicas, who lived to the end, and all changes by replica and serial number."""
    network = VirtualNetwork(random.Random(seed).randrange, kills)
    books, changes = dict[int, Book](), dict[tuple[int, int], list[Tensor]]()

    def body(replica: int) -> Callable[[Mailbox], Any]:
        def run(box: Mailbox) -> None:
            books[replica] = book = Book(box, replica, count, changes)
            parameters = start(replica + 1)
            for _ in range(steps):
                book.begin(parameters)
                book.end(parameters)
            book.finish(parameters)

        return run

    done = network.run({replica_name(replica): body(replica) for replica in range(count)})
    return books, {int(name.removeprefix("replica ")) for name in done}, changes, network


@pytest.mark.parametrize("seed", range(6))
def test_an_asynchronous_center_gains_what_replicas_lose(seed: int) -> None:
    books, _, _, _ = run_center(seed, {})
    lost = torch.stack([book.lost for book in books.values()]).sum(0)
    assert sum(book.times for book in books.values()) > 8
    torch.testing.assert_close(books[0].center[0], start()[0] + lost, rtol=0, atol=1e-12)
    assert same(books[0].center, books[1].center)


@pytest.mark.parametrize("every", [16, pytest.param(2, marks=pytest.mark.product)])
@pytest.mark.parametrize("victim", range(4))
def test_a_center_survives_its_keepers(victim: int, every: int) -> None:
    """Whoever dies when, the center has gained what replicas have lost, but for the last change of the one that died:
    every change counts once."""
    _, _, _, network = run_center(0, {})
    for turn in range(1 + victim, network.turn, every):
        books, living, changes, _ = run_center(turn, {turn: replica_name(victim)})
        center = next(books[replica].center for replica in sorted(living))
        lost = torch.stack([book.lost for book in books.values()]).sum(0)
        unexplained = center[0] - start()[0] - lost
        last = changes.get((victim, books[victim]._serial), []) if victim in books else []
        possible = [torch.zeros_like(unexplained), *last]
        assert min(float((unexplained - each).abs().max()) for each in possible) < 1e-12, turn


# --- deaths, and replicas that join ----------------------------------------------------------------------------------

TEXTS = [
    "local(2)", "diloco(2, lr=0.5, momentum=0.5)", "diloco(4, fragments=2, delay=3, momentum=0.5)", "gossip(ring)",
    "gossip(one-peer)", "gossip(random, staleness=2)", "gossip(torus, staleness=1)", "gossip(ring, staleness=any)",
    "gossip(one-peer, push=on)", "gossip(random, push=on, staleness=2)", "gossip(ring, push=on, staleness=any)",
    "easgd(0.25, every=2)", "easgd(0.25, mode=async)", "ensemble", "diloco(2, codec=onebit)",
]  # fmt: skip
EQUAL = ("local(2)", "diloco(2, lr=0.5, momentum=0.5)")


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.product)])
@pytest.mark.parametrize("text", TEXTS)
def test_nobody_waits_for_the_dead(text: str, every: int) -> None:
    """A death at every turn, or at some: all others end, and end equal where the rule says so."""
    _, network = train(text, 3, 4, 1)
    for turn in range(1, network.turn + 1, every):
        victim = turn % 3
        done, _ = train(text, 3, 4, turn, {turn: replica_name(victim)})
        assert done.keys() >= {0, 1, 2} - {victim}
        if text in EQUAL:
            first, *others = done.values()
            assert all(same(first.parameters, other.parameters) for other in others)
        if isinstance(next(iter(done.values())).exchange, DiLoCoExchange):
            first, *others = done.values()
            assert all(same(first.exchange.old, other.exchange.old) for other in others)  # type: ignore[attr-defined]


@tries(40)
@given(st.sampled_from(TEXTS), st.integers(2, 5), st.randoms(use_true_random=False),
       st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), max_size=4))  # fmt: skip
def test_orders_and_deaths(text: str, count: int, choices: random.Random, deaths: list[tuple[int, int]]) -> None:
    kills = {turn: replica_name(victim) for turn, victim in deaths if 0 < victim < count}
    done, _ = train(text, count, 5, choices.randrange, kills)
    assert 0 in done


def lives(text: str, replica: int, count: int, steps: int, *, joined: bool = False) -> Callable[[Mailbox], Run | None]:
    """A replica that answers those that join; if it has ``joined``, it begins with the state of another. None if there
    is no other."""

    def body(box: Mailbox) -> Run | None:
        exchange = exchange_of(consistency_of(text), box, replica, count)
        run = Run(start(), exchange)

        def snapshot() -> tuple[list[Tensor], str]:
            state = exchange.state()
            names = [f"{name}/{'x'.join(map(str, tensor.shape))}" for name, tensor in state.items()]
            return [*run.parameters, *(tensor.reshape(-1) for tensor in state.values())], " ".join(names)

        if joined:
            exchange.join()
            answer = asked(exchange)
            if answer is None:
                exchange.mailbox.leave()
                return None
            for parameter, value in zip(run.parameters, answer.tensors, strict=False):
                parameter.copy_(value)
            exchange.clocks[replica] = answer.numbers[0]
            shaped = zip(answer.text.split(), answer.tensors[len(LENGTHS) :], strict=True)
            exchange.load_state({name.partition("/")[0]: value.view(shape_in(name)) for name, value in shaped})
        exchange.snapshot = snapshot
        for _ in range(exchange.clocks[replica], steps):
            exchange.begin(run.parameters)
            for parameter, gradient in zip(run.parameters, gradients(replica, run.parameters), strict=True):
                parameter.sub_(gradient, alpha=LR)
            exchange.end(run.parameters)
            run.note()
        exchange.leave()
        return run

    return body


def asked(exchange: Exchange[Any]) -> Letter | None:
    """The state of a replica that lives and has one."""
    box, answers, known = exchange.mailbox, list[Letter](), list[str]()

    def take(letter: Letter) -> None:
        if letter.kind == "state":
            answers.append(letter)
        else:
            exchange.take(letter)

    def answered() -> bool:
        exchange.look()
        return bool(answers) or known[-1] not in box.view.members

    while not answers:
        others = [name for name in box.view.members if name not in (box.name, *known)]
        if not others:
            return None
        known.append(others[0])
        box.send(others[0], "state?")
        box.receive_until(answered, take, "a state")
        answers = [letter for letter in answers if letter.tensors]
    return answers[0]


def shape_in(name: str) -> list[int]:
    return [int(size) for size in name.partition("/")[2].split("x") if size]


@pytest.mark.parametrize("seeds", [range(0, 30, 5), pytest.param(range(30), marks=pytest.mark.product)])
@pytest.mark.parametrize("text", TEXTS)
def test_a_replica_that_died_joins_again(text: str, seeds: range) -> None:
    """It dies at one turn and joins at a later one: nobody waits for ever, and all end equal where the rule says so."""
    for seed in seeds:
        network = VirtualNetwork(random.Random(seed).randrange, {10 + 3 * seed: "replica 1"})
        bodies = {replica_name(replica): lives(text, replica, 3, 8) for replica in range(3)}
        done = network.run(bodies, {20 + 5 * seed: ("replica 1", lives(text, 1, 3, 8, joined=True))})
        runs = [done["replica 0"], done["replica 2"]]
        if text in EQUAL:
            assert same(runs[0].parameters, runs[1].parameters)
            if (again := done.get("replica 1")) is not None:
                assert same(runs[0].parameters, again.parameters), seed


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 100), marks=pytest.mark.product)])
@pytest.mark.parametrize("text", TEXTS)
def test_replicas_die_and_join_at_any_time(text: str, seeds: range) -> None:
    """Up to 3 deaths, some followed by a join: nobody waits for ever, and what the rule keeps equal is equal."""
    for seed in seeds:
        draw = random.Random(f"{text} {seed}")
        count, steps, horizon = draw.randint(2, 5), 2 * draw.randint(1, 4), draw.choice([60, 200, 600])
        kills, starts = dict[int, str](), dict[int, tuple[str, Any]]()
        for _ in range(draw.randint(1, 3)):
            victim, turn = draw.randrange(count), draw.randint(1, horizon)
            kills[turn] = replica_name(victim)
            again = lives(text, victim, count, steps, joined=True)
            starts |= (
                {turn + draw.randint(1, horizon // 2): (replica_name(victim), again)} if draw.random() < 0.7 else {}
            )
        network = VirtualNetwork(draw.randrange, kills)
        done = network.run({replica_name(r): lives(text, r, count, steps) for r in range(count)}, starts)
        runs = [run for run in done.values() if run is not None]
        for run in runs[1:]:
            if text in EQUAL:
                assert same(run.parameters, runs[0].parameters), seed
            for name in ("old", "center") if "async" not in text else ():
                kept = [getattr(each.exchange, name, []) for each in (run, runs[0])]
                assert not all(kept) or same(*kept), seed


# --- ensembles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_an_ensemble_predicts_together(seed: int) -> None:
    """Members leave at once after the prediction; a member that is late still gets the mean of all."""
    values = [torch.tensor([[1.0, 3.0], [0.0, 2.0]]) * (replica + 1) for replica in range(3)]

    def body(replica: int) -> Callable[[Mailbox], Any]:
        def run(box: Mailbox) -> Any:
            exchange = exchange_of(consistency_of("ensemble"), box, replica, 3)
            assert isinstance(exchange, EnsembleExchange)
            result = exchange.joint(values[replica])
            later = exchange.joint(values[replica])
            assert later.num_members == 3
            exchange.leave()
            return result, box.sent_bytes

        return run

    network = VirtualNetwork(random.Random(seed).randrange)
    done = network.run({replica_name(replica): body(replica) for replica in range(3)})
    for (mean, spread, count), _ in done.values():
        assert count == 3
        torch.testing.assert_close(mean, torch.stack(values).mean(0))
        torch.testing.assert_close(spread, torch.stack(values).std(0, correction=0))


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "count", "message"), [
    ("local(0)", 2, "at least 1"), ("local(2)", 1, "give 2 or more"), ("sync", 2, "exchange nothing"),
    ("diloco(2, codec=powersgd(2))", 2, "does not code changes"),
    ("gossip(edges=0-1 2-3)", 4, "not connected"), ("gossip(edges=0-1:0.9 1-2:0.9)", 3, "doubly stochastic"),
    ("diloco(4, delay=4)", 2, "less than 4"), ("diloco(2, codec=topk(1%, momentum=0.9))", 2, "does not code changes"),
])  # fmt: skip
def test_bad_input(text: str, count: int, message: str) -> None:
    network = VirtualNetwork(random.Random(0).randrange)
    with pytest.raises(MeshwrightError, match=r"consistency|layout|codec") as caught:
        network.run({"replica 0": lambda box: exchange_of(consistency_of(text), box, 0, count)})
    assert message in str(caught.value)
