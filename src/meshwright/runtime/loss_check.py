"""Checks that the loss of a step is finite: before the update on a CPU, and one step later on an accelerator."""

import torch
from torch import Tensor

from meshwright.errors import NonFiniteLossError

UNCHANGED = "parameters and checkpoints are as they were before the step"


class LossCheck:
    """Raises a NonFiniteLossError for a loss that is NaN or infinite.

    On an accelerator the host does not wait for the loss of a step. The loss is copied to the host, and checked when
    the next step has been queued. By then, the step with the refused loss has updated the parameters, and the error
    says so.

        host     queue 1 | queue 2, check 1   | queue 3, check 2
        device           | step 1 ▸ loss 1    | step 2 ▸ loss 2

    Attributes:
        late: whether the loss is checked one step late.
    """

    def __init__(self, device: torch.device) -> None:
        self.late = device.type != "cpu"
        self._pending: tuple[Tensor, int, torch.cuda.Event | None] | None = None

    def check(self, loss: Tensor, step: int) -> None:
        """Check the loss of step number ``step`` before the step changes parameters. If ``late``, check the previous
        step's loss instead."""
        if not self.late:
            refuse_unless_finite(loss, step, UNCHANGED)
            return
        self.settle()
        copied = None
        host = torch.empty((), dtype=loss.dtype, pin_memory=loss.is_cuda).copy_(loss, non_blocking=True)
        if loss.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(loss.device))
        self._pending = host, step, copied

    def settle(self) -> None:
        """Check the loss that is still pending, if any. A loss that is not finite raises an error only once."""
        if self._pending is None:
            return
        loss, step, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        refuse_unless_finite(
            loss, step, f"parameters are those after step {step}: load the last checkpoint, which is from before it"
        )

    def forget(self) -> None:
        """Drop the pending loss, because a checkpoint was loaded and earlier steps no longer matter."""
        self._pending = None


def refuse_unless_finite(loss: Tensor, step: int, left: str) -> None:
    """Raise a NonFiniteLossError if a loss is not finite. ``left`` describes the state in which the parameters are
    left."""
    if not torch.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss became {float(loss)} at step {step}",
            where=f"step {step}",
            remedy=f"lower the learning rate, clip gradients (max_grad_norm), or look at this step's batch; {left}",
        )
