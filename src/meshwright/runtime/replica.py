"""This rank's part in the exchange between replicas: the tensors, their memory, and the ranks of the replica that
exchange them."""

import atexit
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.groups import broadcast_along, from_every_rank
from meshwright.comm.mailbox import Mailbox, replica_name
from meshwright.comm.record import WAIT, current
from meshwright.consistency.base import Exchange, Snapshot
from meshwright.consistency.rules import exchange_of, participants, takes_gradients
from meshwright.consistency.server import ServerExchange
from meshwright.consistency.server_state import Make
from meshwright.errors import CheckpointError, LostRankError, RankError
from meshwright.ir.consistency import Consistency, Server
from meshwright.ir.mesh import AxisGroup
from meshwright.runtime import launch, trust
from meshwright.runtime.checkpoint import Stateful
from meshwright.runtime.hosting import NOTHING, Hosted, beside, states_of
from meshwright.runtime.state import LocalParameters
from meshwright.runtime.worlds import World

EXCHANGE = "replicas: "
"""In a trace, the names of spans of exchanges with other replicas begin with these words."""
CLOCK, READY = "clock", "ready/"
Kind = tuple[tuple[str, ...], torch.dtype]
"""The axes over which ranks of the replica hold equal copies, and the dtype."""


class FlatParameters:
    """The trained parameters of a rank as flat tensors. There is a flat tensor for each dtype and each set of axes over
    which ranks hold equal copies. The parameters are views of these tensors, so that no copies are needed.

    Attributes:
        flats: the flat tensors.
        names: the names of the parameters in each flat tensor, in order.
        sizes: for each flat tensor, the names and numbers of elements of its parameters.
    """

    def __init__(self, parameters: LocalParameters, groups: dict[str, AxisGroup]) -> None:
        self._groups, self._parameters = groups, parameters
        kinds: dict[Kind, list[str]] = {}
        for name, parameter in parameters.trainable.items():
            kinds.setdefault((self._copied(name), parameter.dtype), []).append(name)
        self._kinds = sorted(kinds, key=str)
        self.names = [kinds[kind] for kind in self._kinds]
        self.sizes = [[(name, parameters.own[name].numel()) for name in names] for names in self.names]
        self.flats: list[Tensor] = []
        for names in self.names:
            own = [parameters.own[name] for name in names]
            flat = torch.cat([value.detach().reshape(-1) for value in own])
            for value, part in zip(own, flat.split([value.numel() for value in own]), strict=True):
                value.data = part.view_as(value)
            self.flats.append(flat)

    def _copied(self, name: str) -> tuple[str, ...]:
        """The axes over which ranks hold equal copies of a parameter."""
        split = self._parameters.split_axes(name)
        return tuple(axis for axis in self._groups if axis not in split and axis != "pp")

    def owned(self) -> list[int]:
        """The indices of the flat tensors that this rank exchanges. These are the tensors of which it holds the first
        copy."""
        return [index for index, (axes, _) in enumerate(self._kinds) if all(self._is_first(axis) for axis in axes)]

    def _is_first(self, axis: str) -> bool:
        return self._groups[axis].index == 0

    def share(self, flats: list[Tensor]) -> None:
        """Copy the flat tensors from their first copies to all other copies. Every rank of the replica must call this
        method."""
        for flat, (axes, _) in zip(flats, self._kinds, strict=True):
            for axis in reversed(axes):
                broadcast_along(flat, self._groups[axis], 0)

    def gathered(self) -> list[Tensor]:
        """The gradients as flat tensors, with 0 for parameters without a gradient."""
        result = []
        for names in self.names:
            own = [self._parameters.own[name] for name in names]
            result.append(torch.cat([_gradient(parameter) for parameter in own]))
        return result

    def put_gradients(self, flats: list[Tensor]) -> None:
        """Use the parts of flat tensors as the gradients of the parameters."""
        for flat, names in zip(flats, self.names, strict=True):
            own = [self._parameters.own[name] for name in names]
            for parameter, part in zip(own, flat.split([value.numel() for value in own]), strict=True):
                parameter.grad = part.view_as(parameter)


class ReplicaConnection:
    """Connects a rank with the ranks of the same index in other replicas, and with servers."""

    def __init__(self, rule: Consistency, world: World, column: int, life: int) -> None:
        from meshwright.comm.mail import ZmqMailbox  # imported here, because only replicas need pyzmq

        self.rule, self.life, self._world = rule, life, world
        self._wait_s = launch.timeout().total_seconds()
        assert world.store is not None
        columns = dist.get_world_size() if dist.is_initialized() else 1
        self._mailbox = partial(
            ZmqMailbox, dist.PrefixStore("letters", world.store), life=life, column=column, num_columns=columns,
            host=launch.own_address(), token=trust.token(world.store), wait_s=self._wait_s,
        )  # fmt: skip

    def mailbox(self, name: str) -> Mailbox:
        """The mailbox of a participant. The call waits until all participants have mailboxes."""
        return self._mailbox(name, None if self.life else participants(self.rule, self._world.num_replicas))

    def exchange(self) -> Exchange[Any]:
        """This rank's part in the consistency rule."""
        replica, count = self._world.replica, self._world.num_replicas
        return exchange_of(self.rule, self.mailbox(replica_name(replica)), replica, count, wait_s=self._wait_s)

    def host(self, flats: list[Tensor], names: list[list[tuple[str, int]]], make: Make | None) -> list[Hosted]:
        """Start the servers in the process of this replica."""
        if isinstance(self.rule, Server) and self.rule.place == "own":
            return []
        where = beside(self._world.replica, self._world.num_replicas)
        states = states_of(self.rule, self._world.num_replicas, where, flats, names, make)
        return [Hosted(name, state, self.mailbox, self._wait_s) for name, state in states.items()]


