"""The device of a rank: its own of those that it sees."""

import pytest
import torch

from meshwright.runtime.device import own_device


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [(0, 3, "cpu"), (1, 0, "cuda:0"), (1, 3, "cuda:0"), (4, 0, "cuda:0"), (4, 3, "cuda:3")],
)
def test_a_rank_takes_the_device_of_its_number_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert own_device(local_rank) == torch.device(device)
