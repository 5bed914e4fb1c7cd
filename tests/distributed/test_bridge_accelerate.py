"""accelerate by our plan: a loop has the losses that accelerate's own has on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

import meshwright as mw
from meshwright.bridges.accelerate import PlannedAccelerator
from meshwright.errors import MeshwrightError
from tests.distributed.launched import example, launched_by_torchrun, lines_of
from tests.distributed.pool import Ranks
from tests.distributed.test_bridge_hugging_face import gpt2, samples


def loop(accelerator: Any, directory: Path, load: bool = False, accumulate: bool = False) -> dict[str, Any]:
    """A loop as accelerate's documentation has it: 4 steps, a save after 2; or a load and the last 2."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    data: Any = samples(40)
    loader: Any = DataLoader(data[:32], batch_size=8)
    held_out: Any = DataLoader(data[32:], batch_size=8)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    if load:
        accelerator.load_state(directory / "state")
    losses, norms = [], []
    model.train()
    for number, batch in enumerate(loader):
        if load and number < 2:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if number == 1:
            accelerator.save_state(directory / "state")
    model.eval()
    right = []
    with torch.no_grad():
        for batch in held_out:
            scores = model(**batch).logits[:, :-1].argmax(-1)
            right.append(accelerator.gather_for_metrics(scores == batch["labels"][:, 1:]))
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "right": torch.cat(right).sum().item(), "state": state,
            "unwrapped": isinstance(accelerator.unwrap_model(model), GPT2LMHeadModel)}  # fmt: skip


def by_plan(plan: mw.Layout | None, directory: Path, load: bool, steps: int = 1) -> dict[str, Any]:
    with launched_by_torchrun():
        return loop(PlannedAccelerator(cpu=True, plan=plan, gradient_accumulation_steps=steps), directory, load)


def by_accelerate(directory: Path, load: bool = False, steps: int = 1) -> dict[str, Any]:
    with launched_by_torchrun():
        return loop(Accelerator(cpu=True, gradient_accumulation_steps=steps), directory, load)


def compare(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms"):
        assert result[key] == pytest.approx(expected[key], abs=1e-6)
    assert result["right"] == expected["right"]
    assert result["unwrapped"]
    for name, value in result["state"].items():
        torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("plan", [None, mw.Layout(tp=2)], ids=["dp", "tp"])
def test_a_loop_has_the_losses_of_one_process(ranks: Ranks, tmp_path: Path, plan: mw.Layout | None) -> None:
    expected = by_accelerate(tmp_path / "one")
    for result in ranks(2, by_plan, plan, tmp_path / "two", False):
        compare(result, expected)
    rest = by_accelerate(tmp_path / "one", load=True)
    for result in ranks(2, by_plan, plan, tmp_path / "two", True):
        compare(result, rest)
    compare(by_accelerate(tmp_path / "two", load=True), rest)  # accelerate itself continues from our files


def test_accumulated_batches_are_those_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    expected = by_accelerate(tmp_path, steps=2)
    for result in ranks(2, by_plan, None, tmp_path, False, 2):
        compare(result, expected)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        return result


def loss_of(model: nn.Module, inputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), label)


def test_a_loss_outside_of_the_model_is_given_as_a_function() -> None:
    with launched_by_torchrun():
        accelerator = PlannedAccelerator(cpu=True, loss_fn=loss_of)
        torch.manual_seed(0)
        plain = Classifier()
        inputs, label = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        expected = loss_of(plain, inputs, label)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        loss = model(inputs, label)
        torch.testing.assert_close(loss, expected)
        accelerator.backward(loss)
        (gradient,) = torch.autograd.grad(expected, [plain.layer.weight])
        torch.testing.assert_close(plain.layer.weight.grad, gradient)


def test_refusals_name_what_cannot_be_honoured() -> None:
    with launched_by_torchrun():
        with pytest.raises(MeshwrightError, match="plan_options: there is no option 'layout'"):
            PlannedAccelerator(cpu=True, plan_options={"layout": 1})
        accelerator = PlannedAccelerator(cpu=True)
        model, optimizer = accelerator.prepare(gpt2(), torch.optim.SGD(gpt2().parameters(), lr=0.1))
        with pytest.raises(MeshwrightError, match="not the model's"):
            model(**{name: value[None].repeat(2, 1) for name, value in samples(1)[0].items()})
        with pytest.raises(MeshwrightError, match="prepared already"):
            accelerator.prepare(gpt2())


def test_the_example_runs_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert lines_of("accelerate_loop.py") < 60
    folder = str(tmp_path / "state")
    first, other = ranks(2, example, "accelerate_loop.py", "--tp", "2", "--steps", "10", "--save", folder)
    five, ten = (float(line.split("loss ")[1]) for line in first.splitlines())
    assert ten < five
    assert other == ""
    assert (tmp_path / "state" / "model.safetensors").exists()
