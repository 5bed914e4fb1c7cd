"""Products on grids give what one process computes, forward and backward, on every grid of up to 4 ranks; the bytes
that the transport delivers are those of the closed form, and memory stays within the limit."""

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.comm.transport.point_to_point import TorchLane
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.runtime.products import GridProduct, ShardedMatrix
from meshwright.schedules.products.choose import OVERS, choose_grid, grids
from meshwright.schedules.products.grid import Dim, Grid, ProductPlan, following, words_received
from meshwright.schedules.products.memory import fewest_panels, least_words, peak_words
from tests.distributed.pool import Ranks, RanksFailedError

M, K, N = 13, 11, 9


def matrices(m: int = M, k: int = K, n: int = N, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A, B, and a gradient of C, the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, columns, generator=draw, dtype=torch.float64) for rows, columns in ((m, k), (k, n), (m, n))
    )


def differences(plan: ProductPlan) -> list[float]:
    """How far C and both gradients are from a serial product."""
    a, b, grad = matrices(plan.m, plan.k, plan.n)
    product = GridProduct(plan)
    left, right = product.shard("a", a), product.shard("b", b)
    left.part.requires_grad_()
    right.part.requires_grad_()
    c = mw.matmul(left, right)
    c.part.backward(product.shard("c", grad).part)
    assert left.part.grad is not None
    assert right.part.grad is not None
    results = (c, ShardedMatrix(product, "a", left.part.grad), ShardedMatrix(product, "b", right.part.grad))
    assert product.peak_words <= peak_words(plan, gradients=True)
    return [
        float((each.gather() - whole).abs().max())
        for each, whole in zip(results, (a @ b, grad @ b.T, a.T @ grad), strict=True)
    ]


# --- parity ----------------------------------------------------------------------------------------------------------


def on_every_grid(num_ranks: int) -> float:
    draw, worst = random.Random(num_ranks), 0.0
    for grid in grids(M, K, N, num_ranks):  # idle ranks too
        order = "".join(draw.sample("mkn", 3))
        for over in OVERS:
            for panels in (1, 3):
                sizes = Grid(grid.m, grid.k, grid.n, order)
                algorithms: dict[Dim, str] = {"m": draw.choice(("star", "ring", "partitioned")), "k": "ring"}
                worst = max(worst, *differences(ProductPlan(M, K, N, sizes, over, panels, algorithms)))
    return worst


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_product_and_gradients_are_those_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    assert max(ranks(num_ranks, on_every_grid, num_ranks, timeout=300)) <= 1e-9


def test_product_on_one_rank(ranks: Ranks) -> None:
    assert max(ranks(1, on_every_grid, 1)) <= 1e-9


def at_random(seed: int) -> float:
    draw, worst = random.Random(seed), 0.0
    for _ in range(15):
        m, k, n = (draw.randrange(1, 70) for _ in range(3))
        grid = draw.choice(list(grids(m, k, n, 4)))
        plan = ProductPlan(m, k, n, grid, draw.choice(OVERS))
        plan = ProductPlan(m, k, n, grid, plan.over, draw.randrange(1, plan.largest(plan.over) + 1))
        worst = max(worst, *differences(plan))
    return worst


def test_ragged_sizes_and_any_panels(ranks: Ranks) -> None:
    assert max(ranks(4, at_random, 3)) <= 1e-9


def one_gradient(operand: str) -> float:
    plan = ProductPlan(M, K, N, Grid(2, 2, 1))
    a, b, grad = matrices()
    product = GridProduct(plan)
    left, right = product.shard("a", a), product.shard("b", b)
    wanted = left if operand == "a" else right
    wanted.part.requires_grad_()
    mw.matmul(left, right).part.backward(product.shard("c", grad).part)
    assert wanted.part.grad is not None
    assert (right if operand == "a" else left).part.grad is None
    whole = grad @ b.T if operand == "a" else a.T @ grad
    return float((ShardedMatrix(product, wanted.operand, wanted.part.grad).gather() - whole).abs().max())


