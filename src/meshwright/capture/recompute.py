"""While a step is traced, the model does not recompute activations itself: what is recomputed is the plan's to say."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

log = logging.getLogger("meshwright")


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` call its function and save what that saves.

    A traced recomputation would run after the forward pass, on the module's own parameters instead of the traced
    ones, and draw random numbers of its own. Both kinds of checkpoint (reentrant or not) look up by name what is
    replaced here, so that references to ``checkpoint`` that a model has taken long ago are reached as well.
    """
    kept = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    seen: list[bool] = []

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            seen.append(True)
            return function(*args)

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        seen.append(True)
        yield

    module: Any = torch_checkpoint
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = Plain, plain
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = kept
    if seen:
        log.info("the model recomputes activations itself (torch.utils.checkpoint); here the plan decides that")
