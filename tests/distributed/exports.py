"""Hugging Face models on two ranks: trained by their plan, and by the file that the plan is exported to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import meshwright as mw
from meshwright.export import fsdp2
from meshwright.export.exported import Exported
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Plan
from tests.distributed import hugging_face, oracle
from tests.distributed.hugging_face import Size

EVEN = Size(ragged=False)
"""Equally many labels in every sample: the mean over ranks of their means is the mean."""
STEPS = 3


@dataclass(frozen=True)
class Losses:
    """The losses of both sides, and how much the parameters have moved."""

    ours: list[float]
    theirs: list[float]

    @property
    def error(self) -> float:
        """The largest difference, relative to losses above 1."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return max(abs(loss - other) / max(1.0, abs(loss)) for loss, other in pairs)


def planned(name: str, layout: mw.Layout) -> Plan:
    """The plan of a small model."""
    subject = hugging_face.subject(name, 1, EVEN)
    with oracle.WiderCasts():
        graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    return mw.plan(graph, "cpu-local", devices=layout.num_ranks, layout=layout)


def exported(name: str, plan: Plan) -> Exported:
    """The file for the plan of a small model."""
    subject = hugging_face.subject(name, 1, EVEN)
    with oracle.WiderCasts():
        return fsdp2.export(subject.model, subject.loss_fn, subject.batches[0], plan, cluster="cpu-local")


def text_of(result: Exported) -> str:
    """The only file of an export."""
    (text,) = result.files.values()
    return text


def compare(name: str, plan: Plan, text: str) -> Losses:
    """On each rank: train by the plan, then by the exported file, from the same values, and compare the losses."""
    with oracle.WiderCasts():
        return _compared(name, plan, text)


def ours(name: str, plan: Plan) -> list[float]:
    """On each rank: the losses of training by the plan."""
    with oracle.WiderCasts():
        return _by_plan(name, plan)


def _by_plan(name: str, plan: Plan) -> list[float]:
    subject = hugging_face.subject(name, STEPS, EVEN)
    trainer = mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=plan, optimizer=_sgd, seed=0)
    return [float(trainer.step(batch)) for batch in subject.batches]


def _compared(name: str, plan: Plan, text: str) -> Losses:
    ours = _by_plan(name, plan)
    fresh = hugging_face.subject(name, STEPS, EVEN)
    return Losses(ours, trained_by_file(fresh.model, fresh.loss_fn, fresh.batches, text))


def trained_by_file(model: nn.Module, loss_fn: Any, batches: list[Any], text: str) -> list[float]:
    """The losses of steps by an exported file."""
    program: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), program)
    split = program["parallelize"](model, "cpu")
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        losses.append(float(program["train_step"](split, batch, loss_fn)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def part(batch: dict[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    """Part ``index`` of ``count`` equal parts of a batch."""
    return {name: values.chunk(count)[index] for name, values in batch.items()}


def described(name: str, layout: mw.Layout) -> str:
    """A model and its layout in words."""
    return f"{name}, {layout_text(layout)}"
