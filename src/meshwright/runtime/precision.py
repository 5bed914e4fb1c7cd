"""Training in a low precision on this rank: the check of the device, the loss scale, and skipped steps.

As in Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3, weights, gradients and optimizer state are
float32. Before a backward in float16, the loss is multiplied by a scale, because gradients below 6e-8 are 0 in float16.
The scale adapts to the gradients, with the constants of ``torch.amp.GradScaler``. It is a power of two, so that scaling
rounds nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.groups import sum_over
from meshwright.errors import LaunchError, LossScaleError
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.precision import LOSS_SCALE, Precision, is_scaled
from meshwright.runtime.device import DeviceEvent, DeviceKind, lacks
from meshwright.torch_private import unscale_and_check, update_scale

log = logging.getLogger("meshwright")

FIRST_SCALE = 2.0**16
MOST_SCALE = 2.0**24
LEAST_SCALE = 2.0**-14
"""Smallest loss scale: if gradients overflow even at this scale, the loss cannot be trained."""
GROWTH_STEPS = 2000
"""Steps without overflow after which the scale is doubled."""
MOST_SKIPPED = 8
"""Number of consecutive skipped steps after which training fails, in a precision whose loss scale is always 1."""
_NEEDS = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
_ARM = {"bfloat16": ("bf16",), "float16": ("fp16", "fphp")}


def check_device(precision: Precision | None, device: torch.device, *, tells: bool = True) -> None:
    """Raise a LaunchError if a device cannot compute in a precision. Log a warning (if ``tells``) if a CPU only
    emulates the precision."""
    if precision not in _NEEDS:
        return
    if device.type == "cuda":
        if name := lacks(device, precision):
            other = "'float16' or 'float32'" if precision == "bfloat16" else "'float32'"
            raise LaunchError(f"{name} does not compute in {precision}", where="precision", remedy=f"use {other}")
    elif device.type == "cpu":
        missing = missing_instructions(precision)
        if tells and missing:
            log.warning(
                "this CPU has no instructions for %s (%s): results are right, but slower than in float32",
                precision, " or ".join(missing),
            )  # fmt: skip


def missing_instructions(precision: Precision) -> tuple[str, ...]:
    """Return the instruction sets that support a low precision, if this CPU has none of them; else ()."""
    known = torch.cpu.get_capabilities()
    wanted = _NEEDS[precision] if known.get("architecture") == "x86_64" else _ARM[precision]
    return () if any(known.get(name) for name in wanted) else wanted


class LossScale:
    """Holds the scale of the loss (always 1, except for float16), and decides which steps are skipped. All ranks skip a
    step if a gradient or the loss is not finite on any rank. With ``kind``, the device does both, so that the host does
    not wait for it."""

    def __init__(self, precision: Precision, device: torch.device, kind: DeviceKind | None = None) -> None:
        self.precision, self.device = precision, device
        self.dynamic = is_scaled(precision)
        self.value = FIRST_SCALE if self.dynamic else 1.0
        self.good_steps = self.skipped = 0
        self._kind = kind
        self._scale = torch.full((), self.value, device=device)
        self._grown = torch.zeros((), dtype=torch.int32, device=device)
        self._pending: tuple[Tensor, int, DeviceEvent | None] | None = None

    @property
    def on_device(self) -> bool:
        """Whether the device adapts the scale, and the host follows one step later."""
        return self._kind is not None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of a captured step that hold the scale; none if the scale is always 1."""
        if not self.dynamic:
            return {}
        return {LOSS_SCALE: self._scale if self.on_device else torch.full((), self.value, device=self.device)}

    def adapt(
        self, gradients: Sequence[Tensor], groups: Mapping[str, AxisGroup], loss: Tensor, step: int, *, tells: bool
    ) -> dict[str, Tensor]:
        """Unscale the gradients and adapt the scale on the device. Return the step's metrics: ``skipped``, which is 1
        if the update must be skipped, and the scale of the next step. What happened in the step before is noted now,
        as in ``note``."""
        assert self._kind is not None
        overflow = self.unscaled(gradients, groups, loss).reshape(()).clamp_(max=1.0)
        if self.dynamic:
            update_scale(self._scale, self._grown, overflow, 2.0, 0.5, GROWTH_STEPS)
            self._scale.clamp_(max=MOST_SCALE)
        self.settle(tells=tells)
        host = self._kind.pinned(overflow)
        host.copy_(overflow, non_blocking=True)
        self._pending = host, step, self._kind.event()
        return {"skipped": overflow.to(torch.int64)} | ({"loss_scale": self._scale.clone()} if self.dynamic else {})

    def settle(self, *, tells: bool = True) -> None:
        """Note the step that the device has run, if it was not noted yet."""
        if self._pending is None:
            return
        (overflow, step, copied), self._pending = self._pending, None
        if copied is not None:
            copied.synchronize()
        self.note(not bool(overflow), step, tells=tells)

    def unscale(self, gradients: Sequence[Tensor], groups: Mapping[str, AxisGroup], loss: Tensor) -> bool:
        """Divide the gradients by the scale, in place. Return whether they and the loss are finite on every rank. All
        ranks must call it together."""
        return not float(self.unscaled(gradients, groups, loss))

    def unscaled(self, gradients: Sequence[Tensor], groups: Mapping[str, AxisGroup], loss: Tensor) -> Tensor:
        """Divide the gradients by the scale, in place. Return on how many ranks they or the loss are not finite. On a
        device, a scale of 1 needs no pass that writes."""
        found_inf = (~torch.isfinite(loss)).to(torch.float32).reshape(1)
        if self.on_device and not self.dynamic:
            if present := [gradient for gradient in gradients if gradient.numel()]:
                largest = torch.nn.utils.get_total_norm(present, torch.inf)
                found_inf = torch.maximum(found_inf, (~torch.isfinite(largest)).to(found_inf.dtype))
        else:
            inverse = torch.full((1,), 1.0 / self.value, device=self.device)
            if self.on_device:
                inverse = self._scale.reciprocal().reshape(1)
            alike: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients:
                alike.setdefault(gradient.dtype, []).append(gradient)
            for values in alike.values():
                unscale_and_check(values, found_inf, inverse)
        for axis in sorted(groups, key=lambda axis: axis == "pp"):  # last, because stages may have other axes
            found_inf = sum_over(found_inf, groups[axis])
        return found_inf

    def note(self, finite: bool, step: int, *, tells: bool = True) -> None:
        """Adapt the scale after step ``step``, which is skipped if not ``finite``. Raise a LossScaleError if no scale
        helps."""
        if finite:
            self.good_steps, self.skipped = self.good_steps + 1, 0
            if self.dynamic and self.good_steps % GROWTH_STEPS == 0:
                self.value = min(2 * self.value, MOST_SCALE)
            return
        self.good_steps, self.skipped = 0, self.skipped + 1
        self.value /= 2 if self.dynamic else 1
        if tells:
            scale = f"; the loss scale is now {self.value:g}" if self.dynamic else ""
            log.warning("step %d is skipped: a gradient is not finite%s", step, scale)
        if self.dynamic and self.value < LEAST_SCALE:
            problem = f"the loss scale fell to {self.value:g} at step {step}"
        elif not self.dynamic and self.skipped == MOST_SKIPPED:
            problem = f"{self.skipped} steps in a row up to step {step} had gradients that are not finite"
        else:
            return
        other = "'bfloat16', whose range is that of float32" if self.dynamic else "'float32'"
        raise LossScaleError(
            f"{problem}: the step overflows in {self.precision} at any scale, or its loss is not finite",
            where=f"step {step}",
            remedy=f"look at this step's batch and learning rate, or use precision {other}; parameters are as they "
            f"were before step {step - self.skipped + 1}",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; call ``settle`` first."""
        return {"precision": self.precision, "value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state. If the state is None or of another precision, the current scale stays."""
        if state is not None and state["precision"] == self.precision:
            self.value, self.good_steps, self.skipped = state["value"], state["good_steps"], 0
            self._scale.fill_(self.value)
            self._grown.fill_(self.good_steps % GROWTH_STEPS)
            self._pending = None
