"""Servers inside the processes of replicas: threads that hold ranges of the parameters."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.mailbox import Mailbox
from meshwright.consistency.copies import host, serve, server_name
from meshwright.consistency.range_state import RangeState
from meshwright.consistency.ranges import check_servers, key_ranges, parts, pieces
from meshwright.consistency.round_state import RoundState
from meshwright.consistency.server_state import Make, ServerState
from meshwright.errors import OptimizerError
from meshwright.ir.consistency import Consistency, Partial, Server
from meshwright.runtime.optimizer import ELEMENT_WISE

log = logging.getLogger("meshwright")


NOTHING = [[("nothing", 1)]]
"""The names of a rank that has no parameters to exchange. It exchanges a single number instead, which one server
holds."""


class Hosted:
    """A server in a thread of this process.

    ``connect`` makes its mailbox; ``met`` is set when it has done so.
    """

    def __init__(self, name: str, state: RangeState, connect: Callable[[str], Mailbox], wait_s: float) -> None:
        self.name, self._state, self._connect, self._wait_s = name, state, connect, wait_s
        self.mailbox: Mailbox | None = None
        self.met = threading.Event()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.mailbox = self._connect(self.name)
            self.met.set()
            serve(self.mailbox, self._state, wait_s=self._wait_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, others must learn that this server is gone
            log.error("%s ends: %s: %s", self.name, type(error).__name__, error)
            if self.mailbox is not None:
                self.mailbox.leave()
        finally:
            self.met.set()


def states_of(
    rule: Consistency, num_replicas: int, hosted_by: Callable[[int, int], bool], flats: Sequence[Tensor],
    names: Sequence[Sequence[tuple[str, int]]], make: Make | None,
) -> dict[str, RangeState]:  # fmt: skip
    """The states of the servers for which ``hosted_by(range, copy)`` is true, by server name. ``flats``: the initial
    parameters, as flat tensors. ``names``: for each flat tensor, its parameters and their numbers of elements.

    Raises:
        PlanError: there are more servers than parameter elements.
    """
    states: dict[str, RangeState] = {}
    if isinstance(rule, Partial):
        return {
            server_name(0, copy): RoundState(rule, num_replicas) for copy in range(rule.copies) if hosted_by(0, copy)
        }
    if not isinstance(rule, Server):
        return {}
    assert make is not None
    sizes = [flat.numel() for flat in flats]
    if names is not NOTHING:
        check_servers(rule.servers, sum(sizes))
    for index, spans in enumerate(key_ranges(sizes, rule.servers)):
        for copy in range(rule.copies):
            if hosted_by(index, copy):
                own = [part.clone() for part in parts(flats, spans)]
                states[server_name(index, copy)] = ServerState(rule, num_replicas, own, pieces(names, spans, own), make)
    return states


def beside(replica: int, num_replicas: int) -> Callable[[int, int], bool]:
    """A function that says whether a copy of a range is hosted by this replica."""
    return lambda index, copy: host(index, copy, num_replicas) == replica


def maker(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Make:
    """Return a function that makes an optimizer like ``optimizer``, which trains ``parameters``, for pieces of these
    parameters. A piece belongs to the group of its parameter.

    Raises:
        OptimizerError: the optimizer does not update each element independently.
    """
    kind: Any = type(optimizer)
    if not (kind.__name__ in ELEMENT_WISE and kind.__module__.startswith(torch.optim.__name__)):
        raise OptimizerError(
            f"servers hold ranges of elements, and {kind.__name__} is not known to update every element alone",
            where="optimizer",
            remedy=f"use {', '.join(ELEMENT_WISE[:3])} or another element-wise optimizer of torch.optim, or a rule "
            "without servers",
        )
    groups = optimizer.param_groups
    number_of = {id(value): number for number, group in enumerate(groups) for value in group["params"]}
    place = {name: number_of[id(value)] for name, value in parameters.items() if id(value) in number_of}
    options = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        members: list[list[nn.Parameter]] = [[] for _ in options]
        for name, piece in named:
            members[place.get(name, 0)].append(piece)
        return kind([{**option, "params": own} for option, own in zip(options, members, strict=True)])

    return make
