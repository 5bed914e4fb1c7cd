"""Time programs in turns in the same processes. Each round gives one time per program: the time of the slowest rank."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.groups import from_every_rank
from meshwright.runtime.loop import Progress, Silent

WARMUP_STEPS = 5

Step = Callable[[], object]


def alternate(
    sides: Mapping[str, Step],
    *,
    rounds: int,
    steps: int,
    warmup_steps: int = WARMUP_STEPS,
    progress: Progress | None = None,
) -> dict[str, list[float]]:
    """Seconds per step of every program in ``sides``, per round: the slowest rank's mean over a block of ``steps``.

    In each round every program runs one block. The order rotates from round to round, so that a drift of the machine
    affects all programs. All ranks of the process group call this with the same programs; a barrier precedes each
    block.
    """
    progress = progress or Silent()
    for step in sides.values():
        for _ in range(warmup_steps):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _settle()
            from_every_rank(None)
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            _settle()
            seconds[name].append(max(from_every_rank(time.perf_counter() - start)) / steps)
        progress.advance()
    return seconds


def eager_step(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any], optimizer: torch.optim.Optimizer, max_norm: float = 0.0
) -> Callable[[Any], Tensor]:
    """A training step in plain eager PyTorch, from a batch to its loss. Gradients are clipped to ``max_norm`` (0: not
    clipped)."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        output = loss_fn(model, batch)
        loss: Tensor = output[0] if isinstance(output, tuple) else output
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.detach()

    return step


@contextmanager
def measuring(progress: Progress) -> Iterator[None]:
    """A context for measurements: at its end, progress is ended and the number of threads is restored."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        progress.end()
        torch.set_num_threads(before)


def _settle() -> None:
    """Wait for the kernels that were launched on a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
