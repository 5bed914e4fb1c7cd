"""The use of a consistency rule in a run: measurements beside predictions."""

import msgspec

from meshwright.ir.units import aligned, seconds, size


class ReplicaUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The exchange of a replica with other replicas, seen from its rank 0, averaged over its steps. ``waited_s``:
    seconds per step in which it exchanged or waited. ``sent_bytes``: bytes of tensors that it sent per step.
    ``staleness`` maps a number k to the number of steps that began k steps ahead of the slowest replica. Predictions
    assume equally fast replicas, and are means over them. They leave out messages to a server in the replica's own
    process."""

    rule: str
    num_replicas: int
    num_steps: int
    waited_s: float
    sent_bytes: float
    staleness: dict[int, int]
    predicted_waited_s: float
    predicted_bytes: float
    predicted_staleness: dict[int, int]

    def lines(self) -> list[str]:
        """The comparison as text."""
        rows = [
            ("replicas", "predicted", "measured"),
            ("exchange and waiting in a step", seconds(self.predicted_waited_s), seconds(self.waited_s)),
            ("bytes sent in a step", size(self.predicted_bytes), size(self.sent_bytes)),
            ("steps ahead of the slowest", _staleness_text(self.predicted_staleness), _staleness_text(self.staleness)),
        ]
        title = f"  {self.num_replicas} replicas, {self.rule}, {self.num_steps} steps"
        return [title, *aligned(rows)]


def _staleness_text(staleness: dict[int, int]) -> str:
    """The mean and the maximum of the staleness, as text."""
    count = sum(staleness.values())
    mean = sum(value * times for value, times in staleness.items()) / max(1, count)
    return f"{mean:.1f} (at most {max(staleness, default=0)})"
