"""A mixture-of-experts language model with static shapes (Lepikhin et al., "GShard", 2021), for the evaluation of Alpa.

Its experts are one Meshwright operator, so that a layout may split them over the ranks that divide the batch (``ep``).
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.gpt import Attention, GPTConfig
from meshwright.ops.experts import experts


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a ``MoE``. ``group`` is the number of tokens that are sent to experts together; an expert takes at most
    ``2 * group // experts`` of them. Every second layer has experts. Each of the other layers has a dense MLP."""

    layers: int
    width: int
    heads: int
    experts: int
    vocabulary: int
    sequence_length: int
    group: int
    mlp_factor: int = 8


class _Experts(nn.Module):
    """Top-2 gating and experts: [b, s, width] -> [b, s, width]."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        inner = config.mlp_factor * config.width
        self.experts, self.group = config.experts, config.group
        self.capacity = 2 * config.group // config.experts
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, inner, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, inner))

    def forward(self, x: Tensor) -> Tensor:
        """Send each token of ``x`` to its two best experts, unless an expert is full, and sum the experts' results."""
        tokens = x.reshape(-1, self.group, x.shape[-1])  # [g, s, m]
        combine = self._combine(self.gate(tokens).softmax(-1)).flatten(2)  # [g, s, e c]
        sent = (combine != 0).to(x.dtype).transpose(1, 2) @ tokens  # [g, e c, m]
        rows = sent.flatten(0, 1)
        number = torch.arange(self.experts, device=x.device).repeat_interleave(self.capacity)
        number = number.expand(len(tokens), -1).reshape(-1, 1)
        done = experts(rows, number, rows.new_ones(len(rows), 1), self.up, self.down, "relu")
        return (combine @ done.view_as(sent)).view_as(x)

    def _combine(self, gates: Tensor) -> Tensor:
        """The weight of every token in every slot of every expert: [g, s, e] -> [g, s, e, c]."""
        weights, chosen = gates.topk(2, dim=-1)
        numbers = torch.arange(self.experts, device=gates.device)
        places = torch.arange(self.capacity, device=gates.device)
        before: Tensor | float = 0.0
        parts = []
        for rank in range(2):
            taken = (chosen[..., rank : rank + 1] == numbers).to(gates.dtype)  # [g, s, e]
            place = ((taken.cumsum(1) - taken + before) * taken).sum(-1, keepdim=True)
            before = taken.sum(1, keepdim=True)  # the second choices come after all first choices
            weight = (taken * weights[..., rank : rank + 1]).unsqueeze(-1)
            parts.append(weight * (place == places).to(gates.dtype).unsqueeze(2))
        return parts[0] + parts[1]


class _Dense(nn.Module):
    """Two linear layers around a GELU: [b, s, width] -> [b, s, width]."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_factor * config.width)
        self.down = nn.Linear(config.mlp_factor * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, sequence, width] to a tensor of the same shape."""
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class _Block(nn.Module):
    def __init__(self, config: MoEConfig, sparse: bool) -> None:
        super().__init__()
        sizes = GPTConfig(
            width=config.width, heads=config.heads, sequence_length=config.sequence_length, writes_scores=True
        )
        self.attention = Attention(sizes)
        self.attention_norm = nn.LayerNorm(config.width)
        self.mlp = _Experts(config) if sparse else _Dense(config)
        self.mlp_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return cast(Tensor, self.mlp_norm(x + self.mlp(x)))


class MoE(nn.Module):
    """A language model in which every second layer has experts, beginning with the first: tokens [b, s] -> logits."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(_Block(config, layer % 2 == 0) for layer in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, vocabulary] of ``tokens`` [b, s] (int64)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))
