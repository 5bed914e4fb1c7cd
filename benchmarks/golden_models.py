"""The small models of Alpa's tests of its intra-operator planner, for ``benchmarks/placements.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.ir.graph import Graph
from meshwright.models import MLP


class BertLayer(nn.Module):
    """A transformer layer with layer norms after the additions, and one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = inner or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(mixed))
        return self.last_norm(x + self.inner(x))


class Experts(nn.Module):
    """Experts of two products in groups of tokens, each token for its two best experts, with room for as many tokens
    as there are on average (GShard: Lepikhin et al. 2020)."""

    def __init__(self, width: int, experts: int, group: int) -> None:
        super().__init__()
        self.group, self.experts = group, experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 8 * width))
        self.down = nn.Parameter(torch.empty(experts, 8 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, self.group, x.shape[-1])
        shares = functional.softmax(self.gate(tokens), -1)
        room = 2 * self.group // self.experts
        best = functional.one_hot(shares.argmax(-1), self.experts).to(x.dtype)
        second = functional.one_hot((shares * (1 - best)).argmax(-1), self.experts).to(x.dtype)
        places = (best.cumsum(1) - 1) * best, (second.cumsum(1) - 1 + best.sum(1, keepdim=True)) * second
        slots = torch.arange(room, device=x.device)
        masks = [
            (chosen * (place < room)).unsqueeze(-1) * (place.unsqueeze(-1) == slots).to(x.dtype)
            for chosen, place in zip((best, second), places, strict=True)
        ]
        combine = shares.unsqueeze(-1) * (masks[0] + masks[1])
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), tokens)
        inner = functional.relu(torch.einsum("egcm,emh->egch", sent, self.up))
        done = torch.einsum("egch,ehm->egcm", inner, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, done).reshape(x.shape)


class LanguageModel(nn.Module):
    """Embeddings of tokens and positions, layers, and a product with the vocabulary, whose weight may be ``tied``.
    ``masked``: a norm after the embeddings, and a dense layer and a norm before the vocabulary, as in BERT."""

    def __init__(self, layers: Sequence[nn.Module], width: int, vocabulary: int, sequence: int, masked: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.norm = nn.LayerNorm(width) if masked else nn.Identity()
        self.layers = nn.Sequential(*layers)
        head = nn.Linear(width, vocabulary)
        if masked:
            head.weight = self.tokens.weight
        self.dense = nn.Linear(width, width) if masked else nn.Identity()
        self.last_norm = nn.Sequential(nn.GELU(), nn.LayerNorm(width)) if masked else nn.Identity()
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        return self.head(self.last_norm(self.dense(self.layers(x))))


class Tied(nn.Module):
    """An embedding whose weight is the weight of the product with the vocabulary, too."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.tokens(tokens), self.tokens.weight)


class ConvNet(nn.Module):
    """3x3 convolutions with a stride of 2, each with a batch norm, a ReLU and a 2x2 max pooling of stride 1."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, 2, 1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.max_pool2d(functional.pad(functional.relu(norm(conv(x))), (0, 1, 0, 1)), 2, 1)
        return x


class Depthwise(nn.Module):
    """A convolution, a depthwise convolution and a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.middle = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class DenseAndExperts(nn.Module):
    """Two dense layers, two products with one weight for each expert, and two dense layers."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.experts = experts
        self.one, self.two, self.three, self.four = (
            nn.Linear(experts * width, experts * width, bias=False) for _ in range(4)
        )
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x)).unflatten(1, (self.experts, -1))
        x = torch.einsum("ebh,ehm->bem", torch.einsum("bem,emh->ebh", x, self.up), self.down)
        return self.four(self.three(x.flatten(1)))


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them, without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.relu(self.w1(x)))


class Block(nn.Module):
    """A transformer block without norms and biases."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.inner = FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        heads = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.inner(x)


def squares(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error."""
    return functional.mse_loss(model(batch["x"]), batch["y"])


def entropy(model: nn.Module, batch: Any) -> Tensor:
    """The cross-entropy of every token."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def of_numbers(make: Callable[[], nn.Module], *shape: int) -> Graph:
    """The step of a model that maps numbers of ``shape`` to numbers."""
    with torch.device("meta"):
        model, x = make(), torch.zeros(shape)
        return mw.capture(model, squares, {"x": x, "y": torch.zeros_like(model(x))})


def of_tokens(make: Callable[[], nn.Module], *shape: int) -> Graph:
    """The step of a model that maps tokens of ``shape`` to logits."""
    with torch.device("meta"):
        tokens = torch.zeros(shape, dtype=torch.int64)
        return mw.capture(make(), entropy, {"x": tokens, "y": tokens})


@cache
def mlp(batch: int, width: int) -> Graph:
    """6 linear layers with ReLUs between them."""
    return of_numbers(lambda: MLP((width,) * 7), batch, width)


@cache
def bert(batch: int, sequence: int, width: int) -> Graph:
    """2 BERT layers of 8 heads."""
    return of_numbers(lambda: nn.Sequential(*(BertLayer(width, 8) for _ in range(2))), batch, sequence, width)


@cache
def moe_layer() -> Graph:
    """A transformer layer with 16 experts."""
    return of_numbers(lambda: BertLayer(64, 16, Experts(64, 16, 32)), 64, 16, 64)


@cache
def moe_language_model() -> Graph:
    """A language model with 2 layers. The first layer has 16 experts."""

    def make() -> nn.Module:
        layers = [BertLayer(64, 16, Experts(64, 16, 32)), BertLayer(64, 16)]
        return LanguageModel(layers, 64, 32, 16, masked=False)

    return of_tokens(make, 64, 16)


@cache
def masked_language_model() -> Graph:
    """BERT with 2 layers of 4 heads, 512 wide, and a tied vocabulary of 4,096."""
    return of_tokens(lambda: LanguageModel([BertLayer(512, 4) for _ in range(2)], 512, 4096, 4, masked=True), 4, 4)


@cache
def tied(batch: int, sequence: int, width: int, vocabulary: int) -> Graph:
    """``Tied``."""
    return of_tokens(lambda: Tied(vocabulary, width), batch, sequence)


@cache
def convolutions(layers: int, batch: int, channels: int) -> Graph:
    """``ConvNet`` on images of 16x16."""
    return of_numbers(lambda: ConvNet(layers, channels), batch, channels, 16, 16)


@cache
def depthwise() -> Graph:
    """``Depthwise`` with 256 channels."""
    return of_numbers(lambda: Depthwise(256), 4, 256, 8, 8)


@cache
def dense_and_experts(inner: int = 256) -> Graph:
    """``DenseAndExperts`` of 4 experts, 16 wide. The inner width of the experts is not published."""
    return of_numbers(lambda: DenseAndExperts(16, 4, inner), 256, 64)


@cache
def feed_forward(rows: int) -> Graph:
    """``FeedForward``, 1,024 wide with 4,096 inner features."""
    return of_numbers(lambda: FeedForward(1024, 4096), rows, 1024)


@cache
def blocks(batch: int) -> Graph:
    """Two ``Block``s of 48 heads, 6,144 wide with 24,576 inner features, on sequences of 256. The second computes the
    gradients of its inputs, too."""
    return of_numbers(lambda: nn.Sequential(*(Block(6144, 24576, 48) for _ in range(2))), batch, 256, 6144)
