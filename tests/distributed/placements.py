"""What is true of an operator's placements beside what our rules allow, and why they omit some of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.ops.base import Call
from tests.distributed.placement_rules import Form, allowed, form, splits
from tests.distributed.placement_truth import Combination, Truth, names, written

aten = torch.ops.aten

AVERAGE = "averages: a mean is a sum over a global count"
EXTREME = "partial maxima and minima are reduced before they are read"
RENAMED = "a whole value under another name"
UNREAD = "an input whose values do not matter"
IDENTITY = "the operator returns its input at these sizes"
CHANCE = "holds for the values of this sample only"
TWO_SPLITS = "two splits on one axis: a partial tensor, to which split rows are added"
GROUPS = "an operand belongs to one linear group, and is linear in another, too"
ONE_OUTPUT = "linear in one of several outputs only"
SIZES = "whole windows or rows lie inside the parts at these sizes"
EQUAL_MASKS = "a mask that is broadcast over the split dim, so that every part takes as many values"
ZERO_LOGARITHM = "linear but for zeros, where the product with a logarithm is zero"
ADDS_INTO = (aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.scatter_reduce.two)
OF_OPERATORS: dict[Any, str] = {
    **dict.fromkeys(ADDS_INTO, TWO_SPLITS),
    **dict.fromkeys([aten.addcdiv.default, aten.addcmul.default, aten.mse_loss_backward.default], GROUPS),
    **dict.fromkeys([aten.nll_loss_forward.default, aten.nll_loss2d_forward.default], ONE_OUTPUT),
    **dict.fromkeys([aten.convolution.default, aten.convolution_backward.default, aten.roll.default], SIZES),
    **dict.fromkeys([aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default], SIZES),
    aten.masked_scatter.default: EQUAL_MASKS,
    aten.round.decimals: CHANCE,
    **dict.fromkeys([aten.xlogy.Tensor, aten.special_xlog1py.default], ZERO_LOGARITHM),
}
"""Why the rules of single operators omit something true."""
UNRULED: dict[str, str] = {
    "_copy": "a copy of a view: functionalization makes it for other compilers",
    "histogram": "counts of values, without a gradient",
    "bincount": "counts of values, without a gradient",
    "histc": "counts of values, without a gradient",
    "hash_tensor": "a check sum, without a gradient",
    "_embedding_bag": "bags given by offsets: no dim of their indices is the batch",
    "_pdist": "pairs within one set of vectors: no dim of the result belongs to a vector",
    "_scaled_dot_product": "captured as the operator attention",
    "_unsafe_masked_index": "made by PyTorch's compiler, after capture",
    "_chunk_cat": "made by fully_shard, which a captured step does not contain",
    "batch_norm_backward": "made of other forms of batch norm on devices",
    "_batch_norm": "made of other forms of batch norm on devices",
    "fractional_max_pool": "windows at random places of the whole image",
    "linspace": "bounds are tensors: positions in the whole result",
    "logspace": "positions in the whole result",
    "empty": "values are whatever lies in memory",
    "_efficientzerotensor": "zeros without memory, which only forward-mode derivatives make",
    "lstsq": "least squares, whose shapes depend on the rank that is found",
    "_ctc_loss": "lengths of sequences are numbers in the call, or decide shapes",
    "block_diag": "blocks with rows and columns of their own",
    "nonzero_static": "places among all elements, without a gradient",
    "repeat_interleave": "counts decide the places of the whole result",
    "aten.put.": "positions in the flattened tensor, which stays whole",
}
"""Why a training step does without a rule for operators, by a part of their names."""
DYNAMIC = "values decide its shape, so that no captured step holds it"


@dataclass
class Verdict:
    """What a call of an operator shows. ``true``: combinations that the validator calls valid."""

    target: str
    true: int = 0
    allowed: int = 0
    listed: dict[str, int] = field(default_factory=dict)
    """Combinations that are true and not allowed, by reason."""
    missing: list[str] = field(default_factory=list)
    """Combinations that are true and not allowed, without a reason."""
    right: int = 0
    """Splits by our rule that gave the whole on two ranks."""
    wrong: list[str] = field(default_factory=list)
    unruled: str = ""
    """Why the operator has no rule, if it has none."""
    needs: bool = False
    """Whether a training step can hold the operator, which has no rule."""


def judged(call: Call, mesh: DeviceMesh, *, every_part: bool = True, plain: bool = False) -> Verdict:
    """Compare what is true of a call with what our rules allow, and run what they allow.

    Without ``every_part``, only the latter: some operators read beyond their tensors if parts do not belong together.
    ``plain``: see ``Truth``."""
    truth, operator_form, verdict = Truth(call, mesh, plain), form(call), Verdict(str(call.target))
    verdict.unruled = operator_form.reason and (unruled(verdict.target, operator_form) or operator_form.reason)
    verdict.needs = bool(operator_form.reason) and not unruled(verdict.target, operator_form)
    for split in splits(call, operator_form):
        if split.error:
            verdict.wrong.append(f"{written(split.combination)}: {split.error}")
        else:
            verdict.right += 1
    if not every_part or not truth.countable:
        return verdict
    valid, ours = truth.valid(), allowed(call, operator_form)
    every = frozenset(valid)
    for combination in valid:
        verdict.true += 1
        if combination in ours:
            verdict.allowed += 1
        elif reason := _reason(truth, operator_form, combination, every):
            verdict.listed[reason] = verdict.listed.get(reason, 0) + 1
        else:
            verdict.missing.append(written(combination))
    return verdict


def _reason(truth: Truth, operator_form: Form, combination: Combination, valid: frozenset[Combination]) -> str:
    """Why our rules do without a true combination; empty without a reason."""
    inputs, outputs = combination
    if "P(avg)" in (*inputs, *outputs):
        return AVERAGE
    if {"P(min)", "P(max)"} & set(inputs):
        return EXTREME
    if (inputs, ("R",) * len(outputs)) in valid:
        return RENAMED
    if operator_form.reason:
        return unruled(str(truth.call.target), operator_form)
    if truth.is_identity():
        return IDENTITY
    if any(truth.ignores(index) for index in range(len(inputs))):
        return UNREAD
    if truth.holds_by_chance(combination):
        return CHANCE
    return OF_OPERATORS.get(truth.call.target, "")


def unruled(target: str, operator_form: Form) -> str:
    """Why an operator without a rule needs none; empty if it would need one."""
    if operator_form.refused:
        return DYNAMIC
    if not operator_form.reason.startswith(("no rule for", "refused:")):
        return operator_form.reason  # the operator's rule does not split this call, and says why
    return next((reason for part, reason in UNRULED.items() if part in target), "")


def drawn(count: int, seed: int) -> list[str]:
    """Some of the operators with samples."""
    chosen = random.Random(seed).sample(names(), count)
    return sorted(chosen)
