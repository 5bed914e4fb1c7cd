"""The rule ``ensemble``: members train independently, and predict together."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from meshwright.consistency.local_steps import MeanExchange
from meshwright.errors import LostRankError
from meshwright.ir.consistency import Ensemble


class Joint(NamedTuple):
    """The joint prediction of an ensemble: the mean of the members' values, the standard deviation over members (their
    spread), and the number of members."""

    mean: Tensor
    spread: Tensor
    num_members: int


class EnsembleExchange(MeanExchange[Ensemble]):
    """``ensemble``: no exchange in training; ``joint`` computes the joint prediction."""

    waits_for_all = False

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """Members exchange nothing."""
        return False

    def joint(self, values: Tensor) -> Joint:
        """The mean and the spread of the values of all living members. All of them must call this, with tensors of one
        shape, such as the probabilities of classes; all get the same bits. The spread is the root of the mean square of
        the deviations from the mean.

        The cross-entropy of mean probabilities is at most the mean of the members' cross-entropies (Jensen's
        inequality).
        """
        flat = values.detach().cpu().reshape(-1)
        mean = self._joint(flat).clone()
        number = self.mean.start([(flat - mean).square()])
        squares = self.finish(number, 0)
        return Joint(mean.view_as(values), squares.tensors[0].sqrt().view_as(values), squares.num_contributors)

    def leave(self) -> None:
        """See ``Exchange``. A member stays until all living members have finished the joint predictions that it has
        begun: if it left before, they would begin again without it."""
        with suppress(LostRankError):  # another member's end must not make this member fail
            self._wait(self.mean.all_have_finished, "the joint prediction of other members")
        super().leave()

    def _joint(self, flat: Tensor) -> Tensor:
        return self.finish(self.mean.start([flat]), 0).tensors[0]
