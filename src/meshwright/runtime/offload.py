"""Optimizer state that lies on the host between steps: brought to the device in chunks, one ahead, and sent back.

    copies    bring 0 | bring 1 |  send 0, bring 2  |  send 1, ...
    device            | step 0  |  step 1           |  step 2

After S. Rajbhandari et al., "ZeRO-Infinity", 2021, section 5.1.2; but the step itself stays on the device, so that any
optimizer works: it is called once for every chunk of parameters, of which alone it is then given gradients. On CUDA the
host's memory is pinned and copies run on a stream of their own; on a CPU both are the same memory, and only the
order is exercised.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CHUNK_BYTES = 2**26
"""Parameters that are stepped together."""


class Offloader:
    """Steps an optimizer whose state lies on the host. All ranks that share parameters hold them in one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """One step of what has a gradient; gradients are let go."""
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        pending = chunks([*gradients])
        for index, chunk in enumerate(pending):
            if index == 0:
                self._bring(optimizer, chunk)
            self._wait()
            if index + 1 < len(pending):
                self._bring(optimizer, pending[index + 1])
            for parameter in chunk:
                parameter.grad = gradients.pop(parameter)
            optimizer.step()
            for parameter in chunk:
                parameter.grad = None
            self._send(optimizer, chunk)
        self._wait()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copies) if self._copies is not None else nullcontext()

    def _wait(self) -> None:
        """Let the device's work wait for the copies that have been asked for."""
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def _bring(self, optimizer: Optimizer, chunk: Sequence[nn.Parameter]) -> None:
        with self._on_stream():
            for parameter, state, key, value in _moved(optimizer, chunk):
                host = self._host.get((parameter, key))
                if host is not value:  # newly made, or loaded from a checkpoint
                    host = self._kept(parameter, key, value)
                state[key] = torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def _send(self, optimizer: Optimizer, chunk: Sequence[nn.Parameter]) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            for parameter, state, key, value in _moved(optimizer, chunk):
                state[key] = self._kept(parameter, key, value)

    def _kept(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """The host's copy of a value, from now on."""
        host = self._host.get((parameter, key))
        if host is None or host.dtype != value.dtype:
            pinned = self.device.type == "cuda"
            host = self._host[parameter, key] = torch.empty_like(value, device="cpu", pin_memory=pinned)
        host.copy_(value, non_blocking=True)
        if self._copies is not None and value.is_cuda:
            value.record_stream(self._copies)
        return host

    def settle(self) -> None:
        """Wait until the host has what was sent to it; before anybody but ``step`` reads optimizer state."""
        if self._copies is not None:
            self._copies.synchronize()

    @property
    def host_bytes(self) -> int:
        """What lies on the host."""
        return sum(value.nbytes for value in self._host.values())


def chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in order, in runs of about ``CHUNK_BYTES``."""
    found: list[list[nn.Parameter]] = []
    filled = CHUNK_BYTES
    for one in parameters:
        if filled + one.nbytes > CHUNK_BYTES:
            found.append([])
            filled = 0
        found[-1].append(one)
        filled += one.nbytes
    return found


def _moved(
    optimizer: Optimizer, chunk: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
    """State of its parameter's shape; steps and the like are small, and stay where the optimizer wants them."""
    for parameter in chunk:
        state = optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                yield parameter, state, key, value
