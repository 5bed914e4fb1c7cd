"""A step in pieces: the loss, backward, clipping and the update of a loop that calls them itself."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import MeshwrightError
from tests.distributed.pool import Ranks

LAYOUTS = [
    mw.Layout(dp=2), mw.Layout(tp=2), mw.Layout(dp=2, zero=1), mw.Layout(dp=2, zero=3), mw.Layout(pp=2, microbatches=2),
]  # fmt: skip
EVERY = [
    pytest.param(layout, id=name, marks=pytest.mark.product if name in ("dp", "zero-1") else ())
    for layout, name in zip(LAYOUTS, ("dp", "tp", "zero-1", "zero-3", "pp"), strict=True)
]


class Blocks(nn.Module):
    """Two blocks, of which the model recomputes the activations itself, and a table."""

    def __init__(self, dropout: float = 0.0, recomputes: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.dropout, self.recomputes = nn.Dropout(dropout), recomputes
        self.head = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        result: Tensor = self.head(self.dropout(x))
        return result


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"]), batch["label"])


def model_of(**arguments: Any) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**arguments).double()


def batch_of(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"words": torch.randint(16, (8,), generator=draw), "label": torch.randint(4, (8,), generator=draw)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def trainer_of(layout: mw.Layout, model: nn.Module | None = None) -> mw.Trainer:
    return mw.parallelize(model or model_of(), loss_fn, batch_of(0), plan=layout, optimizer=adamw)


def far(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((actual[name] - value.detach()).abs().max()) for name, value in expected.items())


# ----------------------------------------------------------------------------------------------------- pieces of a step


def pieces_and_steps(layout: mw.Layout) -> tuple[bool, list[int]]:
    whole = mw.parallelize(model_of(), loss_fn, batch_of(0), plan=layout, optimizer=adamw, max_grad_norm=0.1)
    pieces = trainer_of(layout)
    equal = True
    for step in range(3):
        loss = pieces.loss(batch_of(step))
        loss.backward()
        pieces.clip_gradients(0.1)
        pieces.update()
        equal &= torch.equal(whole.step(batch_of(step)), loss.detach())
        equal &= torch.equal(whole.metrics["grad_norm"], pieces.metrics["grad_norm"])
    ours, theirs = (trainer.full_state_dict(all_ranks=True) for trainer in (pieces, whole))
    return equal and all(torch.equal(ours[name], theirs[name]) for name in theirs), [
        whole.step_number,
        pieces.step_number,
    ]


@pytest.mark.parametrize("layout", EVERY)
def test_pieces_have_the_bits_of_a_step(ranks: Ranks, layout: mw.Layout) -> None:
    assert ranks(2, pieces_and_steps, layout) == [(True, [3, 3])] * 2


def separately(first: Tensor, second: Tensor) -> None:
    (first / 2).backward()
    (3 * second).backward()


def together(first: Tensor, second: Tensor) -> None:
    (first / 2 + 3 * second).backward()


def accumulated(layout: mw.Layout, add: Callable[[Tensor, Tensor], None]) -> float:
    plain, trainer = model_of(), trainer_of(layout)
    optimizer = adamw(plain.parameters())
    for step in range(2):
        optimizer.zero_grad()
        together(loss_fn(plain, batch_of(step)), loss_fn(plain, batch_of(step + 10)))
        optimizer.step()
        if add is together:
            add(trainer.loss(batch_of(step)), trainer.loss(batch_of(step + 10)))
        else:
            (trainer.loss(batch_of(step)) / 2).backward()
            (3 * trainer.loss(batch_of(step + 10))).backward()
        trainer.update()
    return far(trainer.full_state_dict(all_ranks=True), dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("layout", "add"),
    [
        pytest.param(LAYOUTS[1], separately, id="tp"),
        pytest.param(LAYOUTS[3], together, id="zero-3"),
        pytest.param(LAYOUTS[4], separately, id="pp"),
        pytest.param(LAYOUTS[4], together, id="pp-together", marks=pytest.mark.product),
    ],
)
def test_scaled_and_summed_losses_have_the_gradients_of_autograd(
    ranks: Ranks, layout: mw.Layout, add: Callable[[Tensor, Tensor], None]
) -> None:
    assert max(ranks(2, accumulated, layout, add)) < 1e-9


def test_losses_of_one_update_draw_different_masks() -> None:
    trainer = trainer_of(mw.Layout(), model_of(dropout=0.5))
    first, second = trainer.loss(batch_of(0)), trainer.loss(batch_of(0))
    assert not torch.equal(first, second)
    trainer.update()
    assert not torch.equal(trainer.loss(batch_of(0)), first)


def test_pieces_refuse_what_they_cannot_do() -> None:
    trainer = trainer_of(mw.Layout())
    loss = trainer.loss(batch_of(0))
    loss.backward(retain_graph=True)
    with pytest.raises(MeshwrightError, match="already been added"):
        loss.backward()
    without = mw.parallelize(model_of(), loss_fn, batch_of(0), plan=mw.Layout())
    without.loss(batch_of(0)).backward()
    with pytest.raises(MeshwrightError, match="no optimizer"):
        without.update()
    trainer.replica = SimpleNamespace()  # type: ignore[assignment]
    for piece in (lambda: trainer.loss(batch_of(0)), trainer.update, trainer.follow_optimizer):
        with pytest.raises(MeshwrightError, match="exchange their states"):
            piece()


def follows(layout: mw.Layout) -> tuple[bool, int]:
    ours, whole = trainer_of(layout), trainer_of(layout)
    ours.follow_optimizer()
    for step in range(2):
        ours.loss(batch_of(step)).backward()
        ours.optimizer.step()
        whole.step(batch_of(step))
    state, expected = (trainer.full_state_dict(all_ranks=True) for trainer in (ours, whole))
    return all(torch.equal(state[name], expected[name]) for name in expected), ours.step_number


def test_the_callers_own_optimizer_step_is_followed(ranks: Ranks) -> None:
    assert ranks(2, follows, mw.Layout(dp=2, zero=3)) == [(True, 2)] * 2


# ------------------------------------------------------------------------------------------------ states of plain torch


def round_trip(layout: mw.Layout) -> tuple[bool, float]:
    """A plain model and its optimizer, taken over, given back with equal bits, and trained on."""
    plain = model_of()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_fn(plain, batch_of(step)).backward()
        optimizer.step()
    trainer = trainer_of(layout)
    trainer.load_state_dict(plain.state_dict())
    trainer.load_optimizer_state_dict(optimizer.state_dict())
    weights, state = trainer.full_state_dict(all_ranks=True), trainer.full_optimizer_state_dict(all_ranks=True)
    equal = all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    expected = optimizer.state_dict()
    for number, values in expected["state"].items():
        equal &= state["state"][number].keys() == values.keys()
        equal &= all(torch.equal(state["state"][number][key], value) for key, value in values.items())
    for group, other in zip(state["param_groups"], expected["param_groups"], strict=True):
        equal &= {key: group[key] for key in other} == other
    again = torch.optim.AdamW(plain.parameters(), lr=1.0)
    again.load_state_dict(state)
    again.zero_grad()
    loss_fn(plain, batch_of(2)).backward()
    again.step()
    trainer.step(batch_of(2))
    return equal, far(trainer.full_state_dict(all_ranks=True), dict(plain.named_parameters()))


@pytest.mark.parametrize("layout", EVERY)
def test_states_go_to_plain_torch_and_back_with_equal_bits(ranks: Ranks, layout: mw.Layout) -> None:
    for equal, error in ranks(2, round_trip, layout):
        assert equal
        assert error < 1e-9


def test_states_of_other_parameters_are_refused() -> None:
    trainer = trainer_of(mw.Layout())
    trainer.step(batch_of(0))
    state = trainer.full_optimizer_state_dict()
    before = copy.deepcopy(state)
    fewer = {**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]}
    with pytest.raises(MeshwrightError, match=r"groups have \[1\] parameters"):
        trainer.load_optimizer_state_dict(fewer)
    other = {**state, "state": {**state["state"], 0: {"exp_avg": torch.zeros(3)}}}
    with pytest.raises(MeshwrightError, match=r"'exp_avg' of table.weight has shape \[3\], the parameter \[16, 8\]"):
        trainer.load_optimizer_state_dict(other)
    with pytest.raises(MeshwrightError, match="no 'state' and 'param_groups'"):
        trainer.load_optimizer_state_dict({})
    after = trainer.full_optimizer_state_dict()
    for number, values in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in values.items())


# ---------------------------------------------------------------------------- several losses, and models that recompute


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def discriminator_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    real, generated = model.discriminator(batch["real"]), model.discriminator(model.generator(batch["noise"]).detach())
    return F.softplus(-real).mean() + F.softplus(generated).mean()


def generator_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.softplus(-model.discriminator(model.generator(batch["noise"]))).mean()


def of(part: str) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of one part's parameters only."""
    return lambda named: torch.optim.Adam([pair for pair in named if pair[0].startswith(part)], lr=1e-2)


