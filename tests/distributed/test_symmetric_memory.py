"""Memory that the GPUs of a group share: all ranks say alike whether there is some."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import symmetric_memory
from meshwright.ir.mesh import AxisGroup
from tests.distributed.pool import Ranks


def shared(visible: int, indices: tuple[int, ...], lonely: int = -1) -> tuple[bool, bool, list[int]]:
    """Whether the ranks share memory, whether this rank enables it, and the GPUs for which this rank asks. ``indices``:
    the GPU of each rank. The GPU ``lonely`` reaches no other."""
    group, asked, enabled = dist.group.WORLD, list[int](), list[str]()
    assert group is not None

    def reaches(device: torch.device, other: int) -> bool:
        asked.append(other)
        return device.index != lonely

    with (
        mock.patch.object(torch.cuda, "device_count", return_value=visible),
        mock.patch.object(torch.cuda, "can_device_access_peer", reaches),
        mock.patch.object(symmetric_memory, "enable_symmetric_memory", enabled.append),
    ):
        own = AxisGroup(group.group_name, group.size(), group.rank())
        named = symmetric_memory.symmetric_groups([own], torch.device("cpu", indices[group.rank()]))
    return named == {group.group_name}, enabled == [group.group_name], asked


@pytest.mark.parametrize(
    ("visible", "indices", "lonely", "shares", "asked"),
    [
        (8, (2, 5), -1, True, [[5], [2]]),
        (8, (2, 5), 5, False, [[5], [2]]),
        (1, (0, 0), -1, False, [[], []]),
        (1, (0, 1), -1, False, [[], []]),
    ],
    ids=["all visible", "apart", "own alone", "fewer than ranks"],
)
def test_gpus_of_a_group_share_memory_if_each_reaches_the_others(
    ranks: Ranks, visible: int, indices: tuple[int, ...], lonely: int, shares: bool, asked: list[list[int]]
) -> None:
    """GPUs outside the group do not matter. A launcher that shows each process its own GPU alone hides whether it
    reaches the others."""
    assert ranks(2, shared, visible, indices, lonely) == [(shares, shares, each) for each in asked]
