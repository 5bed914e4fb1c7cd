"""Starts this rank's replica or server, and joins it with the others."""

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.comm.mailbox import Letter, replica_name, replicas_of
from meshwright.consistency.base import Exchange
from meshwright.consistency.copies import serve
from meshwright.consistency.packing import packed, unpacked
from meshwright.consistency.peers import PeerExchange
from meshwright.consistency.rules import servers_of
from meshwright.consistency.server_state import hyperparameters
from meshwright.errors import LayoutError, LostRankError
from meshwright.ir.consistency import Consistency, Ensemble, Partial, Server, Sync, consistency_of, is_asynchronous
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.runtime import launch, worlds
from meshwright.runtime.hosting import maker, states_of
from meshwright.runtime.replica import (
    FlatParameters,
    Replica,
    ReplicaConnection,
    awaited,
    check_equal,
    check_like_first,
    digest,
)
from meshwright.runtime.trainer import Trainer
from meshwright.runtime.worlds import World
from meshwright.schedules.replicas import of_replica

log = logging.getLogger("meshwright")

NO_STEP, POLL_S = -1, 0.02
TRIES = 20
"""A joining replica requests a state this many times, until all of its ranks have received the state of the same
moment."""

PlanArgument = str | os.PathLike[str] | Layout | Plan


def start(plan: PlanArgument, layout: Layout, device: torch.device | str | None) -> tuple[Any, torch.device, World]:
    """Start torch.distributed for the ranks of this replica. Return the plan for one replica, the device of this rank,
    and the place of this rank among all ranks. ``layout``: the layout of the plan."""
    if layout.replicas == 1 and isinstance(consistency_of(layout.consistency), Sync):
        return plan, launch.start(device), World()
    target, place = worlds.start(layout, device)
    if isinstance(plan, Layout):
        plan, _ = of_replica(plan, place.num_launched)
    return plan, target, place


def join(trainer: Trainer, place: World) -> None:
    """Join a trainer with the trainers of the other replicas, by the consistency rule of its plan. Replicas must start
    with the same model, plan and weights. A replica that was restarted takes over the state of a living replica:
    parameters, optimizer, step. It goes on alone if all others have made their last steps. The replicas connect in the
    first step, so a checkpoint may be loaded before it.

    Raises:
        RankError: this replica's model, plan or weights differ from the others'.
        LayoutError: the rule does not fit the plan.
        OptimizerError: servers cannot run the optimizer.
        LostRankError: another replica does not answer.
    """
    rule, store = consistency_of(trainer.plan.consistency), place.store
    assert store is not None
    _check_fits(rule, trainer)
    flat = FlatParameters(trainer.parameters, trainer.groups)
    name = replica_name(place.replica)
    life = from_rank_0(lambda: int(store.add(f"lives/{name}", 1)) - 1)
    facts = {"model": trainer.graph.fingerprint, "plan": trainer.plan.digest}
    if not isinstance(rule, Ensemble):
        facts["weights"] = digest(flat.flats)
    if life == 0:
        check_equal(store, place, trainer.rank, facts)
    else:
        check_like_first(store, place, trainer.rank, facts)
    connection = ReplicaConnection(rule, place, trainer.rank, life)
    make = maker(trainer.optimizer, trainer.parameters.trainable) if isinstance(rule, Server) else None
    trainer.replica = Replica(place, flat, connection, make)
    trainer.replica.snapshot = partial(snapshot, trainer, trainer.replica)
    trainer.replica.hyperparameters = partial(hyperparameters, trainer.optimizer)
    if life and not isinstance(rule, Ensemble):
        _join_again(trainer, trainer.replica)


