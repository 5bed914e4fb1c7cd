"""Makes ``meshwright`` a backend of torch.distributed. PyTorch calls ``register`` when it is imported."""

from typing import Any

import torch.distributed as dist

from meshwright.comm.process_group.identity import NAME


def register() -> None:
    """Register the backend, unless it is registered. The entry point ``torch.backends`` of the package calls this, so a
    program needs no import but torch; nothing else is loaded before a group is made."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])


def _make(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make this rank's end of a group; torch.distributed calls this on all ranks of the group."""
    from meshwright.comm.process_group.group import MeshwrightGroup

    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return MeshwrightGroup(options.store, options.group_rank, ranks, options.timeout.total_seconds(), options.group_id)
