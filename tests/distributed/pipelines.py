"""Trainings in a pipeline and in micro-batches: their cases, and the serial run that each must equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import ScheduleError
from meshwright.ir.pipeline import SCHEDULES
from meshwright.models import UNet, segmentation_loss
from meshwright.models.losses import IGNORED
from meshwright.schedules.pipeline import build
from tests.distributed import oracle
from tests.distributed.oracle import Batch, LargestErrors, Run, Subject

SIZE = 112
"""Of the global batch: it divides into 1, 4, 7 and 8 micro-batches, also over two dp ranks."""
SEQUENCE = 6


@dataclass(frozen=True)
class Case:
    """One training to be run in parallel and in one process."""

    model: str
    schedule: str
    pp: str
    chunks: str
    microbatches: str
    recompute: str
    mesh: str
    optimizer: str
    clipping: str
    labels: str

    @property
    def layout(self) -> mw.Layout:
        return mw.Layout(
            pp=int(self.pp.removeprefix("pp")),
            chunks=int(self.chunks.removeprefix("v")),
            schedule=self.schedule,  # type: ignore[arg-type]
            microbatches=int(self.microbatches.removeprefix("m")),
            recompute=self.recompute,  # type: ignore[arg-type]
            batch_statistics="microbatch" if self.model == "ResNet" else "global",
            dp=2 if "dp2" in self.mesh else 1,
            tp=2 if "tp2" in self.mesh else 1,
        )

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, field.name)) for field in fields(self))


# --- models ----------------------------------------------------------------------------------------------------------


def hugging_face_llama(ragged: bool) -> Subject:
    """Hugging Face's Llama: rotary positions, grouped queries, RMS norm; a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQUENCE, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    batches = []
    for _ in range(oracle.STEPS):
        tokens = torch.randint(40, (SIZE, SEQUENCE))
        batches.append({"input_ids": tokens, "labels": oracle.ragged_ends(tokens) if ragged else tokens.clone()})
    return Subject(LlamaForCausalLM(config).double(), oracle.own_loss, batches)


