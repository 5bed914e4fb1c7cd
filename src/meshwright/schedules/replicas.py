"""Replicas of a layout: the ranks of each replica, and the requirements of a consistency rule."""

from collections.abc import Iterator

import msgspec

from meshwright.errors import LayoutError, Problem, refuse
from meshwright.ir.consistency import ElasticAverage, Gossip, Partial, Server, Sync, consistency_of
from meshwright.ir.layout import Layout
from meshwright.schedules.mixing import check_topology


def server_ranks(layout: Layout) -> int:
    """The number of ranks that serve only as servers (``server(..., place=own)``). These are the last ranks."""
    rule = consistency_of(layout.consistency)
    return rule.servers * rule.copies if isinstance(rule, Server) and rule.place == "own" else 0


def of_replica(layout: Layout, num_ranks: int) -> tuple[Layout, int]:
    """The layout of one replica, and its number of ranks, if there are ``num_ranks`` ranks in total. With ``sync``, the
    ranks of all replicas become data-parallel ranks of one process group.

    Raises:
        LayoutError: the number of replicas does not divide the ranks, or the rule does not fit the layout.
        PlanError: the rule is malformed, or its topology is not connected.
    """
    rule = consistency_of(layout.consistency)
    refuse(LayoutError, _unfit(layout, num_ranks))
    if isinstance(rule, Gossip):
        check_topology(rule, layout.replicas, "layout: consistency")
    if isinstance(rule, Sync):
        dp = layout.dp if layout.dp < 0 else layout.dp * layout.replicas
        return msgspec.structs.replace(layout, dp=dp, replicas=1), num_ranks
    return layout, (num_ranks - server_ranks(layout)) // layout.replicas


def all_ranks(layout: Layout | None, world_size: int) -> int:
    """The number of ranks of all replicas and servers, if each replica has ``world_size`` ranks."""
    if layout is None or isinstance(consistency_of(layout.consistency), Sync):
        return world_size
    return world_size * layout.replicas + server_ranks(layout)


def num_ranks(layout: Layout) -> int:
    """The number of ranks that a layout needs for all its replicas and servers; negative if a size is open."""
    return layout.num_ranks * layout.replicas + server_ranks(layout) if layout.num_ranks > 0 else layout.num_ranks


def _unfit(layout: Layout, num_ranks: int) -> Iterator[Problem]:
    rule, replicas = consistency_of(layout.consistency), layout.replicas
    place, named = "layout: replicas", "layout: consistency"
    if replicas < 1:
        yield place, f"replicas={replicas}", "give 1 or more"
    if isinstance(rule, Sync):
        if layout.stage_sizes and replicas > 1:
            yield place, "replicas with stage_sizes and consistency='sync'", "give the stages more dp instead"
        return
    if replicas < 2:
        yield place, f"consistency={layout.consistency!r} with {replicas} replica", "give 2 or more replicas"
    servers = server_ranks(layout)
    if num_ranks - servers < replicas or (num_ranks - servers) % replicas:
        besides = f" and {servers} servers" if servers else ""
        remedy = "choose replicas that divide the ranks that are no servers, or start other ranks"
        yield place, f"{num_ranks} ranks do not divide into {replicas} replicas{besides}", remedy
    if servers and num_ranks - servers > replicas:
        yield (
            named,
            f"{layout.consistency} with replicas of several ranks",
            "leave place=own out, or give one rank each",
        )
    if isinstance(rule, Partial) and num_ranks - servers > replicas:
        problem = f"{layout.consistency} with replicas of several ranks, which would count other gradients in a step"
        yield named, problem, "give each replica one rank, or another rule"
    if isinstance(rule, Partial) and rule.copies > replicas:
        yield named, f"copies={rule.copies} on {replicas} replicas", f"give at most {replicas}"
    if isinstance(rule, Server) and rule.place == "beside" and rule.copies > replicas:
        yield named, f"copies={rule.copies} on {replicas} replicas", f"give at most {replicas}, or place=own"
    if isinstance(rule, ElasticAverage) and not rule.asynchronous and rule.alpha * replicas > 1:
        remedy = f"give an alpha of at most 1/{replicas}"
        yield named, f"{layout.consistency} moves the center beyond the mean of {replicas} replicas", remedy
    if isinstance(rule, Partial) and rule.count.isdecimal() and int(rule.count) > replicas:
        yield named, f"{layout.consistency} with {replicas} replicas", f"give at most {replicas}"
