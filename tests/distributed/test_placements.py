"""Placements that our rules allow beside PyTorch's own oracle, for some operators of its samples; all of them are in
``make bench-placements``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.placement_rules import form, splits
from tests.distributed.placement_truth import Truth, calls, names, validator, written
from tests.distributed.placements import drawn, judged

aten = torch.ops.aten
SEED, COUNT = 75, 8
UNSAFE = ("pool", "pad", "interpolate", "loss", "conv", "linalg", "lu", "embedding", "fold", "dist", "ctc")
"""Parts of names of operators that read beyond their tensors if parts do not belong together: not in this process."""
NAMES = [name for name in drawn(3 * COUNT, SEED) if not any(part in name for part in UNSAFE)][:COUNT]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), validator() as found:
        warnings.simplefilter("ignore")
        yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_rules_allow_what_is_true(name: str, mesh: DeviceMesh) -> None:
    for call in calls(name, 1):
        verdict = judged(call, mesh, plain=True)
        assert not verdict.wrong
        assert not verdict.missing
        assert not verdict.needs, verdict.unruled


def test_operators_have_samples() -> None:
    assert len(names()) > 600
    assert len(NAMES) == COUNT


def test_the_validator_finds_what_is_known_of_a_product(mesh: DeviceMesh) -> None:
    """The first look rejects nothing that the validator calls valid: these are the seven of its own documentation."""
    (call,) = [call for call in calls("mm", 1) if call.target is aten.mm.default]
    found = {written(one) for one in Truth(call, mesh).valid() if "P(avg)" not in written(one)}
    assert found == {
        "S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)",
    }  # fmt: skip


def test_a_wrong_split_is_found(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax whose rule forgets its decomposition."""
    (call,) = [call for call in calls("softmax", 1) if call.target is aten._softmax.default][:1]
    made = form(call)
    assert all(not split.error for split in splits(call, made))
    monkeypatch.setattr("tests.distributed.lockstep.Wires.swap", lambda self, group, turn, value: [value] * group.size)
    assert any(split.error for split in splits(call, made))
