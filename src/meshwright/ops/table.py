"""The rules of all operators, collected from the modules of this package; a user's own rules take precedence."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.errors import RuleError
from meshwright.ir.rule import Rule
from meshwright.ops import (
    attention,
    batch_norm,
    convolution,
    creation,
    distance,
    embedding,
    experts,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalization,
    opaque,
    packed_attention,
    pointwise,
    pooling,
    random,
    reduction,
    resizing,
    sampling,
    softmax,
    strided,
    unfolding,
    view,
)
from meshwright.ops.base import Call, OperatorRule, Target, Unsplit

aten = torch.ops.aten

FILES = (
    attention, batch_norm, convolution, creation, distance, embedding, experts, fourier, indexing, linear_algebra, loss,
    matmul, normalization, packed_attention, pooling, random, reduction, resizing, sampling, softmax, unfolding, view,
)  # fmt: skip
"""The modules with rules, one for each kind of operator."""
RULES: Mapping[Target, OperatorRule] = {target: rule for file in FILES for target, rule in file.RULES.items()}
CANONICAL: Mapping[Target, Callable[..., Any]] = {
    target: function
    for file in (*FILES, pointwise, strided)
    for target, function in getattr(file, "CANONICAL", {}).items()
}
"""Maps an operator to the function that capture calls in its place. The function returns NotImplemented to keep the
operator."""


def rewrites() -> Mapping[Target, Callable[..., Any]]:
    """``CANONICAL``, and the rewrites of operators that PyTorch defines only when a module of its own is imported."""
    return {**CANONICAL, **packed_attention.rewrites()}


VISIBLE = {aten.native_batch_norm.default: batch_norm.native_batch_norm}
"""Rewrites to operators whose schema shows an in-place change that the original operator's schema does not show."""


def operator_rule(target: Target, own: Mapping[Target, OperatorRule] | None = None) -> OperatorRule | None:
    """Return the rule of an operator. Return None if the operator has none; it then runs replicated."""
    if own and target in own:
        return own[target]
    if target in RULES:
        return RULES[target]
    if target in opaque.RULES:  # their rules depend on the modules that run, not on the operators
        return opaque.RULES[target]
    return pointwise.POINTWISE if pointwise.is_pointwise(target) else None


def is_random(target: Target, own: Mapping[Target, OperatorRule] | None = None) -> bool:
    """Whether an operator draws random numbers: PyTorch tags it as random, or its rule says so."""
    rule = operator_rule(target, own)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or (rule is not None and rule.random)


def rule_of(call: Call, own: Mapping[Target, OperatorRule] | None = None) -> Rule | Unsplit:
    """Return the rule of one call, or the reason why it has none.

    Raises:
        RuleError: the rule's pattern does not fit the call, or the call draws random numbers without a key.
    """
    rule = operator_rule(call.target, own)
    if rule is not None:
        return rule.rule(call)
    if is_random(call.target):
        raise RuleError(
            "this random operator has no form with a key, so that ranks would draw different numbers",
            where=str(call.target),
            remedy="draw with torch.rand, randn, randint, bernoulli or dropout, or pass a rule of your own (rules=)",
        )
    return Unsplit(f"no rule for {call.target}")
