"""Training with coded gradients: exact codecs equal one process; of lossy codecs nothing of a gradient is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.errors import LayoutError, NonFiniteLossError, PlanError
from meshwright.ir.precision import Precision
from meshwright.models import MLP, classification_loss
from meshwright.optim import OneBitAdam
from meshwright.planner.codecs import BucketCodecs
from tests.distributed import oracle
from tests.distributed.pool import Ranks

LR = 0.5
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "m2": {"dp": 2, "microbatches": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2, m2": {"dp": 2, "zero": 2, "microbatches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "hybrid": {"dp": 4, "zero": 3, "zero_ranks": 2},
    "dp4": {"dp": 4},
    "pp2": {"dp": 2, "pp": 2, "microbatches": 2},
}
EXACT = ("topk(100%)", "threshold(0)", "lossless", "powersgd(64)", "randk(100%)")
LOSSY = (
    "bf16(feedback=on)",
    "qsgd(4, feedback=on)",
    "onebit",
    "topk(10%)",
    "topk(10%)+qsgd(8)",
    "threshold(0.01)",
    "randk(10%)",
    "powersgd(2)",
)


def subject(*hidden: int) -> oracle.Subject:
    torch.manual_seed(3)
    batches = [
        {"inputs": torch.randn(8, 12, dtype=torch.float64), "label": torch.randint(5, (8,))}
        for _ in range(oracle.STEPS)
    ]
    return oracle.Subject(MLP((12, *(hidden or (20, 17)), 5)).double(), classification_loss, batches)


def trainer_of(layout: str, *hidden: int, **codecs: Any) -> mw.Trainer:
    given = subject(*hidden)
    plan = mw.Layout(**LAYOUTS[layout], **codecs)
    return oracle.sharing_capture(("codecs", hidden))(
        given.model, given.loss_fn, given.batches[0], plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=LR)
    )


def error_of(layout: str, codec: str) -> float:
    """The largest error of the parameters after some steps with an exact codec."""
    given = subject()
    expected = oracle.in_one_process(given, lambda p: torch.optim.SGD(p, lr=LR), None).state
    trainer = trainer_of(layout, codec=codec)
    for batch in given.batches:
        trainer.step(batch)
    return oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected)


SUMS = ("powersgd", "randk")
"""Codecs whose sums are whole on every rank: ZeRO over all dp ranks refuses them."""


def pairs(codecs: Sequence[str]) -> list[Any]:
    """Every codec under ``dp2``, and every layout with a codec that it takes, in turn; `make matrix` has the others."""
    combinations = {("dp2", codec) for codec in codecs}
    cases = [pytest.param(*case) for case in sorted(combinations)]
    for turn, (layout, sizes) in enumerate(LAYOUTS.items()):
        cut = "zero" in sizes and "zero_ranks" not in sizes
        usable = [codec for codec in codecs if not (cut and codec.startswith(SUMS))]
        taken = usable[turn % len(usable)]
        for codec in (codec for codec in usable if (layout, codec) not in combinations):
            cases.append(pytest.param(layout, codec, marks=() if codec == taken else pytest.mark.product))
    return cases


@pytest.mark.parametrize(("layout", "codec"), pairs(EXACT))
def test_exact_codecs_equal_one_process(ranks: Ranks, layout: str, codec: str) -> None:
    errors = ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, error_of, layout, codec)
    assert max(errors) <= oracle.TOLERANCE


def error_of_mixed_buckets() -> tuple[float, list[str]]:
    """The largest error of the parameters if each bucket has another codec, and these codecs."""
    expected = oracle.in_one_process(subject(), lambda p: torch.optim.SGD(p, lr=LR), None).state
    given = subject()
    graph = mw.capture(given.model, given.loss_fn, given.batches[0])
    plan = mw.plan(graph, layout=mw.Layout(dp=2, tp=2, codec="topk(100%)"))
    codecs = BucketCodecs(plan.mesh, None, 8)
    buckets = tuple(
        codecs.reduced(msgspec.structs.replace(bucket, codings=()), text, cut=False)
        for bucket, text in zip(plan.buckets, ("lossless", "", "topk(100%)"), strict=False)
    )
    assert len(buckets) == len(plan.buckets)
    trainer = mw.parallelize(
        given.model, given.loss_fn, given.batches[0], plan=msgspec.structs.replace(plan, buckets=buckets),
        optimizer=lambda p: torch.optim.SGD(p, lr=LR),
    )  # fmt: skip
    for batch in given.batches:
        trainer.step(batch)
    taken = [coding.codec for bucket in trainer.plan.buckets for coding in bucket.codings]
    return oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected), taken


def test_buckets_of_several_codecs_equal_one_process(ranks: Ranks) -> None:
    for error, taken in ranks(4, error_of_mixed_buckets):
        assert error <= oracle.TOLERANCE
        assert "lossless" in taken


def total_residuals(trainer: mw.Trainer) -> dict[str, Tensor]:
    """The sum over ranks of the residuals of each parameter, whole."""
    shapes = {name: value.shape for name, value in trainer.full_state_dict(all_ranks=True).items()}
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    _, parts = trainer._codecs.extract(trainer.parameters)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    own_chunks = [
        (entry, chunk.offsets, chunk.sizes, part.view(chunk).clone())
        for entry, part in parts.items() if ".residual." in entry for chunk in part.chunks
    ]  # fmt: skip
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own_chunks)
    for entry, offsets, sizes, value in (chunk for each in every for chunk in each):
        if (entry, offsets) not in seen:  # replicas hold the same
            seen.add((entry, offsets))
            name = entry.removeprefix("codec.residual.").rpartition(".")[0]
            place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            totals[name][place] += value
    return totals


@dataclass
class Kept:
    """What a training with a lossy codec kept: the largest error of the law, and the largest residual."""

    error: float
    residual: float
    equal: bool


def law_of(layout: str, codec: str) -> Kept:
    """sent + new residuals = gradient + old residuals, at every step; parameters are equal on all ranks."""
    given = subject()
    trainer = trainer_of(layout, codec=codec)
    before, old, error, residual = trainer.full_state_dict(all_ranks=True), None, 0.0, 0.0
    for batch in given.batches:
        serial = subject().model
        serial.load_state_dict(before)
        loss, _ = classification_loss(serial, batch)
        loss.backward()
        trainer.step(batch)
        after, new = trainer.full_state_dict(all_ranks=True), total_residuals(trainer)
        for name, parameter in serial.named_parameters():
            assert parameter.grad is not None
            sent = (before[name] - after[name]) / LR
            left = parameter.grad + (old[name] if old is not None else 0) - sent - new[name]
            error = max(error, float(left.abs().max()))
            residual = max(residual, float(new[name].abs().max()))
        before, old = after, new
    digest = torch.cat([value.reshape(-1) for value in before.values()])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, digest)
    return Kept(error, residual, all(torch.equal(digest, other) for other in every))


@pytest.mark.parametrize(("layout", "codec"), pairs(LOSSY))
def test_what_messages_leave_out_is_kept(ranks: Ranks, layout: str, codec: str) -> None:
    for kept in ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, law_of, layout, codec):
        assert kept.error <= 1e-9
        assert kept.residual > 1e-6, "something was left out"
        assert kept.equal


# --- checkpoints -----------------------------------------------------------------------------------------------------


def saved(layout: str, codec: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps and a checkpoint; the sums of the residuals then, and the parameters after the third step."""
    given, trainer = subject(), trainer_of(layout, codec=codec)
    for batch in given.batches[:2]:
        trainer.step(batch)
    trainer.save(path)
    totals = total_residuals(trainer)
    trainer.step(given.batches[2])
    return totals, trainer.full_state_dict(all_ranks=True)