def unet(ragged: bool) -> Subject:
    """Skips that cross stages: the encoder's first level is read by the decoder's last."""
    batches = []
    for _ in range(oracle.STEPS):
        label = torch.randint(3, (SIZE, 4, 4))
        if ragged:
            label[: SIZE // 3, 1:] = IGNORED
        batches.append({"image": torch.randn(SIZE, 1, 4, 4, dtype=torch.float64), "label": label})
    return Subject(UNet(depth=2, width=2, image_channels=1, classes=3).double(), segmentation_loss, batches)


MODELS: Mapping[str, Callable[[bool], Subject]] = {
    "GPT": lambda ragged: oracle.gpt(ragged, layers=4, size=SIZE),
    "HF Llama": hugging_face_llama,
    "HF T5": lambda ragged: oracle.hugging_face_t5(ragged, encoder_layers=1, size=SIZE),
    "ResNet": lambda ragged: oracle.resnet(ragged, depth=14, size=SIZE),
    "U-Net": unet,
}
MOST_STAGES = {"ResNet": 8, "U-Net": 6}
"""Of models that cannot be cut in twelve."""
FACTORS: tuple[tuple[str, ...], ...] = (
    tuple(MODELS),
    SCHEDULES,
    ("pp2", "pp4"),
    ("v1", "v2", "v3"),
    ("m1", "m4", "m7", "m8"),
    ("none", "selective", "full"),
    ("alone", "dp2", "tp2"),
)
SETTINGS = tuple(itertools.product(oracle.OPTIMIZERS, oracle.CLIPPING, oracle.LABELS))


def possible(case: Case) -> bool:
    """Whether the schedule is defined for these counts, and the model has enough places to cut. Ranks that meet within
    a micro-batch (in tp; under dp, in batch norm, and in T5's sums over labels) cannot be message-driven."""
    layout = case.layout
    if layout.schedule == "message-driven" and (
        layout.feature_ranks > 1 or (layout.dp > 1 and case.model in ("ResNet", "HF T5"))
    ):
        return False
    stages = layout.pipeline.num_stages
    if stages > MOST_STAGES.get(case.model, stages):
        return False
    return defined(layout.schedule, layout.pp, layout.microbatches, layout.chunks)


@cache
def defined(schedule: str, pp: int, microbatches: int, chunks: int) -> bool:
    try:
        build(schedule, pp, microbatches, chunks)
    except ScheduleError:
        return False
    return True


@cache
def every_case() -> tuple[Case, ...]:
    """The full product of what concerns pipelines; optimizer, clipping and labels take turns."""
    settings = itertools.cycle(SETTINGS)
    products = zip(itertools.product(*FACTORS), settings, strict=False)
    cases = (Case(*(*values, *setting)) for values, setting in products)
    return tuple(case for case in cases if possible(case))


def pairwise_cases(max_ranks: int, *, models_meet_schedules: bool = True) -> list[Case]:
    """Cases on at most ``max_ranks`` ranks. Every pair of values that can occur together occurs in one of them; of
    models and schedules, only if ``models_meet_schedules``: a model decides how it is cut into stages, and a schedule
    the order of stages, whatever they compute."""
    cases = (case for case in every_case() if case.num_ranks <= max_ranks)
    met = {case: pairs(case) for case in cases}
    if not models_meet_schedules:
        met = {case: {pair for pair in case_pairs if {name for name, _ in pair} != {"model", "schedule"}}
               for case, case_pairs in met.items()}  # fmt: skip
    return oracle.pairwise(met)


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """The pairs of (factor, value) that meet in a case."""
    return set(itertools.combinations(((field.name, getattr(case, field.name)) for field in fields(case)), 2))


# --- both sides ------------------------------------------------------------------------------------------------------


def subject_of(model: str, labels: str) -> Subject:
    """The model and its batches, the same on every rank."""
    torch.manual_seed(7)
    return MODELS[model](oracle.LABELS[labels])


def in_microbatches(
    subject: Subject,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    max_grad_norm: float | None,
    layout: mw.Layout,
) -> Run:
    """Plain eager training on one micro-batch after the other: losses over the batch's count of labels, gradients
    accumulated, statistics those of the micro-batch (of all dp ranks)."""
    model, run = subject.model.train(), Run()
    stepper = optimizer(model.parameters())
    for batch in subject.batches:
        stepper.zero_grad()
        total = int((batch["label"] != IGNORED).sum())
        loss, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        for part in parts(batch, layout.dp, layout.microbatches):
            count = int((part["label"] != IGNORED).sum())
            mean, metrics = subject.loss_fn(model, part)
            if count:
                (mean * count / total).backward()
                loss += mean.detach() * count / total
            correct += metrics["correct"]
        step_metrics: dict[str, Tensor] = {"correct": correct}
        if max_grad_norm is not None:
            step_metrics["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        stepper.step()
        run.note(loss, step_metrics)
    run.state = once_a_step({name: value.detach().clone() for name, value in model.state_dict().items()}, layout)
    return run


def once_a_step(state: dict[str, Tensor], layout: mw.Layout) -> dict[str, Tensor]:
    """Batch norm's count does not depend on the batch, and is of steps, not of micro-batches."""
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):
            value.div_(layout.microbatches, rounding_mode="floor")
    return state


def parts(batch: Batch, dp: int, microbatches: int) -> list[Batch]:
    """The micro-batches of a global batch: each has a part of every dp rank's part."""
    shards = list(oracle.shards(batch, dp))
    split = [list(oracle.shards(shard, microbatches)) for shard in shards]
    return [
        {name: torch.cat([shard[index][name] for shard in split]) for name in batch} for index in range(microbatches)
    ]


def compare(case: Case) -> tuple[dict[str, list[float]], LargestErrors | None]:
    """The losses and metrics that this rank saw, by step; on rank 0 also the comparison with one process."""
    layout, settings = case.layout, (oracle.OPTIMIZERS[case.optimizer], oracle.CLIPPING[case.clipping])
    subject, widens = subject_of(case.model, case.labels), case.model.startswith("HF")
    parallelize = oracle.sharing_capture(("pipelines", case.model), widens=widens)
    run, trainer = oracle.in_parallel(subject, layout, *settings, parallelize)
    seen = {name: [float(value) for value in values] for name, values in {"loss": run.losses, **run.metrics}.items()}
    if trainer.rank != 0:
        return seen, None
    serial = subject_of(case.model, case.labels)
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    with oracle.widening(widens):
        if case.model == "ResNet":
            expected = in_microbatches(serial, *settings, layout)
        else:
            expected = oracle.in_one_process(serial, *settings)
    return seen, oracle.compared(before, expected, run, trainer)


def dp_tp_pp() -> tuple[dict[str, list[float]], float]:
    """GPT on eight ranks, through ``parallelize``; the error of rank 0 against one process."""
    layout = mw.Layout(dp=2, tp=2, pp=2, microbatches=2)
    settings = oracle.OPTIMIZERS["AdamW"], oracle.CLIPPING["clipped"]
    torch.manual_seed(7)
    serial = oracle.gpt(True)
    torch.manual_seed(7)
    parallel = oracle.gpt(True)
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    run, trainer = oracle.in_parallel(parallel, layout, *settings)
    assert any(trainer.parameters.is_sharded(name) for name in trainer.parameters)
    seen = {"loss": [float(loss) for loss in run.losses]}
    if trainer.rank != 0:
        return seen, 0.0
    return seen, oracle.compared(before, oracle.in_one_process(serial, *settings), run, trainer).error
