"""Momenta that codecs exchange: Deep Gradient Compression's and 1-bit Adam's, against their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm.coding import CollectiveCoding
from meshwright.comm.member import MeasuredCoding
from meshwright.compress.select import share_of
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.codec import codec_of
from meshwright.ir.plan_check import check_fits
from meshwright.models import classification_loss
from meshwright.optim import OneBitAdam, ZeroOneAdam
from tests.distributed import oracle
from tests.distributed.pool import Ranks
from tests.distributed.test_codecs import LAYOUTS, subject
from tests.distributed.test_coded import each_rank, values_of

LENGTH, SHAPES, BETA = 60, [(6, 10)], 0.9


class Exchanges:
    """All-reduces of several ranks under one codec, step by step."""

    def __init__(self, codec: str, num_ranks: int, algorithm: str) -> None:
        self.text, self.algorithm, self.steps = codec, algorithm, 0
        self.lengths = codec_of(codec).state_lengths(SHAPES)
        self.measured = [MeasuredCoding() for _ in range(num_ranks)]
        self.states = [torch.zeros(sum(self.lengths.values()), dtype=torch.float64) for _ in range(num_ranks)]
        self.written = [torch.full_like(state, torch.nan) for state in self.states]

    def kept(self, name: str) -> list[Tensor]:
        """A segment of the memory of each rank, copied."""
        place = [*self.lengths].index(name)
        return [state.split([*self.lengths.values()])[place].clone() for state in self.states]

    def sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The result on each rank."""
        results, num_ranks = [gradient.clone() for gradient in gradients], len(gradients)

        def call(ours: Any) -> None:
            coding = self._coding(ours.rank, num_ranks)
            coding.all_reduce(results[ours.rank], ours, ours, self.algorithm, "gradients").wait()

        each_rank(num_ranks, call)
        self._accept()
        return results

    def scatter(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The rows of all ranks after a reduce-scatter, as one vector."""
        num_ranks = len(gradients)
        parts = [gradients[0].new_empty(LENGTH // num_ranks) for _ in gradients]

        def call(ours: Any) -> None:
            rank = ours.rank
            coding = self._coding(rank, num_ranks)
            rows = gradients[rank].clone().view(num_ranks, -1)
            coding.reduce_scatter(rows, parts[rank], ours, self.algorithm, "gradients").wait()

        each_rank(num_ranks, call)
        self._accept()
        return [torch.cat(parts)]

    def _coding(self, rank: int, num_ranks: int) -> CollectiveCoding:
        before, state = self.states[rank], self.written[rank]
        return CollectiveCoding(self.text, before, state, self.steps, SHAPES, num_ranks, self.measured[rank])

    def _accept(self) -> None:
        self.states, self.written = self.written, self.states
        self.steps += 1
        for state in self.states if "steps" in self.lengths else ():
            state.split([*self.lengths.values()])[[*self.lengths].index("steps")].fill_(self.steps)
        for written in self.written:
            written.fill_(torch.nan)  # all of it must be written in each step


# --- Deep Gradient Compression ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("topk(10%, momentum=0.9, warmup=3)", "star"),
        ("topk(10%, momentum=0.9)", "ring"),
        ("topk(10%, warmup=3)", "ring"),
        ("topk(10%, warmup=3)", "star+ring@2x2"),
        ("topk(10%, momentum=0.9, warmup=3)+qsgd(4)", "ring"),
        ("threshold(1.5, momentum=0.9)+fp16", "halving"),
        ("topk(10%, momentum=0.9)", "star+ring@2x2"),
        ("topk(10%, momentum=0.9)+qsgd(8)", "star+ring@2x2"),
        ("randk(10%, momentum=0.9, warmup=3)", "ring"),
    ],
)
def test_a_selections_momentum_is_of_the_ranks_own_gradients(text: str, algorithm: str, scatters: bool) -> None:
    """Lin et al. 2018, equations 4 to 6, on each rank: u = m u + g, v = v + u; where v is sent, both become 0. The sum,
    and what is left of every v, are all v. Errors of values are left in v too."""
    codec, num_ranks = codec_of(text), 4
    assert codec.select is not None
    if scatters and codec.needs_whole_sum:
        return
    whole = {"star": "shares", "halving": "rabenseifner"}.get(algorithm, algorithm)
    exchanges = Exchanges(text, num_ranks, algorithm if scatters else whole)
    u = [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(num_ranks)]
    for step in range(6):
        gradients, v = values_of(num_ranks, LENGTH, seed=step), exchanges.kept("residual")
        results = exchanges.scatter(gradients) if scatters else exchanges.sum(gradients)
        left = exchanges.kept("residual")
        total = torch.zeros(LENGTH, dtype=torch.float64)
        for rank, gradient in enumerate(gradients):
            u[rank] = codec.momentum * u[rank] + gradient
            v[rank] += u[rank]
            total += v[rank]
            sent = sent_by(codec.select.rule, share_of(codec, step), v[rank], left[rank])
            u[rank][sent] = v[rank][sent] = 0
            if codec.values is None and (codec.momentum or step < codec.warmup or "@" not in algorithm):
                torch.testing.assert_close(left[rank], v[rank], rtol=1e-12, atol=1e-12)
        if codec.momentum:
            torch.testing.assert_close(exchanges.kept("momentum"), u, rtol=1e-12, atol=1e-12)
        for result in results:
            torch.testing.assert_close(result + torch.stack(left).sum(0), total, rtol=1e-9, atol=1e-9)


def sent_by(rule: str, share: float | None, v: Tensor, residual: Tensor) -> Tensor:
    """The indices that a rank sends. Those of ``randk`` are random: they are as many as they must be."""
    if rule == "threshold":
        return (v.abs() >= 1.5).nonzero().view(-1)
    assert share is not None
    count = math.ceil(share * LENGTH)
    if rule == "topk":
        return v.abs().sort(descending=True, stable=True).indices[:count]
    sent = (residual == 0).nonzero().view(-1)
    assert len(sent) == count
    return sent


# --- 1-bit Adam ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["shares", "ring"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_bit_adams_momentum_is_of_the_sum(algorithm: str, num_ranks: int) -> None:
    """Dense in the warm-up. Then momentum + residuals = b old momentum + (1 - b) gradients + old residuals, and the
    optimizer's momentum, made of the resulting gradients, is the one that was exchanged."""
    exchanges = Exchanges(f"onebit(bucket=16, momentum={BETA}, warmup=2)", num_ranks, algorithm)
    optimizers = torch.zeros(LENGTH, dtype=torch.float64)
    for step in range(6):
        gradients = values_of(num_ranks, LENGTH, seed=step)
        total = torch.stack(gradients).sum(0)
        before, left = exchanges.kept("momentum")[0], torch.stack(exchanges.kept("residual")).sum(0)
        results = exchanges.sum(gradients)
        momenta = exchanges.kept("momentum")
        assert all(torch.equal(result, results[0]) for result in results)
        assert all(torch.equal(momentum, momenta[0]) for momentum in momenta)
        residual = torch.stack(exchanges.kept("residual")).sum(0)
        torch.testing.assert_close(momenta[0] + residual, BETA * before + (1 - BETA) * total + left, rtol=0, atol=1e-12)
        optimizers = torch.lerp(optimizers, results[0], 1 - BETA)
        torch.testing.assert_close(optimizers, momenta[0], rtol=0, atol=1e-12)
        if step < 2:
            torch.testing.assert_close(results[0], total, rtol=0, atol=1e-14)
            assert not residual.any()
        else:
            assert residual.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "text",
    [
        f"onebit(bucket=16, momentum={BETA})",
        f"onebit(bucket=16, momentum={BETA}, warmup=9)",
        "topk(10%, momentum=0.9)",
        "topk(2%, momentum=0.9)+qsgd(4)",
        "threshold(1, momentum=0.9)",
        "randk(10%, momentum=0.9)",
        "randk(10%)",
        "powersgd(1)",
        "qsgd(4, feedback=on)",
    ],
)
def test_elements_that_are_not_finite_arrive_and_do_not_stay(text: str, bad: float) -> None:
    """A result says so on every rank. What a codec keeps is finite, so that later results are."""
    exchanges = Exchanges(text, 2, "ring")
    for step in range(4):
        gradients = values_of(2, LENGTH, seed=step)
        if step == 1:
            gradients[0][3:6] = bad
        results = exchanges.sum(gradients)
        assert [bool(result.isfinite().all()) for result in results] == [step != 1] * 2
        for name in exchanges.lengths.keys() & {"momentum", "residual"}:
            assert all(kept.isfinite().all() for kept in exchanges.kept(name))


