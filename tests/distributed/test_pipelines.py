"""Pipelines equal one process: losses, metrics, gradient norms, parameters, buffers after three steps, in float64."""

from __future__ import annotations

import pytest

from tests.distributed import oracle, pipelines
from tests.distributed.pipelines import Case
from tests.distributed.pool import Ranks

PAIRWISE = [
    *pipelines.pairwise_cases(max_ranks=4, models_meet_schedules=False),
    # The encoder's gradient is a sum of what two stages make, partial over tp, and of what a third one sends.
    Case("HF T5", "interleaved", "pp2", "v2", "m4", "none", "tp2", "AdamW", "clipped", "ragged"),
]


MORE = [case for case in pipelines.pairwise_cases(max_ranks=4) if case not in PAIRWISE]
"""With them, every model meets every schedule."""


@pytest.mark.parametrize(
    "case", [*PAIRWISE, *(pytest.param(case, marks=pytest.mark.product) for case in MORE)], ids=str
)
def test_pipeline_equals_one_process(ranks: Ranks, case: Case) -> None:
    results = ranks(case.num_ranks, pipelines.compare, case)
    first, errors = results[0]
    assert errors is not None
    assert errors.error <= oracle.TOLERANCE, errors
    assert all(seen == first for seen, _ in results), "every rank reports the same losses and metrics"
    assert errors.moved > 1e-3, "the parameters were trained"
    assert all(norm > oracle.MAX_GRAD_NORM for norm in errors.norms), "clipping clipped"
    assert bool(errors.norms) == (case.clipping == "clipped")


def test_data_tensor_and_pipeline_parallel_on_eight_ranks(ranks: Ranks) -> None:
    results = ranks(8, pipelines.dp_tp_pp, timeout=240)
    assert results[0][1] <= oracle.TOLERANCE
    assert all(seen == results[0][0] for seen, _ in results)
