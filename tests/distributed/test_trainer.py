"""The trainer: what step, evaluate, optimizer, metrics and state promise, on ranks and against plain eager PyTorch."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.errors import PlanError
from meshwright.ir import files
from meshwright.ir.plan_check import check_fits
from meshwright.models import GPT, MLP, classification_loss
from meshwright.models.losses import IGNORED
from tests.distributed import oracle
from tests.distributed.oracle import TOLERANCE, Batch, Subject, error_of, largest_error
from tests.distributed.pool import Ranks

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = {"one": mw.Layout(), **oracle.LAYOUTS}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def num_ranks(layout: mw.Layout) -> int:
    return layout.dp * layout.feature_ranks


def fresh(make: Callable[[], Subject]) -> tuple[Subject, Subject]:
    """The same subject twice: for the trainer, and for eager PyTorch."""
    torch.manual_seed(3)
    subject = make()
    return subject, copy.deepcopy(subject)


def trainer_of(subject: Subject, layout: mw.Layout | mw.Plan, *, of: object = None, **options: Any) -> mw.Trainer:
    """A trainer. Subjects with the same ``of`` are the same step, which a process captures once."""
    options.setdefault("optimizer", sgd)
    make = mw.parallelize if of is None else oracle.sharing_capture(("trainer", of))
    return make(subject.model, subject.loss_fn, subject.batches[0], plan=layout, **options)


def eager_loss(subject: Subject, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    result = subject.loss_fn(subject.model, batch)
    return result if isinstance(result, tuple) else (result, {})


def eager_step(
    subject: Subject, optimizer: torch.optim.Optimizer, batch: Batch, max_grad_norm: float | None = None
) -> Tensor:
    optimizer.zero_grad()
    loss, _ = eager_loss(subject, batch)
    loss.backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(subject.model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.detach()


def state_error(trainer: mw.Trainer, subject: Subject) -> float:
    """On every rank, against the eager model's parameters and buffers."""
    return largest_error(trainer.full_state_dict(all_ranks=True), subject.model.state_dict())


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate_between_steps(layout: mw.Layout, make: Callable[[bool], Subject]) -> list[float]:
    parallel, plain = fresh(lambda: make(True))
    trainer, optimizer = trainer_of(parallel, layout), sgd(plain.model.parameters())
    errors = []
    for batch in parallel.batches:
        errors.append(error_of(trainer.step(batch), eager_step(plain, optimizer, batch)))
        plain.model.eval()
        with torch.no_grad():
            expected, metrics = eager_loss(plain, batch)
        plain.model.train()
        errors.append(error_of(trainer.evaluate(batch), expected))
        errors.append(largest_error(trainer.metrics, {"loss": expected, **metrics}))
    return [*errors, state_error(trainer, plain)]


@pytest.mark.parametrize(("layout", "make"), [("dp2", oracle.resnet), ("dp2 x tp2", oracle.one_block)])
def test_evaluation_equals_eval_mode_and_disturbs_nothing(
    ranks: Ranks, layout: str, make: Callable[[bool], Subject]
) -> None:
    """ResNet: running statistics are used and left alone; training goes on as if nobody had evaluated."""
    chosen = oracle.LAYOUTS[layout]
    for errors in ranks(num_ranks(chosen), evaluate_between_steps, chosen, make):
        assert max(errors) <= TOLERANCE, errors


def evaluate_with_dropout(layout: mw.Layout) -> tuple[float, float, bool]:
    parallel, plain = fresh(lambda: oracle.one_block(True, dropout=0.5))
    trainer = trainer_of(parallel, layout, optimizer=None)
    plain.model.eval()
    losses = [trainer.evaluate(parallel.batches[0]) for _ in range(2)]
    expected = eager_loss(plain, parallel.batches[0])[0].detach()
    return error_of(losses[0], expected), error_of(losses[1], expected), parallel.model.training


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_evaluation_drops_nothing_and_keeps_the_models_mode(ranks: Ranks, layout: str) -> None:
    for first, second, training in ranks(2, evaluate_with_dropout, oracle.LAYOUTS[layout]):
        assert first <= TOLERANCE
        assert second <= TOLERANCE
        assert training


