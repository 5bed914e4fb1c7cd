"""A GPT-2 style decoder: learned positions, pre-norm blocks, fused query-key-value projection, optional tied head."""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults are the sizes of ``gpt_s``."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 256
    """Size of the hidden state; a multiple of ``heads``."""
    heads: int = 4
    """Attention heads per block."""
    vocabulary: int = 2048
    """Number of different tokens."""
    sequence_length: int = 128
    """Longest sequence, in tokens, that the learned positions cover."""
    dropout: float = 0.0
    """Probability of dropping an activation (after embeddings, in attention, after both projections)."""
    tied_head: bool = True
    """Whether the output head shares the token embedding's weight, as in GPT-2."""
    writes_scores: bool = False
    """Whether attention writes its scores to memory, as before fused kernels: a product, an added mask, a softmax, and
    a product."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig.width {self.width} is not divisible by heads {self.heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig.dropout must be in [0, 1), not {self.dropout}")


# Every layer initialises itself, so that a model on the meta device can be initialised module by module.
class _Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, *, std: float = 0.02, bias: bool = True) -> None:
        self.std = std  # nn.Linear's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal self-attention: [b, s, width] -> [b, s, width]."""

    future: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = _Linear(config.width, 3 * config.width)
        self.projection = _Linear(config.width, config.width, std=_residual_std(config))
        self.residual_dropout = nn.Dropout(config.dropout)
        self.writes_scores = config.writes_scores
        if config.writes_scores:
            future = torch.full((config.sequence_length, config.sequence_length), -math.inf).triu(1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, sequence, width] to a tensor of the same shape."""
        batch, sequence, width = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        if self.writes_scores:
            scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1) + self.future[:sequence, :sequence]
            y = F.dropout(scores.softmax(-1), dropout) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, sequence, width)
        return cast(Tensor, self.residual_dropout(self.projection(y)))


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside: [b, s, width] -> [b, s, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _Linear(config.width, 4 * config.width)
        self.down = _Linear(4 * config.width, config.width, std=_residual_std(config))
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, sequence, width] to a tensor of the same shape."""
        return cast(Tensor, self.residual_dropout(self.down(F.gelu(self.up(x)))))


class Block(nn.Module):
    """One pre-norm transformer block: [b, s, width] -> [b, s, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the MLP, each with a residual, to ``x`` [batch, sequence, width]; the shape does not
        change."""
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only language model (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = _Embedding(config.vocabulary, config.width)
        self.position_embedding = _Embedding(config.sequence_length, config.width)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = _Linear(config.width, config.vocabulary, bias=False)
        if config.tied_head:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, vocabulary] for the token that follows each of ``tokens`` [b, s] (int64).

        Raises:
            ValueError: s is longer than ``config.sequence_length``.
        """
        sequence = tokens.shape[1]
        if sequence > self.config.sequence_length:
            raise ValueError(f"{sequence} tokens, but the model has {self.config.sequence_length} positions")
        positions = torch.arange(sequence, device=tokens.device)
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.final_norm(x)))


def gpt_s() -> GPT:
    """GPT-S, the language model of the benchmarks: 4 layers, 256 wide, 4 heads, vocabulary 2048, sequence 128."""
    return GPT(GPTConfig(layers=4, width=256, heads=4, vocabulary=2048, sequence_length=128))


def demo_gpt() -> GPT:
    """The demo's byte-level model: GPT-S with sequence 256 and vocabulary 256."""
    return GPT(GPTConfig(layers=4, width=256, heads=4, vocabulary=256, sequence_length=256))


def _residual_std(config: GPTConfig) -> float:
    # Two residual additions per block: their sum keeps the variance of one residual (GPT-2, section 2.3).
    return 0.02 / math.sqrt(2 * config.layers)
