"""Keeps optimizer state on the host between steps: chunks are copied to the device, one chunk ahead, and then back.

    copies    bring 0 | bring 1 |  send 0, bring 2  |  send 1, ...
    device            | step 0  |  step 1           |  step 2

This follows S. Rajbhandari et al., "ZeRO-Infinity", 2021, section 5.1.2, except that the optimizer's step runs on the
device, so that any optimizer works. The optimizer is called once for every chunk of parameters. During a call only the
parameters of its chunk have gradients. On CUDA the host's memory is pinned, and copies run on their own stream. On a
CPU, host and device memory are the same, so copies save nothing there and only their order can be tested.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm.record import copying
from meshwright.runtime.device import DeviceKind, within

CHUNK_BYTES = 2**26
"""Approximate bytes of the parameters in a chunk, which are updated together."""


class Offloader:
    """Steps an optimizer whose state lies on the host. Ranks that share parameters hold these parameters in the same
    order."""

    def __init__(self, kind: DeviceKind) -> None:
        self.device, self._kind = kind.device, kind
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._copies = kind.copies()

    def step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Update all parameters that have a gradient, and release the gradients."""
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

    def _wait(self) -> None:
        """Let later work on the device wait for the copies that were requested so far."""
        if self._copies is not None:
            self._copies.hold_kernels()

    def _bring(self, optimizer: Optimizer, chunk: Sequence[nn.Parameter]) -> None:
        moved = [*_moved(optimizer, chunk)]
        with within(self._copies), copying("optimizer state to the device", _bytes_of(moved)):
            for parameter, state, key, value in moved:
                host = self._host.get((parameter, key))
                if host is not value:  # newly made, or loaded from a checkpoint
                    host = self._kept(parameter, key, value)
                state[key] = torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def _send(self, optimizer: Optimizer, chunk: Sequence[nn.Parameter]) -> None:
        if self._copies is not None:
            self._copies.wait_for_kernels()
        moved = [*_moved(optimizer, chunk)]
        with within(self._copies), copying("optimizer state to the host", _bytes_of(moved)):
            for parameter, state, key, value in moved:
                state[key] = self._kept(parameter, key, value)

    def _kept(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """Copy a value to the host, and return the host's copy."""
        host = self._host.get((parameter, key))
        if host is None or host.dtype != value.dtype:
            host = self._host[parameter, key] = self._kind.pinned(value)
        host.copy_(value, non_blocking=True)
        if self._copies is not None and value.device == self.device:
            self._copies.keep(value)
        return host

    def settle(self) -> None:
        """Wait until all copies to the host are done. Call it before optimizer state is read outside of ``step``."""
        if self._copies is not None:
            self._copies.synchronize()

    @property
    def host_bytes(self) -> int:
        """The bytes of optimizer state on the host."""
        return sum(value.nbytes for value in self._host.values())


def chunks(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split the parameters, in order, into chunks of about ``CHUNK_BYTES``."""
    result: list[list[nn.Parameter]] = []
    filled = CHUNK_BYTES
    for parameter in parameters:
        if filled + parameter.nbytes > CHUNK_BYTES:
            result.append([])
            filled = 0
        result[-1].append(parameter)
        filled += parameter.nbytes
    return result


def _bytes_of(moved: Sequence[tuple[nn.Parameter, dict[str, Any], str, Tensor]]) -> int:
    return sum(value.nbytes for _, _, _, value in moved)


def _moved(
    optimizer: Optimizer, chunk: Sequence[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
    """Yield the state tensors that have the shape of their parameter. Other state (step counts) stays where the
    optimizer put it."""
    for parameter in chunk:
        state = optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                yield parameter, state, key, value
