"""The rule ``easgd``: replicas and a center attract each other (EASGD, Zhang et al. 2015).

With e_i = alpha (x_i - c), where x_i are the parameters of a replica before a step, an exchange makes
x_i <- x_i - e_i and c <- c + e_i. The optimizer's change of that step, whose gradients are at the old x_i, is added, as
in the paper: x_i <- x_i - eta g_i(x_i) - alpha (x_i - c). The sum of all x_i and c is conserved.
"""

from collections.abc import Sequence

from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_number
from meshwright.consistency.local_steps import MeanExchange
from meshwright.ir.consistency import ElasticAverage


class ElasticAverageExchange(MeanExchange[ElasticAverage]):
    """``easgd(alpha, every=H)``: all replicas at once, before every step that follows H others. Every replica has the
    center, with the same bits: c <- c + beta (mean x_i - c), beta = P alpha. The mean is computed while gradients are
    computed.

    Attributes:
        center: c, for each flat tensor.
    """

    def __init__(
        self, rule: ElasticAverage, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.center: list[Tensor] = []
        self._sent: tuple[int, int, list[Tensor]] | None = None
        """The clock and the number of the current round, and this replica's parameters in it."""

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``. The center starts at the replicas' parameters, which are equal."""
        if not self.center:
            self.center = [parameter.clone() for parameter in parameters]

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``."""
        clock = self.clocks[self.replica]
        if clock and clock % self.rule.every == 0 and self._sent is None:
            own = [parameter.clone() for parameter in parameters]
            self._sent = clock, self.mean.start(own), own

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        if self._sent is None:
            return False
        clock, number, olds = self._sent
        self._sent = None
        result, alpha = self.finish(number, clock), self.rule.alpha
        for parameter, old, center, mean in zip(parameters, olds, self.center, result.tensors, strict=True):
            parameter.sub_(old - center, alpha=alpha)
            center.add_(mean - center, alpha=result.num_contributors * alpha)
        return True

    def take(self, letter: Letter) -> None:
        """See ``Exchange``. A contribution contains the clock of its sender."""
        if letter.kind == "mean+":
            self.heard(replica_number(letter.sender), (letter.numbers[0] + 1) * self.rule.every)
        super().take(letter)

    def state(self) -> dict[str, Tensor]:
        """See ``Exchange``. Between two steps no round is in progress."""
        return super().state() | {f"center.{index}": flat for index, flat in enumerate(self.center)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``."""
        super().load_state(state)
        count = sum(name.startswith("center.") for name in state)
        self.center = [state[f"center.{index}"].clone() for index in range(count)]