def loaded(layout: str, codec: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums of the residuals after a load, and the parameters after the third step."""
    given, trainer = subject(), trainer_of(layout, codec=codec)
    trainer.step(given.batches[1])  # residuals of another history are overwritten
    trainer.load(path)
    totals = total_residuals(trainer)
    trainer.step(given.batches[2])
    return totals, trainer.full_state_dict(all_ranks=True)


@pytest.mark.parametrize("codec", ["qsgd(4, feedback=on)", "powersgd(2)", "topk(10%, momentum=0.9, warmup=4)"])
def test_a_run_goes_on_bit_for_bit_from_its_checkpoint(ranks: Ranks, codec: str, tmp_path: Path) -> None:
    for layout in ("dp2", "dp2 x tp2", "pp2"):
        size = mw.Layout(**LAYOUTS[layout]).num_ranks
        before, expected = ranks(size, saved, layout, codec, tmp_path / layout)[0]
        after, parameters = ranks(size, loaded, layout, codec, tmp_path / layout)[0]
        assert all(torch.equal(after[name], before[name]) for name in before), layout
        assert all(torch.equal(parameters[name], expected[name]) for name in expected), layout


@pytest.mark.parametrize("codec", ["qsgd(4, feedback=on)", "topk(10%)"])
def test_residuals_of_lost_ranks_are_added_up(ranks: Ranks, codec: str, tmp_path: Path) -> None:
    for source, targets in {"dp4": ("dp2", "zero3", "dp2 x tp2"), "zero1": ("dp4", "dp2"), "hybrid": ("dp2",)}.items():
        size = mw.Layout(**LAYOUTS[source]).num_ranks
        before, _ = ranks(size, saved, source, codec, tmp_path / source)[0]
        for target in targets:
            after, _ = ranks(mw.Layout(**LAYOUTS[target]).num_ranks, loaded, target, codec, tmp_path / source)[0]
            for name, total in before.items():
                assert torch.allclose(after[name], total, rtol=0, atol=1e-12), (source, target, name)


def steps_counted(layout: str, path: Path, first: bool) -> list[int]:
    """The number of steps that each of this rank's warm-ups has counted: after three steps, or after a load and one
    more step."""
    given, trainer = subject(), trainer_of(layout, codec="topk(10%, warmup=9)")
    if not first:
        trainer.load(path)
    for batch in given.batches[: 3 if first else 1]:
        trainer.step(batch)
    if first:
        trainer.save(path)
    return [int(memory.segment("steps")) for memory in trainer._codecs._known.values()]


def test_a_warm_up_goes_on_under_another_layout_with_other_buckets(ranks: Ranks, tmp_path: Path) -> None:
    for counted in ranks(4, steps_counted, "dp4", tmp_path, True):
        assert set(counted) == {3}
    for layout in ("dp2", "pp2", "zero3"):
        results = ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, steps_counted, layout, tmp_path, False)
        assert {steps for counted in results for steps in counted} == {4}, layout


def without_codec(path: Path) -> None:
    """A run without codecs reads a checkpoint with residuals, and a run with codecs one without."""
    given, plain = subject(), trainer_of("dp2")
    plain.load(path / "coded")
    plain.step(given.batches[2])
    plain.save(path / "plain")
    coded = trainer_of("dp2", codec="topk(10%)")
    coded.step(given.batches[0])
    coded.load(path / "plain")
    assert all(not total.any() for total in total_residuals(coded).values())


def test_checkpoints_with_and_without_residuals_are_exchanged(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, saved, "dp2", "topk(10%)", tmp_path / "coded")
    ranks(2, without_codec, tmp_path)


# --- optimizers, metrics and the ledger ------------------------------------------------------------------------------


def factors_of(layout: str) -> tuple[float, list[str]]:
    """The error of the parameters if ranks gather factors, and the parameters whose gradients are still reduced."""
    given = subject(400, 400)
    expected = oracle.in_one_process(given, lambda p: torch.optim.SGD(p, lr=LR), None).state
    trainer = trainer_of(layout, 400, 400, codec="factors")
    for batch in given.batches:
        trainer.step(batch)
    reduced = [name for bucket in trainer.plan.buckets for name in bucket.parameters]
    return oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected), reduced


@pytest.mark.parametrize("layout", ["dp2", "zero1", "zero3", "dp2 x tp2", "dp4"])
def test_sufficient_factors_are_exact(ranks: Ranks, layout: str) -> None:
    for error, reduced in ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, factors_of, layout):
        assert error <= oracle.TOLERANCE
        assert "layers.2.weight" not in reduced, "400 x 400 elements, of 8 samples"
        assert "layers.2.bias" in reduced


def momenta(layout: str) -> tuple[float, float, bool]:
    """1-bit Adam: the error against one process in the warm-up; then the difference between the momentum of the codec
    and that of the optimizer; and whether parameters still moved."""
    given = subject()
    make = partial(mw.optim.OneBitAdam, lr=0.05, betas=(0.9, 0.99), freeze_step=2)
    expected = oracle.in_one_process(oracle.Subject(given.model, given.loss_fn, given.batches[:2]), make, None).state
    plan = mw.Layout(**LAYOUTS[layout], codec="onebit(momentum=0.9, warmup=2)")
    given = subject()
    parallelize = oracle.sharing_capture(("codecs", ()))
    trainer = parallelize(given.model, given.loss_fn, given.batches[0], plan=plan, optimizer=make)
    for batch in given.batches[:2]:
        trainer.step(batch)
    warm = trainer.full_state_dict(all_ranks=True)
    for batch in given.batches:
        trainer.step(batch)
    error, moved = 0.0, trainer.full_state_dict(all_ranks=True)
    _, parts = trainer._codecs.extract(trainer.parameters)
    for entry, part in parts.items():
        if entry.startswith("codec.momentum."):
            name = entry.removeprefix("codec.momentum.").rpartition(".")[0]
            own = trainer.optimizer.state[trainer.parameters.own[name]]["exp_avg"]
            if own.shape == part.value.shape:
                error = max(error, float((own - part.value).abs().max()))
    return oracle.largest_error(warm, expected), error, any(not torch.equal(moved[name], warm[name]) for name in warm)


@pytest.mark.parametrize("layout", ["dp2", "dp4", "dp2 x tp2", "m2"])
def test_one_bit_adam_exchanges_its_momentum(ranks: Ranks, layout: str) -> None:
    for warm, later, moved in ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, momenta, layout):
        assert warm <= oracle.TOLERANCE
        assert later <= 1e-9
        assert moved


def overflowing(codec: str) -> list[bool]:
    """Whether parameters are finite, and whether the codec's memory is, after a step whose gradients were not."""
    given, trainer = subject(), trainer_of("dp2", codec=codec)
    batch = {**given.batches[0], "inputs": given.batches[0]["inputs"].clone()}
    trainer.step(given.batches[0])
    batch["inputs"][0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError):
        trainer.step(batch)
    finite = [all(value.isfinite().all() for value in trainer.full_state_dict(all_ranks=True).values())]
    trainer.step(given.batches[1])
    finite += [all(value.isfinite().all() for value in trainer.full_state_dict(all_ranks=True).values())]
    return [*finite, all(total.isfinite().all() for total in total_residuals(trainer).values())]


@pytest.mark.parametrize("codec", ["qsgd(4, feedback=on)", "topk(10%)", "powersgd(2)", "onebit"])
def test_what_is_not_finite_is_not_hidden_and_does_not_stay(ranks: Ranks, codec: str) -> None:
    for finite in ranks(2, overflowing, codec):
        assert all(finite)


SKIPPED = (
    *LOSSY,
    "topk(10%, momentum=0.9, warmup=3)",
    "randk(10%, momentum=0.9)",
    "onebit(bucket=16, momentum=0.9, warmup=1)",
)


def skipping(layout: str, codec: str, precision: Precision, poisoned: bool) -> dict[str, Tensor]:
    """The parameters and residuals of a training with a step that is not accepted, or without this step."""
    given, scaled = subject(), precision == "float16"
    batches = [{**batch, "inputs": batch["inputs"].float()} for batch in given.batches]
    bad = {**batches[1], "inputs": batches[1]["inputs"].clone()}
    bad["inputs"][0, 0] = float("inf")
    adam = partial(OneBitAdam, betas=(0.9, 0.99), freeze_step=1)
    trainer = oracle.sharing_capture("codecs, float32")(
        given.model.float(), given.loss_fn, batches[0], plan=mw.Layout(**LAYOUTS[layout], codec=codec),
        precision=precision, optimizer=adam if "momentum=0.9, warmup=1" in codec else partial(torch.optim.SGD, lr=LR),
    )  # fmt: skip
    for place, batch in enumerate([*batches[:2], bad, batches[2], batches[0]]):
        if batch is not bad:
            trainer.step(batch)
        elif not poisoned:
            trainer.step_number += scaled  # it decides random numbers; a refused loss raises before it is counted
            if trainer.loss_scale is not None:
                trainer.loss_scale.value /= 2
                trainer._codecs.rescale(0.5)
        elif scaled:
            trainer.step(bad)
            assert trainer.metrics["skipped"] == 1, place
        else:
            with pytest.raises(NonFiniteLossError):
                trainer.step(bad)
    _, kept = trainer._codecs.extract(trainer.parameters)
    return trainer.full_state_dict(all_ranks=True) | {name: part.value for name, part in kept.items()}


@pytest.mark.parametrize(
    ("layout", "codec", "precision"),
    [
        *[
            pytest.param("dp2", codec, precision, marks=pytest.mark.product if (turn + number) % 2 else ())
            for turn, codec in enumerate(SKIPPED)
            for number, precision in enumerate(("float16", "float32"))
        ],
        ("zero2, m2", "topk(10%)", "float16"),
        ("zero2, m2", "qsgd(4, feedback=on)", "float16"),
        ("pp2", "onebit", "float16"),
        ("hybrid", "topk(10%)+qsgd(8)", "float32"),
    ],
)
def test_a_step_that_is_not_accepted_leaves_all_as_it_was(
    ranks: Ranks, layout: str, codec: str, precision: Precision
) -> None:
    size = mw.Layout(**LAYOUTS[layout]).num_ranks
    for state, expected in zip(
        *(ranks(size, skipping, layout, codec, precision, bad) for bad in (True, False)), strict=True
    ):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def refused_by_verify() -> str:
    given = subject()
    try:
        mw.verify(given.model, given.loss_fn, given.batches[0], mw.Layout(dp=2, codec="topk(1%)"))
    except LayoutError as error:
        return str(error)
    return ""


def test_verify_refuses_lossy_codecs(ranks: Ranks) -> None:
    assert all("topk(1%)" in text for text in ranks(2, refused_by_verify))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codecs", "words"),
    [
        ({"codec": "qsgd(3)"}, "3 bits"),
        ({"codec": "powersgd(2)", "zero": 1}, "powersgd"),
        ({"codec": "randk(1%)", "zero": 3}, "randk"),
        ({"parameter_codec": "qsgd(8)"}, "zero=0"),
        ({"parameter_codec": "topk(1%)", "zero": 3}, "make up"),
        ({"parameter_codec": "auto", "zero": 3}, "auto"),
        ({"activation_codec": "bf16"}, "pp=1"),
        ({"codec": "topk(1%, warmup=5)", "zero": 2, "microbatches": 2}, "as a step"),
        ({"codec": "factors", "microbatches": 2}, "micro-batches"),
        ({"activation_codec": "lossless", "pp": 2}, "size"),
    ],
)
def test_refusals(codecs: dict[str, Any], words: str) -> None:
    given = subject()
    graph = mw.capture(given.model, given.loss_fn, given.batches[0])
    with pytest.raises((LayoutError, PlanError), match=words) as refused:
        mw.plan(graph, layout=mw.Layout(**{"dp": 2, **codecs}))
    assert refused.value.remedy