def _join_again(trainer: Trainer, replica: Replica) -> None:
    """Join as a replica that was restarted: take over the state of a living replica. If all others have made their last
    steps meanwhile, go on alone, from the latest checkpoint of this replica.

    Raises:
        LostRankError: no other replica is alive, or the others have left, and with them the servers.
    """
    if not from_rank_0(replica.others_have_left):
        take_over(trainer, replica)
        replica.has_state_of_another = True
    elif servers_of(replica.connection.rule):
        problem = "the others have made their last steps, and the servers have ended with them"
        raise LostRankError(problem, where=replica_name(replica.number), remedy="use the model of another replica")
    elif trainer.rank == 0:
        log.warning("replica %d goes on alone from its own checkpoint: the others have made their last steps",
                    replica.number)  # fmt: skip


def serve_only(trainer: Trainer, place: World) -> NoReturn:
    """Run as a server on a separate rank until all replicas have left. Then end the program. ``trainer``: made as on a
    replica; it makes no steps.

    Raises:
        OptimizerError: servers cannot run the optimizer.
        LostRankError: another participant does not answer.
        SystemExit: all replicas have left.
    """
    rule, store = consistency_of(trainer.plan.consistency), place.store
    assert store is not None
    assert isinstance(rule, Server)
    flat = FlatParameters(trainer.parameters, trainer.groups)
    make = maker(trainer.optimizer, trainer.parameters.trainable)
    check_like_first(store, place, trainer.rank, {"weights": digest(flat.flats)})
    ((name, state),) = states_of(
        rule, place.num_replicas, lambda index, copy: index * rule.copies + copy == place.server, flat.flats,
        flat.sizes, make,
    ).items()  # fmt: skip
    life = int(store.add(f"lives/{trainer.rank}/{name}", 1)) - 1
    log.info("this rank is %s", name)
    serve(
        ReplicaConnection(rule, place, trainer.rank, life).mailbox(name), state, wait_s=launch.timeout().total_seconds()
    )
    raise SystemExit(0)


def _check_fits(rule: Consistency, trainer: Trainer) -> None:
    if trainer.device.type != "cpu":
        raise LayoutError(
            f"{rule} on {trainer.device}: letters between replicas carry tensors of the CPU",
            where="layout: consistency",
            remedy="use consistency='sync' on CUDA devices",
        )
    parameters = trainer.parameters
    tied = next((name for name in parameters if len(parameters.owners(name)) > 1), "")
    if tied and is_asynchronous(rule):
        raise LayoutError(
            f"{tied} is tied across stages, whose copies {rule} would mix with letters of different times",
            where="layout: consistency",
            remedy="use a rule whose replicas wait for each other, or pp=1",
        )


# --- a replica that comes later --------------------------------------------------------------------------------------


def snapshot(trainer: Trainer, replica: Replica) -> tuple[list[Tensor], str]:
    """The state that a joining replica needs from this rank: its flat tensors, and all other state as bytes."""
    state: dict[str, Any] = {
        "optimizer": trainer.optimizer.state_dict(),
        "buffers": dict(trainer.parameters.named_buffers),
        "exchange": replica.handover(),
        "loss_scale": trainer.loss_scale.state_dict() if trainer.loss_scale is not None else None,
        "loader": replica.loader.state_dict() if replica.loader is not None else None,
    }
    return [*replica.flat.flats, packed(state)], json.dumps({"step": trainer.step_number, "moment": replica.moment})


def align(trainer: Trainer) -> None:
    """Align replicas after all have loaded checkpoints of their own: a replica with an older checkpoint takes over the
    state of a replica with the newest. With ``partial(...)``, replicas in the same step may have applied different
    numbers of rounds, so all take over the state of one replica. Members of an ensemble keep their own states.

    Raises:
        LostRankError: another replica does not answer.
    """
    replica = trainer.replica
    if replica is None or replica.world.store is None or isinstance(replica.connection.rule, Ensemble):
        return
    store, own = dist.PrefixStore(f"aligned/{trainer.rank}", replica.world.store), str(replica.number)
    store.set(own, str(trainer.step_number if replica.connection.life == 0 else NO_STEP))
    if replica.connection.life:  # it has already taken over a state
        return
    steps = [int(awaited(store, str(number), number)) for number in range(replica.world.num_replicas)]
    newest = [number for number, step in enumerate(steps) if step == max(steps)]
    if isinstance(replica.connection.rule, Partial):
        newest = newest[:1]
    late = [number for number, step in enumerate(steps) if number not in newest and step != NO_STEP]
    if not late:
        return
    exchange = replica.connected()
    if replica.number in late:
        take_over(trainer, replica, newest)
        store.set(f"{own}/done", "")
    while not isinstance(exchange, PeerExchange) and not all(_is_done(store, exchange, number) for number in late):
        if (letter := exchange.mailbox.receive(POLL_S)) is not None:  # other replicas request this replica's state
            exchange.take(letter)


