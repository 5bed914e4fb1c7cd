"""Correct a few constants of a cluster by the measured times of a run (its ledger)."""

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster, CollectiveTiming, Level
from meshwright.ir.ledger import Ledger

MOST = 8.0
"""The largest factor by which constants are corrected; a larger error has another cause than a constant."""
_TIMES = ("kernel_s", "launch_s")
_FRACTIONS = ("matmul_fraction", "attention_fraction", "bandwidth_fraction")
_SAYS = "; corrected by a run of "


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """Measured time divided by the time that the cluster's constants predict, for computing and for communication."""

    compute: float = 1.0
    communication: float = 1.0


def factors(ledger: Ledger) -> Corrections:
    """Measured over predicted time of a ledger, for computing and for communication.

    Raises:
        ClusterError: a factor is above ``MOST`` or below its inverse.
    """
    ratios = Corrections(compute=ledger.compute_factor, communication=ledger.communication_factor)
    remedy = "calibrate the machine again while nothing else runs, or name the cluster that it really is"
    for what, factor in (("computing", ratios.compute), ("communication", ratios.communication)):
        if not 1 / MOST <= factor <= MOST:
            problem = f"{what} took {factor:.3g} times as long as predicted, which no constant explains"
            raise ClusterError(problem, where=f"cluster {ledger.cluster}", remedy=remedy)
    return ratios


def recalibrate(cluster: Cluster, ledger: Ledger) -> Cluster:
    """The cluster with the constants that would have predicted the ledger's run correctly.

    The factor of computing divides the device's efficiency curves and fractions, and multiplies its times per kernel.
    No efficiency rises above 1, so a device that is faster than its peaks is corrected only in part. The factor of
    communication multiplies alpha and beta of the levels that the run's ranks cross, and the measured times of
    collectives on these levels. All other constants stay.

    Raises:
        ClusterError: the ledger is of another cluster; a factor is out of bounds (``factors``); the device has neither
            efficiency curves nor kernels, so that there is nothing to correct.
    """
    if ledger.cluster != cluster.name:
        raise ClusterError(
            f"the ledger is of a run on {ledger.cluster!r}", where=f"cluster {cluster.name}",
            remedy="correct the cluster that the run was predicted for",
        )  # fmt: skip
    ratios = factors(ledger)
    if not cluster.device.efficiency and cluster.device.kernels is None:
        raise ClusterError(
            "the device has no efficiency curves that could be corrected",
            where=f"cluster {cluster.name}: device",
            remedy="calibrate the machine first",
        )
    said = (
        f"{_SAYS}{ledger.model} as {ledger.layout}: computing takes {ratios.compute:.3f} times as long, "
        f"communication {ratios.communication:.3f} times"
    )
    changed: Cluster = _corrected(cluster, ratios, ledger.levels)
    return msgspec.structs.replace(changed, source=cluster.source.partition(_SAYS)[0] + said)


def _corrected(value: Any, ratios: Corrections, levels: tuple[str, ...], key: str = "") -> Any:
    """The value with its constants corrected: those of every device in it, under every condition, by
    ``ratios.compute``; alpha, beta and the collectives of ``levels`` by ``ratios.communication``."""
    replace = msgspec.structs.replace
    if key == "efficiency":
        return {
            kind: tuple((size, min(1.0, fraction / ratios.compute)) for size, fraction in curve)
            for kind, curve in value.items()
        }
    if key in _FRACTIONS:
        return min(1.0, value / ratios.compute)
    if key in _TIMES:
        return value * ratios.compute
    if isinstance(value, CollectiveTiming):
        return replace(value, time_s=value.time_s * ratios.communication) if value.level in levels else value
    changed = _inside(value, lambda part, name: _corrected(part, ratios, levels, name))
    if isinstance(changed, Level) and changed.name in levels and ratios.communication != 1:
        alpha_s, beta_s_per_byte = (term * ratios.communication for term in (changed.alpha_s, changed.beta_s_per_byte))
        changed = replace(changed, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, origin="measured")
    return changed


def _inside(value: Any, change: Callable[[Any, str], Any]) -> Any:
    """The value with every field of a struct, or every item of a tuple, replaced by ``change(item, field's name)``."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: change(getattr(value, name), name) for name in value.__struct_fields__}
        )
    return tuple(change(item, "") for item in value) if isinstance(value, tuple) else value