def step_without_optimizer() -> None:
    parallel, _ = fresh(lambda: oracle.mlp(False))
    trainer_of(parallel, mw.Layout(dp=2), optimizer=None).step(parallel.batches[0])


def test_step_without_optimizer_is_refused(ranks: Ranks) -> None:
    with pytest.raises(Exception, match="OptimizerError: trainer: this trainer has no optimizer\n  -> pass optimizer="):
        ranks(2, step_without_optimizer)


# --- batches ---------------------------------------------------------------------------------------------------------


def cut(batch: Batch, samples: int, positions: int | None = None) -> Batch:
    return {
        name: value[:samples] if positions is None else value[:samples, :positions].contiguous()
        for name, value in batch.items()
    }


class Captures(logging.Handler):
    """Counts how often a batch shape was captured again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.shapes: list[str] = []
        logger = logging.getLogger("meshwright")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "capturing the step again" in record.getMessage():
            self.shapes.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("meshwright").removeHandler(self)
        logging.getLogger("meshwright").setLevel(logging.NOTSET)

    def __enter__(self) -> Captures:
        return self


def train_on_several_shapes(layout: mw.Layout) -> tuple[list[float], list[str]]:
    parallel, plain = fresh(lambda: oracle.one_block(True))
    trainer, optimizer = trainer_of(parallel, layout), sgd(plain.model.parameters())
    whole = parallel.batches[0]
    shapes = [whole, cut(whole, 5), cut(whole, 2), whole, cut(whole, 5), cut(whole, 8, 7), cut(whole, 2)]
    with Captures() as captures:
        errors = [error_of(trainer.step(batch), eager_step(plain, optimizer, batch)) for batch in shapes]
        errors.append(error_of(trainer.evaluate(cut(whole, 3)), eager_loss(plain, cut(whole, 3))[0].detach()))
    return [*errors, state_error(trainer, plain)], captures.shapes


@pytest.mark.parametrize("layout", ["dp2 x tp2"])
def test_other_batch_shapes_are_captured_once_and_right(ranks: Ranks, layout: str) -> None:
    """A ragged last batch that does not divide, and shorter sequences, under the same plan."""
    chosen = oracle.LAYOUTS[layout]
    for errors, captured in ranks(num_ranks(chosen), train_on_several_shapes, chosen):
        assert max(errors) <= TOLERANCE, errors
        assert len(captured) == 3, "5 samples, 2 samples, 7 positions"
        assert "(5, 12)" in captured[0]


def train_on_many_shapes() -> list[str]:
    parallel, _ = fresh(lambda: oracle.mlp(False))
    trainer = trainer_of(parallel, mw.Layout())
    batch = parallel.batches[0]
    twice = {name: torch.cat([value, value]) for name, value in batch.items()}
    with Captures() as captures:
        for samples in [*range(1, 11), 10, 3, 1]:
            trainer.step(cut(twice, samples))
    return captures.shapes


def test_eight_shapes_are_kept(ranks: Ranks) -> None:
    """Ten shapes, of which 8 is the first: of the later 10, 3 and 1, only 1 has been forgotten."""
    captured = ranks(1, train_on_many_shapes)[0]
    assert len(captured) == 10
    assert "(1, 6)" in captured[-1]


def train_on_parts(layout: mw.Layout, make: Callable[[bool], Subject]) -> tuple[tuple[int, int], list[float]]:
    parallel, plain = fresh(lambda: make(True))
    trainer, optimizer = trainer_of(parallel, layout), sgd(plain.model.parameters())
    index, count = trainer.data_shard
    errors = []
    for batch in [*parallel.batches, cut(parallel.batches[0], 4)]:
        part = list(oracle.shards(batch, count))[index]
        errors.append(error_of(trainer.step(part, local=True), eager_step(plain, optimizer, batch)))
        expected, metrics = eager_loss(plain, batch)
        if make is not oracle.resnet:
            errors.append(error_of(trainer.evaluate(part, local=True), expected.detach()))
            errors.append(largest_error(trainer.metrics, {"loss": expected.detach(), **metrics}))
    return trainer.data_shard, [*errors, state_error(trainer, plain)]


@pytest.mark.parametrize("layout", ["dp2", "dp2 x tp2"])
def test_local_parts_equal_the_global_batch(ranks: Ranks, layout: str) -> None:
    """With ragged labels: the count of the parts differ, and the mean is still that of the global batch."""
    chosen = oracle.LAYOUTS[layout]
    results = ranks(num_ranks(chosen), train_on_parts, chosen, oracle.one_block)
    for rank, (shard, errors) in enumerate(results):
        assert shard == (rank // chosen.feature_ranks, chosen.dp)
        assert max(errors) <= TOLERANCE, errors


def step_on(change: str) -> None:
    parallel, _ = fresh(lambda: oracle.mlp(False))
    trainer = trainer_of(parallel, mw.Layout(dp=2))
    batch = parallel.batches[0]
    trainer.step({**batch, "more": batch["label"]} if change == "structure" else cut(batch, 1))


def test_batch_of_another_structure_is_refused(ranks: Ranks) -> None:
    with pytest.raises(
        Exception,
        match=r"DataError: batch: the batch holds batch\.inputs, batch\.label, batch\.more, "
        r"the captured one holds batch\.inputs, batch\.label\n  -> pass batches of one structure",
    ):
        ranks(2, step_on, "structure")


def test_batch_that_is_too_small_is_refused(ranks: Ranks) -> None:
    with pytest.raises(
        Exception, match=r"LayoutError: batch: a global batch of 1 is too small for dp=2\n  -> use a batch of 2 or more"
    ):
        ranks(2, step_on, "size")


def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = classification_loss(model, batch)[0] * batch["scale"]
    return loss


def step_with_numbers() -> list[float]:
    parallel, _ = fresh(lambda: oracle.mlp(False))
    batch: dict[str, Any] = {**parallel.batches[0], "scale": 1.0}
    trainer = mw.parallelize(parallel.model, scaled_loss, batch, plan=mw.Layout(dp=2), optimizer=sgd)
    return [float(trainer.evaluate({**batch, "scale": scale})) for scale in (1.0, 3.0, 1.0)]


def test_numbers_in_the_batch_are_not_frozen_at_their_first_value(ranks: Ranks) -> None:
    for loss, three, again in ranks(2, step_with_numbers):
        assert three == pytest.approx(3 * loss)
        assert again == loss


# --- state -----------------------------------------------------------------------------------------------------------


def state_into_plain_model(layout: mw.Layout, make: Callable[[bool], Subject]) -> tuple[list[str], float]:
    parallel, plain = fresh(lambda: make(True))
    trainer, optimizer = trainer_of(parallel, layout), sgd(plain.model.parameters())
    for batch in parallel.batches:
        trainer.step(batch)
        eager_step(plain, optimizer, batch)
    state = trainer.full_state_dict()
    if not state:
        return [], 0.0
    assert all(not value.requires_grad for value in state.values())
    _, loaded = fresh(lambda: make(True))
    loaded.model.load_state_dict(state, strict=True)
    batch = parallel.batches[0]
    error = error_of(eager_loss(loaded, batch)[0].detach(), eager_loss(plain, batch)[0].detach())
    return list(state), max(error, largest_error(loaded.model.state_dict(), plain.model.state_dict()))


@pytest.mark.parametrize(
    "make", [oracle.one_block, oracle.resnet, oracle.hugging_face_gpt2], ids=lambda make: make.__name__
)
def test_full_state_dict_loads_into_the_plain_model(ranks: Ranks, make: Callable[[bool], Subject]) -> None:
    layout = oracle.LAYOUTS["tp2"]
    results = ranks(2, widened_state_into_plain_model, layout, make)
    names, error = results[0]
    assert names == list(make(False).model.state_dict()), "the model's own names, tied ones too, in its order"
    assert error <= TOLERANCE
    assert results[1] == ([], 0.0), "only on rank 0"


def widened_state_into_plain_model(layout: mw.Layout, make: Callable[[bool], Subject]) -> tuple[list[str], float]:
    with oracle.WiderCasts():
        return state_into_plain_model(layout, make)


def whole_and_split(layout: mw.Layout) -> tuple[dict[str, bool], dict[str, bool], bool]:
    parallel, _ = fresh(lambda: oracle.gpt(False, vocabulary=oracle.LARGE_VOCABULARY))
    before = dict(parallel.model.named_parameters())
    trainer = trainer_of(parallel, layout)
    trainer.step(parallel.batches[0])
    after = dict(parallel.model.named_parameters())
    meta = {name: value.is_meta for name, value in after.items()}
    same = {name: trainer.parameters[name] is before[name] is after[name] for name in after}
    model = parallel.model
    assert isinstance(model, GPT)
    return meta, same, model.head.weight is model.token_embedding.weight


def test_whole_parameters_are_the_callers_and_split_ones_become_meta(ranks: Ranks) -> None:
    for meta, same, tied in ranks(2, whole_and_split, oracle.LAYOUTS["dp2"]):
        assert not any(meta.values())
        assert all(same.values())
        assert tied
    for meta, same, tied in ranks(2, whole_and_split, oracle.LAYOUTS["tp2"]):
        assert meta["blocks.0.attention.qkv.weight"]
        assert meta["token_embedding.weight"]
        assert not meta["final_norm.weight"]
        assert same == {name: not is_meta for name, is_meta in meta.items()}
        assert tied


def from_meta(layout: mw.Layout, seed: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = oracle.gpt(False).model
    _, plain = fresh(lambda: oracle.gpt(False))
    trainer = mw.parallelize(model, plain.loss_fn, plain.batches[0], plan=layout, optimizer=sgd, seed=seed)
    state = trainer.full_state_dict(all_ranks=True)
    assert torch.isfinite(trainer.step(plain.batches[0]))
    return state


def test_meta_models_begin_alike_under_every_layout(ranks: Ranks) -> None:
    states = [state for layout in LAYOUTS.values() for state in ranks(num_ranks(layout), from_meta, layout, 5)]
    assert len(states) == 9
    for state in states[1:]:
        assert largest_error(state, states[0]) == 0.0
    first = states[0]
    assert torch.equal(first["head.weight"], first["token_embedding.weight"])
    assert first["final_norm.weight"].eq(1).all()
    # Each module draws its own numbers, as wide as it says.
    up = [first[f"blocks.{index}.mlp.up.weight"] for index in range(2)]
    assert float(up[0].std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(up[0], up[1])
    assert largest_error(ranks(1, from_meta, mw.Layout(), 6)[0], first) > 0.0, "another seed, another beginning"


class Bare(nn.Module):
    """A module that cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def bare_from_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Bare())
    batch = oracle.mlp(False).batches[0]
    mw.parallelize(model, classification_loss, batch, plan=mw.Layout(), optimizer=sgd)


