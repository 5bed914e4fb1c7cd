"""ZeRO equals one process: losses, gradient norms, parameters and buffers after three steps, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.errors import OptimizerError
from meshwright.ir.plan_check import check_fits
from meshwright.models import MLP, classification_loss
from tests.distributed import oracle, pipelines
from tests.distributed.oracle import LargestErrors
from tests.distributed.pool import Ranks

OPTIMIZERS = {**oracle.OPTIMIZERS, **oracle.MORE_OPTIMIZERS}
PARTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "microbatches": 4},
    "zb": {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
    "zb-v": {"pp": 2, "microbatches": 4, "schedule": "zb-v", "chunks": 2},
    "m4": {"microbatches": 4},
    "recompute": {"recompute": "full"},
    "dp2 x 2": {"dp": 4, "zero_ranks": 2},
}


@dataclass(frozen=True)
class Case:
    """One training under ZeRO, to be compared with one process."""

    model: str
    zero: int
    parts: str
    optimizer: str
    clipping: str

    @property
    def layout(self) -> mw.Layout:
        statistics = "microbatch" if self.model == "ResNet" else "global"
        return mw.Layout(**{"dp": 2, "zero": self.zero, "batch_statistics": statistics, **PARTS[self.parts]})

    def __str__(self) -> str:
        return f"{self.model}, zero{self.zero}, {self.parts}, {self.optimizer}, {self.clipping}"


CASES = [
    Case("GPT", 1, "dp2", "AdamW", "clipped"),
    Case("GPT", 2, "recompute", "AdaGrad", "whole"),
    Case("GPT", 3, "m4", "RMSProp", "whole"),
    Case("GPT", 1, "recompute", "LAMB", "clipped"),
    Case("HF Llama", 3, "dp2", "LAMB", "whole"),
    Case("HF Llama", 2, "m4", "SGD", "clipped"),
    Case("HF Llama", 3, "recompute", "AdamW", "clipped"),
    Case("HF Llama", 1, "m4", "RMSProp", "whole"),
    Case("ResNet", 3, "dp2", "AdaGrad", "clipped"),
    Case("ResNet", 2, "m4", "LAMB", "whole"),
    Case("ResNet", 1, "dp2", "SGD", "clipped"),
    Case("GPT", 2, "tp2", "LAMB", "clipped"),
    Case("GPT", 3, "tp2", "AdamW", "whole"),
    Case("GPT", 3, "pp2", "SGD", "clipped"),
    Case("GPT", 1, "pp2", "RMSProp", "whole"),
    Case("GPT", 3, "zb", "LAMB", "clipped"),
    Case("GPT", 2, "interleaved", "AdamW", "clipped"),
    Case("GPT", 1, "zb-v", "SGD", "clipped"),
    Case("GPT", 3, "zb-v", "AdamW", "whole"),
    Case("GPT", 3, "dp2 x 2", "AdaGrad", "clipped"),
    Case("GPT", 1, "dp2 x 2", "AdamW", "whole"),
    Case("HF Llama", 3, "tp2", "AdamW", "clipped"),
    Case("HF Llama", 1, "pp2", "LARS", "clipped"),
    Case("HF Llama", 2, "dp2 x 2", "LARC", "whole"),
    Case("ResNet", 3, "tp2", "Nesterov", "clipped"),
    Case("ResNet", 2, "pp2", "RMSProp", "clipped"),
    Case("ResNet", 2, "dp2 x 2", "LARS", "clipped"),
    Case("ResNet", 1, "recompute", "LARC", "whole"),
]
"""Every model meets every stage and every other technique, every stage every other technique; every optimizer under
every stage is in ``test_optimizers.py``."""


def compare(case: Case) -> tuple[list[float], LargestErrors | None, int]:
    """The losses that this rank saw; on rank 0 also the comparison with one process."""
    settings = OPTIMIZERS[case.optimizer], oracle.CLIPPING[case.clipping]
    widens = case.model.startswith("HF")
    parallelize = oracle.sharing_capture(("pipelines", case.model), widens=widens)
    subject = pipelines.subject_of(case.model, "ragged")
    run, trainer = oracle.in_parallel(subject, case.layout, *settings, parallelize)
    losses = [float(loss) for loss in run.losses]
    if trainer.rank != 0:
        return losses, None, 0
    serial = pipelines.subject_of(case.model, "ragged")
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    with oracle.widening(widens):
        if case.model == "ResNet" and case.layout.microbatches > 1:
            expected = pipelines.in_microbatches(serial, *settings, case.layout)
        else:
            expected = oracle.in_one_process(serial, *settings)
    return losses, oracle.compared(before, expected, run, trainer), len(list(trainer.parameters))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_equals_one_process(ranks: Ranks, case: Case) -> None:
    results = ranks(case.layout.num_ranks, compare, case)
    losses, errors, held = results[0]
    assert errors is not None
    assert errors.error <= oracle.TOLERANCE, errors
    assert all(seen == losses for seen, _, _ in results), "every rank reports the same loss"
    assert errors.moved > 1e-3, "the parameters were trained"
    assert errors.num_split == held, "nothing is whole on a rank"


# --- sizes that do not divide, and checkpoints -----------------------------------------------------------------------

ODD = {
    "one rank": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "zero1": mw.Layout(dp=2, zero=1),
    "zero2, m2": mw.Layout(dp=2, zero=2, microbatches=2),
    "zero3": mw.Layout(dp=2, zero=3),
}


def odd() -> oracle.Subject:
    """No dim of its parameters is even."""
    torch.manual_seed(3)
    batches = [
        {"inputs": torch.randn(8, 5, dtype=torch.float64), "label": torch.randint(3, (8,))} for _ in range(oracle.STEPS)
    ]
    return oracle.Subject(MLP((5, 7, 3)).double(), classification_loss, batches)


def odd_trainer(layout: str) -> mw.Trainer:
    subject = odd()
    return mw.parallelize(
        subject.model, subject.loss_fn, subject.batches[0], plan=ODD[layout], optimizer=OPTIMIZERS["AdamW"],
        max_grad_norm=0.1,
    )  # fmt: skip


def begin(layouts: list[str], directory: Path) -> list[tuple[int, int]]:
    """Two steps under each, and a checkpoint; how many elements of parameters and of their state this rank holds."""
    held = []
    for layout in layouts:
        trainer = odd_trainer(layout)
        for batch in odd().batches[:2]:
            trainer.step(batch)
        trainer.save(directory / layout)
        states = trainer.optimizer.state.values()
        moments = sum(value.numel() for state in states for key, value in state.items() if key != "step")
        held.append((sum(trainer.parameters[name].numel() for name in trainer.parameters), moments))
    return held


def go_on(pairs: list[tuple[str, str]], directory: Path) -> list[float]:
    """The other steps, from the checkpoint of the first layout under the second: the error against one process."""
    subject = odd()
    expected = oracle.in_one_process(subject, OPTIMIZERS["AdamW"], 0.1).state
    errors = []
    for source, layout in pairs:
        trainer = odd_trainer(layout)
        trainer.load(directory / source)
        for batch in odd().batches[2:]:
            trainer.step(batch)
        errors.append(oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected))
    return errors


def test_odd_sizes_are_cut_and_checkpoints_load_under_any_stage(ranks: Ranks, tmp_path: Path) -> None:
    spread = [name for name in ODD if name != "one rank"]
    (whole, moments), *_ = begin(["one rank"], tmp_path)
    assert (whole, moments) == (5 * 7 + 7 + 7 * 3 + 3, 2 * whole)
    for held in ranks(2, begin, spread, tmp_path):
        part = 18 + 4 + 11 + 2  # of each parameter a half, rounded up
        assert held == [(whole, moments), *[(part, 2 * part)] * 3]
    assert max(go_on([(source, "one rank") for source in ODD], tmp_path)) <= oracle.TOLERANCE
    pairs = [("one rank", "zero3"), ("dp2", "zero1"), ("zero1", "zero3"), ("zero3", "zero2, m2"), ("zero2, m2", "dp2")]
    for errors in ranks(2, go_on, pairs, tmp_path):
        assert max(errors) <= oracle.TOLERANCE, dict(zip(pairs, errors, strict=True))


# --- plans, evaluation, refusals -------------------------------------------------------------------------------------


def edited() -> list[float]:
    """A plan in which one parameter stays whole, one is gathered by itself, and one is not gathered again."""
    subject = odd()
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(graph, layout=ODD["zero3"])
    first, second, third, fourth = plan.stage.released
    stage = msgspec.structs.replace(
        plan.stage,
        storage={**plan.stage.storage, first: {}},
        gradients={name: placements for name, placements in plan.stage.gradients.items() if name != first},
        released=(second, fourth),
    )
    gathers = [msgspec.structs.replace(plan.gathers[0], parameters=names) for names in ((third,), (fourth,))]
    plan = msgspec.structs.replace(plan, stages=(stage,), gathers=tuple(gathers), buckets=())
    check_fits(plan, graph)
    trainer = mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=plan, optimizer=OPTIMIZERS["SGD"])
    assert not trainer.parameters.is_sharded(first)
    losses = [float(trainer.step(batch)) for batch in subject.batches]
    loss = float(trainer.evaluate(subject.batches[0]))
    serial = odd()
    expected = oracle.in_one_process(serial, OPTIMIZERS["SGD"])
    with torch.no_grad():
        evaluated, _ = serial.loss_fn(serial.model.eval(), serial.batches[0])
    errors = [abs(step_loss - float(other)) for step_loss, other in zip(losses, expected.losses, strict=True)]
    state = oracle.largest_error(trainer.full_state_dict(all_ranks=True), expected.state)
    return [*errors, abs(loss - float(evaluated)), state]


def test_a_plan_says_it_of_each_parameter(ranks: Ranks) -> None:
    for errors in ranks(2, edited):
        assert max(errors) <= oracle.TOLERANCE, errors


def refused(name: str) -> str:
    subject = odd()
    optimizer = getattr(torch.optim, name)
    try:
        mw.parallelize(
            subject.model, subject.loss_fn, subject.batches[0], plan=ODD["zero1"],
            optimizer=lambda parameters: optimizer([value for _, value in parameters]),
        )  # fmt: skip
    except OptimizerError as error:
        return str(error)
    return "it was not"


WHOLE = """Adafactor needs whole tensors
  -> use an element-wise optimizer (SGD, AdamW, ...), or a layout that does not split parameters"""
SEVERAL = """LBFGS needs to evaluate the step several times
  -> use an optimizer that evaluates it once: SGD, AdamW, LAMB, ..."""


@pytest.mark.parametrize(("name", "why"), [("Adafactor", WHOLE), ("LBFGS", SEVERAL)])
def test_an_optimizer_that_cannot_be_sharded_is_refused(ranks: Ranks, name: str, why: str) -> None:
    for error in ranks(2, refused, name):
        assert error == f"optimizer; layers.0.weight is split: {why}"


def linear() -> oracle.Subject:
    """The loss is linear in the last bias: its gradient depends on no parameter, and is alike in all micro-batches."""
    torch.manual_seed(3)
    batches = [{"inputs": torch.randn(8, 5, dtype=torch.float64)} for _ in range(oracle.STEPS)]
    return oracle.Subject(MLP((5, 7, 3)).double(), lambda model, batch: model(batch["inputs"]).mean(), batches)


def without_parameters_in_it(layouts: list[str]) -> list[float]:
    serial = linear()
    expected = oracle.in_one_process(serial, OPTIMIZERS["SGD"]).state
    errors = []
    for layout in layouts:
        run, _ = oracle.in_parallel(linear(), ODD[layout], OPTIMIZERS["SGD"])
        errors.append(oracle.largest_error(run.state, expected) if run.state else 0.0)
    return errors


def test_a_gradient_that_depends_on_no_parameter_is_counted_once(ranks: Ranks) -> None:
    layouts = ["zero1", "zero2, m2", "zero3"]
    for errors in ranks(2, without_parameters_in_it, layouts):
        assert max(errors) <= oracle.TOLERANCE, dict(zip(layouts, errors, strict=True))
