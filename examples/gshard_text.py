"""GShard: a language model with eight experts in each layer, whose tokens travel to the ranks of their experts.

    python examples/gshard_text.py
    torchrun --nproc-per-node 2 examples/gshard_text.py

Each token goes to its two best experts, unless they are full; an expert has room for a fixed number of tokens of each
sequence (Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2021,
algorithm 1). Dispatch and combination are products with masks, in plain PyTorch. On two ranks the batch is split
everywhere but in the experts: two pins say so, and between them the plan puts the all-to-alls, which bring
tokens to their experts and back. An additional loss keeps the experts about equally loaded.
"""

import torch
import torch.nn.functional as F
from application import Outcome, Training, parallelized, run
from library_text import TRIVIAL, frequency_bits, held_out_bits, texts
from torch import Tensor, nn

import meshwright as mw
from meshwright.data.loaders import TextLoader
from meshwright.models.gpt import Attention, GPTConfig

WIDTH, EXPERTS, LAYERS, LENGTH, BATCH, BALANCE = 64, 8, 2, 64, 16, 0.01


class Experts(nn.Module):
    """Each expert's two products, on the tokens in its slots: [e, slots, width] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, slots: Tensor) -> Tensor:
        return torch.einsum("egch,ehm->egcm", F.relu(torch.einsum("egcm,emh->egch", slots, self.up)), self.down)


class Layer(nn.Module):
    """Attention, then a mixture of experts: x [g, s, m] to the same shape, and the loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(GPTConfig(width=WIDTH, heads=4, sequence_length=LENGTH))
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm(x))
        tokens, room = self.mixture_norm(x), 2 * x.shape[1] // EXPERTS
        gates = self.gate(tokens).softmax(-1)  # [g, s, e]
        first = F.one_hot(gates.argmax(-1), EXPERTS).to(x.dtype)
        second = F.one_hot((gates * (1 - first)).argmax(-1), EXPERTS).to(x.dtype)
        before = first.sum(1, keepdim=True)  # second choices come after all first choices
        places = first.cumsum(1) - 1, second.cumsum(1) - 1 + before
        slots = torch.arange(room, device=x.device)
        taken = [
            (choice * (place < room)).unsqueeze(-1) * (place.unsqueeze(-1) == slots)
            for choice, place in zip((first, second), places, strict=True)
        ]
        combine = gates.unsqueeze(-1) * (taken[0] + taken[1])  # [g, s, e, c]
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), tokens)
        done = torch.einsum("gsec,egcm->gsm", combine, self.experts(sent))
        return x + done, EXPERTS * (first.mean(1) * gates.mean(1)).sum(-1).mean()


class Model(nn.Module):
    """Bytes [g, s] to logits [g, s, 256], and the loss of balance, which is 1 if all experts are equally loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        balance = torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more / LAYERS
        return self.head(x), balance


def gshard_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the next byte in nats, and a hundredth of the loss of balance; the metric has no balance."""
    logits, balance = model(batch["tokens"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return losses.mean() + BALANCE * balance, {"nats": losses.sum(), "bytes": (batch["targets"] >= 0).sum()}


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 16 windows of 64 bytes."""
    torch.manual_seed(0)
    pins = {"*": "batch@tp", "layers.*.experts": "v@tp"} if ranks > 1 else {}  # v: the experts, in the products' rules
    layout = mw.Layout(tp=ranks, pin=pins)
    return parallelized(Model(), gshard_loss, TextLoader(texts()[0], LENGTH, BATCH), layout, lr=3e-3)


def main(ranks: int, steps: int = 400, goal: float = 3.8) -> list[Outcome]:
    """Train, and compute the bits per byte of text that was not trained on."""
    model = training(ranks)
    model.run(steps)
    train, held_out = texts()
    bits = held_out_bits(model.trainer, held_out, LENGTH, BATCH)
    return [Outcome("held-out text", bits, TRIVIAL, frequency_bits(train, held_out), goal, "bits per byte", lower=True)]


if __name__ == "__main__":
    run(main, __doc__)
