"""What-if questions about a cluster: the same devices behind faster or slower links."""

import msgspec

from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster
from meshwright.ir.level import Level

MOST = 1000.0
"""The largest factor of a link's speed."""


def with_links(cluster: Cluster, *, inside: float = 1.0, between: float = 1.0) -> Cluster:
    """The cluster with links of other speeds. ``inside`` multiplies the bytes per second of the innermost level (the
    links inside a box), ``between`` those of all other levels. Latencies stay. Measured times of collectives over a
    changed level are left out, because they no longer hold; closed forms take their place.

    Raises:
        ClusterError: a factor is not above 0 and at most ``MOST``; or a factor has no level to act on.
    """
    factors = {"inside": inside, "between": between}
    for name, factor in factors.items():
        if not 0 < factor <= MOST:
            problem = f"links {name} boxes that are {factor:g} times as fast"
            raise ClusterError(problem, where=name, remedy=f"give a number above 0, up to {MOST:g}")
    if inside == between == 1:
        return cluster
    changed: set[str] = set()
    levels = _scaled(cluster.levels, factors, changed)
    for name, factor in factors.items():
        if factor != 1 and not any(key.startswith(name) for key in changed):
            remedy = "leave their speed at 1, or take more devices"
            raise ClusterError(f"it has no links {name} boxes", where=f"cluster {cluster.name}", remedy=remedy)
    names = {key.partition(":")[2] for key in changed}
    words = " and ".join(f"links {name} boxes x{factor:g}" for name, factor in factors.items() if factor != 1)
    return msgspec.structs.replace(
        cluster, name=f"{cluster.name} with {words}", levels=levels,
        collectives=tuple(row for row in cluster.collectives if row.level not in names),
    )  # fmt: skip


def _scaled(levels: tuple[Level, ...], factors: dict[str, float], changed: set[str]) -> tuple[Level, ...]:
    """The levels with other speeds; adds ``inside:NAME`` or ``between:NAME`` to ``changed`` for each changed level."""
    result = []
    for index, level in enumerate(levels):
        innermost = index == 0 and not any(member.levels for member in level.members)
        name = "inside" if innermost else "between"
        members = tuple(
            msgspec.structs.replace(member, levels=_scaled(member.levels, factors, changed)) for member in level.members
        )
        if factors[name] != 1:
            changed.add(f"{name}:{level.name}")
        result.append(
            msgspec.structs.replace(level, beta_s_per_byte=level.beta_s_per_byte / factors[name], members=members)
        )
    return tuple(result)
