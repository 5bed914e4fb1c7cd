"""A model of code reads the functions of this Python's own standard library, and guesses what they are called.

    python examples/function_names.py
    torchrun --nproc-per-node 2 examples/function_names.py

A function becomes a row of tokens: the words of its arguments and body (names are cut at underscores and capitals), a
mark, and the words of its name. A GPT learns the next token of such rows, and so completes code and says names (compare
Alon et al., "code2vec", 2019). It is judged by functions of other files, without those that also stand in a file that
it read. Names such as `__init__`, which Python prescribes, are left out. Batches are split over the ranks.
"""

import torch
import torch.nn.functional as F
from application import Outcome, Training, parallelized, run
from library_functions import BODY, NAME, OTHER, VOCABULARY, data
from torch import Tensor, nn

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import GPT, GPTConfig
from meshwright.models.losses import IGNORED


def code_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the next token, and that of the words of names; rare tokens do not count. The metrics: how many
    tokens, and how many first words of names, have the largest logit."""
    logits = model(batch["tokens"])
    targets = batch["targets"].masked_fill(batch["targets"] == OTHER, IGNORED)
    everywhere, names = (
        F.cross_entropy(logits[:, first:].flatten(0, 1), targets[:, first:].flatten(), ignore_index=IGNORED)
        for first in (0, BODY)
    )
    right = logits.argmax(dim=-1) == targets
    return everywhere + names, {"right": right[:, :BODY].sum(), "names_right": right[:, BODY].sum()}


def training(ranks: int, files: int = 1000) -> Training:
    """The trainer for this number of ranks, and batches of 64 functions."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, vocabulary=VOCABULARY, sequence_length=BODY + NAME + 1))
    loader = TensorLoader(data(files)[0], batch_size=64, drop_last=True)
    training = parallelized(model, code_loss, loader, mw.Layout(dp=ranks), lr=5e-3, max_grad_norm=1.0)
    return training._replace(warmup=0.1)


def main(
    ranks: int, steps: int = 500, files: int = 1000, goal: float = 7.0, goal_tokens: float = 28.0
) -> list[Outcome]:
    """Train, and count the held-out tokens and first words of names that the model finds."""
    model = training(ranks, files)
    model.run(steps)
    train, held_out = data(files)
    right = names = 0
    for batch in TensorLoader(held_out, batch_size=32, shuffle=False, drop_last=True, epochs=1):
        model.trainer.evaluate(batch)
        right += int(model.trainer.metrics["right"])
        names += int(model.trainer.metrics["names_right"])
    count = len(held_out["tokens"]) // 32 * 32

    def share(count_right: int | Tensor, columns: slice) -> float:
        """In percent of the tokens in these columns, also of the rare ones, which are never right."""
        return 100 * float(count_right) / int((held_out["targets"][:count, columns] != IGNORED).sum())

    def most_frequent(columns: slice) -> float:
        known, wanted = train["targets"][:, columns], held_out["targets"][:count, columns]
        return share((wanted == known[known > OTHER].mode().values).sum(), columns)

    token, name = slice(BODY), slice(BODY, BODY + 1)
    return [
        Outcome("first words of names", share(names, name), "the most frequent", most_frequent(name), goal),
        Outcome("next tokens", share(right, token), "the most frequent", most_frequent(token), goal_tokens),
    ]


if __name__ == "__main__":
    run(main, __doc__)
