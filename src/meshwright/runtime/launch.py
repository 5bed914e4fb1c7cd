"""Starting ranks and torch.distributed: under plain python, torchrun, or our own launcher."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start(device: torch.device | str | None = None) -> torch.device:
    """Start torch.distributed where a launcher has set its environment and nobody has started it.

    Returns:
        The device of this rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        timeout = timedelta(seconds=float(os.environ.get("MESHWRIGHT_TIMEOUT_S", "600")))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
