"""Halo exchange between ranks: every row that a part reads arrives, from however many neighbours, and every term of a
sum comes to the rank that owns its row."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from unittest import mock

import torch
import torch.distributed as dist

from meshwright.comm import halo
from meshwright.comm.backend import halo_exchange_start, halo_reduce_start, wait
from tests.distributed.lockstep import halo_rows, halo_sums
from tests.distributed.pool import Ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def exchange_at_random(seed: int) -> int:
    """Shapes, dims, dtypes, parts that are equal or not, and ranges that reach over several of them, over none, or past
    the ends."""
    me, size, draw = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    world = dist.group.WORLD
    assert world is not None
    moved = 0
    for turn in range(60):
        generator = torch.Generator().manual_seed(1000 * seed + turn)
        shape = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        dim, rows, dtype = draw.randrange(len(shape)), draw.randint(1, 4), draw.choice(DTYPES)
        edges = list(accumulate((draw.randint(0, rows) if turn % 2 else rows for _ in range(size)), initial=0))
        lows = [edges[part] + draw.randint(-2 * rows, rows) for part in range(size)]
        highs = [low + draw.randint(1, 4 * rows) for low in lows]
        parts = []
        for first, end in pairwise(edges):
            shape[dim] = end - first
            parts.append(torch.randint(0, 9, shape, generator=generator).to(dtype))
        dim -= draw.choice([0, len(shape)])
        received = wait(halo_exchange_start(parts[me], dim, lows, highs, edges, 1.0, world.group_name, me))
        assert torch.equal(received, halo_rows(parts[me], parts, dim, lows, highs, edges, 1.0, part=me))
        moved += received.numel()
        if dtype == torch.bool:  # nothing is added up
            continue
        terms = []
        for low, high in zip(lows, highs, strict=True):
            shape[dim] = high - low
            terms.append(torch.randint(0, 9, shape, generator=generator).to(dtype))
        total = wait(halo_reduce_start(terms[me], dim, lows, highs, edges, world.group_name, me))
        assert torch.equal(total, halo_sums(terms, dim, lows, highs, edges, part=me))
    return moved


def tensors_that_are_kept() -> tuple[int, bool]:
    """The number of tensors in the messages of an exchange, and whether its work keeps all of them until it ends."""
    sent: list[torch.Tensor] = []
    start, group = dist.batch_isend_irecv, dist.group.WORLD
    assert group is not None

    def noted(messages: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(message.tensor for message in messages)
        return start(messages)

    part = halo.HaloPart(1, ((0, 5), (3, 8)), (0, 4, 8), group.rank())
    with mock.patch.object(dist, "batch_isend_irecv", noted):
        _, work = halo.exchange(torch.ones(3, 4), part, group, 0.0)
    kept = all(any(tensor is each for each in work._kept) for tensor in sent)
    work.wait()
    return len(sent), kept


def test_an_exchange_keeps_the_tensors_of_its_messages(ranks: Ranks) -> None:
    """NCCL drops its references to them at the first wait on any stream, also where only a trace waits."""
    assert ranks(2, tensors_that_are_kept) == [(2, True)] * 2


def test_rows_arrive_and_come_back(ranks: Ranks) -> None:
    for size in (2, 4):
        assert min(ranks(size, exchange_at_random, size)) > 100
