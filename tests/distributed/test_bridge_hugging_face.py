"""Hugging Face's Trainer by our plan: losses, logs, evaluation and files are those of its own on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import meshwright as mw
from meshwright.bridges.hugging_face import PlannedTrainer
from meshwright.errors import PlanError
from tests.distributed.launched import example, launched_by_torchrun, lines_of
from tests.distributed.pool import Ranks

STEPS = 20
Plan = mw.Layout | None


def samples(count: int, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Real text, of whose bytes three bits are kept, so that the loss is about 2. Sentences have different lengths: the
    rest is padding, which has no label."""
    text = Path(str(nn.modules.module.__file__)).read_bytes()[: count * length]
    rows = torch.tensor(list(text)).view(-1, length) % 8
    ends = [length - 3 * (row % 3) for row in range(count)]
    return [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(length) >= end, -100)}
        for row, end in zip(rows, ends, strict=True)
    ]


def gpt2(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    """A small GPT-2. In float64, so that a test does not depend on the order of sums on a machine; transformers still
    adds up the loss in float32, with errors of some 1e-7."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def trainer_of(kind: type[Trainer], directory: Path, more: dict[str, Any], **others: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(directory), use_cpu=True, learning_rate=1e-3, warmup_steps=5, weight_decay=0.1,
        max_grad_norm=1.0, logging_steps=1, eval_strategy="steps", eval_steps=10, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="cosine",
        **{"save_strategy": "no", "max_steps": STEPS, **more},
    )  # fmt: skip
    data = samples(64)
    model = gpt2(torch.float32 if more.get("bf16") else torch.float64)
    trainer = kind(model=model, args=arguments, train_dataset=data[:48], eval_dataset=data[48:], **others)
    return trainer


def by_plan(directory: Path, plan: Plan, more: dict[str, Any], resume: str | None = None) -> list[dict[str, float]]:
    with launched_by_torchrun():
        trainer = trainer_of(PlannedTrainer, directory, more, plan=plan)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(directory / "pushed"))
        assert trainer.planned.trainer._num_changes == 0  # the loop changes nothing that the captured step has read
        history: list[dict[str, float]] = trainer.state.log_history
        return history


ALONE: dict[str, Any] = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
ON_TWO: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
HALVES: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    with launched_by_torchrun():
        trainer = trainer_of(Trainer, tmp_path_factory.mktemp("alone"), ALONE)
        trainer.train()
        return trainer.state.log_history, trainer.model.state_dict()


def compare(history: list[dict[str, float]], expected: list[dict[str, float]], within: float) -> None:
    keys = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")
    assert [row["step"] for row in history] == [row["step"] for row in expected]
    for row, other in zip(history, expected, strict=True):
        for key in (key for key in keys if key in other):
            assert row[key] == pytest.approx(other[key], abs=within), (row["step"], key)


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        pytest.param(None, ON_TWO, id="data-parallel", marks=pytest.mark.product),
        pytest.param(None, ON_TWO | HALVES, id="accumulated"),
        pytest.param(mw.Layout(tp=2), ON_TWO, id="tensor-parallel"),
        pytest.param(mw.Layout(dp=2, zero=3), ON_TWO, id="sharded", marks=pytest.mark.product),
    ],
)
def test_losses_are_those_of_trainer_on_one_process(
    ranks: Ranks, tmp_path: Path, alone: tuple[Any, dict[str, torch.Tensor]], plan: Plan, more: dict[str, Any]
) -> None:
    expected, weights = alone
    for history in ranks(2, by_plan, tmp_path, plan, more):
        compare(history, expected, 1e-6)
    saved = load_file(tmp_path / "pushed" / "model.safetensors")
    for name, value in saved.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)


def test_a_run_continues_from_a_checkpoint_and_pushes_the_best_model(
    ranks: Ranks, tmp_path: Path, alone: tuple[Any, dict[str, torch.Tensor]]
) -> None:
    saving = ON_TWO | {"save_strategy": "steps", "save_steps": 10, "load_best_model_at_end": True,
                       "metric_for_best_model": "loss"}  # fmt: skip
    ranks(2, by_plan, tmp_path, mw.Layout(dp=2, zero=3), saving)
    last = str(tmp_path / "checkpoint-10")
    for history in ranks(2, by_plan, tmp_path / "again", mw.Layout(tp=2), ON_TWO, last):
        compare(history, alone[0], 1e-6)
    with launched_by_torchrun():  # Trainer itself continues from our files too
        plain = trainer_of(Trainer, tmp_path / "plain", ALONE)
        plain.train(resume_from_checkpoint=last)
    compare(plain.state.log_history, alone[0], 1e-6)
    best = load_file(tmp_path / "checkpoint-20" / "model.safetensors")
    pushed = tmp_path / "pushed"
    for name, value in load_file(pushed / "model.safetensors").items():
        assert torch.equal(value, best[name])
    assert {path.name for path in pushed.iterdir()} >= {"config.json", "generation_config.json", "training_args.bin"}
    assert GPT2LMHeadModel.from_pretrained(pushed).config.n_embd == 16


def with_accuracy(directory: Path, plan: Plan) -> tuple[float, int, str]:
    def accuracy(prediction: Any) -> dict[str, float]:
        right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"right": float(right.mean())}

    with launched_by_torchrun():
        more = ON_TWO | {"max_steps": 2, "activation_checkpointing": True, "bf16": True}
        trainer = trainer_of(PlannedTrainer, directory, more, plan=plan, compute_metrics=accuracy)
        trainer.train()
        recompute = trainer.planned.trainer.plan.layout.recompute
        return trainer.evaluate()["eval_right"], len(trainer.predict(samples(6)).predictions), recompute


def test_metrics_predictions_precision_and_recomputation(ranks: Ranks, tmp_path: Path) -> None:
    (first, *others) = ranks(2, with_accuracy, tmp_path, None)
    assert others == [first]
    assert first[1:] == (6, "full")
    assert 0 <= first[0] <= 1


def adapters(directory: Path, planned: bool, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    with launched_by_torchrun():
        torch.manual_seed(1)
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        model = get_peft_model(gpt2(torch.float32), lora)
        arguments = TrainingArguments(
            output_dir=str(directory), use_cpu=True, max_steps=6, learning_rate=1e-2, logging_steps=1, report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
            per_device_train_batch_size=4 if planned else 8,
        )  # fmt: skip
        data = samples(48)
        if planned:
            trainer: Any = PlannedTrainer(model, arguments, train_dataset=data, plan=plan)
        else:
            trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        trainer.save_model(str(directory / "adapter"))
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return losses, load_file(directory / "adapter" / "adapter_model.safetensors") if not planned else {}


@pytest.mark.parametrize(
    "plan",
    [pytest.param(mw.Layout(dp=2), id="dp", marks=pytest.mark.product), pytest.param(mw.Layout(tp=2), id="tp")],
)
def test_adapters_of_peft_are_trained_and_saved_as_peft_saves_them(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    losses, weights = adapters(tmp_path / "plain", False, None)
    for planned_losses, _ in ranks(2, adapters, tmp_path / "planned", True, plan):
        assert planned_losses == pytest.approx(losses, abs=5e-6)  # adapters are in float32
    saved = tmp_path / "planned" / "adapter"
    ours = load_file(saved / "adapter_model.safetensors")
    assert ours.keys() == weights.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5)
    tuned = PeftModel.from_pretrained(gpt2(torch.float32), str(saved)).state_dict()
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_B.default.weight"
    assert torch.equal(tuned[name], ours[name.replace(".default", "")])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("fp16", True), ("auto_find_batch_size", True), ("use_liger_kernel", True), ("torch_empty_cache_steps", 2),
        ("bf16_full_eval", True), ("average_tokens_across_devices", False),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path, argument: str, value: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    setattr(arguments, argument, value)
    with pytest.raises(PlanError, match=f"TrainingArguments, {argument}: {value} cannot be honoured\n  -> "):
        PlannedTrainer(gpt2(), arguments)


def test_other_refusals(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], dataloader_drop_last=True, gradient_accumulation_steps=2
    )
    with pytest.raises(PlanError, match="dataloader_drop_last"):
        PlannedTrainer(gpt2(), arguments)
    with pytest.raises(PlanError, match="plan_options: there is no option 'max_norm'"):
        PlannedTrainer(gpt2(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True), plan_options={"max_norm": 1})


@pytest.mark.parametrize(
    "lora", [pytest.param(False, id="whole", marks=pytest.mark.product), pytest.param(True, id="adapters")]
)
def test_the_example_runs_on_two_ranks(ranks: Ranks, tmp_path: Path, lora: bool) -> None:
    assert lines_of("hugging_face_trainer.py") < 60
    more = ["--lora"] if lora else ["--tp", "2"]
    first, other = ranks(2, example, "hugging_face_trainer.py", "--steps", "5", "--folder", str(tmp_path), *more)
    assert "held-out loss 5." in first
    assert "held-out" not in other
    assert (tmp_path / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
