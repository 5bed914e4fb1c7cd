"""Any placement becomes any other: what every rank ends with is its part of the same whole tensor."""

import itertools
import random
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm.backend import TOGETHER_BYTES  # and gives the collective operators their kernels
from meshwright.comm.groups import axis_groups, gather_whole
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ir.placement import Flat, Partial, Placement, Placements, Replicate, Shard
from meshwright.ir.resharding import AxisLink
from meshwright.lower.reshard import Resharder, local_part
from meshwright.ops import collectives
from tests.distributed.pool import Ranks

SHAPE = (8, 24, 4)
CHOICES: list[Placement] = [
    Replicate(),
    Partial("sum"),
    Partial("max"),
    Shard(0),
    Shard(0, outer=2),
    Shard(1),
    Shard(1, outer=3),
    Shard(1, outer=6),
    Shard(2),
    Flat(),
]


def _legal(placements: Placements) -> bool:
    """Partials of one kind; at most one axis flat; two axes split one dim at one factor, or at factors of which one is
    whole in each part of the other."""
    operations = {placement.op for placement in placements.values() if isinstance(placement, Partial)}
    shards = [placement for placement in placements.values() if isinstance(placement, Shard)]
    nested = all(
        first.dim != second.dim
        or first.outer == second.outer
        or max(first.outer, second.outer) % (2 * min(first.outer, second.outer)) == 0
        for first, second in itertools.combinations(shards, 2)
    )
    return len(operations) <= 1 and nested and list(placements.values()).count(Flat()) < 2


def _doubled(placements: Placements) -> bool:
    """Two axes split one factor, the outer one first."""
    first, second = placements.values()
    return isinstance(first, Shard) and first == second


