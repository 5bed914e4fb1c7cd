"""Captures Hugging Face's mixtures of experts as one operator, through the interface that all of them call."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.capture.precision import lowered
from meshwright.ops.experts import experts

_INTERFACE = "transformers.integrations.moe"
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip


@contextmanager
def one_operator() -> Iterator[None]:
    """Replace every implementation of experts in transformers, because loops over experts read values of tensors.

    Experts that the operator cannot express (with biases, transposed weights, a gate of their own) run unchanged.
    """
    module = sys.modules.get(_INTERFACE)
    interface: Any = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:
        yield
        return
    known = interface.get_interface
    interface.get_interface = lambda name, default: _standing_for(known(name, default), module)
    try:
        yield
    finally:
        del interface.get_interface  # this makes the class's own method visible again


def _standing_for(original: Callable[..., Tensor], module: Any) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        activation = _activation(self, module)
        if activation is None:
            return original(self, hidden_states, top_k_index, top_k_weights)
        up = self.gate_up_proj if self.has_gate else self.up_proj
        tokens, index, weights, up, down = lowered((hidden_states, top_k_index, top_k_weights, up, self.down_proj))
        return experts(tokens, index, weights, up, down, activation)

    return forward


def _activation(experts: Any, module: Any) -> str | None:
    """Return the activation's name; None if the operator cannot express these experts."""
    own_gate = experts.has_gate and type(experts)._apply_gate is not module._default_apply_gate
    if own_gate or experts.has_bias or experts.is_transposed or not experts.is_concatenated:
        return None
    if getattr(experts, "has_post_expert_norm", False):
        return None
    function: nn.Module = experts.act_fn
    return _ACTIVATIONS.get(type(function).__name__)
