"""What is dry-run: every model of the parity matrix under every layout, pipelines, and layouts of 256 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

import meshwright as mw
from meshwright.api.dry_runs import dry_run_captured
from meshwright.ir.dry_run import DryRun, RankRun
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from tests.distributed import hugging_face, oracle, pipelines

CLUSTER = "h100-dgx-ndr400x8"
MAX_RANKS = 16
WITHIN = 0.05
"""The largest relative difference between the peak memory of a rank and its prediction."""
SCALARS_BYTES = 256
"""Scalars of a step, such as flags and norms, are not predicted; they count in models of a few KiB."""
LAYOUTS: Mapping[str, mw.Layout] = {
    **oracle.LAYOUTS,
    "dp2, zero 1": mw.Layout(dp=2, zero=1),
    "dp2, zero 2": mw.Layout(dp=2, zero=2),
    "dp2, zero 3": mw.Layout(dp=2, zero=3),
    "dp2 x tp2, zero 3, m2": mw.Layout(dp=2, tp=2, zero=3, microbatches=2),
    "dp2 x tp2 x pp2, zero 3": mw.Layout(dp=2, tp=2, pp=2, zero=3, microbatches=2),
    "dp8": mw.Layout(dp=8),
    "dp4 x tp2 x pp2": mw.Layout(dp=4, tp=2, pp=2, microbatches=2),
    "dp2 x tp2, recompute": mw.Layout(dp=2, tp=2, recompute="full"),
}
"""Layouts of 2 to 16 ranks, under each of which each model is run: those of the parity matrix, and wider ones."""
MODELS: Mapping[str, Any] = {**oracle.MODELS, **oracle.MORE_MODELS}
LARGE: Mapping[str, mw.Layout] = {
    "dp8 x tp8 x pp4": mw.Layout(dp=8, tp=8, pp=4, microbatches=8),
    "dp64 x tp4, zero 3": mw.Layout(dp=64, tp=4, zero=3),
    "dp64 x pp4": mw.Layout(dp=64, pp=4, microbatches=4),
    "dp16 x pp16, zb-h1": mw.Layout(dp=16, pp=16, microbatches=16, schedule="zb-h1"),
}
"""Layouts of 256 ranks."""


class Case(NamedTuple):
    """A dry run: its name, a function that makes the model and its batches, the options of ``mw.dry_run``, and the name
    of the capture that it shares with others."""

    name: str
    make: Callable[[], oracle.Subject]
    options: dict[str, Any]
    capture: str = ""


def firsts(layout: mw.Layout) -> tuple[int, ...]:
    """The first rank of each stage."""
    return tuple(stage * layout.num_ranks // layout.pp for stage in range(layout.pp))


def layouts(*, all_ranks: bool) -> Iterator[Case]:
    """Every model under every layout; optimizer, clipping and labels take turns."""
    settings = itertools.cycle(itertools.product(oracle.OPTIMIZERS, oracle.CLIPPING, oracle.LABELS))
    for (model, name), (optimizer, clipping, labels) in zip(itertools.product(MODELS, LAYOUTS), settings, strict=False):
        layout = LAYOUTS[name]
        if model == "ResNet" and layout.microbatches > 1:
            layout = msgspec.structs.replace(layout, batch_statistics="microbatch")
        options = {
            "plan": layout, "ranks": () if all_ranks else firsts(layout), "optimizer": oracle.OPTIMIZERS[optimizer],
            "max_grad_norm": oracle.CLIPPING[clipping],
        }  # fmt: skip
        case = oracle.Case(model, name, optimizer, clipping, labels)
        yield Case(f"{case}", partial(oracle.subject_of, case), options, model)


OTHER: Mapping[str, tuple[Callable[[bool], oracle.Subject], mw.Layout]] = {
    "spatial": (oracle.lenet, mw.Layout(spatial=(2, 2))),
    "mixed": (oracle.lenet, mw.Layout(dp=2, mixed=(2,))),
    "sequence parallel": (oracle.one_block, mw.Layout(dp=2, tp=2, zero=1, sequence_parallel=True)),
    "context": (oracle.one_block, mw.Layout(cp=2, tp=2)),
    "context in a ring": (oracle.one_block, mw.Layout(dp=2, cp=2, context="ring", zero=3)),
}
"""Models under layouts whose axes are not those of the parity matrix."""
SHORT: Mapping[str, mw.Layout] = {
    "gpipe, dp2 x tp2": mw.Layout(pp=2, dp=2, tp=2, microbatches=2, schedule="gpipe", recompute="full"),
    "1f1b, dp2": mw.Layout(pp=2, dp=2, microbatches=4, recompute="selective"),
    "interleaved, tp2": mw.Layout(pp=2, tp=2, microbatches=4, chunks=2, schedule="interleaved"),
    "zb-h1, dp2, zero 1": mw.Layout(pp=2, dp=2, zero=1, microbatches=4, schedule="zb-h1"),
    "zb-h2, tp2": mw.Layout(pp=2, tp=2, microbatches=4, schedule="zb-h2"),
    "zb-v, dp2": mw.Layout(pp=2, dp=2, microbatches=4, chunks=2, schedule="zb-v"),
    "dualpipe-v, tp2": mw.Layout(pp=2, tp=2, microbatches=4, chunks=2, schedule="dualpipe-v"),
}
"""A pipeline of each schedule that GPUs run."""


def stacked_mlp() -> oracle.Subject:
    """A small model that can be cut in 4."""
    batch = {"inputs": torch.zeros(64, 32), "label": torch.zeros(64, dtype=torch.int64)}
    return oracle.Subject(MLP((32, *[32] * 5, 16)), classification_loss, [batch])


def small() -> Iterator[Case]:
    """Small models under the axes that ``layouts`` lacks, and in pipelines. All ranks are run."""
    settings = {"optimizer": oracle.OPTIMIZERS["AdamW"], "max_grad_norm": oracle.MAX_GRAD_NORM}
    for name, (make, layout) in OTHER.items():
        yield Case(name, partial(make, False), {"plan": layout, **settings})
    for name, layout in SHORT.items():
        yield Case(name, stacked_mlp, {"plan": layout, **settings}, stacked_mlp.__name__)


def models() -> Iterator[Case]:
    """The models of Hugging Face under the layouts in which they are compared with one process."""
    for model, name in itertools.product(hugging_face.MODELS, hugging_face.LAYOUTS):
        layout = hugging_face.LAYOUTS[name]
        if isinstance(layout, mw.Layout) and hugging_face.fits(model, name):
            options = {"plan": layout, "optimizer": oracle.OPTIMIZERS["AdamW"]}
            yield Case(f"{model}, {name}", partial(hugging_face.subject, model, steps=1), options)


def pipeline_cases(every: bool) -> Iterator[Case]:
    """The pipelines of the matrix; message-driven ones do not run on GPUs. The first rank of each stage is run."""
    for case in pipelines.every_case() if every else pipelines.pairwise_cases(MAX_RANKS):
        if case.schedule == "message-driven" or case.num_ranks > MAX_RANKS:
            continue
        layout = case.layout
        options = {
            "plan": layout, "ranks": firsts(layout), "optimizer": oracle.OPTIMIZERS[case.optimizer],
            "max_grad_norm": oracle.CLIPPING[case.clipping],
        }  # fmt: skip
        yield Case(f"{case}", partial(pipelines.subject_of, case.model, case.labels), options)


def deep_gpt() -> oracle.Subject:
    """A GPT of 16 layers."""
    torch.manual_seed(7)
    config = GPTConfig(layers=16, width=64, heads=8, vocabulary=1024, sequence_length=32)
    tokens = torch.randint(1024, (256, 32))
    return oracle.Subject(GPT(config), language_model_loss, [{"tokens": tokens, "targets": tokens.roll(-1, 1)}])


def deep_mlp() -> oracle.Subject:
    """A small model that can be cut in 16."""
    batch = {"inputs": torch.zeros(256, 64), "label": torch.zeros(256, dtype=torch.int64)}
    return oracle.Subject(MLP((64, *[64] * 18, 16)), classification_loss, [batch])


def large(make: Callable[[], oracle.Subject]) -> Iterator[Case]:
    """A few layouts of 256 ranks."""
    for name, layout in LARGE.items():
        yield Case(name, make, {"plan": layout, "optimizer": oracle.OPTIMIZERS["AdamW"]}, make.__name__)


def as_predicted(rank: RankRun) -> bool:
    """Whether the peak memory of a rank is predicted."""
    return abs(rank.predicted_bytes - rank.peak_bytes) <= max(WITHIN * rank.peak_bytes, SCALARS_BYTES)


def run(case: Case) -> DryRun:
    """The report of a dry run."""
    subject = case.make()
    given = subject.model, subject.loss_fn, subject.batches[0]
    captured = oracle.captured(("dry run", case.capture or case.name), subject)
    return dry_run_captured(captured, *given, cluster=CLUSTER, **case.options)
