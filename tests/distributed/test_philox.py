"""Counter-based random numbers: published vectors, equal numbers under every layout, and their distributions."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import meshwright as mw
from meshwright.ops import philox
from meshwright.ops.philox import key_of
from tests.distributed import oracle
from tests.distributed.pool import Ranks

KEY, SALT = 0x5DEECE66D << 16, 0x2545F4914F6CDD1D
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KERNELS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "bernoulli": (philox.bernoulli, (0.7,)),
    "uniform": (philox.uniform, (-1.0, 3.0)),
    "normal": (philox.normal, (2.0, 0.5)),
}


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
        (
            (2**64 - 1,) * 4,
            (2**64 - 1,) * 2,
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Those of Random123 1.14 (``kat_vectors``, philox4x64, 10 rounds)."""

    def as_tensor(word: int) -> Tensor:
        return torch.tensor([word - (1 << 64) if word >> 63 else word])

    assert philox.philox(counter, key) == words
    on_tensors = philox.philox([as_tensor(word) for word in counter], key)
    assert tuple(int(word) % (1 << 64) for word in on_tensors) == words
    mixed = philox.philox([as_tensor(counter[0]), *counter[1:]], key)
    assert tuple(int(word) % (1 << 64) for word in mixed) == words


# --- parts ------------------------------------------------------------------------------------------------------------


@st.composite
def parts(draw: Any) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """The letters of each dim of a tensor, and a range of each letter."""
    dims = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=3))
    ranges: list[list[tuple[int, int]]] = []
    for letters in dims:
        ranges.append([])
        for size in letters:
            begin = draw(st.integers(0, size - 1))
            ranges[-1].append((begin, draw(st.integers(begin + 1, size))))
    return dims, ranges


@settings(max_examples=60, deadline=None)
@given(parts(), st.sampled_from(sorted(KERNELS)), st.sampled_from(DTYPES), st.sampled_from([1, 2, 5, 1 << 14]))
def test_a_part_has_the_numbers_of_the_whole(part: Any, name: str, dtype: torch.dtype, tile: int) -> None:
    """On CPUs and by the operations that other devices run, however blocks are put together."""
    dims, ranges = part
    kernel, parameters = KERNELS[name]
    whole = kernel(torch.empty([math.prod(letters) for letters in dims], dtype=dtype), *parameters, KEY, SALT)
    index = tuple(slice(*each) for dim in ranges for each in dim)
    expected = whole.view([size for letters in dims for size in letters])[index]
    expected = expected.reshape([math.prod(end - begin for begin, end in dim) for dim in ranges])
    flat = [each for dim in ranges for each in dim]
    place = (
        [size for letters in dims for size in letters],
        [begin for begin, _ in flat],
        [end - begin for begin, end in flat],
        len(dims[-1]),
        -1,
    )
    like = torch.empty_like(expected)
    with patch.multiple(philox, _TILE=tile, _LARGE_TILE=tile):
        assert torch.equal(kernel(like, *parameters, KEY, SALT, *place), expected)
        with patch.object(philox, "_by_numpy", philox._by_pytorch):
            assert torch.equal(kernel(like, *parameters, KEY, SALT, *place), expected)


def test_rows_that_lie_far_apart_are_read_one_by_one() -> None:
    whole = philox.uniform(torch.empty(6, 8000), 0.0, 1.0, KEY, SALT)
    place = [6, 8000], [1, 4003], [4, 37], 1, -1
    assert torch.equal(philox.uniform(torch.empty(4, 37), 0.0, 1.0, KEY, SALT, *place), whole[1:5, 4003:4040])


def test_micro_batches_draw_the_parts_of_the_whole_batch() -> None:
    """Unless the tensor has no batch: then each draws numbers of its own."""
    whole = philox.uniform(torch.empty(2, 12, 5), 0.0, 1.0, key_of(0, 7, 1), SALT, [2, 12, 5], [0, 0, 0], [2, 12, 5])
    for microbatch in range(3):
        place = [2, 12, 5], [0, 0, 0], [2, 4, 5], 1, 1
        numbers = philox.uniform(torch.empty(2, 4, 5), 0.0, 1.0, key_of(microbatch, 7, 1), SALT, *place)
        assert torch.equal(numbers, whole[:, 4 * microbatch : 4 * microbatch + 4])
    alone = [philox.uniform(torch.empty(8), 0.0, 1.0, key_of(number, 7, 1), SALT) for number in range(2)]
    assert not torch.equal(*alone)


def test_numbers_lie_in_memory_as_the_given_tensor_does() -> None:
    like = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    numbers = philox.normal(like, 0.0, 1.0, KEY, SALT)
    assert numbers.stride() == like.stride()
    assert torch.equal(numbers, philox.normal(torch.empty(2, 3, 4, 5), 0.0, 1.0, KEY, SALT))
    assert philox.normal(torch.empty(0, 3), 0.0, 1.0, KEY, SALT).shape == (0, 3)
    assert philox.normal(torch.empty(()), 0.0, 1.0, KEY, SALT).shape == ()


# --- distributions ----------------------------------------------------------------------------------------------------

MANY = 1 << 18
"""Tests of fits at this number, with fixed keys; a probability below 1e-4 is a failure."""


