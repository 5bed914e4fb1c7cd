"""Replicas in processes of their own: rules equal one process where they should, and go on when replicas die."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.errors import CheckpointError, MeshwrightError, RankError
from meshwright.models import MLP, classification_loss
from meshwright.runtime import joining, launch
from meshwright.runtime.launch_replicas import run_replicas
from meshwright.runtime.replica import digest
from tests.end_to_end.launchers import LAUNCHERS, Launcher

STEPS = 5


def batch(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 8, dtype=torch.float64, generator=random)
    return {"inputs": inputs, "label": torch.randint(0, 4, (24,), generator=random)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trainer_of(layout: mw.Layout, optimizer: Any = sgd, seed: int = 0) -> mw.Trainer:
    torch.manual_seed(seed)
    model = MLP((8, 16, 16, 4)).double()
    return mw.parallelize(model, classification_loss, batch(0), plan=layout, optimizer=optimizer, device="cpu")


def trained(layout: mw.Layout, optimizer: Any = sgd, steps: int = STEPS) -> tuple[dict[str, Tensor], tuple[int, int]]:
    trainer = trainer_of(layout, optimizer)
    for step in range(steps):
        trainer.step(batch(step))
    return trainer.full_state_dict(all_ranks=True), trainer.data_shard


def check(layout: mw.Layout, each: int, tmp_path: Path, optimizer: Any = sgd) -> None:
    given, shard = run_replicas(
        trained, layout, optimizer, num_replicas=layout.replicas, num_ranks=each, directory=tmp_path, restarts=0
    )
    assert shard[1] == layout.replicas * layout.dp
    serial, _ = trained(mw.Layout(), optimizer)
    for name, value in serial.items():
        torch.testing.assert_close(given[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "rule",
    [
        "server(ssp=0, servers=2)",
        "gossip(complete)",
        pytest.param("server(sync)", marks=pytest.mark.product),  # inside are these two, too
        pytest.param("local(1)", marks=pytest.mark.product),
        pytest.param("diloco(1, lr=1, momentum=0)", marks=pytest.mark.product),
    ],
)
def test_limits_of_rules_are_synchronous_training(rule: str, tmp_path: Path) -> None:
    check(mw.Layout(replicas=2, consistency=rule), 1, tmp_path)


@pytest.mark.parametrize("rule", ["server(sync)", "partial(2)"])
def test_any_optimizer_makes_its_own_steps(rule: str, tmp_path: Path) -> None:
    check(mw.Layout(replicas=2, consistency=rule), 1, tmp_path, adam)


INSIDE = [mw.Layout(dp=2), mw.Layout(tp=2), mw.Layout(dp=2, zero=1), mw.Layout(pp=2)]


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        *zip(INSIDE, 2 * ["local(1)", "server(sync)"], strict=True),
        *(
            pytest.param(layout, rule, marks=pytest.mark.product)
            for layout, rule in zip(INSIDE, 2 * ["server(sync)", "local(1)"], strict=True)
        ),
    ],
    ids=str,
)
def test_any_layout_inside_a_replica(layout: mw.Layout, rule: str, tmp_path: Path) -> None:
    check(msgspec.structs.replace(layout, replicas=2, consistency=rule), 2, tmp_path)


@pytest.mark.parametrize(
    "rule", [pytest.param("gossip(complete)", marks=pytest.mark.product), "diloco(1, lr=1, momentum=0)"]
)
def test_zero_inside_replicas_that_mix(rule: str, tmp_path: Path) -> None:
    check(mw.Layout(dp=2, zero=3, replicas=2, consistency=rule), 2, tmp_path)


def saved_or_loaded(rule: str, directory: str, steps: int) -> tuple[dict[str, Tensor], float]:
    """Train from the last checkpoint of this replica, if there is one, and save another."""
    trainer = trainer_of(mw.Layout(replicas=2, consistency=rule), adam)
    assert trainer.replica is not None
    own = Path(directory) / f"replica-{trainer.replica.number}"
    if (own / "latest").exists():
        trainer.load(own / "latest")
    for step in range(trainer.step_number, steps):
        trainer.step(batch(step))
    trainer.save(own / "latest")
    if rule.startswith("server"):
        with pytest.raises(CheckpointError, match="after the first step, when servers hold them"):
            trainer.load(own / "latest")
    return trainer.full_state_dict(), trainer.evaluate(batch(0)).item()


@pytest.mark.parametrize("rule", ["server(sync, servers=2, copies=2)", "partial(2)"])
def test_checkpoints_have_what_servers_hold(rule: str, tmp_path: Path) -> None:
    def run(steps: int) -> tuple[dict[str, Tensor], float]:
        directory = tmp_path / str(steps)
        directory.mkdir()
        return run_replicas(
            saved_or_loaded, rule, str(tmp_path), steps, num_replicas=2, num_ranks=1, directory=directory, restarts=0
        )

    run(3)
    given, loss = run(STEPS)
    trainer = trainer_of(mw.Layout(), adam)
    for step in range(STEPS):
        trainer.step(batch(step))
    for name, value in trainer.full_state_dict().items():
        torch.testing.assert_close(given[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert abs(loss - trainer.evaluate(batch(0)).item()) < 1e-9


def tracked(path: str, steps: int) -> None:
    """Train from the last checkpoint, if there is one; replica 2 is late. Write a hash of the parameters after each
    round."""
    trainer = trainer_of(mw.Layout(replicas=3, consistency="partial(majority)"), adam)
    assert trainer.replica is not None
    number = trainer.replica.number
    own = Path(path) / f"replica-{number}"
    if (own / "latest").exists():
        trainer.load(own / "latest")
        joining.align(trainer)
    track = {}
    for step in range(trainer.step_number, steps):
        time.sleep(0.05 * (number == 2))
        trainer.step(batch(step))
        track[trainer.replica.connected().clocks[number]] = digest(trainer.replica.flat.flats)
    trainer.save(own / "latest")
    (own / f"{steps}.json").write_text(json.dumps(track))


def test_replicas_that_have_applied_other_rounds_go_on_from_the_state_of_one(tmp_path: Path) -> None:
    for steps in (6, 12):
        directory = tmp_path / str(steps)
        directory.mkdir()
        run_replicas(tracked, str(tmp_path), steps, num_replicas=3, num_ranks=1, directory=directory, restarts=0)
        tracks = [json.loads((tmp_path / f"replica-{number}/{steps}.json").read_text()) for number in range(3)]
        for track in tracks[1:]:
            common = track.keys() & tracks[0].keys()
            assert common
            assert all(track[number] == tracks[0][number] for number in common)


# --- ensembles -------------------------------------------------------------------------------------------------------


def probabilities(model: torch.nn.Module, given: dict[str, Tensor]) -> Tensor:
    result: Tensor = torch.softmax(model(given["inputs"]), dim=-1)
    return result


def member(directory: str) -> tuple[Tensor, Tensor, int]:
    """Train a member, note what it predicts alone, and return what all predict together."""
    number = launch.launched_replica()
    trainer = trainer_of(mw.Layout(replicas=3, consistency="ensemble"), seed=number)
    for step in range(STEPS):
        trainer.step(batch(step))
    alone = probabilities(trainer.parameters.model, batch(99)).detach()
    torch.save(alone, Path(directory) / f"member{number}.pt")
    return mw.joint(trainer, probabilities, batch(99))


def test_an_ensemble_predicts_together(tmp_path: Path) -> None:
    place = tmp_path / "ranks"
    mean, spread, count = run_replicas(member, str(tmp_path), num_replicas=3, num_ranks=1, directory=place, restarts=0)
    alone = torch.stack([torch.load(tmp_path / f"member{number}.pt", weights_only=True) for number in range(3)])
    assert count == 3
    torch.testing.assert_close(mean, alone.mean(0))
    torch.testing.assert_close(spread, alone.std(0, correction=0))
    assert spread.max() > 1e-3, "members differ"
    labels = batch(99)["label"]
    losses = [-each.gather(1, labels[:, None]).log().mean() for each in (mean, *alone)]
    assert losses[0] <= sum(losses[1:]) / 3, "Jensen's inequality"


def test_only_members_of_an_ensemble_predict_together() -> None:
    with pytest.raises(MeshwrightError, match="consistency='ensemble'"):
        mw.joint(trainer_of(mw.Layout()), probabilities, batch(0))


# --- deaths ----------------------------------------------------------------------------------------------------------

RULES_THAT_GO_ON = [
    "server(async, copies=2)", "partial(majority)", "gossip(one-peer, push=on, staleness=any)",
    "easgd(0.2, mode=async)", "diloco(4, fragments=2, delay=1, codec=qsgd(8))",
    *(
        pytest.param(rule, marks=pytest.mark.product)
        for rule in ("server(ssp=2, copies=2)", "gossip(ring)", "easgd(0.2, every=2)", "local(3)", "diloco(4)")
    ),
]  # fmt: skip
"""One rule of each kind, and others of these kinds; ``test_peer_rules.py`` has deaths under all of them."""


def killed_once(rule: str, victim: int, at: int) -> int:
    """Train; the victim kills itself in its first life. All end when it has made some steps of its second life. Return
    the number of steps."""
    trainer = trainer_of(mw.Layout(replicas=3, consistency=rule))
    assert trainer.replica is not None
    store, number, life = trainer.replica.world.store, trainer.replica.number, trainer.replica.connection.life
    assert store is not None
    first = trainer.step_number
    assert (first > 0) == (life > 0), "the state is a peer's"
    for step in itertools.count(first):
        if number == victim and life == 0 and step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        assert torch.isfinite(trainer.step(batch(step)))
        if life and step == first + 5:
            store.set("again", "")
        if store.check(["again"]):
            break
        time.sleep(0.02)
    return trainer.step_number


@pytest.mark.parametrize("rule", RULES_THAT_GO_ON)
def test_others_go_on_when_a_replica_dies_and_it_joins_again(rule: str, tmp_path: Path) -> None:
    messages: list[str] = []
    steps = run_replicas(
        killed_once, rule, 1, 4, num_replicas=3, num_ranks=1, directory=tmp_path, restarts=1, tell=messages.append
    )
    assert steps > 5
    assert len(messages) == 1
    assert "replica 1 has died" in messages[0]


def comes_too_late(rule: str, directory: str) -> tuple[int, int]:
    """Train on two replicas. Replica 0 kills itself, and comes again when the other has left. Return the number of this
    replica, and how many steps it has made since it was started."""
    has_left, dead = Path(directory, "has left"), Path(directory, "dead")
    while dead.exists() and not has_left.exists() and launch.what_is_launched().replica == 0:
        time.sleep(0.01)
    trainer = trainer_of(mw.Layout(replicas=2, consistency=rule))
    assert trainer.replica is not None
    first = trainer.step_number
    while trainer.step_number < 7:
        if trainer.replica.number == 0 and trainer.step_number == 4 and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        assert torch.isfinite(trainer.step(batch(trainer.step_number)))
    trainer.replica.leave()
    assert not trainer.replica.has_state_of_another
    has_left.touch()
    return trainer.replica.number, trainer.step_number - first


@pytest.mark.parametrize("rule", ["local(2)", "gossip(one-peer, push=on, staleness=any)", "easgd(0.2, mode=async)"])
def test_a_replica_that_comes_too_late_goes_on_alone(rule: str, tmp_path: Path) -> None:
    messages: list[str] = []
    number, steps = run_replicas(
        comes_too_late, rule, str(tmp_path), num_replicas=2, num_ranks=1, directory=tmp_path, tell=messages.append
    )
    assert (number, steps) == (0, 7), "it has no checkpoint"
    assert len(messages) == 1, messages


def test_a_replica_that_comes_after_the_servers_have_ended(tmp_path: Path) -> None:
    messages: list[str] = []
    number, _ = run_replicas(
        comes_too_late, "partial(majority, copies=2)", str(tmp_path), num_replicas=2, num_ranks=1, directory=tmp_path,
        restarts=1, tell=messages.append,
    )  # fmt: skip
    assert number == 1
    assert "the servers have ended with them" in messages[1]
    assert f"the result is that of replica 1, in {tmp_path / 'replica-1'}" in messages[2]


# --- mistakes --------------------------------------------------------------------------------------------------------


def unlike(what: str) -> None:
    """Make the trainers of two replicas that differ in ``what``."""
    second = launch.launched_replica() == 1
    torch.manual_seed(second and what == "weights")
    model = MLP((8, 16, 4) if second and what == "model" else (8, 16, 16, 4)).double()
    layout = mw.Layout(replicas=2, consistency="local(2)", microbatches=2 if second and what == "plan" else 1)
    mw.parallelize(model, classification_loss, batch(0), plan=layout, optimizer=sgd, device="cpu")


@pytest.mark.parametrize("what", ["weights", "model", "plan"])
def test_unlike_replicas_are_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=what):
        run_replicas(unlike, what, num_replicas=2, num_ranks=1, directory=tmp_path, restarts=0)


def test_replicas_need_ranks() -> None:
    with pytest.raises(MeshwrightError, match="do not divide"):
        trainer_of(mw.Layout(replicas=2, consistency="local(2)"))


def test_verify_refuses_replicas() -> None:
    with pytest.raises(MeshwrightError, match="verify one replica"):
        mw.verify(MLP((8, 4)), classification_loss, batch(0), mw.Layout(replicas=2, consistency="local(2)"))


# --- other launchers -------------------------------------------------------------------------------------------------


def write(layout: mw.Layout, directory: Path) -> None:
    """Train, and write down the part of the data and the sum of all parameters."""
    weights, shard = trained(layout)
    total = float(sum(value.double().sum() for value in weights.values()))
    (directory / f"rank{os.environ['RANK']}").write_text(f"shard {shard} {total}")


def lines_of(launch: Launcher, layout: mw.Layout, directory: Path) -> list[str]:
    """What the ranks write, in order."""
    launch(4, directory, write, layout, directory)
    return [file.read_text() for file in sorted(directory.glob("rank*"))]


@LAUNCHERS
def test_another_launcher_starts_all_replicas_together(launch: Launcher, tmp_path: Path) -> None:
    lines = lines_of(launch, mw.Layout(replicas=2, consistency="local(1)", tp=2), tmp_path)
    assert [line.split(")")[0] for line in lines] == ["shard (0, 2", "shard (0, 2", "shard (1, 2", "shard (1, 2"]
    assert len({line.split(")")[1] for line in lines}) == 1


@LAUNCHERS
def test_servers_on_ranks_of_their_own(launch: Launcher, tmp_path: Path) -> None:
    lines = lines_of(launch, mw.Layout(replicas=2, consistency="server(sync, servers=2, place=own)"), tmp_path)
    serial = float(sum(value.double().sum() for value in trained(mw.Layout())[0].values()))
    assert [line.split(")")[0] for line in lines] == ["shard (0, 2", "shard (1, 2"], "servers say nothing"
    assert all(float(line.split()[-1]) == pytest.approx(serial, rel=1e-9) for line in lines)