@pytest.mark.parametrize("operand", ["a", "b"])
def test_one_gradient_alone(ranks: Ranks, operand: str) -> None:
    assert max(ranks(4, one_gradient, operand)) <= 1e-9


def two_in_a_row() -> float:
    first = ProductPlan(M, K, N, Grid(2, 1, 2), "k", 2)
    a, b, _ = matrices()
    other = matrices(M, N, 7)[1]
    product = GridProduct(first)
    c = mw.matmul(product.shard("a", a), product.shard("b", b))
    with received_bytes() as counts:
        second = GridProduct(following(first, 7))
        left = c.as_operand(second, "a")
    assert counts() == 0
    return float((mw.matmul(left, second.shard("b", other)).gather() - a @ b @ other).abs().max())


def test_one_product_leaves_what_the_next_needs(ranks: Ranks) -> None:
    assert max(ranks(4, two_in_a_row)) <= 1e-9


def in_dtype(dtype: torch.dtype) -> float:
    a, b, _ = (each.to(dtype) for each in matrices(32, 32, 32))
    product = mw.grid_product(32, 32, 32, dtype=dtype)
    c = mw.matmul(product.shard("a", a), product.shard("b", b)).gather()
    return float((c.double() - a.double() @ b.double()).abs().max())


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.05)]
)
def test_dtypes(ranks: Ranks, dtype: torch.dtype, most: float) -> None:
    assert max(ranks(2, in_dtype, dtype)) <= most


# --- words and memory ------------------------------------------------------------------------------------------------


@contextmanager
def received_bytes() -> Iterator[Callable[[], int]]:
    """Counts the bytes of the messages that lanes deliver to this rank."""
    counted, takes = [0], {kind: kind.take for kind in (SharedMemory, TorchLane)}

    def counting(take: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Any, num: int, dtype: Any, *args: Any) -> Any:
            counted[0] += num * dtype.itemsize
            return take(self, num, dtype, *args)

        return count

    for kind, take in takes.items():
        kind.take = counting(take)  # type: ignore[method-assign]
    try:
        yield lambda: counted[0]
    finally:
        for kind, take in takes.items():
            kind.take = take  # type: ignore[method-assign]


def transported() -> list[tuple[ProductPlan, int, int, int]]:
    """Of every grid of 4 ranks: the plan, and the bytes received forward, and backward."""
    rank, rows = dist.get_rank(), []
    a, b, grad = matrices()
    for grid in grids(M, K, N, 4):
        for over, panels in itertools.product(OVERS, (1, 2)):
            plan = ProductPlan(M, K, N, grid, over, panels)
            product = GridProduct(plan)
            left, right = product.shard("a", a), product.shard("b", b)
            left.part.requires_grad_()
            right.part.requires_grad_()
            grad_part = product.shard("c", grad).part
            with received_bytes() as forward:
                c = mw.matmul(left, right)
            with received_bytes() as both:
                c.part.backward(grad_part)
            rows.append((plan, rank, forward(), both()))
    return rows


def test_transport_delivers_the_bytes_of_the_closed_form(ranks: Ranks) -> None:
    for plan, rank, forward, backward in itertools.chain(*ranks(4, transported, timeout=300)):
        words = words_received(plan, rank)
        assert forward == 8 * words, plan
        assert backward == 8 * (words_received(plan, rank, gradients=True) - words), plan


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that operators make and that still live; those of ``given`` do not count."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.most = 0
        self._given = {value.untyped_storage()._cdata for value in given}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._given:
                storage = value.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return result


def held_words(limit: int) -> list[tuple[int, int, int]]:
    """Of several grids: the limit, the words of a plan within it, and the peak that the product counted."""
    a, b, grad = matrices(48, 64, 40)
    rows = []
    for grid in grids(48, 64, 40, 4):
        for over in OVERS:
            plan = ProductPlan(48, 64, 40, grid, over)
            words = max(limit, least_words(plan, gradients=True))
            panels = fewest_panels(plan, words, gradients=True)
            product = GridProduct(ProductPlan(48, 64, 40, grid, over, panels))
            left, right = product.shard("a", a), product.shard("b", b)
            left.part.requires_grad_()
            right.part.requires_grad_()
            c = mw.matmul(left, right)
            c.part.backward(product.shard("c", grad).part)
            rows.append((words, peak_words(product.plan, gradients=True), product.peak_words))
    return rows