def _terms(
    seed: int, op: str, groups: dict[str, AxisGroup], partial: list[str], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """(this rank's term, the whole): terms that differ along the partial axes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [groups[axis].size for axis in partial]
    terms = torch.randn(*sizes, *shape, generator=generator, dtype=torch.float64)
    term = terms[tuple(groups[axis].index for axis in partial)]
    flat = terms.reshape(-1, *shape)
    return term, flat.sum(0) if op == "sum" else flat.amax(0)


def _finished(steps: Any) -> Any:
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value


def _reshard(
    cases: list[tuple[int, Placements, Placements]], algorithm: str, shape: tuple[int, ...], tp: int
) -> list[str]:
    mesh = Mesh.of(dp=torch.distributed.get_world_size() // tp, tp=tp)
    groups = axis_groups(mesh, torch.distributed.get_rank(), dict.fromkeys(("dp", "tp", "dp+tp"), algorithm))

    def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    wrong = []
    links = {axis: AxisLink() for axis in groups}
    for seed, have, want in cases:
        partial = [axis for axis, placement in have.items() if isinstance(placement, Partial)]
        op = next((p.op for p in have.values() if isinstance(p, Partial)), "sum")
        term, whole = _terms(seed, op, groups, partial, shape)
        start = local_part(term, have, groups).clone()
        resharder = Resharder(emit, groups, links)
        steps = resharder.steps(start, shape, have, want, item_bytes=8, owned=True)  # type: ignore[arg-type]
        result = _finished(steps)
        expected = local_part(whole, want, groups)
        if result.shape != expected.shape or not torch.allclose(result, expected, rtol=0, atol=1e-12):
            wrong.append(f"{have} -> {want}")
        elif not torch.equal(gather_whole(expected, shape, want, groups), whole):
            wrong.append(f"gather_whole from {want}")
    return wrong


@pytest.mark.parametrize("algorithm", ["native", "exchange"])
def test_every_rank_ends_with_its_part(ranks: Ranks, algorithm: str) -> None:
    chooser = random.Random(0)
    every = [dict(zip(("dp", "tp"), pair, strict=True)) for pair in itertools.product(CHOICES, CHOICES)]
    sources = [placements for placements in every if _legal(placements)]
    targets = [source for source in sources if not any(isinstance(placement, Partial) for placement in source.values())]
    pairs = list(itertools.product(sources, targets))
    doubled = [pair for pair in pairs if _doubled(pair[0]) or _doubled(pair[1])]
    chosen = chooser.sample(pairs, 250) + chooser.sample(doubled, 150)
    cases = [(seed, *pair) for seed, pair in enumerate(chosen)]
    for wrong in ranks(4, _reshard, cases, algorithm, SHAPE, 2):
        assert wrong == []


UNEVEN = (5, 42, 3)
"""The middle dim is three blocks of seven heads of two."""
UNEVEN_CHOICES: list[Placement] = [
    Replicate(),
    Partial("sum"),
    Shard(0),
    Shard(1),
    Shard(1, outer=1, unit=14),
    Shard(1, outer=3, unit=2),
    Shard(1, outer=21),
    Shard(2),
    Flat(),
]


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 2), (3, 3), (4, 2)])
def test_uneven_parts_are_resharded_too(ranks: Ranks, num_ranks: int, tp: int) -> None:
    chooser, axes = random.Random(0), ("dp", "tp") if num_ranks > tp else ("tp",)
    nested = [Shard(1, 1, 14), Shard(1, 3, 2), Shard(1, 21)]  # from the outermost factor of the dim to the innermost
    every = [dict(zip(axes, pair, strict=True)) for pair in itertools.product(UNEVEN_CHOICES, repeat=len(axes))]

    def legal(placements: Placements) -> bool:
        shards = [placement for placement in placements.values() if isinstance(placement, Shard)]
        apart = len({shard.dim for shard in shards}) == len(shards) or all(shard in nested for shard in shards)
        same = len(set(shards)) == 1  # two axes, one factor: of three elements, a rank has none
        return (apart or same) and list(placements.values()).count(Flat()) < 2

    sources = [placements for placements in every if legal(placements)]
    targets = [source for source in sources if not any(isinstance(placement, Partial) for placement in source.values())]
    pairs = list(itertools.product(sources, targets))
    cases = [(seed, *pair) for seed, pair in enumerate(chooser.sample(pairs, min(len(pairs), 250)))]
    for wrong in ranks(num_ranks, _reshard, cases, "native", UNEVEN, tp):
        assert wrong == []


ODD = [(3,), (4, 3), (), (5, 2), (0, 3), (8, 2)]
"""Shapes of which most do not divide: their parts are padded."""
LONG = [(301, 401), (1, 120000)]
"""Shapes of which each part is sent in a message of its own."""


def _in_parts(algorithm: str, sizes: dict[str, int], shapes: list[tuple[int, ...]]) -> list[str]:
    groups = axis_groups(Mesh.of(**sizes), torch.distributed.get_rank(), {"dp": algorithm})
    group, generator = groups["dp"], torch.Generator().manual_seed(0)
    terms = [torch.randn(group.size, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    own_terms = [term[group.index].clone() for term in terms]
    parts = [local_part(term.sum(0), {"dp": Flat()}, groups) for term in terms]
    options = group.name, group.size, group.algorithm
    wrong = []
    reduced = collectives.WAIT(collectives.REDUCE_TO_PARTS(own_terms, *options))
    if not torch.allclose(reduced, torch.cat([part.flatten() for part in parts]), rtol=0, atol=1e-12):
        wrong.append("reduced to parts")
    flat = collectives.WAIT(collectives.GATHER_PARTS(parts, *options))
    for term, part, whole in zip(terms, parts, flat.split([group.size * part.numel() for part in parts]), strict=True):
        padding = torch.zeros(whole.numel() - term[0].numel(), dtype=torch.float64)
        if not torch.equal(whole, torch.cat([term.sum(0).flatten(), padding])):
            wrong.append(f"gathered {list(term[0].shape)}")
        if not torch.equal(gather_whole(part, tuple(term[0].shape), {"dp": Flat()}, groups), term.sum(0)):
            wrong.append(f"gather_whole {list(term[0].shape)}")
    return wrong


@pytest.mark.parametrize("shapes", [ODD, LONG, [*ODD, *LONG, *ODD]], ids=["short", "long", "short and long"])
@pytest.mark.parametrize(("algorithm", "sizes"), [("native", {"dp": 4}), ("exchange", {"dp": 2, "tp": 2})])
def test_many_tensors_are_reduced_to_parts_and_gathered(
    ranks: Ranks, algorithm: str, sizes: dict[str, int], shapes: list[tuple[int, ...]]
) -> None:
    assert all(prod(shape) // 4 * 8 > TOGETHER_BYTES for shape in LONG)
    for wrong in ranks(4, _in_parts, algorithm, sizes, shapes):
        assert wrong == []