@pytest.mark.parametrize("text", ["randk(10%)", "powersgd(1)"])
def test_vectors_that_are_added_up_are_measured(text: str) -> None:
    exchanges, codec = Exchanges(text, 3, "ring"), codec_of(text)
    exchanges.sum(values_of(3, LENGTH))
    for measured in exchanges.measured:
        assert measured.count == 1
        assert measured.num_bytes == 8 * LENGTH
        assert measured.sent_bytes == 2 * 2 * 8 * sum(codec.summed_lengths(SHAPES)) // 3
        assert measured.coding_s > 0
        assert measured.residual_share > 0


CODEC = f"onebit(bucket=16, momentum={BETA}, warmup=2)"


def one_bit_trainer(layout: str) -> mw.Trainer:
    given = subject()
    return mw.parallelize(
        given.model, given.loss_fn, given.batches[0], plan=mw.Layout(**LAYOUTS[layout], codec=CODEC),
        optimizer=lambda parameters: OneBitAdam(parameters, lr=0.01, betas=(BETA, 0.99), freeze_step=2),
    )  # fmt: skip


def momenta_of(trainer: mw.Trainer) -> dict[str, Tensor]:
    """This rank's exchanged momenta, by parameters."""
    _, parts = trainer._codecs.extract(trainer.parameters)
    prefix = "codec.momentum."
    return {
        entry.removeprefix(prefix).rpartition(".")[0]: part.value
        for entry, part in parts.items() if entry.startswith(prefix)
    }  # fmt: skip


