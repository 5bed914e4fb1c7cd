"""The oracle of training: one process of eager PyTorch, with which every parallel run must agree in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import meshwright as mw
from meshwright.api.machine import known_cluster
from meshwright.api.plans import Rules, plan_by_layout
from meshwright.capture.batch import take_apart
from meshwright.capture.builder import Capture, capture
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.ir.cluster import Cluster
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.plan_check import check_fits
from meshwright.ir.precision import Precision
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, LeNet, ResNet, classification_loss, language_model_loss
from meshwright.models.losses import IGNORED
from meshwright.optim import LAMB, LARC, LARS, OneBitAdam, ZeroOneAdam
from meshwright.planner.explicit import Ask, adapt_plan, plan_layout
from meshwright.runtime.trainer import Trainer
from meshwright.torch_private import DisableTorchFunction

TOLERANCE = 1e-9
"""|a - b| <= TOLERANCE * max(1, max|b|), in float64."""
STEPS = 3
BATCH = 8
SEQUENCE = 12
MAX_GRAD_NORM = 0.1
"""Below the norm of every model's first gradients, so that clipping clips."""

Batch = dict[str, Tensor]
C = TypeVar("C")
LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Subject:
    """A model with the loss function and the batches it is trained on."""

    model: nn.Module
    loss_fn: LossFunction
    batches: list[Batch]


@dataclass(frozen=True)
class Case:
    """One training to be run in parallel and in one process."""

    model: str
    layout: str
    optimizer: str
    clipping: str
    labels: str

    @property
    def num_ranks(self) -> int:
        layout = LAYOUTS[self.layout]
        return layout.num_ranks

    def __str__(self) -> str:
        return ", ".join((self.model, self.layout, self.optimizer, self.clipping, self.labels))


@dataclass
class Run:
    """What a training left behind: per step the loss, the other metrics and the gradient norm; then all values."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def note(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        self.losses.append(loss.detach().clone())
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append(value.detach().clone())


@dataclass(frozen=True)
class LargestErrors:
    """The largest errors of one rank's run, relative to max(1, max|expected|), and what the plan did.

    ``state`` is of parameters and buffers and infinite if a name is missing; only rank 0 has them.
    ``moved`` is the largest change of a parameter in the serial run and ``norms`` are its gradient norms where it
    clips, so that a comparison that could not fail shows. ``values`` are the losses, ``num_split`` counts parameters.
    """

    losses: float
    metrics: float
    state: float
    moved: float
    norms: tuple[float, ...]
    values: tuple[float, ...]
    num_split: int

    @property
    def error(self) -> float:
        return max(self.losses, self.metrics, self.state)


# --- models and batches ----------------------------------------------------------------------------------------------


LARGE_VOCABULARY = 1024
"""Embeddings of so many words are split over two ranks: that saves more than its sums cost."""


def gpt(
    ragged: bool,
    *,
    layers: int = 2,
    heads: int = 2,
    tied: bool = True,
    dropout: float = 0.0,
    vocabulary: int = 128,
    size: int = BATCH,
) -> Subject:
    """A small GPT. Whole heads and feed-forward layers of it are split over tp; its vocabulary if it is large."""
    config = GPTConfig(
        layers=layers,
        width=16,
        heads=heads,
        vocabulary=vocabulary,
        sequence_length=SEQUENCE,
        dropout=dropout,
        tied_head=tied,
    )
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(vocabulary, (size, SEQUENCE + 1))
        targets = ragged_ends(tokens[:, 1:]) if ragged else tokens[:, 1:].contiguous()
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": targets})
    return Subject(GPT(config).double(), language_model_loss, batches)


def one_block(ragged: bool, *, dropout: float = 0.0) -> Subject:
    """The smallest GPT, for tests that capture it many times."""
    return gpt(ragged, layers=1, dropout=dropout)


def hugging_face_gpt2(ragged: bool, *, masked: bool = False, dtype: torch.dtype = torch.float64) -> Subject:
    """Hugging Face's GPT-2 as it comes, with random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=SEQUENCE, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(40, (BATCH, SEQUENCE))
        batch = {"input_ids": tokens, "labels": ragged_ends(tokens) if ragged else tokens.clone()}
        if masked:
            lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (BATCH, 1))
            batch["attention_mask"] = (torch.arange(SEQUENCE) < lengths).long()
        batches.append(batch)
    return Subject(GPT2LMHeadModel(config).to(dtype), own_loss, batches)