def test_memory_stays_within_the_limit(ranks: Ranks) -> None:
    for words, planned, counted in itertools.chain(*ranks(4, held_words, 4_000)):
        assert counted <= planned <= words


def measured_words() -> tuple[int, int]:
    """The peak of a product's new storages, beside the planned words without the stored operands."""
    plan = ProductPlan(64, 256, 48, Grid(2, 1, 2), "k", 8)
    a, b, _ = matrices(64, 256, 48)
    product = GridProduct(plan)
    left, right = product.shard("a", a), product.shard("b", b)
    mw.matmul(left, right)  # lanes and kinds are made
    gc.collect()
    with Held(left.part, right.part) as held:
        mw.matmul(left, right)
    return held.most // 8, peak_words(plan) - left.part.numel() - right.part.numel()


def test_measured_peak_is_the_planned(ranks: Ranks) -> None:
    for measured, planned in ranks(4, measured_words):
        assert 0.5 * planned <= measured <= planned


# --- refused ---------------------------------------------------------------------------------------------------------


def refused(case: str) -> None:
    plan = ProductPlan(8, 8, 8, Grid(2, 1, 1))
    if case == "grid":
        mw.grid_product(8, 8, 8, grid=(2, 2, 1))
    elif case == "two sizes":
        mw.grid_product(8, 8, 8, grid=(2, 1))
    elif case == "more":
        GridProduct(ProductPlan(8, 8, 8, Grid(2, 2, 1)))
    elif case == "empty":
        mw.grid_product(8, 0, 8)
    elif case == "memory":
        mw.grid_product(8, 8, 8, memory_bytes=64)
    elif case == "integers":
        mw.grid_product(8, 8, 8, dtype=torch.int64)
    elif case == "complex":
        GridProduct(plan).shard("a", torch.zeros(8, 8, dtype=torch.complex64))
    elif case == "shape":
        GridProduct(plan).shard("a", torch.zeros(8, 7))
    elif case == "strides":
        product = GridProduct(plan)
        ShardedMatrix(product, "a", torch.zeros(8, 4).t())
    elif case == "dtypes":
        product = GridProduct(plan)
        mw.matmul(product.shard("a", torch.zeros(8, 8)), product.shard("b", torch.zeros(8, 8, dtype=torch.float64)))
    elif case == "operands":
        product = GridProduct(plan)
        mw.matmul(product.shard("b", torch.zeros(8, 8)), product.shard("a", torch.zeros(8, 8)))
    elif case == "parts":
        GridProduct(plan).shard("b", torch.zeros(8, 8)).as_operand(GridProduct(plan), "a")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("grid", "grid 2x2x1 has 4 ranks, and there are 2"),
        ("two sizes", "give three sizes"),
        ("more", "grid 2x2x1 has 4 ranks, and there are 2"),
        ("empty", "a product of 8x0 and 0x8"),
        ("memory", "the smallest that fits is"),
        ("integers", "torch.int64 has no kernel"),
        ("complex", "torch.complex64 has no kernel"),
        ("shape", r"operand a has the shape \[8, 7\]"),
        ("strides", "a part that is not contiguous"),
        ("dtypes", "torch.float32 and torch.float64"),
        ("operands", "operands b of"),
        ("parts", "rank 0 has rows 0 to 8 and columns 0 to 4 of b, and needs rows 0 to 4 and columns 0 to 8"),
    ],
)
def test_bad_input_is_named(ranks: Ranks, case: str, words: str) -> None:
    with pytest.raises(RanksFailedError, match=words):
        ranks(2, refused, case)


def test_idle_ranks_take_no_part(ranks: Ranks) -> None:
    plan = choose_grid(64, 64, 64, 3, idle=0.34)
    assert plan.grid.num_ranks == 2
    assert max(max(each) for each in ranks(3, differences, plan)) <= 1e-9