def errors_of_one_bit_adam(layout: str) -> tuple[float, float, float]:
    """The largest differences of optimizers' and exchanged momenta; of the parameters and the formula's, given these
    momenta; and of the parameters and those of one process, in the warm-up."""
    given, trainer = subject(), one_bit_trainer(layout)
    serial = subject().model
    alone = OneBitAdam(serial.parameters(), lr=0.01, betas=(BETA, 0.99), freeze_step=2)
    momentum, formula, warm_up = 0.0, 0.0, 0.0
    variances = {name: torch.zeros_like(value) for name, value in serial.named_parameters()}
    for step, batch in enumerate(given.batches):
        before = trainer.full_state_dict(all_ranks=True)
        trainer.step(batch)
        after, exchanged = trainer.full_state_dict(all_ranks=True), momenta_of(trainer)
        assert trainer.optimizer is not None
        for state, name in zip(trainer.optimizer.state.values(), trainer.parameters, strict=True):
            momentum = max(momentum, float((state["exp_avg"] - exchanged[name]).abs().max()))
        if step < 2:
            alone.zero_grad()
            classification_loss(serial, batch)[0].backward()
            for name, value in serial.named_parameters():
                assert value.grad is not None
                variances[name].mul_(0.99).addcmul_(value.grad, value.grad, value=0.01)
            alone.step()
            warm_up = max(warm_up, oracle.largest_error(after, serial.state_dict()))
        for name, variance in variances.items():
            update = exchanged[name] / (variance.sqrt() + 1e-8)
            if step >= 2:
                update[variance == 0] = 0
            formula = max(formula, float((before[name] - 0.01 * update - after[name]).abs().max()))
    return momentum, formula, warm_up


