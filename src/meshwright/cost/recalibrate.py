"""Correction factors for computing and for communication, from the measured times of a run, and their application to a
cluster."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.ledger import Ledger
from meshwright.ir.level import Level

MOST = 8.0
"""The largest factor by which constants are corrected. A larger error has a cause other than a constant."""


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """Measured time divided by the time that the cluster's constants predict, for computing and for communication. None
    if one of the two times is too short to give a factor."""

    compute: float | None = None
    communication: float | None = None


def factors(ledger: Ledger) -> Corrections:
    """Measured over predicted times in a ledger, for computing and for communication.

    Raises:
        ClusterError: a factor is above ``MOST`` or below its inverse.
    """
    ratios = Corrections(
        compute=ledger.compute_factor if ledger.tells_computing else None,
        communication=ledger.communication_factor if ledger.tells_communication else None,
    )
    remedy = "calibrate the machine again while nothing else runs, or name the cluster that it really is"
    for what, factor in (("computing", ratios.compute), ("communication", ratios.communication)):
        if factor is not None and not 1 / MOST <= factor <= MOST:
            problem = f"{what} took {factor:.3g} times as long as predicted, which no constant explains"
            raise ClusterError(problem, where=f"cluster {ledger.cluster}", remedy=remedy)
    return ratios


def with_slower_levels(cluster: Cluster, slower: Mapping[str, float]) -> Cluster:
    """The cluster with alpha, beta and the measured collectives of each level multiplied by the level's factor in
    ``slower`` (default: 1)."""
    for level, factor in slower.items():
        cluster = _slower(cluster, factor, level)
    return cluster


def _slower(value: Any, factor: float, level: str) -> Any:
    """The value with alpha, beta and the collectives of ``level`` multiplied by ``factor``, at any depth."""
    replace = msgspec.structs.replace
    if isinstance(value, CollectiveTiming):
        return replace(value, time_s=value.time_s * factor) if value.level == level else value
    if isinstance(value, msgspec.Struct):
        value = replace(
            value, **{name: _slower(getattr(value, name), factor, level) for name in value.__struct_fields__}
        )
        if isinstance(value, Level) and value.name == level and factor != 1:
            alpha_s, beta_s_per_byte = (term * factor for term in (value.alpha_s, value.beta_s_per_byte))
            return replace(value, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, origin="measured")
        return value
    return tuple(_slower(item, factor, level) for item in value) if isinstance(value, tuple) else value
