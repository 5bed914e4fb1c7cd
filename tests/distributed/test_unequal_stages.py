"""Stages with different numbers of ranks, or with ZeRO stages of their own: training equals one process, and so do its
saved states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.files import decode, encode_json
from meshwright.ir.level import Level, LevelMembers
from meshwright.ir.placement import Flat
from meshwright.models import GPT, GPTConfig, language_model_loss
from tests.distributed import oracle
from tests.distributed.oracle import LargestErrors, Subject
from tests.distributed.pool import Ranks


def three_heads() -> Subject:
    config = GPTConfig(layers=3, width=12, heads=3, vocabulary=64, sequence_length=6, dropout=0.0, tied_head=True)
    batches = []
    for _ in range(oracle.STEPS):
        tokens = torch.randint(64, (12, 7))
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": oracle.ragged_ends(tokens[:, 1:])})
    return Subject(GPT(config).double(), language_model_loss, batches)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "GPT": partial(oracle.gpt, True, layers=3, size=12),
    "T5": partial(oracle.hugging_face_t5, True, encoder_layers=2, size=12),
    "ResNet": partial(oracle.resnet, True, size=12),
    "GPT of many words": partial(oracle.gpt, True, layers=3, size=12, vocabulary=1025),
    "GPT, 3 heads": three_heads,
    "GPT, 7 samples": partial(oracle.gpt, True, layers=3, size=7),
}

ONE = {"dp": 1}
CASES: list[tuple[str, tuple[dict[str, int], ...], dict[str, Any]]] = [
    ("GPT", (ONE, {"dp": 2}), {}),
    ("GPT", ({"dp": 2}, ONE), {"microbatches": 2}),
    ("GPT", ({"tp": 2}, ONE), {"microbatches": 3, "schedule": "zb-h1"}),
    ("GPT", (ONE, {"tp": 2}), {"microbatches": 2, "recompute": "full"}),
    ("GPT, 3 heads", ({"tp": 3}, ONE), {"microbatches": 2}),
    ("GPT", ({"dp": 2}, ONE, ONE), {"microbatches": 3}),
    ("GPT", ({"dp": 2}, ONE), {"microbatches": 2, "zero": 3}),
    ("GPT, 7 samples", ({"dp": 2}, ONE), {}),
    ("GPT of many words", ({"tp": 2}, ONE), {"microbatches": 2}),
    ("GPT of many words", (ONE, {"dp": 3}), {"microbatches": 2, "zero": 2}),
    ("T5", ({"dp": 2}, ONE, {"tp": 1}), {"microbatches": 2}),
    ("ResNet", (ONE, {"dp": 2}), {}),
    ("GPT", (ONE, {"dp": 2}), {"microbatches": 2, "schedule": "interleaved", "chunks": 2}),
    ("GPT", ({"dp": 2}, {"tp": 1}, {"dp": 2}), {"microbatches": 2, "zero": 3, "stage_zero": (1, 0, 3)}),
    ("GPT", (ONE, {"tp": 2}), {"microbatches": 3, "schedule": "zb-v", "chunks": 2}),
    ("T5", ({"dp": 2}, ONE), {"microbatches": 6, "schedule": "dualpipe-v", "chunks": 2}),
]
MORE: list[tuple[str, tuple[dict[str, int], ...], dict[str, Any]]] = [
    ("GPT", ({"tp": 1}, {"dp": 3}), {"microbatches": 2}),
    ("GPT", (ONE, ONE, {"dp": 2}), {"microbatches": 2, "schedule": "gpipe"}),
    ("GPT", (ONE, {"tp": 2}, ONE), {"microbatches": 2}),
    ("GPT", (ONE, {"dp": 3}), {"microbatches": 2, "zero": 1}),
    ("T5", (ONE, {"dp": 2}), {"microbatches": 2}),
    ("T5", ({"dp": 3}, {"tp": 1}), {"microbatches": 2}),
    ("ResNet", ({"dp": 3}, ONE), {}),
    ("GPT", ({"dp": 2}, {"dp": 2}, {"dp": 4}), {"microbatches": 3, "zero": 1}),
    ("GPT", ({"dp": 2}, ONE, ONE), {"microbatches": 6, "schedule": "zb-v", "chunks": 2, "zero": 1}),
    ("GPT", ({"dp": 3}, {"tp": 1}), {"microbatches": 4, "schedule": "dualpipe-v", "chunks": 2, "recompute": "full"}),
]
"""Other numbers of ranks for techniques that ``CASES`` has."""


def layout_of(stages: tuple[dict[str, int], ...], options: dict[str, Any]) -> mw.Layout:
    return mw.Layout(pp=len(stages), stage_sizes=stages, **options)


def subject_of(name: str) -> Subject:
    torch.manual_seed(7)
    return SUBJECTS[name]()


def train(name: str, layout: mw.Layout) -> LargestErrors:
    """The comparison with one process."""
    serial, parallel = subject_of(name), subject_of(name)
    before = {each: value.clone() for each, value in serial.model.state_dict().items()}
    settings, key = (oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM), ("unequal", name)
    with oracle.WiderCasts():
        expected = oracle.reference(serial, *settings, key=key)
    run, trainer = oracle.in_parallel(parallel, layout, *settings, oracle.sharing_capture(key, widens=True))
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.product) for case in MORE)],
    ids=str,
)
def test_unequal_stages_train_as_one_process(
    ranks: Ranks, name: str, stages: tuple[dict[str, int], ...], options: dict[str, Any]
) -> None:
    layout = layout_of(stages, options)
    for errors in ranks(layout.num_ranks, train, name, layout):
        assert errors.error <= oracle.TOLERANCE, errors
        assert errors.moved > 1e-3, "the parameters were trained"


@pytest.mark.parametrize(
    ("name", "zeros", "options"),
    [
        ("GPT", (3, 0), {}),  # the embedding is the weight of the last product, too
        ("GPT of many words", (0, 2), {"schedule": "zb-h1", "recompute": "full"}),
        ("T5", (1, 3), {"offload": "optimizer"}),
        ("GPT", (3, 0, 1, 2), {"schedule": "interleaved", "chunks": 2}),
    ],
    ids=str,
)
def test_stages_with_zero_stages_of_their_own_train_as_one_process(
    ranks: Ranks, name: str, zeros: tuple[Literal[0, 1, 2, 3], ...], options: dict[str, Any]
) -> None:
    layout = mw.Layout(pp=2, dp=2, microbatches=2, zero=3 if 3 in zeros else 2, stage_zero=zeros, **options)
    for errors in ranks(4, train, name, layout):
        assert errors.error <= oracle.TOLERANCE, errors
        assert errors.moved > 1e-3, "the parameters were trained"


def test_a_stage_stores_parameters_by_its_own_zero_stage() -> None:
    """Parameters of several stages are divided if any of the stages divides them."""
    subject = subject_of("GPT")
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    layout = mw.Layout(pp=2, dp=2, microbatches=2, zero=3, stage_zero=(3, 0))
    first, last = mw.plan(graph, devices=4, layout=layout).stages
    shared = first.storage.keys() & last.storage.keys()
    assert len(shared) == 1
    assert {*first.released} == {*first.storage} == {*first.gradients}
    assert all((Flat() in last.storage[name].values()) == (name in shared) for name in last.storage)


def test_two_two_and_four_ranks_are_said_and_trained(ranks: Ranks) -> None:
    """The sizes of Alpa's unequal answers, on 8 ranks, with ZeRO in each stage."""
    layout = layout_of(({"dp": 2}, {"dp": 2}, {"dp": 4}), {"microbatches": 3, "zero": 1})
    subject = subject_of("GPT")
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(graph, devices=8, layout=layout)
    assert [len(plan.mesh.stage_ranks(stage)) for stage in range(3)] == [2, 2, 4]
    assert "pp=3 of (dp=2 x tp=1), (dp=2 x tp=1), (dp=4 x tp=1), 8 ranks" in plan.explain()
    for errors in ranks(8, train, "GPT", layout):
        assert errors.error <= oracle.TOLERANCE, errors
        assert errors.moved > 1e-3, "the parameters were trained"


