"""Memory that collectives take turns in: given again when nobody holds it, never before; as much as is lent at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.comm import groups
from meshwright.comm.blocks import LEAST_BYTES, BlockPool
from meshwright.models import MLP, classification_loss
from meshwright.planner.explicit import Ask, plan_layout
from tests.distributed.pool import Ranks

COUNT = LEAST_BYTES // 4
"""Elements of the smallest block, in float32."""


def test_memory_is_given_again_when_no_view_of_it_is_left() -> None:
    blocks = BlockPool()
    first, other = blocks.empty(COUNT, torch.float32), blocks.empty(COUNT, torch.float32)
    place, view = first.data_ptr(), first.view(2, -1)[1].t()
    del first
    assert blocks.empty(COUNT, torch.float32).data_ptr() not in (place, other.data_ptr()), "a view holds it"
    del view
    assert blocks.empty(COUNT // 2, torch.float64).data_ptr() == place, "of two that are free, the latest"
    assert blocks.num_bytes == 3 * LEAST_BYTES


def test_small_tensors_are_left_to_torch() -> None:
    blocks = BlockPool()
    assert blocks.empty(COUNT - 1, torch.float32).shape == (COUNT - 1,)
    assert blocks.num_bytes == 0


def test_a_larger_block_takes_the_place_of_a_free_one_and_serves_down_to_two_thirds_of_its_size() -> None:
    blocks = BlockPool()
    blocks.empty(COUNT, torch.float32)
    place = blocks.empty(3 * COUNT, torch.float32).data_ptr()
    assert blocks.num_bytes == 3 * LEAST_BYTES, "that of one is gone"
    assert blocks.empty(2 * COUNT, torch.float32).data_ptr() == place
    blocks.empty(2 * COUNT - 1, torch.float32)
    assert blocks.num_bytes == 3 * LEAST_BYTES + 4 * (2 * COUNT - 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from((1, 2, 3, 5))), max_size=30))
def test_tensors_never_share_memory_while_they_live(turns: list[tuple[bool, int, int]]) -> None:
    """``turns``: whether to lend or to let go, which of three holders, and how much."""
    blocks, held = BlockPool(), dict[int, tuple[torch.Tensor, int]]()
    for number, (lend, holder, size) in enumerate(turns):
        held.pop(holder, None)
        if lend:
            held[holder] = (blocks.empty(size * COUNT, torch.float32).fill_(number), number)
        for value, written in held.values():
            assert (float(value[0]), float(value[-1])) == (written, written)
        assert blocks.num_bytes >= sum(value.nbytes for value, _ in held.values())


WIDTH, LAYERS, BATCH = 1024, 6, 4


def bytes_by_step() -> list[int]:
    """Of the blocks of two ranks that train under ZeRO-3, after each of three steps."""
    batch = {"inputs": torch.randn(BATCH, WIDTH), "label": torch.zeros(BATCH, dtype=torch.int64)}
    model, layout = MLP((WIDTH,) * (LAYERS + 1)), mw.Layout(dp=2, zero=3, microbatches=2)
    graph = mw.capture(model, classification_loss, batch)
    plan = plan_layout(graph, layout, world_size=2, ask=Ask(room_bytes=0))
    trainer = mw.parallelize(model, classification_loss, batch, plan=plan, optimizer=_sgd)
    group = groups.process_group(trainer.groups["dp"].name)
    num_bytes = []
    for _ in range(3):
        trainer.step(batch)
        num_bytes.append(groups.member(group).blocks.num_bytes)
    return num_bytes


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_zero_3_holds_blocks_for_two_buckets_and_the_sum_of_one(ranks: Ranks) -> None:
    """However many steps there are, and layers. A bucket of the usual size has a layer; the first one of gradients has
    the last layer's and the bias of the one before."""
    gathered, reduced = 4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH * WIDTH + 2 * WIDTH)
    for result in ranks(2, bytes_by_step):
        assert result == [2 * gathered + reduced // 2] * 3
