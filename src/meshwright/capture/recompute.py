"""Stops the model from recomputing activations while a step is traced: the plan decides about recomputation."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint as torch_checkpoint

from meshwright.torch_private import CHECKPOINT_GENERATORS

log = logging.getLogger("meshwright")


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` call its function and keep the activations that the function saves.

    A traced recomputation would run after the forward pass, use the module's own parameters instead of the traced ones,
    and draw its own random numbers. Both kinds of checkpoint (reentrant or not) look up the replaced names at every
    call, so that references to ``checkpoint`` that a model took earlier are covered too.
    """
    seen: list[bool] = []

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            seen.append(True)
            return function(*args)

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        seen.append(True)
        yield

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(torch_checkpoint, "CheckpointFunction", Plain))
        for name in CHECKPOINT_GENERATORS:
            replaced.enter_context(patch.object(torch_checkpoint, name, plain))
        yield
    if seen:
        log.info("the model recomputes activations itself (torch.utils.checkpoint); here the plan decides that")