def hugging_face_t5(ragged: bool, *, encoder_layers: int = 2, size: int = BATCH) -> Subject:
    """Hugging Face's T5: encoder and decoder, relative positions added in place, one embedding for both."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=encoder_layers, num_decoder_layers=2, num_heads=2, vocab_size=40,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    batches = []
    for _ in range(STEPS):
        labels = torch.randint(1, 40, (size, 6))
        tokens = torch.randint(1, 40, (size, SEQUENCE))
        batches.append({"input_ids": tokens, "labels": ragged_ends(labels) if ragged else labels})
    return Subject(T5ForConditionalGeneration(config).double(), own_loss, batches)


def mlp(ragged: bool) -> Subject:
    """Three layers, so that one product's columns meet the next one's rows."""
    return Subject(MLP((6, 16, 12, 4)).double(), classification_loss, _samples("inputs", (6,), 4, ragged))


def lenet(ragged: bool) -> Subject:
    """Two convolutions and three dense layers."""
    model = LeNet(image_size=8, classes=4, channels=(2, 4), dense=(16, 12), kernel=3)
    return Subject(model.double(), classification_loss, _samples("image", (1, 8, 8), 4, ragged))


def resnet(ragged: bool, *, depth: int = 8, size: int = BATCH) -> Subject:
    """Batch norm at every layer, whose statistics are those of the global batch."""
    model = ResNet(depth=depth, width=4, image_channels=1, classes=4)
    return Subject(model.double(), classification_loss, _samples("image", (1, 8, 8), 4, ragged, size))


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that a Hugging Face model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def _samples(name: str, shape: tuple[int, ...], classes: int, ragged: bool, size: int = BATCH) -> list[Batch]:
    batches = []
    for step in range(STEPS):
        label = torch.randint(classes, (size,))
        if ragged:  # uneven over the halves of the batch, as over dp shards
            label[: size // 8 + step % 3] = IGNORED
        batches.append({name: torch.randn(size, *shape, dtype=torch.float64), "label": label})
    return batches


def ragged_ends(targets: Tensor) -> Tensor:
    """The ends of samples ignored, from a random position on: an early one in the first half of the batch."""
    batch, sequence = targets.shape
    length = torch.randint(1, 1 + sequence // 3, (batch, 1))
    length[batch // 2 :] += sequence // 2
    return targets.masked_fill(torch.arange(sequence) >= length, IGNORED)


MODELS: Mapping[str, Callable[[bool], Subject]] = {
    "GPT": lambda ragged: gpt(ragged, vocabulary=LARGE_VOCABULARY),
    "GPT, own head": lambda ragged: gpt(ragged, tied=False),
    "HF GPT-2": hugging_face_gpt2,
    "HF GPT-2, mask": lambda ragged: hugging_face_gpt2(ragged, masked=True),
    "MLP": mlp,
    "LeNet": lenet,
    "ResNet": resnet,
}
MORE_MODELS: Mapping[str, Callable[[bool], Subject]] = {"HF T5": hugging_face_t5}
"""Compared in chosen cases, not in every combination."""
LAYOUTS: Mapping[str, mw.Layout] = {"dp2": mw.Layout(dp=2), "tp2": mw.Layout(tp=2), "dp2 x tp2": mw.Layout(dp=2, tp=2)}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
MORE_OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdaGrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "RMSProp": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "LARS": lambda parameters: LARS(parameters, lr=10.0, weight_decay=0.01),
    "LARC": lambda parameters: LARC(parameters, lr=0.1, weight_decay=0.01, nesterov=True),
    "LAMB": lambda parameters: LAMB(parameters, lr=1e-2, weight_decay=0.01),
    "1-bit Adam": lambda parameters: OneBitAdam(parameters, lr=1e-3, freeze_step=2, weight_decay=0.01),
    "0/1 Adam": lambda parameters: ZeroOneAdam(parameters, lr=1e-3, num_updates=1, weight_decay=0.01),
}
"""Compared on one model, not in every combination."""
CLIPPING: Mapping[str, float | None] = {"whole": None, "clipped": MAX_GRAD_NORM}
LABELS: Mapping[str, bool] = {"full": False, "ragged": True}


def every_case() -> list[Case]:
    """The full product."""
    return [Case(*values) for values in itertools.product(MODELS, LAYOUTS, OPTIMIZERS, CLIPPING, LABELS)]


def pairwise_cases() -> list[Case]:
    """Cases in which every two values of different factors meet at least once."""
    return pairwise({case: pairs(case) for case in every_case()})


def pairwise(pairs_of: Mapping[C, set[tuple[tuple[str, str], ...]]]) -> list[C]:
    """Cases that together have every pair that any case has.

    Greedily the case with most new pairs, and of these one whose pairs have met least often, so that what the larger
    factors leave free varies too.
    """
    cases = list(pairs_of)
    columns = {pair: column for column, pair in enumerate(set().union(*pairs_of.values()))}
    holds = np.zeros((len(cases), len(columns)))
    for row, case in enumerate(cases):
        holds[row, [columns[pair] for pair in pairs_of[case]]] = 1
    missing, met, chosen = np.ones(len(columns)), np.zeros(len(columns)), []
    while missing.any():
        new = holds @ missing
        best = int(np.where(new == new.max(), holds @ met, np.inf).argmin())
        chosen.append(cases[best])
        missing *= 1 - holds[best]
        met += holds[best]
    return chosen


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """The pairs of (factor, value) that meet in a case."""
    values = [("model", case.model), ("layout", case.layout), ("optimizer", case.optimizer)]
    values += [("clipping", case.clipping), ("labels", case.labels)]
    return set(itertools.combinations(values, 2))


# --- both sides ------------------------------------------------------------------------------------------------------


NARROW, WIDE = torch.float32, torch.float64


class WiderCasts(TorchFunctionMode):
    """Casts to float32 inside a model become casts to float64, so that its rounding does not hide an error of ours."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return Tensor.double(*args)
        for value in args:  # few calls have a dtype, and a model has very many calls
            if value is NARROW:
                args = [WIDE if value is NARROW else value for value in args]
                break
        if not kwargs:
            return function(*args)
        return function(*args, **{key: WIDE if value is NARROW else value for key, value in kwargs.items()})


