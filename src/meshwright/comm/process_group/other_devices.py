"""Backends for the tensors of other devices in the same group, such as NCCL in ``cpu:meshwright,cuda:nccl``."""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.process_group.identity import NAME
from meshwright.comm.process_group.work import GroupError
from meshwright.torch_private import is_registered


class OtherDevices:
    """The backends that a program has named for devices other than CPUs. They are made when a tensor first needs them,
    because torch.distributed keeps only this group, and makes no other, when a backend is written in Python. All ranks
    of the group then make theirs together."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._lock = threading.Lock()
        self._backends: dict[str, Any] = {}

    def device_types(self, group: dist.ProcessGroup) -> list[torch.device]:
        """The kinds of devices whose tensors the group carries: CPUs, and those for which the program has named another
        backend. PyTorch 2.15 asks for them while it makes the group. No kinds are known then, so it attaches none of
        its recorders, which need a group in C++."""
        return [torch.device(kind) for kind in ("cpu", *self._named(group))] if is_registered(group) else []

    def has(self, group: dist.ProcessGroup, device: str) -> bool:
        """Whether the program has named a backend for tensors of this kind of device."""
        return device in self._named(group)

    def backend(self, group: dist.ProcessGroup, device: str) -> Any:
        """The backend for tensors of a kind of device.

        Raises:
            GroupError: the program has named none, or one that is not known here.
        """
        with self._lock:
            backend = self._backends.get(device)
            if backend is None:
                backend = self._backends[device] = self._make(device, self._named(group).get(device, ""))
        return backend

    def shutdown(self) -> None:
        """Shut down the backends that have been made."""
        for backend in self._opened():
            backend.shutdown()

    def abort(self) -> None:
        """Let what has been started in the backends fail, as far as each of them can."""
        for backend in self._opened():
            backend.abort()

    def _opened(self) -> list[Any]:
        with self._lock:
            return list(self._backends.values())

    def _make(self, device: str, name: str) -> Any:
        store, timeout = dist.PrefixStore(device, self._store), timedelta(seconds=self._timeout_s)
        if name == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout)
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        raise GroupError(
            f"no backend for tensors on {device}" + (f": {name} is not available" if name else ""),
            where=f"backend {NAME}",
            remedy='name one when the group is made, such as "cpu:meshwright,cuda:nccl"',
        )

    def _named(self, group: dist.ProcessGroup) -> dict[str, str]:
        """The names of backends by kind of device, as the program has given them."""
        pairs = [part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part]
        return {device: name for device, name in pairs if device != "cpu" and name != NAME}