def test_meta_module_that_cannot_initialise_itself_is_refused(ranks: Ranks) -> None:
    message = r"CaptureError: module 0: Bare is on the meta device and has no reset_parameters\n  -> give it a reset_"
    with pytest.raises(Exception, match=message):
        ranks(1, bare_from_meta)


# --- optimizers ------------------------------------------------------------------------------------------------------


def train_with_scheduler(layout: mw.Layout) -> list[float]:
    parallel, plain = fresh(lambda: oracle.mlp(True))
    trainer, optimizer = trainer_of(parallel, layout), sgd(plain.model.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(stepper, 1, gamma=0.1) for stepper in (trainer.optimizer, optimizer)]
    errors = []
    for batch in parallel.batches:
        errors.append(error_of(trainer.step(batch), eager_step(plain, optimizer, batch)))
        for schedule in schedules:
            schedule.step()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)
    return [*errors, state_error(trainer, plain)]


def test_scheduler_drives_the_optimizer(ranks: Ranks) -> None:
    for errors in ranks(2, train_with_scheduler, mw.Layout(tp=2)):
        assert max(errors) <= TOLERANCE, errors


def groups(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay on matrices only, by shape and by name: what optimizers of transformers do."""
    named = list(parameters)
    decayed = [(name, value) for name, value in named if value.dim() > 1 and "embedding" not in name]
    rest = [(name, value) for name, value in named if value.dim() <= 1 or "embedding" in name]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def train_with_groups(layout: mw.Layout) -> list[float]:
    parallel, plain = fresh(lambda: oracle.one_block(True))
    trainer, optimizer = trainer_of(parallel, layout, optimizer=groups), groups(plain.model.named_parameters())
    errors = [error_of(trainer.step(batch), eager_step(plain, optimizer, batch)) for batch in parallel.batches]
    return [*errors, state_error(trainer, plain)]


@pytest.mark.parametrize("layout", ["dp2 x tp2"])
def test_optimizer_gets_names_and_shapes_for_its_groups(ranks: Ranks, layout: str) -> None:
    chosen = oracle.LAYOUTS[layout]
    for errors in ranks(num_ranks(chosen), train_with_groups, chosen):
        assert max(errors) <= TOLERANCE, errors


def train_with_adafactor(layout: mw.Layout) -> list[float]:
    parallel, plain = fresh(lambda: oracle.mlp(True))
    optimizer = torch.optim.Adafactor(plain.model.parameters(), lr=0.1)
    trainer = trainer_of(parallel, layout, optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1))
    return [error_of(trainer.step(batch), eager_step(plain, optimizer, batch)) for batch in parallel.batches]


def test_optimizer_that_needs_whole_tensors(ranks: Ranks) -> None:
    """Fine while they are whole, and refused by name where one is split."""
    for errors in ranks(2, train_with_adafactor, mw.Layout(dp=2)):
        assert max(errors) <= TOLERANCE, errors
    message = (
        r"OptimizerError: optimizer; layers\.0\.weight is split: Adafactor needs whole tensors\n  -> use an element"
    )
    with pytest.raises(Exception, match=message):
        ranks(2, train_with_adafactor, mw.Layout(tp=2))


def clip_around_the_norm(layout: mw.Layout) -> tuple[list[float], list[float]]:
    norms, errors = [], []
    for scale in (0.5, 2.0):
        parallel, plain = fresh(lambda: oracle.one_block(True))
        loss, _ = eager_loss(plain, parallel.batches[0])
        loss.backward()
        limit = scale * float(
            nn.utils.get_total_norm(value.grad for value in plain.model.parameters() if value.grad is not None)
        )
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), limit)
        sgd(plain.model.parameters()).step()
        trainer = trainer_of(parallel, layout, of="one block", max_grad_norm=limit)
        trainer.step(parallel.batches[0])
        norms.append(float(trainer.metrics["grad_norm"]) / limit)
        errors += [error_of(trainer.metrics["grad_norm"], norm), state_error(trainer, plain)]
    return norms, errors


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2 x tp2"])
def test_clipping_equals_torchs(ranks: Ranks, layout: str) -> None:
    """Below the limit nothing changes, above it everything is scaled; the norm counts split tensors once."""
    for norms, errors in ranks(num_ranks(LAYOUTS[layout]), clip_around_the_norm, LAYOUTS[layout]):
        assert norms == [pytest.approx(2.0, rel=1e-6), pytest.approx(0.5, rel=1e-6)]
        assert max(errors) <= TOLERANCE, errors


def freeze(model: nn.Module, *names: str) -> None:
    for name, value in model.named_parameters():
        if any(part in name for part in names):
            value.requires_grad_(False)


def train_partly_frozen(layout: mw.Layout, when: str) -> tuple[list[float], float]:
    parallel, plain = fresh(lambda: oracle.one_block(True))
    if when == "before":
        freeze(parallel.model, "mlp", "position")
        freeze(plain.model, "mlp", "position")
    trainer, optimizer = trainer_of(parallel, layout, of=("frozen", when)), sgd(plain.model.parameters())
    errors = []
    weight = plain.model.get_parameter("blocks.0.mlp.up.weight")
    before = weight.detach().clone()
    for step, batch in enumerate(parallel.batches):
        if when == "meanwhile" and step == 2:
            freeze(parallel.model, "mlp", "position")
            freeze(plain.model, "mlp", "position")
            before = weight.detach().clone()
        errors.append(error_of(trainer.step(batch), eager_step(plain, optimizer, batch)))
    return [*errors, state_error(trainer, plain)], float((weight.detach() - before).abs().max())


@pytest.mark.parametrize(
    ("when", "layout"),
    [("before", "dp2 x tp2"), ("meanwhile", "one"), ("meanwhile", "tp2"), ("meanwhile", "dp2 x tp2")],
)
def test_frozen_parameters_stay(ranks: Ranks, layout: str, when: str) -> None:
    """Frozen from the start (transfer learning), or in the middle of training, through the caller's module."""
    for errors, moved in ranks(num_ranks(LAYOUTS[layout]), train_partly_frozen, LAYOUTS[layout], when):
        assert max(errors) <= TOLERANCE, errors
        assert moved == 0.0


class WithSpares(nn.Module):
    """Has a parameter that no output depends on, and one that only a part of the output does."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.body = MLP((6, 16, 4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs) * self.scale
        return scores


def with_spares(ragged: bool) -> Subject:
    return Subject(WithSpares().double(), classification_loss, oracle.mlp(ragged).batches)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def train_with_spares(layout: mw.Layout) -> list[float]:
    parallel, plain = fresh(lambda: with_spares(True))
    trainer = trainer_of(parallel, layout, of="spares", optimizer=adamw, max_grad_norm=0.1)
    optimizer = adamw(plain.model.parameters())
    errors = []
    for batch in parallel.batches:
        errors.append(error_of(trainer.step(batch), eager_step(plain, optimizer, batch, max_grad_norm=0.1)))
    return [*errors, state_error(trainer, plain)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unused_parameters_are_left_alone(ranks: Ranks, layout: str) -> None:
    """They have no gradient, so that weight decay does not touch them either, as in eager PyTorch."""
    for errors in ranks(num_ranks(LAYOUTS[layout]), train_with_spares, LAYOUTS[layout]):
        assert max(errors) <= TOLERANCE, errors


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics_of_a_step(layout: mw.Layout) -> dict[str, Tensor]:
    parallel, _ = fresh(lambda: oracle.one_block(True))
    trainer = trainer_of(parallel, layout, max_grad_norm=1.0)
    loss = trainer.step(parallel.batches[0])
    assert loss is trainer.metrics["loss"]
    return trainer.metrics


@pytest.mark.parametrize("layout", ["dp2 x tp2"])
def test_metrics_are_of_the_global_batch(ranks: Ranks, layout: str) -> None:
    chosen = oracle.LAYOUTS[layout]
    batch = fresh(lambda: oracle.one_block(True))[0].batches[0]
    counts = [int((part["targets"] != IGNORED).sum()) for part in oracle.shards(batch, 2)]
    assert counts[0] != counts[1]
    for metrics in ranks(num_ranks(chosen), metrics_of_a_step, chosen):
        assert list(metrics) == ["loss", "tokens", "grad_norm"]
        assert metrics["tokens"].dtype == torch.int64
        assert int(metrics["tokens"]) == sum(counts)
        assert all(value.dim() == 0 for value in metrics.values())


# --- dropout ---------------------------------------------------------------------------------------------------------


def first_and_last(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and those of the first and the last sample."""
    logits, targets = model(batch["tokens"]), batch["targets"]
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)
    ends = torch.zeros(2, len(each), dtype=each.dtype)
    ends[0, 0] = ends[1, -1] = 1.0
    return each.mean(), {"first": (each * ends[0]).sum(), "last": (each * ends[1]).sum()}


