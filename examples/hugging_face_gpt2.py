"""Hugging Face's GPT-2, unmodified, learns bytes of real text on any number of ranks.

    python examples/hugging_face_gpt2.py
    torchrun --nproc-per-node 2 examples/hugging_face_gpt2.py
    torchrun --nproc-per-node 2 examples/hugging_face_gpt2.py --tp 2
    torchrun --nproc-per-node 4 examples/hugging_face_gpt2.py --tp 2 --full 1

The weights are random at the start; nothing is downloaded. `--full 1` takes GPT-2's own 124 million parameters, whose
vocabulary of 50,257 does not divide over `tp`, so that head and embedding stay whole: the printed plan says so.
"""

import torch
from application import Outcome, Training, parallelized, run
from library_text import TRIVIAL, frequency_bits, held_out_bits, texts
from torch import Tensor

import meshwright as mw
from meshwright.data.loaders import TextLoader
from meshwright.errors import DataError

LENGTH, BATCH = 128, 8


def loss_fn(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, which is the cross-entropy of the next byte in nats."""
    loss: Tensor = model(input_ids=batch["tokens"], labels=batch["targets"], shift_labels=batch["targets"]).loss
    return loss


def training(ranks: int, tp: int = 1, full: int = 0) -> Training:
    """The trainer for this number of ranks, of which ``tp`` divide heads and hidden features, and the others the batch
    of 8 windows of 128 bytes. Raise a DataError if transformers is not installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise DataError(
            "transformers, which has GPT-2, is not installed", remedy="pip install 'meshwright[hf]'"
        ) from None
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config() if full else GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    loader = TextLoader(texts()[0], LENGTH, BATCH)
    return parallelized(model, loss_fn, loader, mw.Layout(dp=-1, tp=tp), lr=1e-3, max_grad_norm=1.0)


def main(ranks: int, steps: int = 200, goal: float = 4.1, tp: int = 1, full: int = 0) -> list[Outcome]:
    """Train, and compute the bits per byte of text that was not trained on."""
    model = training(ranks, tp, full)
    model.run(steps)
    train, held_out = texts()
    bits = held_out_bits(model.trainer, held_out, LENGTH, BATCH)
    return [Outcome("held-out text", bits, TRIVIAL, frequency_bits(train, held_out), goal, "bits per byte", lower=True)]


if __name__ == "__main__":
    run(main, __doc__)
