"""The host of a device: it launches kernels while the device runs earlier kernels, and may limit their speed."""

from collections.abc import Sequence

HOST_BLEND = 4.4
"""The order p of the p-norm that combines host time and device time. If a few kernels are short and the others are
long, both times matter."""


def launched_s(busy_s: float, launch_s: float) -> float:
    """Seconds of kernels that keep the device busy for ``busy_s`` and that the host launches in ``launch_s``: about the
    larger of the two, and more if the two are close. Estimates by sizes and costs of programs share this rule."""
    if not launch_s:
        return busy_s
    return float((busy_s**HOST_BLEND + launch_s**HOST_BLEND) ** (1 / HOST_BLEND))


def waits_s(busy_s: float, launch_s: Sequence[float]) -> list[float]:
    """The device's waiting time, in seconds, before each of several groups of kernels in an action. ``launch_s`` has
    the host's launch time for each group. ``busy_s`` is the device's time for all groups together, including
    collectives that it waits for."""
    total_s = sum(launch_s)
    waited_s = launched_s(busy_s, total_s) - busy_s
    return [waited_s * each / total_s if total_s else 0.0 for each in launch_s]