# --- found by a search -----------------------------------------------------------------------------------------------


def fast_and_slow() -> Cluster:
    """One device, and a box of two that are a third as fast."""
    known = load_cluster("cpu-local", 2)
    fast = msgspec.structs.replace(
        known.device,
        name="fast",
        peak_flops_per_s={name: 3 * peak for name, peak in known.device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=3 * known.device.memory_bandwidth_bytes_per_s,
    )
    members = (LevelMembers(count=1, device=fast), LevelMembers(count=1, levels=known.levels))
    inside = known.levels[-1]
    network = Level(
        name="network", fan_out=2, alpha_s=inside.alpha_s, beta_s_per_byte=inside.beta_s_per_byte, members=members
    )
    return Cluster(name="fast and slow", num_devices=3, device=known.device, levels=(network,))


def wide(size: int = 12) -> Subject:
    """A model whose computing outweighs its messages."""
    config = GPTConfig(layers=2, width=48, heads=2, vocabulary=64, sequence_length=24, dropout=0.0, tied_head=True)
    batches = []
    for _ in range(oracle.STEPS):
        tokens = torch.randint(64, (size, 25))
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": oracle.ragged_ends(tokens[:, 1:])})
    return Subject(GPT(config).double(), language_model_loss, batches)


def train_plan(text: bytes) -> LargestErrors:
    torch.manual_seed(7)
    serial = wide()
    torch.manual_seed(7)
    parallel = wide()
    before = {key: value.clone() for key, value in serial.model.state_dict().items()}
    optimizer = oracle.OPTIMIZERS["AdamW"]
    expected = oracle.reference(serial, optimizer, oracle.MAX_GRAD_NORM)
    plan = decode(text, mw.Plan, where="plan of the test")
    run, trainer = oracle.in_parallel(parallel, plan, optimizer, oracle.MAX_GRAD_NORM)
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.usefixtures("without_workers")
def test_ranks_run_the_unequal_stages_that_a_search_finds_for_unlike_devices(ranks: Ranks) -> None:
    subject = wide()
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(graph, fast_and_slow(), devices=3)
    assert len({submesh.world_size for submesh in plan.mesh.stages}) == 2, plan.explain()
    for errors in ranks(3, train_plan, encode_json(plan)):
        assert errors.error <= oracle.TOLERANCE, errors
        assert errors.moved > 1e-3


# --- saved under one layout, continued under another -----------------------------------------------------------------

LAYOUTS = {
    "one rank": mw.Layout(),
    "dp3": mw.Layout(dp=3),
    "1 + 2": mw.Layout(pp=2, stage_sizes=(ONE, {"dp": 2}), microbatches=2),
    "2 + 1": mw.Layout(pp=2, stage_sizes=({"tp": 2}, ONE), microbatches=2),
    "1 + 3, zero": mw.Layout(pp=2, stage_sizes=(ONE, {"dp": 3}), microbatches=2, zero=2),
    "1 + 1 + 2": mw.Layout(pp=3, stage_sizes=(ONE, ONE, {"tp": 2}), microbatches=2),
}


def trainer_of(layout: str) -> tuple[mw.Trainer, Subject]:
    subject = subject_of("GPT")
    trainer = oracle.sharing_capture(("unequal", "GPT"))(
        subject.model, subject.loss_fn, subject.batches[0], plan=LAYOUTS[layout],
        optimizer=oracle.OPTIMIZERS["AdamW"], max_grad_norm=0.5,
    )  # fmt: skip
    return trainer, subject


def saved(layout: str, directory: Path) -> dict[str, torch.Tensor]:
    """Save after the first step, and train on. Returns the state after the second step."""
    trainer, subject = trainer_of(layout)
    trainer.step(subject.batches[0])
    trainer.save(directory)
    trainer.step(subject.batches[1])
    return trainer.full_state_dict(all_ranks=True)


def continued(layout: str, directory: Path) -> dict[str, torch.Tensor]:
    trainer, subject = trainer_of(layout)
    trainer.load(directory)
    trainer.step(subject.batches[1])
    return trainer.full_state_dict(all_ranks=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dp3", "1 + 2"),
        ("2 + 1", "1 + 3, zero"),
        ("1 + 3, zero", "1 + 1 + 2"),
        pytest.param("1 + 2", "dp3", marks=pytest.mark.product),
        pytest.param("1 + 1 + 2", "one rank", marks=pytest.mark.product),
    ],
)
def test_a_checkpoint_of_unequal_stages_continues_under_another_layout(
    ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    expected = ranks(LAYOUTS[first].num_ranks, saved, first, tmp_path / "saved")
    for state in ranks(LAYOUTS[second].num_ranks, continued, second, tmp_path / "saved"):
        assert oracle.largest_error(state, expected[0]) <= oracle.TOLERANCE


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (
            mw.Layout(pp=2, stage_sizes=(ONE, {"dp": 2})), 4,
            r"stage_sizes: stages of 1 \+ 2 = 3 ranks, there are 4\n  -> give sizes whose products sum up to 4",
        ),
        (mw.Layout(pp=3, stage_sizes=(ONE, {"dp": 2})), 3, "2 stage_sizes for pp=3"),
        (mw.Layout(pp=2, stage_sizes=(ONE, {"cp": 2})), 3, r"\[1\]: \{'cp': 2\} has an axis.*\n  -> give sizes"),
        (mw.Layout(pp=2, stage_sizes=(ONE, {"dp": 0})), 1, r"stage_sizes\[1\]: \{'dp': 0\}"),
        (mw.Layout(pp=2, cp=2, stage_sizes=(ONE, ONE)), 2, "stage_sizes with cp, ep, spatial or mixed"),
        (mw.Layout(pp=2, stage_sizes=(ONE, {"dp": 2}), zero=1, zero_ranks=2), 3, "zero_ranks with stage_sizes"),
        (mw.Layout(pp=2, stage_sizes=(ONE, {"tp": 2}), zero=1), 3, "zero=1 with dp=1"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(layout: mw.Layout, world: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout.resolved(world)
