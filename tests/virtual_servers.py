"""Replicas and servers in a virtual network, whose updates are counted, and chaos that kills and restarts them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox, replica_name, replicas_of
from meshwright.consistency.copies import living_copies, range_of, serve, server_name
from meshwright.consistency.partial import PartialExchange
from meshwright.consistency.range_state import Operation, RangeState, Reply
from meshwright.consistency.ranges import key_ranges, parts, pieces
from meshwright.consistency.round_state import RoundState
from meshwright.consistency.server import ServerExchange
from meshwright.consistency.server_state import Make, ServerState, hyperparameters
from meshwright.ir.consistency import Partial, Server
from tests.virtual_mailbox import VirtualNetwork

Gradient = Callable[[int, int, int, Tensor], Tensor]
"""``gradient(replica, life, step, parameters)``."""


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0)


class Training:
    """Trains under a rule, in a network. What happens is noted here, whoever dies.

    ``watch`` is called after each operation of each server, and ``loaded`` after a server got the state of another.

    Attributes:
        done: the updates (replica, life, step) of which the replica knows that they count.
        pushed: those that it has handed over.
        tracks: for ``partial``, the parameters of each life of a replica after each round.
    """

    def __init__(
        self,
        rule: Server | Partial,
        num_replicas: int,
        num_steps: int,
        start: Tensor,
        gradient: Gradient,
        make: Make = plain_sgd,
        *,
        names: Sequence[tuple[str, int]] = (),
        watch: Callable[[RangeState, Operation, list[Reply]], None] = lambda *_: None,
        loaded: Callable[[RangeState], None] = lambda _: None,
        lr: Callable[[int], float] | None = None,
    ) -> None:
        self.rule, self.num_replicas, self.num_steps, self.start, self.gradient = (
            rule, num_replicas, num_steps, start, gradient,
        )  # fmt: skip
        self.make, self.names, self.lr = make, list(names) or [("w", start.numel())], lr
        self.watch, self.loaded = watch, loaded
        self.num_ranges = rule.servers if isinstance(rule, Server) else 1
        self.ranges = key_ranges([start.numel()], self.num_ranges)
        self.done: set[tuple[int, int, int]] = set()
        self.pushed: set[tuple[int, int, int]] = set()
        self.tracks: dict[tuple[int, int], dict[int, Tensor]] = {}
        self.staleness: set[int] = set()
        self.states: dict[str, RangeState] = {}
        self.ready: dict[str, bool] = {}

    def bodies(self) -> dict[str, Callable[[Mailbox], Any]]:
        """All participants."""
        servers = [server_name(index, copy) for index in range(self.num_ranges) for copy in range(self.rule.copies)]
        return {replica_name(replica): self.replica(replica) for replica in range(self.num_replicas)} | {
            name: self.server(name) for name in servers
        }

    # --- servers -----------------------------------------------------------------------------------------------------

    def server(self, name: str, life: int = 0) -> Callable[[Mailbox], Any]:
        self.ready[name] = life == 0

        def body(box: Mailbox) -> RangeState:
            self.states[name] = self._state(name)
            return serve(box, self.states[name])

        return body

    def _state(self, name: str) -> RangeState:
        training, index = self, range_of(name)

        class Watched:
            """Calls ``watch`` after each operation, and keeps the parameters of each version of a server."""

            history: dict[int, bytes]

            def apply(self, operation: Operation) -> list[Reply]:
                done = self.is_done(operation)  # type: ignore[attr-defined]
                given = operation._replace(tensors=tuple(tensor.clone() for tensor in operation.tensors))
                replies = super().apply(operation)  # type: ignore[misc]
                if not done:
                    training.watch(self, given, replies)  # type: ignore[arg-type]
                if isinstance(self, ServerState):
                    self.history[self.version] = b"".join(each.numpy().tobytes() for each in self.parameters)
                result: list[Reply] = replies
                return result

            def load_state(self, state: dict[str, Any]) -> None:
                super().load_state(state)  # type: ignore[misc]
                training.ready[name] = True
                self.history = {}
                training.loaded(self)  # type: ignore[arg-type]

        if isinstance(self.rule, Partial):
            return type("WatchedRounds", (Watched, RoundState), {"history": {}})(self.rule, self.num_replicas)
        own = [part.clone() for part in parts([self.start], self.ranges[index])]
        named = pieces([self.names], self.ranges[index], own)
        kind = type("WatchedServer", (Watched, ServerState), {"history": {}})
        return kind(self.rule, self.num_replicas, own, named, self.make)

    # --- replicas ----------------------------------------------------------------------------------------------------

    def replica(self, number: int, life: int = 0) -> Callable[[Mailbox], Any]:
        exchange_type: Any = PartialExchange if isinstance(self.rule, Partial) else ServerExchange
        self.ready[replica_name(number)] = life == 0

        def body(box: Mailbox) -> Tensor | None:
            exchange: Any = exchange_type(self.rule, box, number, self.num_replicas)
            x, sgd = self._optimizer()
            if life:
                exchange.join()
                if isinstance(exchange, PartialExchange) and not ask_peer(exchange, x):
                    exchange.leave()
                    return None
            self.ready[replica_name(number)] = True
            exchange.snapshot = lambda: ([x.detach().clone()], repr(sgd.state_dict()))
            if isinstance(exchange, ServerExchange):
                exchange.hyperparameters = lambda: hyperparameters(sgd)
            track = self.tracks[number, life] = {exchange.clocks[number]: x.detach().clone()}
            for step in range(self.num_steps):
                self._begin(exchange, x, number, life, step - 1)
                if self.lr is not None:
                    sgd.param_groups[0]["lr"] = self.lr(step)
                self.pushed.add((number, life, step))
                for each in exchange.updates([self.gradient(number, life, step, x.detach().clone())]):
                    self._apply(x, sgd, each[0])
                    track[exchange.clocks[number]] = x.detach().clone()
                if isinstance(exchange, PartialExchange):
                    self.done.add((number, life, step))
                exchange.end([x.detach()])
            self._begin(exchange, x, number, life, self.num_steps - 1)
            exchange.leave()
            return x.detach()

        return body

    def _begin(self, exchange: Any, x: Tensor, number: int, life: int, step: int) -> None:
        exchange.begin([x.detach()])
        self.staleness |= set(exchange.staleness)
        if step >= 0:
            self.done.add((number, life, step))

    def _optimizer(self) -> tuple[Tensor, torch.optim.Optimizer]:
        x = self.start.clone()
        own = [torch.nn.Parameter(part) for part in x.split([size for _, size in self.names])]
        optimizer = self.make([(name, part) for (name, _), part in zip(self.names, own, strict=True)])
        self._parts = getattr(self, "_parts", {})
        self._parts[id(optimizer)] = own
        return x, optimizer

    def _apply(self, x: Tensor, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
        own = self._parts[id(optimizer)]
        for parameter, part in zip(own, gradient.split([value.numel() for value in own]), strict=True):
            parameter.grad = part
        optimizer.step()

    # --- oracles -----------------------------------------------------------------------------------------------------

    def synchronous(self) -> Tensor:
        """The parameters after synchronous training: a step with the mean of all gradients."""
        x, optimizer = self._optimizer()
        for step in range(self.num_steps):
            if self.lr is not None:
                optimizer.param_groups[0]["lr"] = self.lr(step)
            first, *others = [self.gradient(each, 0, step, x.detach().clone()) for each in range(self.num_replicas)]
            total = first.clone()
            for other in others:
                total += other
            self._apply(x, optimizer, total / self.num_replicas)
        return x.detach()

    def last_states(self, network: VirtualNetwork) -> list[RangeState]:
        """The primary's state of each range, when the last replica left."""
        last = [view for view in network.views if replicas_of(view.members)][-1]
        return [self.states[living_copies(last, index)[0]] for index in range(self.num_ranges)]


