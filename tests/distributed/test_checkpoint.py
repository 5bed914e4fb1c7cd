"""Checkpoints over ranks: saved under one layout, continued under any, refused by every rank at once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.data.loaders import Loader, TensorLoader
from meshwright.errors import MeshwrightError
from meshwright.ir import files
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.optim import LAMB, LARS
from meshwright.runtime import shards
from tests.distributed.oracle import TOLERANCE, largest_error
from tests.distributed.pool import Ranks, RanksFailedError

T = TypeVar("T")
BATCH, SEQUENCE, VOCABULARY = 4, 8, 128
STEPS_BEFORE, STEPS_AFTER = 3, 3
LAYOUTS: Mapping[str, mw.Layout] = {
    "one rank": mw.Layout(),
    "dp2": mw.Layout(dp=2),
    "tp2": mw.Layout(tp=2),
    "dp2 x tp2": mw.Layout(dp=2, tp=2),
}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "LARS": lambda parameters: LARS(parameters, lr=10.0),
    "LAMB": lambda parameters: LAMB(parameters, lr=1e-2),
}


def num_ranks(layout: str) -> int:
    return LAYOUTS[layout].dp * LAYOUTS[layout].feature_ranks


@dataclass
class Run:
    """What the steps after the checkpoint gave: losses, and at their end the whole model, on every rank."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    lrs: list[float] = field(default_factory=list)
    step_number: int = 0
    num_split: int = 0
    blocks: int = 1


# --- on the ranks ----------------------------------------------------------------------------------------------------


def gpt_trainer(layout: str, optimizer: str, dropout: float = 0.0, seed: int = 0) -> tuple[mw.Trainer, Loader, Any]:
    """A GPT with a fused projection (three blocks) and a tied head, its data, and a learning-rate schedule."""
    config = GPTConfig(
        layers=1, width=16, heads=2, vocabulary=VOCABULARY, sequence_length=SEQUENCE, dropout=dropout, tied_head=True
    )
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (5 * BATCH, SEQUENCE + 1))
    loader = TensorLoader({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}, BATCH)
    example = {"tokens": tokens[:BATCH, :-1], "targets": tokens[:BATCH, 1:]}
    torch.manual_seed(seed)
    trainer = mw.parallelize(
        GPT(config).double(), language_model_loss, example, plan=LAYOUTS[layout], optimizer=OPTIMIZERS[optimizer],
        max_grad_norm=1.0, seed=seed,
    )  # fmt: skip
    return trainer, loader, torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.8)


def trained(trainer: mw.Trainer, loader: Loader, scheduler: Any, steps: int) -> Run:
    run, batches = Run(), iter(loader)
    for _ in range(steps):
        run.losses.append(float(trainer.step(next(batches))))
        scheduler.step()
        run.lrs.append(trainer.optimizer.param_groups[0]["lr"])
    run.state = trainer.full_state_dict(all_ranks=True)
    run.step_number = trainer.step_number
    run.num_split = sum(trainer.parameters.is_sharded(name) for name in trainer.parameters)
    run.blocks = max(
        len(shards.part_of(trainer.parameters, name, trainer.parameters[name]).chunks) for name in trainer.parameters
    )
    return run


def train_and_save(path: str, layout: str, optimizer: str, dropout: float = 0.0) -> Run:
    """Save on the way; what the same trainer does afterwards is what a loaded one must do."""
    trainer, loader, scheduler = gpt_trainer(layout, optimizer, dropout)
    trained(trainer, loader, scheduler, STEPS_BEFORE)
    trainer.save(path, loader=loader, extra={"scheduler": scheduler})
    return trained(trainer, loader, scheduler, STEPS_AFTER)


def load_and_train(path: str, layout: str, optimizer: str, dropout: float = 0.0) -> Run:
    """In a trainer with other weights, another seed, and the loader at its start."""
    trainer, loader, scheduler = gpt_trainer(layout, optimizer, dropout, seed=11)
    trainer.load(path, loader=loader, extra={"scheduler": scheduler})
    return trained(trainer, loader, scheduler, STEPS_AFTER)


def mlp_trainer(
    sizes: tuple[int, ...] = (6, 8, 4), layout: mw.Layout | None = None, optimizer: str = "SGD"
) -> tuple[mw.Trainer, dict[str, Tensor]]:
    batch = {"inputs": torch.randn(8, sizes[0], dtype=torch.float64), "label": torch.randint(sizes[-1], (8,))}
    trainer = mw.parallelize(
        MLP(sizes).double(),
        classification_loss,
        batch,
        plan=layout or mw.Layout(tp=-1),
        optimizer=OPTIMIZERS[optimizer],
    )
    return trainer, batch