@pytest.mark.parametrize("probability", [0.0, 1e-4, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bernoulli(probability: float, dtype: torch.dtype) -> None:
    drawn = philox.bernoulli(torch.empty(MANY, dtype=dtype), probability, KEY, SALT)
    assert set(drawn.double().unique().tolist()) <= {0.0, 1.0}
    assert stats.binomtest(int(drawn.double().sum()), MANY, probability).pvalue > 1e-4
    if 0.1 < probability < 0.95:  # neighbours, and elements a block and a row apart, are independent
        centred = drawn.double() - probability
        for lag in (1, 2, 7, 8, 1024):
            correlation = float((centred[lag:] * centred[:-lag]).mean()) / (probability * (1 - probability))
            assert abs(correlation) < 4 / math.sqrt(MANY)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_uniform_and_normal(dtype: torch.dtype) -> None:
    like = torch.empty(MANY, dtype=dtype)
    uniform, normal = (kernel(like, *given, KEY, SALT).double() for kernel, given in list(KERNELS.values())[1:])
    assert stats.kstest(uniform.numpy(), "uniform", (-1.0, 4.0)).pvalue > 1e-4
    assert stats.kstest(normal.numpy(), "norm", (2.0, 0.5)).pvalue > 1e-4
    assert -1.0 <= float(uniform.min()) < float(uniform.max()) <= 3.0
    pairs = (normal.view(-1, 2) - 2.0) / 0.5
    assert abs(float(pairs.prod(1).mean())) < 4 / math.sqrt(MANY / 2), "both numbers of a pair are independent"
    assert stats.kstest(pairs.square().sum(1).numpy(), "chi2", (2,)).pvalue > 1e-4


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_numbers_in_half_precision_stay_below_one(dtype: torch.dtype) -> None:
    drawn = philox.uniform(torch.empty(MANY, dtype=dtype), 0.0, 1.0, KEY, SALT).float()
    assert 0.0 <= float(drawn.min()) < float(drawn.max()) < 1.0
    assert abs(float(drawn.mean()) - 0.5) < float(torch.finfo(dtype).eps)


# --- whole steps ------------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Dropout of features, of heads, of flattened tokens and inside of attention (causal, with a window, with a mask),
    and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        window = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 3)
        masks = [None, window, (place % 3 != 1)[None, None, None]]
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = self.dropout(layer(x)).unflatten(-1, (4, 2)).transpose(1, 2)
            key, value = hidden[:, :2], self.dropout(hidden[:, 2:].tanh())
            hidden = F.scaled_dot_product_attention(
                hidden, key, value, mask, dropout_p=0.3, is_causal=mask is None, enable_gqa=True
            )
            x = x + hidden.transpose(1, 2).flatten(2)
            x = self.dropout(x.flatten(0, 1)).view(x.shape) + 0.1 * torch.randn_like(x)
        return x


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["inputs"]) - batch["target"]).square().mean()


LAYOUTS = [
    mw.Layout(dp=2, microbatches=2), mw.Layout(tp=2, recompute="full"), mw.Layout(cp=2),
    mw.Layout(pp=2, microbatches=4), mw.Layout(cp=2, context="ring"),
    mw.Layout(cp=2, context="ring", microbatches=2, recompute="full"), mw.Layout(tp=2, pin={"*": "s1@tp"}),
    mw.Layout(tp=2, pin={"*": "h@tp"}), mw.Layout(tp=2, pin={"*": "h1@tp"}),
]  # fmt: skip
"""Rings are balanced where attention is causal."""


def subject(size: int, length: int) -> oracle.Subject:
    torch.manual_seed(3)
    shape = size, length, 8
    batches = [{name: torch.randn(shape, dtype=torch.float64) for name in ("inputs", "target")} for _ in range(2)]
    return oracle.Subject(Dropped().double(), squares, batches)


def train(layout: mw.Layout, size: int = 8, length: int = 8) -> tuple[list[float], dict[str, Tensor]]:
    parallelize = oracle.sharing_capture(("dropped", size, length))
    run, _ = oracle.in_parallel(subject(size, length), layout, oracle.OPTIMIZERS["SGD"], parallelize=parallelize)
    return [loss.item() for loss in run.losses], run.state


def train_all() -> list[Any]:
    odd_queries, odd_keys = (mw.Layout(tp=2, pin={"*": f"{letter}@tp"}) for letter in ("s", "s1"))
    odd = [train(layout, 8, 7) for layout in (odd_queries, odd_keys)]
    return [*map(train, LAYOUTS), *odd, train(mw.Layout(dp=2), 7)]


def test_a_step_with_dropout_is_the_same_under_every_layout(ranks: Ranks) -> None:
    """Also with micro-batches, recomputation, pipelines, and a batch or a sequence that does not divide."""
    expected = {sizes: train(mw.Layout(), *sizes) for sizes in ((8, 8), (8, 7), (7, 8))}
    whose = [*[(8, 8)] * len(LAYOUTS), (8, 7), (8, 7), (7, 8)]
    for result in ranks(2, train_all):
        for number, (sizes, (losses, state)) in enumerate(zip(whose, result, strict=True)):
            serial_losses, serial_state = expected[sizes]
            assert losses == pytest.approx(serial_losses, rel=1e-12), number
            if state:
                assert oracle.largest_error(state, serial_state) <= oracle.TOLERANCE
