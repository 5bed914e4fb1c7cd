"""Random numbers with explicit keys: replicas and recomputation draw the same, shards draw differently."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, Unsplit, letters, make_rule

aten = torch.ops.aten
ours = torch.ops.meshwright


def random_rule(call: Call) -> Rule:
    """``b s -> b s``: each shard draws its own part."""
    names = " ".join(letters(call.outputs[0].dim())) or "."
    return make_rule(call, f"{', '.join([names] * len(call.tensors))} -> {', '.join([names] * len(call.outputs))}")


def _keyed(kernel: Any, first: float, count: int) -> Any:
    def emit(local: Local) -> Any:
        parameters = [*local.args[1:], *((first, 1.0)[len(local.args) - 1 :])][:count]
        return local.call(kernel, local.args[0], *map(float, parameters), *local.key())

    return emit


def bernoulli_tensor_local(local: Local) -> Any:
    """Bernoulli whose probabilities are a tensor."""
    draws = local.call(ours.uniform.default, local.args[0], 0.0, 1.0, *local.key())
    source = local.args[0]
    return local.call(aten._to_copy.default, local.call(aten.lt.Tensor, draws, source), dtype=source.meta["dtype"])


def creation_rule(call: Call) -> Rule:
    names = " ".join(letters(call.outputs[0].dim())) or "."
    return make_rule(call, f" -> {names}")


def _created(kernel: Any) -> Any:
    def emit(local: Local) -> Any:
        empty = local.call(aten.empty.memory_format, local.shape(), **local.kwargs)
        return local.call(kernel, empty, 0.0, 1.0, *local.key())

    return emit


def dropout_local(local: Local) -> Any:
    """native_dropout: (x · mask / (1 - p), mask)."""
    source, probability, train = local.args
    if train is False or probability == 0.0:
        mask = local.call(aten.ones_like.default, source, dtype=torch.bool)
        return source, mask
    draws = local.call(ours.bernoulli.default, source, 1.0 - probability, *local.key())
    scaled = local.call(aten.mul.Tensor, local.call(aten.mul.Tensor, source, draws), 1.0 / (1.0 - probability))
    return scaled, local.call(aten._to_copy.default, draws, dtype=torch.bool)


def unkeyed(call: Call) -> Unsplit:
    return Unsplit("this random operator has no keyed form")


RULES = {
    aten.bernoulli.p: OperatorRule(random_rule, _keyed(ours.bernoulli.default, 0.5, 1)),
    aten.bernoulli.default: OperatorRule(random_rule, bernoulli_tensor_local),
    aten.native_dropout.default: OperatorRule(random_rule, dropout_local),
    aten.rand_like.default: OperatorRule(
        random_rule, lambda local: local.call(ours.uniform.default, local.args[0], 0.0, 1.0, *local.key())
    ),
    aten.randn_like.default: OperatorRule(
        random_rule, lambda local: local.call(ours.normal.default, local.args[0], 0.0, 1.0, *local.key())
    ),
    aten.uniform.default: OperatorRule(random_rule, _keyed(ours.uniform.default, 0.0, 2)),
    aten.normal_functional.default: OperatorRule(random_rule, _keyed(ours.normal.default, 0.0, 2)),
    aten.rand.default: OperatorRule(creation_rule, _created(ours.uniform.default)),
    aten.randn.default: OperatorRule(creation_rule, _created(ours.normal.default)),
}
