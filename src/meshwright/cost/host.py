"""The host of a device: how long kernels take that the host launches while the device runs earlier kernels."""

from collections.abc import Sequence

HOST_BLEND = 4.4
"""The order p of the p-norm that combines host time and device time. A few short kernels among long kernels make both
times count."""


def launched_s(busy_s: float, launch_s: float) -> float:
    """Seconds of kernels that keep the device busy for ``busy_s`` and that the host launches in ``launch_s``: about the
    larger of the two, and more if the two are close. Estimates by sizes and costs of programs share this rule."""
    if not launch_s:
        return busy_s
    return float((busy_s**HOST_BLEND + launch_s**HOST_BLEND) ** (1 / HOST_BLEND))


def waits_s(busy_s: float, launch_s: Sequence[float]) -> list[float]:
    """Seconds for which the device waits before each of several lots of kernels of one action. ``launch_s`` are the
    host's seconds for each lot, ``busy_s`` the device's for all together, with the collectives that it waits for."""
    total_s = sum(launch_s)
    waited_s = launched_s(busy_s, total_s) - busy_s
    return [waited_s * each / total_s if total_s else 0.0 for each in launch_s]
