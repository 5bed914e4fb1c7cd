"""1-bit Adam and 0/1 Adam in one process, against their papers' formulas written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.optim import OneBitAdam, ZeroOneAdam

STEPS = 12
RATE, BETAS, EPS, DECAY = 0.05, (0.8, 0.95), 1e-8, 0.1


def gradients(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]


def by_formula(given: list[torch.Tensor], updated: set[int]) -> list[float]:
    """Weights after all steps. The variance is updated in the steps ``updated``."""
    weights, m, v = [1.0] * 5, [0.0] * 5, [0.0] * 5
    for step, gradient in enumerate(given):
        for k, g in enumerate(gradient.tolist()):
            m[k] = BETAS[0] * m[k] + (1 - BETAS[0]) * g
            if step in updated:
                v[k] = BETAS[1] * v[k] + (1 - BETAS[1]) * g * g
            weights[k] -= RATE * (m[k] / (math.sqrt(v[k]) + EPS) + DECAY * weights[k])
    return weights


def run(optimizer: torch.optim.Optimizer, given: list[torch.Tensor]) -> torch.Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in given:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(5, dtype=torch.float64))


def test_the_variance_of_one_bit_adam_is_frozen() -> None:
    given = gradients()
    weights = run(OneBitAdam([weight()], RATE, BETAS, EPS, 4, DECAY), given)
    torch.testing.assert_close(weights.tolist(), by_formula(given, {0, 1, 2, 3}), rtol=1e-12, atol=0)


def test_the_variance_of_zero_one_adam_is_updated_at_growing_distances() -> None:
    """Two updates at each distance: 0, 1, then 2, 4, then 6, 10; steps from 10 on are frozen."""
    given = gradients()
    weights = run(ZeroOneAdam([weight()], RATE, BETAS, EPS, 10, DECAY, num_updates=2), given)
    torch.testing.assert_close(weights.tolist(), by_formula(given, {0, 1, 2, 4, 6}), rtol=1e-12, atol=0)


@given(st.integers(1, 20))
def test_distances_follow_the_recurrence_of_the_paper(num_updates: int) -> None:
    optimizer = ZeroOneAdam([weight()], num_updates=num_updates)
    group = optimizer.param_groups[0]
    expected, step = [], 0
    for update in range(100):
        expected.append(step)
        step += 2 ** (update // num_updates)
        if step > 5000:
            break
    steps = [step for step in range(expected[-1] + 1) if optimizer._updates_variance(group, step)]
    assert steps == expected


def test_elements_without_any_gradient_before_the_freeze_do_not_change() -> None:
    """A code of one bit gives the momentum of a constant zero a magnitude."""
    given = gradients()
    for gradient in given[:4]:
        gradient[2] = 0
    weights = run(OneBitAdam([weight()], RATE, BETAS, EPS, 4), given)
    assert weights[2] == 1.0
    assert (weights[[0, 1, 3, 4]] != 1.0).all()


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"freeze_step": 0}, {"eps": float("nan")}])
def test_values_out_of_range_are_refused(options: dict) -> None:
    for kind in (OneBitAdam, ZeroOneAdam):
        with pytest.raises(ValueError, match="must be"):
            kind([weight()], **options)
    with pytest.raises(ValueError, match="num_updates is 0"):
        ZeroOneAdam([weight()], num_updates=0)


def test_a_state_is_saved_and_continued() -> None:
    given = gradients()
    whole = run(OneBitAdam([weight()], RATE, BETAS, EPS, 4, DECAY), given)
    first = OneBitAdam([weight()], RATE, BETAS, EPS, 4, DECAY)
    half = run(first, given[:6])
    second = OneBitAdam([torch.nn.Parameter(half.clone())], RATE, BETAS, EPS, 4, DECAY)
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(second, given[6:]), whole)
