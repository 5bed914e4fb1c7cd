"""The models that are timed on GPUs: a GPT of 1.3 B parameters and a Llama-like model of 1.2 B, and their FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.ir.result import Scalar
from meshwright.models import GPT, GPTConfig
from meshwright.ops.experts import experts

SEQUENCE = 2048


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder with RMS norms, rotary positions, grouped queries and gated feed-forward layers; the defaults
    are those of Llama 3.2 1B."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192
    vocabulary: int = 128256
    sequence_length: int = SEQUENCE


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.size = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.value = nn.Linear(config.width, self.kv_heads * self.size, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        query = self.query(x).view(batch, sequence, self.heads, self.size).transpose(1, 2)
        key = self.key(x).view(batch, sequence, self.kv_heads, self.size).transpose(1, 2)
        value = self.value(x).view(batch, sequence, self.kv_heads, self.size).transpose(1, 2)
        query, key = (_rotated(each, cos, sin).to(value.dtype) for each in (query, key))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.output(y.transpose(1, 2).reshape(batch, sequence, width)))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.width, eps=1e-5) for _ in range(2))
        self.attention = _Attention(config)
        self.gate, self.up = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return cast(Tensor, x + self.down(F.silu(self.gate(y)) * self.up(y)))


class LlamaLike(nn.Module):
    """A decoder like Llama's: tokens [b, s] -> logits [b, s, vocabulary]; the head is the embedding's weight."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        size = config.width // config.heads
        rates = 500000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(config.sequence_length, dtype=torch.float32)[:, None] * rates
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return cast(Tensor, self.head(self.final_norm(x)))


class _MixtureBlock(nn.Module):
    """Each token goes to the two experts that a router prefers; an expert is a gated feed-forward layer."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + experts(tokens, index, weights, self.up, self.down, "silu").view(x.shape)


class Mixture(nn.Module):
    """Mixtures of experts over words: tokens [b, s] -> logits [b, s, vocabulary]. They need no other package than
    PyTorch."""

    def __init__(self, layers: int, width: int, inner: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_MixtureBlock(width, inner, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


@dataclass(frozen=True)
class Workload:
    """A model and its batch: sequences of ``sequence`` tokens."""

    name: str
    make: Callable[[], nn.Module]
    layers: int
    width: int
    vocabulary: int
    sequence: int
    sequences: int

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.sequences * self.sequence

    @property
    def sizes(self) -> dict[str, Scalar]:
        """The sizes, for the settings of a result."""
        return {
            "model": self.name, "layers": self.layers, "width": self.width, "vocabulary": self.vocabulary,
            "tokens of a sequence": self.sequence, "sequences": self.sequences,
        }  # fmt: skip

    def batch(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(self.vocabulary, (self.sequences, self.sequence + 1), generator=generator)
        return {"tokens": text[:, :-1].contiguous().to(device), "targets": text[:, 1:].contiguous().to(device)}

    def flops(self, model: nn.Module) -> float:
        """The FLOPs of a step by torchtitan's formula: 6 for each token and parameter of a product, and 12 for each
        layer, token, position and element of the width. Masked scores count; work that is done again does not."""
        products = sum(
            value.numel() for name, value in model.named_parameters() if value.dim() > 1 and "position" not in name
        )  # a tied embedding is the weight of a product
        return self.tokens * (6.0 * products + 12.0 * self.layers * self.width * self.sequence)


LARGE_BYTES = 100e9


def _sequences() -> int:
    """The sequences of a step: what fits beside the second copy of parameters and optimizer state that peers have."""
    return 8 if torch.cuda.get_device_properties(0).total_memory > LARGE_BYTES else 4


def gpt(rehearse: bool) -> Workload:
    """The GPT: 24 layers of 2,048 features."""
    layers, width, vocabulary, sequence = (2, 64, 512, 64) if rehearse else (24, 2048, 50304, SEQUENCE)
    config = GPTConfig(
        layers=layers, width=width, heads=max(2, width // 128), vocabulary=vocabulary, sequence_length=sequence
    )
    return Workload(
        "GPT 1.3 B", lambda: GPT(config), layers, width, vocabulary, sequence, 2 if rehearse else _sequences()
    )


def llama(rehearse: bool) -> Workload:
    """The Llama-like model."""
    small = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, inner=128, vocabulary=512, sequence_length=64)
    config = small if rehearse else LlamaConfig()
    return Workload(
        "Llama-like 1.2 B", lambda: LlamaLike(config), config.layers, config.width, config.vocabulary,
        config.sequence_length, 2 if rehearse else _sequences(),
    )  # fmt: skip


def long_gpt(rehearse: bool) -> Workload:
    """A GPT of few layers and long sequences, whose scores would take most of the memory."""
    layers, width, sequence = (1, 64, 256) if rehearse else (2, 2048, 8192)
    config = GPTConfig(
        layers=layers, width=width, heads=max(2, width // 128), vocabulary=1024, sequence_length=sequence
    )
    return Workload("GPT at 8,192 tokens", lambda: GPT(config), layers, width, 1024, sequence, 1)


WORKLOADS = {"gpt": gpt, "llama": llama, "attention": long_gpt}
