"""What torch.distributed asks of a group besides operations: names, the store, the number of collectives."""

from typing import Any

import torch.distributed as dist

NAME = "meshwright"
"""The name of the backend."""
_ProcessGroup: Any = dist.ProcessGroup
"""The base class without its types. PyTorch's stubs give each method several signatures, but PyTorch calls only one."""


class NamedGroup(_ProcessGroup):
    """A group with a name and a description. Methods are called as PyTorch calls them, from Python or from C++."""

    supports_splitting = False
    supports_coalescing = False
    profiled_as = NAME
    """How names of events begin in profiles."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # a group that is given its store could not be extended in Python
        self._store, self._name, self._desc, self._number = store, name, "undefined", 0

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """The name of the backend."""
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """The name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of the group."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._desc = desc

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> dist.Store:
        """The store in which the group's ranks meet."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has started."""
        return self._number

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on all ranks."""