def subject_of(case: Case) -> Subject:
    """The case's model and batches, the same on every rank."""
    torch.manual_seed(7)
    return {**MODELS, **MORE_MODELS}[case.model](LABELS[case.labels])


def plan_of(graph: Graph, layout: mw.Layout, world_size: int, cluster: Cluster | None = None) -> mw.Plan:
    """The plan of a layout, with buckets of the usual size."""
    ask = Ask(lower=PlanLowering(graph), fits_buckets=False)
    return plan_layout(graph, layout, world_size=world_size, cluster=cluster, ask=ask)


def in_one_process(
    subject: Subject, optimizer: Callable[[Any], torch.optim.Optimizer], max_grad_norm: float | None = None
) -> Run:
    """Plain eager training, the simplest correct version."""
    model, run = subject.model.train(), Run()
    stepper = optimizer(model.parameters())
    for batch in subject.batches:
        stepper.zero_grad()
        result = subject.loss_fn(model, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        loss.backward()
        if max_grad_norm is not None:
            metrics = {**metrics, "grad_norm": nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)}
        stepper.step()
        run.note(loss, metrics)
    run.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def reference(
    subject: Subject,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    max_grad_norm: float | None = None,
    key: object = None,
) -> Run:
    """Training in one process, for all ranks, which all call this: rank 0 alone runs it. Subjects with the same key,
    which are equal, share a run."""
    kept = key, optimizer, max_grad_norm

    def run() -> dict[str, Any]:
        if key is None:
            return vars(in_one_process(subject, optimizer, max_grad_norm))
        if kept not in _REFERENCES:
            _REFERENCES[kept] = in_one_process(subject, optimizer, max_grad_norm)
        return vars(_REFERENCES[kept])

    return Run(**from_rank_0(run))


def in_parallel(
    subject: Subject,
    layout: mw.Layout | mw.Plan | str,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    max_grad_norm: float | None = None,
    parallelize: Callable[..., mw.Trainer] = mw.parallelize,
) -> tuple[Run, mw.Trainer]:
    """The same training by Meshwright on this rank."""
    trainer = parallelize(
        subject.model,
        subject.loss_fn,
        subject.batches[0],
        plan=layout,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
    )
    run = Run()
    for batch in subject.batches:
        loss = trainer.step(batch)
        run.note(loss, {name: value for name, value in trainer.metrics.items() if name != "loss"})
    run.state = trainer.full_state_dict()
    return run, trainer


_REFERENCES: dict[object, Run] = {}
_CAPTURES: dict[object, Capture] = {}
_PLANS: dict[tuple[object, str], bytes] = {}
_LOWERINGS: dict[tuple[object, str], PlanLowering] = {}


def widening(widens: bool) -> AbstractContextManager[object]:
    """``WiderCasts``, or nothing."""
    return WiderCasts() if widens else nullcontext()