def alternating(layout: mw.Layout) -> float:
    torch.manual_seed(0)
    plain = Pair().double()
    ours = copy.deepcopy(plain)
    batches = [{"real": torch.randn(8, 4).double(), "noise": torch.randn(8, 4).double()} for _ in range(3)]
    parts = (("discriminator", discriminator_loss), ("generator", generator_loss))
    trainers: list[mw.Trainer] = []
    for part, loss in parts:
        beside = trainers[0] if trainers else None
        trainers.append(
            mw.parallelize(ours, loss, batches[0], plan=layout, optimizer=of(part), max_grad_norm=0.5, beside=beside)
        )
    optimizers = [of(part)(plain.named_parameters()) for part, _ in parts]
    for batch in batches:
        for trainer, optimizer, (_, loss) in zip(trainers, optimizers, parts, strict=True):
            trainer.step(batch)
            plain.zero_grad()
            loss(plain, batch).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    weights = trainers[1].full_state_dict(all_ranks=True)
    assert all(torch.equal(weights[name], value) for name, value in trainers[0].full_state_dict(all_ranks=True).items())
    return far(weights, dict(plain.named_parameters()))


@pytest.mark.parametrize(
    "layout", [pytest.param(LAYOUTS[0], id="dp", marks=pytest.mark.product), pytest.param(LAYOUTS[3], id="zero-3")]
)
def test_alternating_losses_train_one_set_of_parameters(ranks: Ranks, layout: mw.Layout) -> None:
    assert max(ranks(2, alternating, layout)) < 1e-9


