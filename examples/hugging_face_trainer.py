"""Hugging Face's Trainer fine-tunes GPT-2 on real text, and trains it by a plan of Meshwright.

    python examples/hugging_face_trainer.py
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --tp 2
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --lora

The weights are random at the start; nothing is downloaded. `--lora` trains adapters of PEFT, and saves only them.
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import meshwright as mw
from meshwright.bridges.hugging_face import PlannedTrainer
from meshwright.runtime.corpus import standard_library_text


def samples(text: bytes, length: int = 64) -> list[dict[str, Tensor]]:
    rows = torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8).view(-1, length).long()
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide heads and hidden features")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4")
    parser.add_argument("--folder", default="tuned")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    if arguments.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))
    train, held_out = standard_library_text(train_bytes=64 * 256, held_out_bytes=64 * 16)
    settings = TrainingArguments(
        output_dir=arguments.folder, max_steps=arguments.steps, per_device_train_batch_size=4, learning_rate=3e-3,
        warmup_steps=2, weight_decay=0.1, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    plan = mw.Layout(dp=-1, tp=arguments.tp)
    trainer = PlannedTrainer(model, settings, None, samples(train), samples(held_out), plan=plan)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"held-out loss {loss:.4f}; the model is in {arguments.folder}")


if __name__ == "__main__":
    main()
