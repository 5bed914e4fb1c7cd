"""What a consistency rule did in a run, beside what was predicted of it."""

import msgspec

from meshwright.ir.units import aligned, seconds, size


class ReplicaUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The exchange of rank 0 of a replica with other replicas, on average over its steps. ``waited_s``: seconds of a
    step in which it exchanged or waited. ``sent_bytes``: bytes of tensors that it sent in a step. ``staleness`` maps
    numbers of steps to how often a step began so many steps ahead of the slowest replica. The predictions are those of
    replicas that are equally fast, on average over them; the prediction leaves out letters to a server beside
    the same replica."""

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
            ("steps ahead of the slowest", _told(self.predicted_staleness), _told(self.staleness)),
        ]
        title = f"  {self.num_replicas} replicas, {self.rule}, {self.num_steps} steps"
        return [title, *aligned(rows)]


def _told(staleness: dict[int, int]) -> str:
    """The mean and the maximum."""
    count = sum(staleness.values())
    mean = sum(value * times for value, times in staleness.items()) / max(1, count)
    return f"{mean:.1f} (at most {max(staleness, default=0)})"
