"""From a consistency rule to a replica's part of it."""

from typing import Any

from meshwright.comm.mailbox import WAIT_S, Mailbox, replica_name
from meshwright.consistency.base import Exchange
from meshwright.consistency.copies import server_name
from meshwright.consistency.elastic_average import ElasticAverageExchange
from meshwright.consistency.elastic_center import ElasticCenterExchange
from meshwright.consistency.ensemble import EnsembleExchange
from meshwright.consistency.gossip import GossipExchange
from meshwright.consistency.local_steps import DiLoCoExchange, LocalExchange
from meshwright.consistency.partial import PartialExchange
from meshwright.consistency.push_sum import PushSumExchange
from meshwright.consistency.server import ServerExchange
from meshwright.errors import LayoutError
from meshwright.ir.consistency import (
    Consistency,
    DiLoCo,
    ElasticAverage,
    Ensemble,
    Gossip,
    Local,
    Partial,
    Server,
)  # fmt: skip


def exchange_of(
    rule: Consistency, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
) -> Exchange[Any]:
    """A replica's part of a rule. ``num_replicas``: the number of replicas at the start of the run.

    Raises:
        LayoutError: there is only one replica, or replicas do not exchange anything by this rule.
        PlanError: the rule's topology is not connected or its matrix not doubly stochastic, or its delay is too long.
    """
    if num_replicas < 2:
        raise LayoutError(f"{rule} with {num_replicas} replica", where="layout: replicas", remedy="give 2 or more")
    return _kind(rule)(rule, mailbox, replica, num_replicas, wait_s=wait_s)


def _kind(rule: Consistency) -> type[Exchange[Any]]:
    match rule:
        case Gossip(push=push):
            return PushSumExchange if push else GossipExchange
        case ElasticAverage(asynchronous=asynchronous):
            return ElasticCenterExchange if asynchronous else ElasticAverageExchange
        case Local():
            return LocalExchange
        case DiLoCo():
            return DiLoCoExchange
        case Server():
            return ServerExchange
        case Partial():
            return PartialExchange
        case Ensemble():
            return EnsembleExchange
        case _:
            raise LayoutError(
                f"replicas exchange nothing by {rule}", where="layout: consistency", remedy="give another rule"
            )


def takes_gradients(rule: Consistency) -> bool:
    """Whether replicas exchange gradients instead of parameters."""
    return isinstance(rule, Server | Partial)


def participants(rule: Consistency, num_replicas: int) -> list[str]:
    """The names of all participants of a rule with this number of replicas."""
    return [*(replica_name(replica) for replica in range(num_replicas)), *servers_of(rule)]


def servers_of(rule: Consistency) -> list[str]:
    """The names of all servers of a rule."""
    if isinstance(rule, Server):
        return [server_name(index, copy) for index in range(rule.servers) for copy in range(rule.copies)]
    return [server_name(0, copy) for copy in range(rule.copies)] if isinstance(rule, Partial) else []
