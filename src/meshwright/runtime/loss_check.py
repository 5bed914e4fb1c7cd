"""Checks that the loss of a step is finite: before the update on a CPU, and one step later on an accelerator."""

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from meshwright.errors import NonFiniteLossError
from meshwright.runtime.device import CpuKind, DeviceEvent, DeviceKind

UNCHANGED = "parameters and checkpoints are as they were before the step"


class LossCheck:
    """Raises a NonFiniteLossError for a loss that is NaN or infinite.

    On an accelerator the host does not wait for the loss of a step. The loss is copied to the host, and checked when
    the next step has been queued:

        host     queue 1 | queue 2, check 1   | queue 3, check 2
        device           | step 1 ▸ loss 1    | step 2 ▸ loss 2

    If the optimizer is one of PyTorch's fused kernels, the device itself skips the update of a step whose loss is not
    finite, and the updates of all later steps until the host has seen it. Otherwise, the step with the refused loss has
    updated the parameters by then. The error says which of the two.

    Attributes:
        late: whether the loss is checked one step late.
        refused: 1 on the device since a loss was not finite, else 0; None if updates are not skipped there.
        skips: 1 on the device if it skips the update of this step, else 0.
    """

    def __init__(self, kind: DeviceKind | None = None) -> None:
        self._kind = kind or CpuKind()
        self.late = self._kind.is_late
        self.refused: Tensor | None = None
        self.skips = torch.zeros((), device=self._kind.device)
        self._pending: tuple[Tensor, int, DeviceEvent | None] | None = None

    def skip_updates_of(self, optimizer: Optimizer | None) -> None:
        """Let the device skip the updates of an optimizer, if the loss is checked late and the optimizer can."""
        if self.late and optimizer is not None and skips_on_device(optimizer):
            self.refused = torch.zeros((), device=self._kind.device)
            optimizer.found_inf = self.skips  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                # PyTorch would make the momentum in the first step, without a value if that step is skipped.
                for parameter in group["params"] if group.get("momentum") else ():
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))

    def check(self, loss: Tensor, step: int) -> None:
        """Check the loss of step number ``step`` before the step changes parameters. If ``late``, check the previous
        step's loss instead."""
        if not self.late:
            refuse_unless_finite(loss, step, UNCHANGED)
            return
        if self.refused is not None:
            torch.maximum(self.refused, (~torch.isfinite(loss)).to(self.refused.dtype), out=self.refused)
        self.settle()
        host = self._kind.pinned(loss)
        host.copy_(loss, non_blocking=True)
        self._pending = host, step, self._kind.event()

    def decide(self, skipped: Tensor | None) -> None:
        """Let the device skip the update of this step if a loss was refused, or ``skipped`` is 1."""
        if self.refused is not None:
            self.skips.copy_(self.refused if skipped is None else torch.maximum(self.refused, skipped))

    def kept(self, before: Tensor, after: Tensor) -> Tensor:
        """The value of a buffer after a step: as before, if the device skips the step's update."""
        return after if self.refused is None else torch.where(self.skips > 0, before, after)

    def settle(self) -> None:
        """Check the loss that is still pending, if any. A loss that is not finite raises an error only once."""
        if self._pending is None:
            return
        loss, step, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        left = f"parameters are those after step {step}: load the last checkpoint, which is from before it"
        if self.refused is not None:
            left = f"parameters are as they were before step {step}, and later steps have not changed them"
        try:
            refuse_unless_finite(loss, step, left)
        except NonFiniteLossError:
            if self.refused is not None:
                self.refused.zero_()
            raise

    def forget(self) -> None:
        """Drop the pending loss, because a checkpoint was loaded and earlier steps no longer matter."""
        self._pending = None
        if self.refused is not None:
            self.refused.zero_()


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels read ``found_inf`` on the device, and change nothing if it is 1."""
    # With dampening, SGD's first momentum is another than that which follows from zero.
    fused = all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
    return fused and isinstance(optimizer, SGD | Adam)  # AdamW is an Adam


def refuse_unless_finite(loss: Tensor, step: int, left: str) -> None:
    """Raise a NonFiniteLossError if a loss is not finite. ``left`` describes the state in which the parameters are
    left."""
    if not torch.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss became {float(loss)} at step {step}",
            where=f"step {step}",
            remedy=f"lower the learning rate, clip gradients (max_grad_norm), or look at this step's batch; {left}",
        )
