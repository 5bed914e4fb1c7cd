"""What the applications in this folder share: their options, their training, and the line with the quality reached."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.ir.run import LearningRate


class Outcome(NamedTuple):
    """The quality reached, its goal, and the quality of a trivial or untrained baseline, which ``trivial`` names."""

    what: str
    quality: float
    trivial: str
    baseline: float
    goal: float
    unit: str = "%"
    lower: bool = False  # less is better

    @property
    def reached(self) -> bool:
        """Whether the quality is as good as the goal."""
        return self.quality <= self.goal if self.lower else self.quality >= self.goal

    @property
    def better(self) -> bool:
        """Whether the quality is better than the baseline."""
        return self.quality < self.baseline if self.lower else self.quality > self.baseline

    def __str__(self) -> str:
        goal = f"goal: {'at most' if self.lower else 'at least'} {self.goal:g}"
        reached = f"{self.quality:.4g} {self.unit}".rstrip()
        return f"{self.what}: {reached} ({goal}; {self.trivial}: {self.baseline:.4g})"


class Training(NamedTuple):
    """A trainer, its model, and batches."""

    trainer: mw.Trainer
    model: torch.nn.Module
    batches: Iterator[Any]
    local: bool = False  # batches have only this rank's part of the samples
    warmup: float = 0.0  # part of the steps in which the learning rate rises

    @property
    def speaks(self) -> bool:
        """Whether this rank prints what all ranks know."""
        replica = self.trainer.replica
        return self.trainer.rank == 0 and (replica is None or replica.number == 0)

    def step(self) -> torch.Tensor:
        """Train on the next batch; the loss."""
        return self.trainer.step(next(self.batches), local=self.local)

    def run(self, steps: int) -> None:
        """Make ``steps`` steps. The learning rate falls to zero as a cosine. Rank 0 prints a few losses."""
        assert self.trainer.optimizer is not None
        course = LearningRate(name="cosine", warmup_steps=round(self.warmup * steps), final=0.0)
        schedule = LambdaLR(self.trainer.optimizer, lambda step: course.factor(step, max(1, steps)))
        for step in range(1, steps + 1):
            loss = self.step()
            schedule.step()
            if self.speaks and (step % max(1, steps // 5) == 0 or step == steps):
                print(f"step {step}/{steps}  loss {float(loss):.4f}")


def parallelized(
    model: torch.nn.Module, loss_fn: Callable[..., Any], batches: Iterable[Any], layout: mw.Layout, lr: float,
    local: bool = False, **options: Any,
) -> Training:  # fmt: skip
    """A trainer with AdamW and these options of ``parallelize``; rank 0 prints its plan for such a batch."""
    batches = iter(batches)
    first = next(batches)
    trainer = mw.parallelize(
        model, loss_fn, first, plan=layout, optimizer=lambda p: torch.optim.AdamW(p, lr=lr), **options
    )
    result = Training(trainer, model, chain([first], batches), local)
    if result.speaks:
        print(trainer.plan.explain())
    return result


def layout_of(ranks: int, layouts: Mapping[int, mw.Layout]) -> mw.Layout:
    """The layout for this number of ranks; a ``LayoutError`` names the numbers for which there is one."""
    if ranks not in layouts:
        remedy = f"start {' or '.join(map(str, layouts))}: torchrun --nproc-per-node {list(layouts)[-1]} PROGRAM"
        raise LayoutError(f"{ranks} ranks", where=os.path.basename(sys.argv[0]), remedy=remedy)
    return layouts[ranks]


def run(main: Callable[..., list[Outcome]], doc: str | None) -> None:
    """Run ``main(ranks, ...)`` with an option for each of its other arguments, and print what was reached. Exit with
    code 1 and a message if the goal is missed, or if something is missing or wrong."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, argument in list(inspect.signature(main).parameters.items())[1:]:
        option, default = f"--{name.replace('_', '-')}", argument.default
        parser.add_argument(option, type=type(default), default=default, help="default: %(default)s")
    options, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        print(f"one rank: nothing is split; on two: torchrun --nproc-per-node 2 {sys.argv[0]}")
    try:
        outcomes = main(ranks, **vars(options))
    except mw.MeshwrightError as error:
        sys.exit(str(error))
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(map(str, outcomes)))
    if missed := [str(outcome) for outcome in outcomes if not outcome.reached]:
        sys.exit("\n".join(["missed:", *missed]))
