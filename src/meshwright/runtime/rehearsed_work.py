"""Operations of torch.distributed in a dry run, which end at once, and the marks of a trace."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.torch_private import Work


class Mark(NamedTuple):
    """A mark of a trace. ``stream``: the stream on which it is: ``kernels``, ``copies``, or one for the ends of
    operations. ``begun``: the number of operations of torch.distributed that the rank had started. ``ended``: the
    numbers of those for which the stream waited just before."""

    stream: str
    begun: int
    ended: tuple[int, ...] = ()


class Done(Work):
    """An operation of torch.distributed that has ended, and that notes when a stream waits for it."""

    def __init__(self, number: int, waited: Callable[["Done"], None]) -> None:
        super().__init__()
        self.number, self._waited = number, waited
        self.writes: dict[int, str] = {}

    def wait(self, timeout: object = None) -> bool:
        """Note that the current stream waits."""
        self._waited(self)
        return True

    def block_current_stream(self) -> None:
        """Note that the current stream waits."""
        self._waited(self)

    def is_completed(self) -> bool:
        """True."""
        return True
