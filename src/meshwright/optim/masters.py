"""An optimizer of parameters in a low precision that keeps float32 masters of them, as in Megatron-LM.

    parameters (bfloat16)    gradient ──▶ float32 ──▶ inner optimizer ──▶ masters (float32) ──round──▶ parameters

The masters are state of the optimizer with the parameter's shape. So they are split like the parameter: under ZeRO,
each rank has the masters of its part only, and gathers carry bfloat16. Checkpoints hold them beside the other state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.optim.whole import NeedsShardSums, ShardSum

MASTER = "master"


class MasterWeights(Optimizer):
    """Steps float32 copies of the parameters with another optimizer, and rounds them into the parameters.

        optimizer=lambda p: MasterWeights(p, lambda masters: torch.optim.AdamW(masters, lr=3e-4))

    Options (the learning rate, ...) are those of ``param_groups``, which have the inner optimizer's names. Float32 and
    float64 parameters are stepped themselves.

    Args:
        params: parameters, (name, parameter), or groups, as in ``torch.optim``.
        make: makes the inner optimizer of groups of tensors.

    Raises:
        ValueError: there are no parameters, or ``make`` refuses its options.
    """

    def __init__(self, params: Any, make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        super().__init__(params, {})
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        for group in self.param_groups:
            for value in group["params"]:
                self._masters[value] = _master_of(value)
                self._versions[value] = value._version
        kept = ("params", "param_names")
        self.inner = make([
            {"params": [self._masters[value] for value in group["params"]]}
            | {key: option for key, option in group.items() if key not in kept}
            for group in self.param_groups
        ])  # fmt: skip
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: option for key, option in inner.items() if key not in kept and key not in group})

    @property
    def described_as(self) -> str:
        """The name of the optimizer in checkpoints."""
        return f"{type(self).__name__}({type(self.inner).__name__})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Parameters without a gradient do not change.

        Returns:
            The result of ``closure``; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: option for key, option in group.items() if key not in ("params", "param_names")})
        stepped = [(value, master) for value, master in self._masters.items() if value.grad is not None]
        for value, master in stepped:
            self._take_state(value, master)
            assert value.grad is not None
            master.grad = value.grad.to(master.dtype)
        self.inner.step()
        for value, master in stepped:
            self.state[value] = self.inner.state[master] | ({MASTER: master.detach()} if master is not value else {})
            if master is not value:
                value.copy_(master)
                master.grad = None
            self._versions[value] = value._version
        return loss

    def sum_shards_with(self, shard_sum: ShardSum) -> None:
        """Let an inner optimizer that needs whole tensors sum over ranks. Its tensors are the masters."""
        if isinstance(self.inner, NeedsShardSums):
            values = {id(master): value for value, master in self._masters.items()}
            self.inner.sum_shards_with(
                lambda masters, sums: shard_sum([values[id(master)] for master in masters], sums)
            )

    def _take_state(self, value: Tensor, master: Tensor) -> None:
        """Use a state that was loaded since the last step. If only the parameter was written to, it is the master."""
        state = self.state.get(value, {})
        kept = state.get(MASTER)
        if kept is not None and kept.data_ptr() != master.data_ptr():
            master.copy_(kept)
        elif master is not value and value._version != self._versions[value]:
            master.copy_(value)
        self.inner.state[master] = {key: entry for key, entry in state.items() if key != MASTER}


def _master_of(value: Tensor) -> Tensor:
    if not value.is_floating_point() or value.dtype in (torch.float32, torch.float64):
        return value
    return torch.nn.Parameter(value.detach().to(torch.float32), requires_grad=True)