def captured(
    key: object,
    subject: Subject,
    precision: Precision | None = None,
    rules: Rules | None = None,
    *,
    widens: bool = False,
) -> Capture:
    """A capture of a subject's step (if it ``widens``, under ``WiderCasts``), which all ranks ask for. Rank 0 makes it
    for all; subjects with the same key share it. The captures of other ranks have no ``reads``, so that they notice no
    change of the model."""
    kept, batch = (key, precision), subject.batches[0]

    def capture_once() -> Graph:
        if kept not in _CAPTURES:
            with widening(widens):
                _CAPTURES[kept] = capture(subject.model, subject.loss_fn, batch, precision=precision, rules=rules)
        return _CAPTURES[kept].graph

    if not all(from_every_rank(kept in _CAPTURES)):
        graph = from_rank_0(capture_once)
        with DisableTorchFunction():  # ``WiderCasts`` would widen them
            constants = from_rank_0(lambda: _CAPTURES[kept].constants)
        if kept not in _CAPTURES:
            _CAPTURES[kept] = Capture(graph, take_apart(batch).without_values(), constants, rules or {})
    return _CAPTURES[kept]


def sharing_capture(key: object, *, widens: bool = False) -> Callable[..., mw.Trainer]:
    """``mw.parallelize`` whose calls with this key share a capture in a process, and a plan for each layout: making
    them is most of the time. If it ``widens``, the step is captured under ``WiderCasts``: the steps of the trainer have
    the wider casts then, without a mode that watches each of their operators."""

    def parallelize(model: nn.Module, loss_fn: LossFunction, batch: Batch, **options: Any) -> mw.Trainer:
        asked = options.pop("plan")
        precision, rules = options.pop("precision", asked.precision), options.get("rules")
        shared = captured(key, Subject(model, loss_fn, [batch]), precision, rules, widens=widens)
        kept = key, repr((precision, asked))

        def planned() -> bytes:
            if isinstance(asked, mw.Plan):
                return encode_json(asked)
            if kept not in _PLANS:
                lower = _LOWERINGS.setdefault((key, repr(precision)), PlanLowering(shared.graph, rules))
                cluster = known_cluster(None, torch.device("cpu"), asked.num_ranks)
                _PLANS[kept] = encode_json(plan_by_layout(shared.graph, asked, cluster, lower))
            return _PLANS[kept]

        text = from_rank_0(planned)
        if not isinstance(asked, mw.Plan):
            _PLANS[kept] = text
        given: dict[str, Any] = {"max_grad_norm": None, "seed": 0, "device": torch.device("cpu"), **options}
        plan = decode(text, mw.Plan, where="plan of rank 0")
        check_fits(plan, shared.graph)
        return Trainer(model, loss_fn, shared, plan, **given, replan=adapt_plan)

    return parallelize


def compare(case: Case, *, widen_casts: bool = True) -> LargestErrors:
    """Run a case both ways on this rank. Cases of a model share its capture, but where casts are left as they are."""
    key = (case.model, case.labels) if widen_casts else None
    parallelize = mw.parallelize if key is None else sharing_capture(key, widens=True)
    serial = subject_of(case)
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    arguments = OPTIMIZERS[case.optimizer], CLIPPING[case.clipping]
    with widening(widen_casts):
        expected = reference(serial, *arguments, key=key)
    run, trainer = in_parallel(subject_of(case), LAYOUTS[case.layout], *arguments, parallelize=parallelize)
    return compared(before, expected, run, trainer)


def compared(before: Mapping[str, Tensor], expected: Run, run: Run, trainer: mw.Trainer) -> LargestErrors:
    """Two runs of one training that began ``before``, the second by ``trainer``."""
    state = 0.0
    if trainer.rank == 0:
        state = largest_error(run.state, expected.state)
    return LargestErrors(
        losses=error_of(torch.stack(run.losses), torch.stack(expected.losses)),
        metrics=largest_error(_stacked(run.metrics), _stacked(expected.metrics)),
        state=state,
        moved=max(float((expected.state[name] - before[name]).abs().max()) for name in trainer.graph.parameters),
        norms=tuple(float(norm) for norm in expected.metrics.get("grad_norm", ())),
        values=tuple(float(loss) for loss in run.losses),
        num_split=sum(trainer.parameters.is_sharded(name) for name in trainer.parameters),
    )


def largest_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest ``error_of`` over tensors by name; infinite if the names are not the same."""
    if actual.keys() != expected.keys():
        return math.inf
    return max((error_of(actual[name], expected[name]) for name in expected), default=0.0)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max(1, max|expected|); infinite if shapes differ or a value is not finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not bool(torch.isfinite(actual).all()):
        return math.inf
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.abs().max()))
    return float((actual.double() - expected.double()).abs().max()) / scale


def _stacked(values: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(list(several)) for name, several in values.items()}


def shards(batch: Batch, count: int) -> Iterator[Batch]:
    """A global batch in ``count`` equal parts along dim 0."""
    chunked = {name: value.chunk(count) for name, value in batch.items()}
    for index in range(count):
        yield {name: parts[index] for name, parts in chunked.items()}
