"""How launchers meet for torch's elastic agent: through a store, without pickles, at one address.

    the host    keeps the store, is node 0       adds the port of the ranks' store ─┐
    a guest     connects, takes the next number  ◀─ waits until all have come ──────┴─▶ all start their ranks

PyTorch's own rendezvous (c10d) unpickles what it finds in the store, and its stores listen at every address of the
machine. Here the store holds numbers, and both stores listen at the meeting's address alone: 127.0.0.1 if there is one
host.
"""

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from meshwright.runtime.meeting_point import OFF, kept_store, store_of_meeting

NAME = "meshwright"
"""The name under which torch's launcher knows this rendezvous."""
LOOK_S = 0.05
"""Seconds between two looks for launchers that come."""


class Rendezvous(RendezvousHandler):
    """The meeting of a fixed number of launchers. ``config`` of the parameters: ``timeout`` in seconds, ``is_host``,
    ``is_kept``."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._name, self._num_nodes = parameters.run_id, parameters.max_nodes
        self._address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        self._limit = timedelta(seconds=float(parameters.config["timeout"]))
        self._is_host, self._closed = bool(parameters.config["is_host"]), False
        self._for_ranks: dist.Store | None = None
        if self._is_host and not parameters.config.get("is_kept"):
            server: dist.Store = kept_store(self._address, port, self._limit, "nodes.port")
        else:
            try:
                server = dist.TCPStore(self._address, port, is_master=False, timeout=self._limit)
            except (dist.DistError, RuntimeError) as error:
                raise RendezvousConnectionError(str(error)) from error
        self._store = store_of_meeting(server, self._name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all launchers have come. Raise a RendezvousError if they do not, and a RendezvousClosedError if
        the meeting was called off."""
        try:
            number = 0 if self._is_host else self._store.add("guests", 1)
            if number >= self._num_nodes:
                raise RendezvousConnectionError(f"{self._num_nodes} launchers have met without this one")
            self._store.set(f"here/{number}", "")
            if self._is_host:
                store = self._for_ranks = kept_store(self._address, 0, self._limit, "nodes.port")
                self._store.set("port", f"{store.port}")
            self._await_all()
            port = int(self._store.get("port"))
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousTimeoutError(str(error)) from error
        return RendezvousInfo(self._store, number, self._num_nodes, RendezvousStoreInfo(self._address, port))

    def _await_all(self) -> None:
        here, deadline = [f"here/{node}" for node in range(self._num_nodes)], time.monotonic() + self._limit.total_seconds()
        while not self._store.check(here):
            if self._store.check([OFF]):
                raise RendezvousClosedError("the meeting was called off")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError("not all launchers have come")
            time.sleep(LOOK_S)

    def num_nodes_waiting(self) -> int:
        """Always 0: the number of launchers is fixed. Raise a RendezvousConnectionError if the host is gone."""
        try:
            self._store.check(["port"])
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error
        return 0

    @property
    def use_agent_store(self) -> bool:
        """Always True: ranks use the store that the host keeps for them."""
        return True

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return NAME

    def get_run_id(self) -> str:
        """The name of the meeting."""
        return self._name

    def is_closed(self) -> bool:
        """Whether ``set_closed`` was called here."""
        return self._closed

    def set_closed(self) -> None:
        """Close the meeting for this launcher."""
        self._closed = True

    def shutdown(self) -> bool:
        """Close the meeting for this launcher."""
        self._closed = True
        return True


def register() -> None:
    """Let torch's launcher find this rendezvous."""
    rendezvous_handler_registry.register(NAME, Rendezvous)
