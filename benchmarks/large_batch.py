"""Does training with a batch 32 times as large reach the loss of the small one? With warm-up and LAMB, and without.

Run as ``make bench-large-batch``. The exit code is 1 if a target is missed. The shape is that of table 1 of P. Goyal et
al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677: a base run, the same learning rate scaled by the ratio of
the batches without and with warm-up, and LAMB (Y. You et al., ICLR 2020, arXiv:1904.00962) with warm-up. All see the
same number of sequences of the text of Python's own library; the loss is that of held-out text, in nats a byte.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import meshwright as mw
from benchmarks import report
from benchmarks.report import show
from meshwright.data.loaders import TextLoader
from meshwright.errors import NonFiniteLossError
from meshwright.ir.learning_rate import scaled_by
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ir.run import LearningRate
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.optim import LAMB
from meshwright.runtime.corpus import standard_library_text

COMMAND = "make bench-large-batch"
CONFIG = GPTConfig(layers=2, width=64, heads=4, vocabulary=256, sequence_length=16)
SMALL, LARGE = 8, 256
SEQUENCES = 256_000
TRAIN_BYTES, HELD_OUT_BYTES = 4_300_000, 128_000
SEEDS = (0, 1, 2)
WITHIN = 0.02
"""Of the base run's loss, relatively: medians over the seeds."""

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """A way to train: batch, optimizer, and the steps over which the learning rate rises. All then fall as a cosine."""

    name: str
    batch: int
    optimizer: Optimizer
    warmup_steps: int = 0


def sgd(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def lamb(lr: float) -> Optimizer:
    return lambda parameters: LAMB(parameters, lr=lr)


BASE_LR, LAMB_LR = 0.1, 0.03
"""LAMB's is the best of 0.02, 0.025, 0.03, 0.04, 0.06 and 0.08 with half as many sequences; SGD's was not searched."""
SCALED_LR = BASE_LR * scaled_by("linear", LARGE, SMALL)
BASE = Recipe(f"SGD, batch {SMALL}", SMALL, sgd(BASE_LR))
LINEAR = Recipe(f"SGD, batch {LARGE}, linear scaling", LARGE, sgd(SCALED_LR))
LINEAR_WARM = Recipe(f"SGD, batch {LARGE}, linear scaling, warm-up", LARGE, sgd(SCALED_LR), 25)
LAMB_WARM = Recipe(f"LAMB, batch {LARGE}, warm-up", LARGE, lamb(LAMB_LR), 25)
RECIPES = (BASE, LINEAR, LINEAR_WARM, LAMB_WARM)


def held_out_loss(recipe: Recipe, seed: int, sequences: int = SEQUENCES) -> float:
    """Train by a recipe; nats a byte of held-out text, infinite where training diverged."""
    text, held_out = standard_library_text(TRAIN_BYTES, HELD_OUT_BYTES)
    torch.manual_seed(seed)
    length, steps = CONFIG.sequence_length, sequences // recipe.batch
    training = iter(TextLoader(text, length, recipe.batch, seed))
    first = next(training)
    trainer = mw.parallelize(GPT(CONFIG), language_model_loss, first, plan=mw.Layout(), optimizer=recipe.optimizer)
    trainer.recorder = None
    course = LearningRate(name="cosine", warmup_steps=recipe.warmup_steps, final=0.0)
    schedule = LambdaLR(trainer.optimizer, lambda step: course.factor(step, steps))
    try:
        for batch in chain([first], islice(training, steps - 1)):
            trainer.step(batch)
            schedule.step()
    except NonFiniteLossError:
        return math.inf
    losses = [float(trainer.evaluate(batch)) for batch in TextLoader(held_out, length, 500, 0, shuffle=False, epochs=1)]
    return statistics.fmean(losses)


def judged(by_recipe: Mapping[str, Sequence[float]]) -> list[Finding]:
    """The targets: LAMB with warm-up is within ``WITHIN`` of the base run, linear scaling without warm-up is not."""
    base = statistics.median(by_recipe[BASE.name])
    results: list[Finding] = []
    for recipe, near in ((LAMB_WARM, True), (LINEAR, False), (LINEAR_WARM, None), (BASE, None)):
        losses = by_recipe[recipe.name]
        more = statistics.median(losses) / base - 1
        passed = near is None or (more <= WITHIN) is near
        what = {True: f"within {WITHIN:.0%} of the base run", False: f"not within {WITHIN:.0%} of it", None: ""}[near]
        spread = f"{_nats(min(losses))} to {_nats(max(losses))} over {len(losses)} seeds"
        results.append(
            Check(
                target=f"{recipe.name}: {what}" if what else recipe.name,
                verdict="reported" if near is None else "pass" if passed else "fail",
                measured=f"{_nats(statistics.median(losses))} ({spread})"
                + (f", {more:+.1%}" if math.isfinite(more) and recipe is not BASE else ""),
                passed=int(passed),
                total=1,
                notes={"losses": [loss if math.isfinite(loss) else None for loss in losses]},
            )
        )
    return results


def _nats(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write every recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_batch", description=(__doc__ or "").splitlines()[0]
    )
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    by_recipe: dict[str, list[float]] = {recipe.name: [] for recipe in RECIPES}
    for seed in SEEDS:
        for recipe in RECIPES:
            by_recipe[recipe.name].append(held_out_loss(recipe, seed))
            print(f"seed {seed}  {recipe.name}: {_nats(by_recipe[recipe.name][-1])}", flush=True)
    results = judged(by_recipe)
    for finding in results:
        show(finding)
    length = CONFIG.sequence_length
    words = f"""The median over {len(SEEDS)} seeds (of initial values and of the order of the data), and the range.
Every recipe trains on {SEQUENCES:,} sequences of {length} bytes of the text of this Python's own library: {
        SEQUENCES // SMALL:,} steps of {SMALL}, or {SEQUENCES // LARGE:,} of {LARGE}. GPT: {CONFIG.layers} layers, {
        CONFIG.width
    } wide,
{CONFIG.heads} heads. SGD has momentum 0.9 and, with batch {SMALL}, a learning rate of {BASE_LR:g}, which was not
searched; scaled linearly it is {SCALED_LR:g}. LAMB's is {
        LAMB_LR:g}: the best of 0.02, 0.025, 0.03, 0.04, 0.06 and 0.08 with
half as many sequences. Warm-up is linear over {LAMB_WARM.warmup_steps} steps; all learning rates then fall to 0 as a
cosine. Losses are in nats a byte."""
    settings = {
        "all": Settings(
            dtype="float32", ranks=1, threads=1,
            sizes={"sequences": SEQUENCES, "bytes": length, "width": CONFIG.width, "layers": CONFIG.layers},
        )
    }  # fmt: skip
    report.write("large_batch", "Training with large batches", COMMAND, "nothing is timed", settings, results, words)
    print("written to benchmarks/results/large_batch.md and .json")
    return int(any(result.verdict == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