def ask_peer(exchange: PartialExchange, x: Tensor) -> bool:
    """Get the parameters of a living replica (plain SGD has no state); False if none lives."""
    box, answers = exchange.mailbox, list[Letter]()

    def take(letter: Letter) -> None:
        if letter.kind == "state":
            answers.append(letter)
        else:
            exchange.take(letter)

    for peer in replicas_of(box.view.members):
        name = replica_name(peer)
        if peer == exchange.replica or any(letter.tensors for letter in answers):
            continue
        answers.clear()
        box.send(name, "state?")
        box.receive_until(lambda name=name: bool(answers) or name not in box.view.members, take, name)  # type: ignore[misc]
    if not answers or not answers[0].tensors:
        return False
    x.copy_(answers[0].tensors[0])
    exchange.clocks[exchange.replica] = answers[0].numbers[0]
    return True


class Chaos(VirtualNetwork):
    """Kills participants at random turns and starts them again, as long as each range has a living copy with its state,
    and some replica lives.

    ``pace``: the mean number of turns between two events. ``most_kills``: no more are killed.
    """

    def __init__(self, seed: int, training: Training, pace: int, most_kills: int, *, restart: bool = True) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randrange)
        self.training, self.pace, self.most_kills, self.restart = training, pace, most_kills, restart
        self.killed: list[str] = []
        self.lives: dict[str, int] = {}

    def _one_turn(self) -> None:
        if self.random.randrange(self.pace) == 0:
            self._plan_an_event()
        super()._one_turn()

    def _plan_an_event(self) -> None:
        living = [name for name, box in self.boxes.items() if not box.over and name in self.views[-1].members]
        replicas = replicas_of(living)
        dead = [name for name, box in self.boxes.items() if box.killed]
        if dead and self.restart and replicas and self.random.randrange(2):
            name = self.random.choice(dead)
            life = self.lives[name] = self.lives.get(name, 0) + 1
            if name.startswith("replica"):
                body = self.training.replica(int(name.removeprefix("replica ")), life)
            else:
                body = self.training.server(name, life)
            self.starts[self.turn + 1] = (name, body)
            return
        victims = [name for name in living if self._may_die(name, living, replicas)]
        if victims and len(self.killed) < self.most_kills:
            self.killed.append(self.random.choice(victims))
            self.kills[self.turn + 1] = self.killed[-1]

    def _may_die(self, name: str, living: list[str], replicas: list[int]) -> bool:
        if name.startswith("replica"):
            return any(self.training.ready[other] for other in map(replica_name, replicas) if other != name)
        copies = [copy for copy in living if copy.startswith(name.split(".")[0] + ".") and copy != name]
        return any(self.training.ready[copy] for copy in copies)