def _is_done(store: dist.Store, exchange: Exchange[Any], number: int) -> bool:
    """Whether a replica has taken over a state, or has died."""
    return store.check([f"{number}/done"]) or replica_name(number) not in exchange.mailbox.view.members


def take_over(trainer: Trainer, replica: Replica, sources: Sequence[int] | None = None) -> None:
    """Request the state of a living replica in ``sources`` (None: any replica), and take it over. All ranks of this
    replica take the state of the same replica at the same moment.

    Raises:
        LostRankError: no other replica is alive, or no replica gives all ranks the state of the same moment.
    """
    exchange = replica.connected()
    if replica.connection.life:
        exchange.join()
    for _ in range(TRIES):
        letter = _received(exchange, replica.number, sources)
        if len(set(from_every_rank((letter.sender, json.loads(letter.text)["moment"])))) == 1:
            break
    else:
        problem = f"in {TRIES} tries its ranks got the state of different moments"
        raise LostRankError(problem, where=replica_name(replica.number), remedy="start it again")
    *flats, rest = letter.tensors
    for own, received in zip(replica.flat.flats, flats, strict=True):
        own.copy_(received)
    state = unpacked(rest)
    trainer.optimizer.load_state_dict(state["optimizer"])
    for name, value in state["buffers"].items():
        trainer.parameters.named_buffers[name].copy_(value)
    if trainer.loss_scale is not None and state["loss_scale"] is not None:
        trainer.loss_scale.load_state_dict(state["loss_scale"])
    replica.load_state(state["exchange"])
    replica.loader_state = state["loader"]
    trainer.step_number = json.loads(letter.text)["step"]
    if trainer.rank == 0:
        log.warning("replica %d has joined with the state of %s, after step %d", replica.number, letter.sender,
                    trainer.step_number)  # fmt: skip


def _received(exchange: Exchange[Any], own: int, sources: Sequence[int] | None) -> Letter:
    """The state of the first living replica in ``sources`` (None: any replica) that has a state. ``own``: this
    replica."""
    mailbox = exchange.mailbox
    asked: set[int] = set()
    while True:
        members = replicas_of(mailbox.view.members)
        living = [peer for peer in sources or members if peer in members and peer not in (own, *asked)]
        if not living:
            remedy = "start all replicas again: each goes on from its checkpoint"
            raise LostRankError("no living replica has a state", where=mailbox.name, remedy=remedy)
        asked.add(living[0])
        letter = _answer(exchange, replica_name(living[0]))
        if letter is not None and letter.tensors:
            return letter


def _answer(exchange: Exchange[Any], name: str) -> Letter | None:
    """The answer of a replica to a request for its state. None if the replica dies. Without tensors if it has no state,
    because it has just joined itself."""
    answers: list[Letter] = []

    def take(letter: Letter) -> None:
        if letter.kind == "state" and letter.sender == name:
            answers.append(letter)
        else:
            exchange.take(letter)

    def has_answered() -> bool:
        exchange.look()
        return bool(answers) or name not in mailbox.view.members

    mailbox = exchange.mailbox
    mailbox.send(name, "state?")
    mailbox.receive_until(has_answered, take, f"the state of {name}", exchange.wait_s)
    return answers[0] if answers else None