def not_alike() -> list[str]:
    model, texts = Pair(), []
    batch = {"real": torch.randn(8, 4), "noise": torch.randn(8, 4)}
    first = mw.parallelize(model, discriminator_loss, batch, plan=LAYOUTS[3], optimizer=of("discriminator"))
    for other, layout, beside in ((model, LAYOUTS[3], None), (model, LAYOUTS[1], first), (Pair(), LAYOUTS[3], first)):
        with pytest.raises(MeshwrightError) as raised:
            mw.parallelize(other, generator_loss, batch, plan=layout, optimizer=of("generator"), beside=beside)
        texts.append(str(raised.value))
    return texts


def test_trainers_beside_each_other_store_parameters_alike(ranks: Ranks) -> None:
    for alone, other_layout, other_model in ranks(2, not_alike):
        assert "split over the ranks of another trainer" in alone
        assert "parallelize(..., beside=trainer)" in alone
        assert "parameter or buffer generator.0.weight: this plan stores it as tp: S(0)" in other_layout
        assert "its model is another Pair" in other_model


def recomputing(layout: mw.Layout) -> float:
    plain, ours = model_of(), model_of(recomputes=True)
    trainer, optimizer = trainer_of(layout, ours), adamw(plain.parameters())
    for step in range(2):
        trainer.step(batch_of(step))
        optimizer.zero_grad()
        loss_fn(plain, batch_of(step)).backward()
        optimizer.step()
    return far(trainer.full_state_dict(all_ranks=True), dict(plain.named_parameters()))


@pytest.mark.parametrize("layout", [mw.Layout(tp=2), mw.Layout(dp=2, recompute="full")], ids=["tp", "dp"])
def test_a_model_that_recomputes_has_the_right_gradients(ranks: Ranks, layout: mw.Layout) -> None:
    assert max(ranks(2, recomputing, layout)) < 1e-9