class Replica:
    """This rank's part in the exchange between replicas. The trainer calls ``begin``, ``updates`` and ``end`` in every
    step. All ranks of the replica call them together, and share the results that come from other replicas. The first
    call connects this replica with the others.

    ``make``: a function that makes the optimizer of a server. ``snapshot``: a function that returns the state for a
    joining replica. ``hyperparameters``: a function that returns the hyperparameters of the trainer's optimizer, for
    servers.

    ``loader``: the training data; a joining replica gets its position. ``loader_state``: the position that this replica
    got when it joined. ``has_state_of_another``: whether this replica was restarted, and has taken over the state of a
    living replica. ``moment`` counts these calls. Ranks of the replica are at the same moment if they are in the
    same call.

    A rank that holds no first copy of a tensor exchanges a single number instead.
    """

    def __init__(self, world: World, flat: FlatParameters, connection: ReplicaConnection, make: Make | None) -> None:
        self.world, self.number, self.flat, self.connection, self._make = world, world.replica, flat, connection, make
        self.snapshot: Snapshot | None = None
        self.hyperparameters: Callable[[], str] | None = None
        self.exchange: Exchange[Any] | None = None
        self.hosted: list[Hosted] = []
        self._owned = flat.owned()
        self._ready: list[list[Tensor]] = []
        self._nothing = torch.zeros(1)
        self._saved: dict[str, Tensor] = {}
        self._left = False
        self.has_state_of_another = False
        self.moment = 0
        self.loader: Stateful | None = None
        self.loader_state: dict[str, Any] | None = None

    def connected(self) -> Exchange[Any]:
        """This rank's exchange. The first call starts the servers in this process, and waits for the other replicas."""
        if self.exchange is None:
            own, names = self._own(self.flat.flats), [self.flat.sizes[index] for index in self._owned]
            self.hosted = self.connection.host(own, names or NOTHING, self._make)
            self.exchange = self.connection.exchange()
            if isinstance(self.exchange, ServerExchange) and self.hyperparameters is not None:
                self.exchange.hyperparameters = self.hyperparameters
            if self._saved:
                self.load_state(self._saved)
            self.exchange.snapshot = self.snapshot
            for each in self.hosted:
                each.met.wait()
            atexit.register(self.leave)  # runs before mailboxes close: exit functions run in reverse
        return self.exchange

    @property
    def sent_bytes(self) -> int:
        """The bytes of tensors that this rank has sent to other replicas and to servers."""
        mailboxes = [each.mailbox for each in (self.exchange, *self.hosted) if each is not None]
        return sum(mailbox.sent_bytes for mailbox in mailboxes if mailbox is not None)

    def begin(self) -> None:
        """Wait until the next step may begin."""
        self.moment += 1
        with _waiting("begin"):
            changed = self.connected().begin(self._own(self.flat.flats))
            self._shared(changed)

    def updates(self, finite: bool) -> Iterator[None]:
        """Exchange the gradients of the parameters. Each time that this method yields, make an optimizer step with the
        present gradients of the parameters. ``finite``: whether this replica's gradients are finite. If not, they are
        not sent."""
        if not takes_gradients(self.connection.rule):
            if finite:
                yield
            return
        gradients = self.flat.gathered()
        self.moment += 1
        with _waiting("gradients"):
            for each in self.connected().updates(self._own(gradients)):
                self._ready.append([tensor.clone() for tensor in each])
            count = min(from_every_rank(len(self._ready)))  # others wait until all ranks have their parts
        for _ in range(count):
            for index, tensor in zip(self._owned, self._ready.pop(0), strict=False):
                gradients[index] = tensor
            self.flat.share(gradients)
            self.flat.put_gradients(gradients)
            yield

    def end(self) -> None:
        """Hand over the result of the step to the rule."""
        self.moment += 1
        with _waiting("end"):
            changed = self.connected().end(self._own(self.flat.flats))
            self._shared(changed)

    def settle(self) -> None:
        """Wait until the exchange of the last step is complete, before parameters are saved or evaluated. After
        leaving, this does nothing."""
        if self.exchange is not None and not self._left:
            with _waiting("settle"):
                changed = self.exchange.settle(self._own(self.flat.flats))
                self._shared(changed)

    def check_may_load(self) -> None:
        """Check that the parameters may still be replaced by a load.

        Raises:
            CheckpointError: servers hold the parameters.
        """
        if self.exchange is not None and isinstance(self.exchange, ServerExchange):
            raise CheckpointError(
                "parameters are loaded after the first step, when servers hold them",
                where=str(self.connection.rule),
                remedy="load them before the first step",
            )

    def state(self) -> dict[str, Tensor]:
        """The state for checkpoints: the clock, and everything that the rule keeps between steps, on this rank and on
        servers."""
        return self._with_clock(self.exchange.state()) if self.exchange is not None else self._saved

    def handover(self) -> dict[str, Tensor]:
        """The same state for a joining replica, with the gradients that are ready for the next steps."""
        columns = enumerate(zip(*self._ready, strict=True))
        ready = {f"{READY}{index}": torch.stack(tensors) for index, tensors in columns}
        return self._with_clock(self.connected().handover() | ready)

    def _with_clock(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**state, CLOCK: torch.tensor(self.connected().clocks[self.number])}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``state`` or of ``handover``."""
        if self.exchange is None:
            self._saved = state
            return
        self.exchange.clocks[self.number] = int(state[CLOCK])
        ready = {name: value for name, value in state.items() if name.startswith(READY)}
        self._ready = [list(tensors) for tensors in zip(*ready.values(), strict=True)]
        self.exchange.load_state({
            name: value for name, value in state.items() if name != CLOCK and name not in ready
        })  # fmt: skip

    def leave(self) -> None:
        """End this replica's part: it makes no more steps. Servers in its process continue until all replicas have
        left. A second call does nothing."""
        if self.exchange is not None and not self._left:
            self._left = True
            self.exchange.leave()
            for each in self.hosted:
                each.thread.join()
            with suppress(dist.DistError):  # the store may be gone already
                self._store.set(_left(self.number), "")

    def others_have_left(self) -> bool:
        """Whether all other replicas have made their last steps and left. Then this replica can join none of them."""
        return all(
            self._store.check([_left(other)]) for other in range(self.world.num_replicas) if other != self.number
        )

    @property
    def _store(self) -> dist.Store:
        assert self.world.store is not None
        return self.world.store

    def _own(self, flats: list[Tensor]) -> list[Tensor]:
        return [flats[index] for index in self._owned] or [self._nothing]

    def _shared(self, changed: bool) -> None:
        if any(from_every_rank(changed)):
            self.flat.share(self.flat.flats)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Record the time of an exchange as a wait in the trace."""
    begun = time.perf_counter()
    yield
    if (note := current()) is not None:
        note.span(WAIT, f"{EXCHANGE}{what}", begun, time.perf_counter())