def train_with_dropout(layout: mw.Layout, dropout: float, seed: int = 0) -> list[tuple[float, float, float]]:
    """The losses of the batch, of its first and of its last sample; all samples are one."""
    parallel, _ = fresh(lambda: oracle.one_block(False, dropout=dropout))
    batch = {name: value[:1].repeat(oracle.BATCH, 1) for name, value in parallel.batches[0].items()}
    trainer = trainer_of(Subject(parallel.model, first_and_last, [batch]), layout, of=("dropout", dropout), seed=seed)
    losses = []
    for _ in range(12):
        loss = trainer.step(batch)
        losses.append((float(loss), float(trainer.metrics["first"]), float(trainer.metrics["last"])))
    return losses


@pytest.mark.parametrize("layout", oracle.LAYOUTS)
def test_dropout_masks_are_equal_on_replicas_and_differ_on_shards(ranks: Ranks, layout: str) -> None:
    chosen = oracle.LAYOUTS[layout]
    results = ranks(num_ranks(chosen), train_with_dropout, chosen, 0.3)
    for result in results:
        assert result == results[0], "with unequal masks on replicas, ranks would drift apart"
    losses = [loss for loss, _, _ in results[0]]
    assert losses[-1] < losses[0] - 0.1, "it learns"
    for _, first, last in results[0]:
        assert abs(first - last) > 1e-6, "equal samples, other masks; the last one is on the other shard under dp"
    for _, first, last in ranks(num_ranks(chosen), train_with_dropout, chosen, 0.0)[0]:
        assert first == pytest.approx(last, rel=1e-12)