@pytest.mark.parametrize("layout", ["dp2", "dp4"])
def test_one_bit_adam_steps_along_the_exchanged_momentum(ranks: Ranks, layout: str) -> None:
    for errors in ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, errors_of_one_bit_adam, layout):
        assert max(errors) <= 1e-9, errors


def momenta_saved(layout: str, path: Path) -> dict[str, Tensor]:
    given, trainer = subject(), one_bit_trainer(layout)
    for batch in given.batches[:3]:
        trainer.step(batch)
    trainer.save(path)
    return momenta_of(trainer)


def momenta_loaded(layout: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The momenta after a load, and the parameters after one more step."""
    given, trainer = subject(), one_bit_trainer(layout)
    trainer.step(given.batches[0])
    trainer.load(path)
    momenta = momenta_of(trainer)
    trainer.step(given.batches[0])
    return momenta, trainer.full_state_dict(all_ranks=True)


def test_the_momentum_of_the_sum_is_the_same_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for source, target in (("dp4", "dp2"), ("dp2", "dp4"), ("dp2", "dp2")):
        path = tmp_path / f"{source} {target}"
        before = ranks(mw.Layout(**LAYOUTS[source]).num_ranks, momenta_saved, source, path)[0]
        results = ranks(mw.Layout(**LAYOUTS[target]).num_ranks, momenta_loaded, target, path)
        for momenta, parameters in results:
            assert all(torch.equal(momenta[name], before[name]) for name in before)
            assert all(torch.equal(value, results[0][1][name]) for name, value in parameters.items())


def test_zero_refuses_a_momentum_of_the_sum() -> None:
    """Its ranks know their parts of the sum only. In groups of ranks that hold copies, they know all of it."""
    given = subject()
    graph = mw.capture(given.model, given.loss_fn, given.batches[0])
    with pytest.raises((LayoutError, PlanError), match="whole on every rank") as refused:
        mw.plan(graph, layout=mw.Layout(dp=2, zero=1, codec=CODEC))
    assert refused.value.remedy
    mw.plan(graph, layout=mw.Layout(dp=4, zero=3, zero_ranks=2, codec=CODEC))
    planned = mw.plan(graph, layout=mw.Layout(dp=2, zero=1, codec="onebit(warmup=2)"))
    for codec in (CODEC, "powersgd(2)"):
        codings = tuple(msgspec.structs.replace(coding, codec=codec) for coding in planned.buckets[0].codings)
        bucket = msgspec.structs.replace(planned.buckets[0], codings=codings)
        changed = msgspec.structs.replace(planned, buckets=(bucket, *planned.buckets[1:]))
        with pytest.raises(PlanError, match="its sums are whole, and ranks keep parts of them") as refused:
            check_fits(changed, graph)
        assert refused.value.remedy


def refusal(make: Callable[[Any], torch.optim.Optimizer]) -> str:
    given = subject()
    try:
        mw.parallelize(given.model, given.loss_fn, given.batches[0], plan=mw.Layout(dp=2, codec=CODEC), optimizer=make)
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(torch.optim.Adam, betas=(BETA, 0.99)), ("the optimizer is Adam", "OneBitAdam or ZeroOneAdam")),
        (partial(OneBitAdam, betas=(0.8, 0.99), freeze_step=2), ("betas=(0.8, 0.99)", "first of the optimizer's")),
        (partial(OneBitAdam, betas=(BETA, 0.99), freeze_step=3), ("freeze_step=3", "as its warmup")),
        (partial(ZeroOneAdam, betas=(0.8, 0.99)), ("betas=(0.8, 0.99)", "first of the optimizer's")),
        (partial(ZeroOneAdam, betas=(BETA, 0.99)), ()),
        (partial(OneBitAdam, betas=(BETA, 0.99), freeze_step=1), ()),
    ],
)
def test_momenta_of_the_sum_need_an_optimizer_that_has_them(
    ranks: Ranks, make: Callable[[Any], torch.optim.Optimizer], words: tuple[str, ...]
) -> None:
    for message in ranks(2, refusal, make):
        assert bool(message) == bool(words)
        assert all(each in message for each in words), message