# --- at the start ----------------------------------------------------------------------------------------------------


def check_equal(store: dist.Store, world: World, column: int, facts: dict[str, str]) -> None:
    """Check that all replicas start with the same model, plan and weights. ``facts`` describes those of this replica.

    Raises:
        RankError: a replica starts with something else. All replicas raise the error. This check is needed because
            unequal initial weights would spoil the training of all replicas silently.
        LostRankError: another replica does not answer.
    """
    store.set(f"start/{column}/{world.replica}", json.dumps(facts))
    for replica in range(world.num_replicas):
        other = json.loads(awaited(store, f"start/{column}/{replica}", replica))
        _compare(json.loads(awaited(store, f"start/{column}/0", 0)), other, replica_name(replica))


def check_like_first(store: dist.Store, world: World, column: int, facts: dict[str, str]) -> None:
    """Check that this rank, which starts later or is a server, has the model, plan and weights with which replica 0
    started, as far as ``facts`` describes them.

    Raises:
        RankError: it has others.
        LostRankError: replica 0 does not answer.
    """
    first = json.loads(awaited(store, f"start/{column}/0", 0))
    where = replica_name(world.replica) if world.server < 0 else f"server {world.server}"
    _compare({key: value for key, value in first.items() if key in facts}, facts, where)


def _left(replica: int) -> str:
    """The key in the store which says that a replica has left."""
    return f"left/{replica_name(replica)}"


def awaited(store: dist.Store, key: str, replica: int) -> str:
    """The value of a key in the store that a replica sets.

    Raises:
        LostRankError: the replica does not set it within the time limit.
    """
    try:
        return str(store.get(key).decode())
    except dist.DistError as error:
        remedy = "look for its own error; MESHWRIGHT_TIMEOUT_S sets how long replicas wait for each other"
        raise LostRankError("it does not come", where=replica_name(replica), remedy=remedy) from error


def _compare(first: dict[str, str], other: dict[str, str], where: str) -> None:
    for key, value in other.items():
        if value != first.get(key):
            problem = f"its {key} is {value}, that of replica 0 is {first.get(key)}"
            remedy = "seed all alike before the model is made" if key == "weights" else "start the same program"
            raise RankError(problem, where=where, remedy=remedy)


def digest(flats: list[Tensor]) -> str:
    """A hash of the bytes of tensors, as 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    for flat in flats:
        state.update(flat.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter).reshape(-1) if parameter.grad is None else parameter.grad.reshape(-1)
