"""The property test of rules can fail: every rule is made wrong in every way that it can be, and must be found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.ops import linear_algebra, pooling, resizing
from meshwright.ops.base import Unsplit
from tests.distributed.lockstep import Subject, WrongRuleError, refined, subject
from tests.distributed.mutants import Chance, mutants
from tests.distributed.rule_cases import CASES, POINTWISE
from tests.distributed.test_rules import check_everything, composites

aten = torch.ops.aten
ours = torch.ops.meshwright

SEEDS = 40
UNCHECKED = frozenset(
    {
        *pooling.RULES, *resizing.RULES, *linear_algebra.RULES, aten.unfold_backward.default,
        aten._cdist_backward.default, aten.multi_margin_loss_backward.default,
        aten.multilabel_margin_loss_backward.default,
    }
) - {aten.constant_pad_nd.default}  # fmt: skip
"""Kernels that read and write where indices and shapes say, without a look at bounds."""
HARMLESS = frozenset({"letter dropped", "^ added", "^ moved", "reduced otherwise", "halo off by a row"})
"""Changes under which an operator still gets parts that belong together."""
CRASHES = (RuntimeError, IndexError, ValueError, AssertionError)
"""Errors of an operator that gets parts that do not fit: the rule is found out, but not by comparing values."""
_CONSTANT = "a constant is the same in every dim"
_NOTHING = "zeros are the sum of zeros"
_SYMMETRIC = "all of its dims are reduced, in any order"
_BOOLEAN = "booleans add up to whether any is true; only collectives cannot add them"
EQUIVALENT: dict[tuple[Any, str], str] = {
    (aten.full.default, "letters swapped"): _CONSTANT,
    (aten.zeros.default, "letters swapped"): _CONSTANT,
    (aten.zeros.default, "letter dropped"): _NOTHING,
    (aten.ones.default, "letters swapped"): _CONSTANT,
    (aten._native_batch_norm_legit_no_training.default, "reduced otherwise"): "what would be reduced is empty",
    (aten.sum.default, "letters swapped"): _SYMMETRIC,
    (aten.count_nonzero.default, "letters swapped"): _SYMMETRIC,
    (aten.max.default, "letters swapped"): _SYMMETRIC,
    (aten.min.default, "letters swapped"): _SYMMETRIC,
    (aten.any.default, "! left out"): _BOOLEAN,
    (aten.any.dim, "! left out"): _BOOLEAN,
    (aten.any.dims, "! left out"): _BOOLEAN,
    (aten.zeros_like.default, "^ added"): _NOTHING,
    (aten.zero.default, "^ added"): _NOTHING,
    (aten._conj.default, "rewrite forgotten"): "the wires of this test carry values, not what lies in memory",
}
"""Changes that leave a rule right, and why."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found_by(whole: Subject, draw: Chance) -> str:
    """How the property test finds a rule out: by its ``values``, by a ``crash`` of the operator, or not at all."""
    try:
        check_everything(whole, draw)
        cuts = composites(whole)
        if cuts:
            check_everything(refined(whole, cuts), draw)
    except WrongRuleError:
        return "values"
    except CRASHES:
        return "crash"
    return ""


def ends(target: Any, build: Any, enough: frozenset[str] = frozenset({"values", "crash"})) -> dict[str, str]:
    """Maps every kind of change that there is to how it was found out; empty if no call found it out. Calls are drawn
    until every kind was found out in a way that is ``enough``."""
    seen: dict[str, str] = {}
    for seed in range(SEEDS):
        draw = Chance(seed)
        args, kwargs = build(draw)
        whole = subject(target, args, kwargs)
        if isinstance(whole, Unsplit):
            continue
        for kind, wrong in mutants(whole.operator, whole.call, draw):
            if seen.get(kind) in enough or (target in UNCHECKED and kind not in HARMLESS):
                continue
            mutant = subject(target, args, kwargs, {target: wrong})
            assert isinstance(mutant, Subject)
            how = found_by(mutant, draw)
            seen[kind] = how if how in enough else seen.get(kind) or how
        if seed > 10 and enough.issuperset(seen.values()):
            break
    return seen


EVERY = {**CASES, **POINTWISE}
TARGETS = [pytest.param(target, marks=pytest.mark.product if number % 6 else ()) for number, target in enumerate(EVERY)]
"""`make test` shows with a sixth of them that the property test can fail."""


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_wrong_rule_is_found(target: Any) -> None:
    seen = ends(target, EVERY[target])
    expected = {kind for other, kind in EQUIVALENT if other == target}
    assert {kind for kind, how in seen.items() if not how} == expected, f"of {sorted(seen)}"


if __name__ == "__main__":  # how many changes there are, and how they are found out
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for target, build in EVERY.items():
        counts.update(how or "nothing" for how in ends(target, build, frozenset({"values"})).values())
    print(f"{counts.total()} changes:", ", ".join(f"{count} found by {how}" for how, count in counts.most_common()))
