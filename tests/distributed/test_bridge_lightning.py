"""Lightning by our plan: losses, logs, validation and checkpoints are those of Lightning on one process."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.bridges.lightning import PlannedStrategy
from meshwright.errors import MeshwrightError
from tests.distributed.launched import example, launched_by_torchrun, lines_of
from tests.distributed.pool import Ranks


class Words(lightning.LightningModule):
    """Predicts the next byte from the eight before it."""

    def __init__(self, uses_number: bool = False, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses_number, self.automatic_optimization = uses_number, automatic
        self.layers = nn.Sequential(
            nn.Embedding(128, 8), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 128)
        )
        self.seen: list[dict[str, float]] = []

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(words)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        words, following = batch
        loss = F.cross_entropy(self(words), following)
        if self.uses_number and batch_idx % 2:
            loss = 2 * loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"tenth": loss / 10, "constant": 3.0})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        words, following = batch
        scores = self(words)
        self.log("val_loss", F.cross_entropy(scores, following))
        self.log("right", (scores.argmax(1) == following).double().mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = self.trainer.callback_metrics
        self.seen.append({name: float(logged[name]) for name in ("loss_step", "tenth", "constant")})
        self.seen[-1]["returned"] = float(outputs["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(begin: int, count: int) -> DataLoader[Any]:
    text = torch.tensor(list(Path(str(nn.modules.module.__file__)).read_bytes())) % 128
    windows = text[begin : begin + count + 8].unfold(0, 9, 1)
    return DataLoader(TensorDataset(windows[:, :8].contiguous(), windows[:, 8].contiguous()), batch_size=16)


def trained(strategy: Any, devices: int, directory: Path, resume: bool = False, **others: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3 if resume else 2, gradient_clip_val=0.5,
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        enable_checkpointing=False, default_root_dir=directory, **others,
    )  # fmt: skip
    module = Words()
    trainer.fit(module, loader(0, 64), loader(64, 32), ckpt_path=directory / "saved.ckpt" if resume else None)
    trainer.save_checkpoint(directory / ("again.ckpt" if resume else "saved.ckpt"))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.seen, logged, {name: value.clone() for name, value in module.state_dict().items()}


def by_plan(plan: mw.Layout | None, directory: Path, resume: bool, more: dict[str, Any]) -> Any:
    with launched_by_torchrun():
        return trained(PlannedStrategy(plan=plan), 2, directory, resume, **more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("alone")
    return trained("auto", 1, directory), trained("auto", 1, directory, resume=True), directory


def compare(result: Any, expected: Any, within: float = 1e-6) -> None:
    for row, other in zip(result[0], expected[0], strict=True):
        assert row == pytest.approx(other, abs=within)
    assert result[1] == pytest.approx(expected[1], abs=within)
    for name, value in result[2].items():
        torch.testing.assert_close(value, expected[2][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("plan", [None, mw.Layout(tp=2), mw.Layout(dp=2, zero=3)], ids=["dp", "tp", "zero-3"])
def test_fit_is_that_of_one_process(ranks: Ranks, tmp_path: Path, alone: Any, plan: mw.Layout | None) -> None:
    first, again, _ = alone
    for result in ranks(2, by_plan, plan, tmp_path, False, {}):
        compare(result, first)
    for result in ranks(2, by_plan, plan, tmp_path, True, {}):
        compare(result, again)


def test_a_checkpoint_continues_in_lightning_itself(ranks: Ranks, tmp_path: Path, alone: Any) -> None:
    ranks(2, by_plan, mw.Layout(dp=2, zero=3), tmp_path, False, {})
    compare(trained("auto", 1, tmp_path, resume=True), alone[1])


def test_accumulated_batches_are_those_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    expected = trained("auto", 1, tmp_path, accumulate_grad_batches=2)
    for result in ranks(2, by_plan, None, tmp_path, False, {"accumulate_grad_batches": 2}):
        compare(result, expected)


def in_bfloat16(directory: Path) -> tuple[Any, Any]:
    with launched_by_torchrun():
        strategy = PlannedStrategy()
        trained(strategy, 2, directory, precision="bf16-mixed")
        return strategy.trained.plan.precision, strategy.trained.metrics["grad_norm"] is not None


def test_bfloat16_is_that_of_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, in_bfloat16, tmp_path) == [("bfloat16", True)] * 2


def refusal(make: dict[str, Any], **others: Any) -> str:
    module = Words(**make)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=PlannedStrategy(), max_steps=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **others,
    )  # fmt: skip
    with pytest.raises(MeshwrightError) as raised:
        trainer.fit(module, loader(0, 32), loader(64, 32))
    return str(raised.value)


def test_refusals_name_what_cannot_be_honoured() -> None:
    with launched_by_torchrun():
        assert "manual optimization" in refusal({"automatic": False})
        assert "batch_idx" in refusal({"uses_number": True})
        with pytest.raises(MeshwrightError, match="precision: '64-true' cannot be honoured"):
            refusal({}, precision="64-true")


def test_the_example_runs_on_two_ranks(ranks: Ranks) -> None:
    assert lines_of("lightning_module.py") <= 60
    first, other = ranks(2, example, "lightning_module.py", "--devices", "2", "--tp", "2", "--epochs", "3")
    assert other == ""
    assert float(first.split("right: ")[1].removesuffix("%\n")) > 85
