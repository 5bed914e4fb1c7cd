"""Hugging Face's GPT-2, unmodified, learns bytes of real text on any number of ranks.

    python examples/hugging_face_gpt2.py
    torchrun --nproc-per-node 2 examples/hugging_face_gpt2.py --dp 2
    torchrun --nproc-per-node 2 examples/hugging_face_gpt2.py --dp 1 --tp 2
    torchrun --nproc-per-node 4 examples/hugging_face_gpt2.py --dp 2 --tp 2 --full

The weights are random at the start; nothing is downloaded. `--full` takes GPT-2's own 124 million parameters, whose
vocabulary of 50,257 does not divide over `tp`, so that head and embedding stay whole: the printed plan says so.
"""

import argparse
import math

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright.data.loaders import TextLoader
from meshwright.runtime.corpus import standard_library_text


def loss_fn(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["targets"], shift_labels=batch["targets"]).loss
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="of the global batch, in sequences")
    parser.add_argument("--dp", type=int, default=-1, help="ranks that divide the batch; -1: those that are left")
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide heads and hidden features")
    parser.add_argument("--full", action="store_true", help="GPT-2 with 124 million parameters")
    arguments = parser.parse_args()

    tiny = GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config() if arguments.full else tiny)
    train, held_out = standard_library_text(train_bytes=2_000_000, held_out_bytes=50_000)
    loader = TextLoader(train, sequence_length=128, batch_size=arguments.batch_size)
    trainer = mw.parallelize(
        model,
        loss_fn,
        next(iter(loader)),
        plan=mw.Layout(dp=arguments.dp, tp=arguments.tp),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        max_grad_norm=1.0,
    )
    if trainer.rank == 0:
        print(trainer.plan.explain())
    for batch in loader:
        loss = trainer.step(batch)
        if trainer.rank == 0 and (trainer.step_number % 10 == 0 or trainer.step_number == arguments.steps):
            print(f"step {trainer.step_number}/{arguments.steps}  loss {float(loss):.4f}")
        if trainer.step_number == arguments.steps:
            break
    losses = [float(trainer.evaluate(batch)) for batch in TextLoader(held_out, 128, arguments.batch_size, epochs=1)]
    if trainer.rank == 0:
        print(f"held-out bits per byte: {sum(losses) / len(losses) / math.log(2):.3f}")


if __name__ == "__main__":
    main()