# --- activations and parameters --------------------------------------------------------------------------------------


def approximate(layout: str, codecs: dict[str, str]) -> tuple[float, float]:
    """The relative error of the first loss, and the error of the parameters, with coded activations or parameters."""
    hidden = (40, 40, 40, 40)  # so many that a stage does not begin at the loss
    given = subject(*hidden)
    expected = oracle.in_one_process(given, lambda p: torch.optim.SGD(p, lr=LR), None)
    trainer = trainer_of(layout, *hidden, **codecs)
    losses = [float(trainer.step(batch)) for batch in given.batches]
    error = max(abs(loss / float(other) - 1) for loss, other in zip(losses, expected.losses, strict=True))
    return error, oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected.state)


CODED = [
    ("pp2", "activation_codec"), ("zero3", "parameter_codec"), ("zero1", "parameter_codec"),
    ("hybrid", "parameter_codec"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "field", "codec"),
    [
        pytest.param(layout, field, codec, marks=() if (turn + number) % 2 else pytest.mark.product)
        for turn, (layout, field) in enumerate(CODED)
        for number, codec in enumerate(["bf16", "qsgd(8)"])
    ],
)
def test_coded_activations_and_parameters_stay_near(ranks: Ranks, layout: str, field: str, codec: str) -> None:
    for error, moved in ranks(mw.Layout(**LAYOUTS[layout]).num_ranks, approximate, layout, {field: codec}):
        assert 1e-7 < error < 0.02, "coded, and near"
        assert moved < 0.05
