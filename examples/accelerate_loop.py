"""A loop with accelerate, whose model trains by a plan of Meshwright: GPT-2 learns bytes of real text.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py --tp 2
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright.bridges.accelerate import PlannedAccelerator
from meshwright.runtime.corpus import standard_library_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide heads and hidden features")
    parser.add_argument("--save", default="", help="a folder for accelerate's checkpoint")
    arguments = parser.parse_args()

    accelerator = PlannedAccelerator(cpu=not torch.cuda.is_available(), plan=mw.Layout(dp=-1, tp=arguments.tp))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    num_bytes = 64 * 8 * arguments.steps
    text, _ = standard_library_text(train_bytes=2 * num_bytes, held_out_bytes=64)
    rows: Any = torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8).view(-1, 64).long()
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    loader: Any = DataLoader(rows, batch_size=8)  # 8 samples for all ranks together; the plan divides them
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for step, tokens in enumerate(loader):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            accelerator.print(f"step {step + 1}/{arguments.steps}  loss {loss.item():.4f}")
    if arguments.save:
        accelerator.save_state(arguments.save)


if __name__ == "__main__":
    main()