def refused(action: Callable[[], object]) -> str:
    """The text of the error that an action ends with."""
    try:
        action()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuse_everything(directory: str) -> dict[str, str]:
    """What each kind of bad checkpoint is refused with, on this rank; and that none of it changed the trainer."""
    root, rank = Path(directory), dist.get_rank()
    trainer, batch = mlp_trainer()
    trainer.step(batch)
    trainer.save(root / "good")
    before = {name: trainer.parameters[name].detach().clone() for name in trainer.parameters}
    messages = {"missing": refused(lambda: trainer.load(root / "god"))}
    for name in ("half", "damaged", "cut"):
        if rank == 0:
            shutil.copytree(root / "good", root / name)
            data = next((root / name).glob("data-*"))
            if name == "half":
                (root / name / "manifest.json").unlink()
            elif name == "damaged":  # the second rank's share: only that rank can notice
                flip_last_byte(sorted(data.iterdir())[1])
            else:
                (data / "__1_0.distcp").write_bytes(b"")
        dist.barrier()
        messages[name] = refused(lambda name=name: trainer.load(root / name))  # type: ignore[misc]
    messages["paths"] = refused(lambda: trainer.save(root / f"of rank {rank}"))
    loader = TensorLoader({"x": torch.arange(8)}, batch_size=2)
    for _ in zip(range(rank), loader, strict=False):
        pass
    messages["positions"] = refused(lambda: trainer.save(root / "positions", loader=loader))
    other, _ = mlp_trainer((6, 8, 8, 4))
    messages["model"] = refused(lambda: other.load(root / "good"))
    assert all(torch.equal(before[name], trainer.parameters[name]) for name in before)
    return messages


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def fail_while_writing(directory: str) -> dict[str, str]:
    """Rank 1 cannot write its tensors, then rank 0 not its manifest: the checkpoint before stays."""
    root, rank = Path(directory), dist.get_rank()
    trainer, batch = mlp_trainer()
    trainer.save(root / "ckpt")
    saved = {name: trainer.parameters[name].detach().clone() for name in trainer.parameters}
    trainer.step(batch)
    messages = {}

    def full_disk(*args: object) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shards.StoredPart, "view", full_disk)
        messages["tensors"] = refused(lambda: trainer.save(root / "ckpt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_atomically", full_disk)
        messages["trainer"] = refused(lambda: trainer.save(root / "ckpt"))
    messages["left"] = ", ".join(sorted(path.name.split("-")[0] for path in (root / "ckpt").iterdir()))
    trainer.load(root / "ckpt")
    assert all(torch.equal(saved[name], trainer.parameters[name]) for name in saved)
    assert trainer.step_number == 0
    return messages


def save_several_and_damage_the_last(directory: str) -> tuple[list[str], str, int]:
    trainer, batch = mlp_trainer(layout=mw.Layout(dp=-1))
    for _ in range(4):
        trainer.step(batch)
        trainer.save_in(directory, keep=3)
    names = sorted(path.name for path in Path(directory).iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        flip_last_byte(next(Path(directory, names[-1]).glob("data-*/__1_0.distcp")))
        Path(directory, names[-2], "manifest.json").unlink()
    dist.barrier()
    taken = trainer.load_latest(directory)
    assert taken is not None
    return names, taken.name, trainer.step_number


def die_while_saving(path: str) -> None:
    """Rank 0 dies when everything is written and only the manifest is not replaced yet."""
    trainer, batch = mlp_trainer()
    trainer.load(path)
    trainer.step(batch)

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", die)
        trainer.save(path)


def step_in(path: str) -> int:
    trainer, _ = mlp_trainer()
    trainer.load(path)
    return trainer.step_number


class Factored(torch.optim.SGD):
    """An optimizer whose state is a row of the parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = parameter.detach().reshape(parameter.shape[0], -1)[:, 0].clone()
        return super().step(closure)


def save_state_of_an_unknown_shape(directory: str) -> str:
    batch = {"inputs": torch.randn(8, 6), "label": torch.randint(4, (8,))}
    trainer = mw.parallelize(
        MLP((6, 8, 4)), classification_loss, batch, plan=mw.Layout(tp=2), optimizer=lambda p: Factored(p, lr=0.1)
    )
    trainer.step(batch)
    return refused(lambda: trainer.save(Path(directory, "ckpt")))


def under(ranks: Ranks, layout: str, action: Callable[..., T], *args: object) -> list[T]:
    """Run on as many ranks as the layout has; one rank is this process, without torch.distributed."""
    count = num_ranks(layout)
    return [action(*args)] if count == 1 else ranks(count, action, *args)


# --- the tests -------------------------------------------------------------------------------------------------------

SAVED_AND_LOADED = [
    ("one rank", "Adagrad", ["dp2 x tp2", "tp2"]),
    ("dp2", "RMSprop", ["tp2"]),
    ("tp2", "AdamW", ["one rank", "dp2"]),
    ("dp2 x tp2", "SGD", ["tp2", "one rank"]),
    ("tp2", "LAMB", ["one rank"]),
    ("one rank", "LARS", ["tp2"]),
]


@pytest.mark.parametrize(("saved", "optimizer", "loaded"), SAVED_AND_LOADED)
def test_training_goes_on_under_another_layout(
    ranks: Ranks, tmp_path: Path, saved: str, optimizer: str, loaded: list[str]
) -> None:
    path = str(tmp_path / "ckpt")
    expected = under(ranks, saved, train_and_save, path, saved, optimizer)[0]
    assert expected.num_split == 0 or "tp2" in saved
    for layout in loaded:
        for run in under(ranks, layout, load_and_train, path, layout, optimizer):
            assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE)
            assert largest_error(run.state, expected.state) <= TOLERANCE
            assert run.lrs == expected.lrs
            assert run.step_number == expected.step_number == STEPS_BEFORE + STEPS_AFTER
            assert bool(run.num_split) == ("tp2" in layout)
            assert run.blocks == (3 if "tp2" in layout else 1), "the fused projection is three blocks"


@pytest.mark.parametrize(("layout", "optimizer", "dropout"), [("dp2", "NAdam", 0.2), ("tp2", "AdamW", 0.2)])
def test_training_goes_on_bit_by_bit_under_the_same_layout(
    ranks: Ranks, tmp_path: Path, layout: str, optimizer: str, dropout: float
) -> None:
    path = str(tmp_path / "ckpt")
    expected = under(ranks, layout, train_and_save, path, layout, optimizer, dropout)
    inner = under(ranks, layout, load_and_train, path, layout, optimizer, dropout)
    for run, other in zip(inner, expected, strict=True):
        assert run.losses == other.losses
        assert all(torch.equal(run.state[name], other.state[name]) for name in other.state)


def test_replicated_tensors_are_written_once(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {}
    for layout in ("one rank", "dp2"):
        path = tmp_path / layout
        under(ranks, layout, save_mlp, str(path), LAYOUTS[layout])
        sizes[layout] = [file.stat().st_size for file in path.glob("data-*/*.distcp")]
    assert len(sizes["dp2"]) == 2, "both ranks write"
    assert sum(sizes["dp2"]) == pytest.approx(sum(sizes["one rank"]), rel=0.01)


def save_mlp(path: str, layout: mw.Layout) -> None:
    mlp_trainer((6, 8, 4), layout)[0].save(path)


def test_every_rank_refuses_a_bad_checkpoint_alike(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, refuse_everything, str(tmp_path))
    assert first == second
    assert first["missing"] == (f"CheckpointError: {tmp_path}/god: there is no checkpoint\n  -> did you mean `good`?")
    assert first["half"] == (
        f"DamagedCheckpointError: {tmp_path}/half: half-written: there is no manifest.json\n"
        "  -> load another checkpoint"
    )
    data = next((tmp_path / "good").glob("data-*")).name
    assert first["damaged"] == (
        f"DamagedCheckpointError: {tmp_path}/damaged/{data}/__0_0.distcp: damaged: its checksum is not the one "
        "that was written\n  -> restore it from a copy, or load another checkpoint"
    )
    size = (tmp_path / "good" / data / "__1_0.distcp").stat().st_size
    assert first["cut"] == (
        f"DamagedCheckpointError: {tmp_path}/cut/{data}/__1_0.distcp: damaged: 0 bytes, {size:,} were written\n"
        "  -> restore it from a copy, or load another checkpoint"
    )
    assert first["paths"] == (
        f"CheckpointError: checkpoint: the path is {tmp_path}/of rank 1 on rank 1, {tmp_path}/of rank 0 on "
        "rank 0\n  -> call save and load with the same on every rank"
    )
    assert "the loader's position is {'epoch': 0, 'position': 2, " in first["positions"]
    assert first["model"].startswith(f"CheckpointError: {tmp_path}/good: the checkpoint is of another model: ")


def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, fail_while_writing, str(tmp_path))
    assert first == second
    assert first["tensors"] == (
        f"DiskError: {tmp_path}/ckpt: tensors could not be written (rank 1: No space left on device)\n"
        "  -> check the disk's space and permissions"
    )
    assert first["trainer"] == (
        f"DiskError: {tmp_path}/ckpt: No space left on device\n  -> check the disk's space and permissions"
    )
    assert first["left"] == "data, manifest.json", "what the failed saves wrote is gone"


def test_a_rank_that_is_killed_while_it_saves_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    ranks(2, save_mlp, str(path), mw.Layout(tp=2))
    with pytest.raises(RanksFailedError, match="exit code -9"):
        ranks(2, die_while_saving, str(path))
    assert len(list(path.glob("data-*"))) == 2, "it was in the middle"
    assert ranks(2, step_in, str(path)) == [0, 0]


def test_the_last_whole_checkpoint_is_taken_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for names, taken, step in ranks(2, save_several_and_damage_the_last, str(tmp_path)):
        assert names == ["step-00000002", "step-00000003", "step-00000004"]
        assert (taken, step) == ("step-00000002", 2)


def test_split_state_of_an_unknown_shape_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, save_state_of_an_unknown_shape, str(tmp_path)):
        assert text == (
            "CheckpointError: optimizer Factored: its state 'row' of layers.0.weight has shape [4], this rank's part "
            "of the parameter [4, 6]\n"
            "  -> use an optimizer whose state has the parameter's shape, or a layout that does not split it"
        )