def test_dropout_follows_the_seed_and_the_step(ranks: Ranks) -> None:
    runs = [ranks(2, train_with_dropout, mw.Layout(dp=2), 0.3, seed)[0] for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


class Dropped(nn.Module):
    """Its loss is the sum of its weights that were not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 64, dtype=torch.float64))
        self.dropout = nn.Dropout(0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(inputs @ self.weight)
        return dropped


def sum_of(model: nn.Module, batch: Batch) -> Tensor:
    total: Tensor = model(batch["inputs"]).sum()
    return total


def gradients_under_dropout(layout: mw.Layout) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    model = Dropped()
    batch = {"inputs": torch.eye(6, dtype=torch.float64).repeat(4, 1)}
    trainer = trainer_of(
        Subject(model, sum_of, [batch]), layout, of="dropped",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )  # fmt: skip
    losses, dots = [], []
    for _ in range(3):
        before = trainer.full_state_dict(all_ranks=True)["weight"]
        losses.append(float(trainer.step(batch)))
        gradient = (before - trainer.full_state_dict(all_ranks=True)["weight"]) / 0.01
        dots.append(float((gradient * before).sum()))
    return losses, dots


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_drops_what_forward_dropped(ranks: Ranks, layout: str) -> None:
    """The loss is linear in the weights, so it equals the product of weights and gradient, if the masks are equal."""
    for losses, dots in ranks(num_ranks(LAYOUTS[layout]), gradients_under_dropout, LAYOUTS[layout]):
        assert dots == pytest.approx(losses, rel=1e-9)
        assert losses[0] == pytest.approx(24 * 64, rel=0.05), "kept values are scaled up"
        assert len({round(loss / losses[0], 6) for loss in losses}) == 3


# --- plans -----------------------------------------------------------------------------------------------------------


def train_by(subject: str, plan: mw.Layout | mw.Plan | str) -> tuple[list[float], list[str], str]:
    parallel, plain = fresh(lambda: oracle.MODELS[subject](True))
    trainer = mw.parallelize(parallel.model, parallel.loss_fn, parallel.batches[0], plan=plan, optimizer=sgd)
    optimizer = sgd(plain.model.parameters())
    errors = [error_of(trainer.step(batch), eager_step(plain, optimizer, batch)) for batch in parallel.batches]
    split = [name for name in trainer.parameters if trainer.parameters.is_sharded(name)]
    return [*errors, state_error(trainer, plain)], split, trainer.plan.explain()


def test_one_weird_trick(ranks: Ranks) -> None:
    """Convolutions data-parallel and dense layers tensor-parallel, on the same two ranks (Krizhevsky, 2014)."""
    layout = mw.Layout(tp=2, pin={"convolutions*": "batch@tp"})
    for errors, split, explained in ranks(2, train_by, "LeNet", layout):
        assert max(errors) <= TOLERANCE, errors
        assert "dense.0.weight" in split
        assert not [name for name in split if name.startswith("convolutions")]
        assert "convolutions.*  batch@tp" in explained


def test_pin_to_the_batch_beside_data_parallel(ranks: Ranks) -> None:
    """Both axes split the batch of the convolutions; where it is too small for both, the plan says so."""
    layout = mw.Layout(dp=2, tp=2, pin={"convolutions*": "batch@tp"})
    for errors, split, explained in ranks(4, train_by, "LeNet", layout):
        assert max(errors) <= TOLERANCE, errors
        assert "dense.0.weight" in split
        assert "convolutions.* batch@dp batch@tp pinned" in " ".join(explained.split())
        assert "replicated on" not in explained
    parallel, _ = fresh(lambda: oracle.lenet(True))
    graph = mw.capture(parallel.model, parallel.loss_fn, cut(parallel.batches[0], 3))
    explained = mw.plan(graph, devices=4, layout=layout).explain()
    assert "batch@dp batch@tp" not in explained
    assert "is split over another axis, and too small for both" in explained


def test_everything_pinned_to_the_batch(ranks: Ranks) -> None:
    """Data parallel said in another way: batch norm counts the global batch here too."""
    for errors, split, _ in ranks(2, train_by, "ResNet", mw.Layout(tp=2, pin={"*": "batch@tp"})):
        assert max(errors) <= TOLERANCE, errors
        assert split == []


def test_pin_against_splitting(ranks: Ranks) -> None:
    for errors, split, _ in ranks(2, train_by, "GPT", mw.Layout(tp=2, pin={"blocks.1.mlp*": "none@tp"})):
        assert max(errors) <= TOLERANCE, errors
        assert "blocks.0.mlp.up.weight" in split
        assert "blocks.1.mlp.up.weight" not in split


@cache
def graph_of(subject: str) -> mw.Graph:
    parallel, _ = fresh(lambda: oracle.MODELS[subject](True))
    return mw.capture(parallel.model, parallel.loss_fn, parallel.batches[0])


def plan_of(subject: str, layout: mw.Layout) -> mw.Plan:
    return oracle.plan_of(graph_of(subject), layout, num_ranks(layout), load_cluster("cpu-local"))


def test_plan_is_written_edited_and_run(ranks: Ranks, tmp_path: Path) -> None:
    """Somebody takes the feed-forward of every block back from tp: its weights are gathered when they are needed."""
    written = tmp_path / "plan.json"
    files.save(plan_of("GPT", mw.Layout(dp=2, tp=2)), written)
    for errors, split, _ in ranks(4, train_by, "GPT", str(written)):
        assert max(errors) <= TOLERANCE, errors
        assert "blocks.0.mlp.up.weight" in split

    plan = files.load(written, mw.Plan)
    assert plan == plan_of("GPT", mw.Layout(dp=2, tp=2))
    text = json.loads(written.read_text())
    for operator, strategy in text["stages"][0]["strategies"].items():
        if operator.startswith("blocks.*.mlp"):
            strategy.pop("tp", None)
    for bucket in text["buckets"]:
        bucket["parameters"] = [name for name in bucket["parameters"] if ".mlp." not in name]
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(text))
    assert files.load(edited, mw.Plan) != plan
    for errors, _, _ in ranks(4, train_by, "GPT", str(edited)):
        assert max(errors) <= TOLERANCE, errors


def edited(plan: mw.Plan, operator: str, **strategy: str) -> mw.Plan:
    """The plan with the strategy of one (starred) operator replaced."""
    stage = msgspec.structs.replace(plan.stage, strategies={**plan.stage.strategies, operator: strategy})
    return msgspec.structs.replace(plan, stages=(stage,))


@pytest.mark.parametrize(
    ("operator", "strategy", "message"),
    [
        ("blocks.*.mlp:gelu#0", {"tp": "^"}, "'^' on 'tp', but no operand of 'b s f -> b s f' is marked so"),
        (
            "blocks.*.mlp.up:mm#2",
            {"tp": "f"},
            "'^' passes a partial sum over 'dp' on, but 'blocks.1.mlp.up:mm#2' is none",
        ),
        (
            "blocks.*.mlp_norm:native_layer_norm_backward#0",
            {},
            "buckets[0]: the gradient of 'blocks.1.mlp_norm.weight' is R, and not dp:P(sum)\n  -> take it out of the",
        ),
    ],
    ids=["nonlinear", "no-partial", "bucket"],
)
def test_edit_that_would_compute_something_else_is_refused(
    operator: str, strategy: dict[str, str], message: str
) -> None:
    """Sums that nobody makes or that are made twice: the plan is checked before it runs."""
    plan, graph = plan_of("GPT", mw.Layout(dp=2, tp=2)), graph_of("GPT")
    check_fits(plan, graph)
    assert operator in plan.stage.strategies
    with pytest.raises(PlanError) as caught:
        check_fits(edited(plan, operator, **strategy), graph)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("subject", "layout"),
    [
        ("GPT", mw.Layout(dp=2, tp=2)),
        ("LeNet", mw.Layout(tp=2, pin={"convolutions*": "batch@tp"})),
        ("ResNet", mw.Layout(dp=2, tp=2)),
    ],
    ids=["gpt", "lenet", "resnet"],
)
def test_explanation_of_a_plan(subject: str, layout: mw.Layout) -> None:
    golden = GOLDEN / f"explain_{subject.lower()}.txt"
    assert plan_of(subject, layout).explain() + "\n" == golden.read_text(encoding="utf-8")
