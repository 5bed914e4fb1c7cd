"""Correct a few constants of a cluster by the measured times of runs (their ledgers)."""

from statistics import geometric_mean
from typing import Any

import msgspec

from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster, CollectiveTiming, Level
from meshwright.ir.ledger import Ledger

MOST = 8.0
"""The largest factor by which constants are corrected; a larger error has another cause than a constant."""
_SAYS = "; corrected by a run of "


class Corrections(msgspec.Struct, frozen=True, kw_only=True):
    """Measured time divided by the time that the cluster's constants predict, for computing and for communication. None
    if one of the two times is too short to tell."""

    compute: float | None = None
    communication: float | None = None


def factors(ledger: Ledger) -> Corrections:
    """Measured over predicted time of a ledger, for computing and for communication.

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


def recalibrate(cluster: Cluster, *ledgers: Ledger) -> Cluster:
    """The cluster as the runs of ``ledgers`` show it: with constants that would have predicted them correctly, in the
    geometric mean of the runs that can tell.

    The factor of computing multiplies the pace of the software (``Software.pace``) with which a run was predicted, and
    with it the time of every kernel. The factor of communication multiplies alpha and beta of the levels that the run's
    ranks cross, and the measured times of collectives on these levels. All other constants stay. A run that has taught
    the cluster already teaches it nothing new.

    Raises:
        ClusterError: a ledger is of another cluster; a factor is out of bounds (``factors``).
    """
    for ledger in ledgers:
        if ledger.cluster != cluster.name:
            raise ClusterError(
                f"the ledger is of a run on {ledger.cluster!r}", where=f"cluster {cluster.name}",
                remedy="correct the cluster that the run was predicted for",
            )  # fmt: skip
    told = [(ledger, factors(ledger)) for ledger in ledgers]
    software, said = cluster.software, []
    paces = [(ledger.pace or software.pace) * each.compute for ledger, each in told if each.compute is not None]
    pace = geometric_mean(paces) if paces else software.pace
    said.append(f"computing takes {pace / software.pace:.3f} times as long")
    changed = msgspec.structs.replace(
        cluster, software=msgspec.structs.replace(software, pace=pace, runs=software.runs + len(ledgers))
    )
    now = cluster.betas
    for level in dict.fromkeys(name for ledger in ledgers for name in ledger.levels):
        communication = [
            each.communication * _then(ledger, level, now[level])
            for ledger, each in told
            if level in ledger.levels and each.communication is not None
        ]
        factor = geometric_mean(communication) if communication else 1.0
        said.append(f"communication over {level} {factor:.3f} times")
        changed = _corrected(changed, factor, level)
    runs = ", ".join(dict.fromkeys(f"{ledger.model} as {ledger.layout}" for ledger in ledgers))
    source = f"{cluster.source.partition(_SAYS)[0]}{_SAYS}{runs}: {', '.join(said)}"
    return msgspec.structs.replace(changed, source=source)


def _then(ledger: Ledger, level: str, now_s_per_byte: float) -> float:
    """The seconds per byte of a level when the run was predicted, relative to now; 1 if the ledger does not say."""
    known = dict(zip(ledger.levels, ledger.beta_s_per_byte, strict=False))
    return known[level] / now_s_per_byte if level in known and now_s_per_byte else 1.0


def _corrected(value: Any, communication: float, level: str) -> Any:
    """The value with alpha, beta and the collectives of ``level`` multiplied by ``communication``, wherever they are in
    it."""
    replace = msgspec.structs.replace
    if isinstance(value, CollectiveTiming):
        return replace(value, time_s=value.time_s * communication) if value.level == level else value
    if isinstance(value, msgspec.Struct):
        value = replace(
            value, **{name: _corrected(getattr(value, name), communication, level) for name in value.__struct_fields__}
        )
        if isinstance(value, Level) and value.name == level and communication != 1:
            alpha_s, beta_s_per_byte = (term * communication for term in (value.alpha_s, value.beta_s_per_byte))
            return replace(value, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, origin="measured")
        return value
    return tuple(_corrected(item, communication, level) for item in value) if isinstance(value, tuple) else value
