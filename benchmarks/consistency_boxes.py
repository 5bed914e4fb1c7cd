"""Consistency rules over slow links: DiLoCo between two boxes, and parameter servers beside their limit.

Parts of ``benchmarks/consistency.py``. Boxes and links are emulated (``emulation/network.py``).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import meshwright as mw
from benchmarks import codec_steps
from benchmarks.report import at_most
from meshwright.bench.repeat import eager_step
from meshwright.bench.replica_runs import begin_together
from meshwright.emulation.network import LINK, run_in_boxes, why_not
from meshwright.emulation.slow import stretch
from meshwright.ir.replica_runs import ReplicaRun, RuleRun, smoothed, time_to
from meshwright.ir.result import Check, Finding, Verdict
from meshwright.ir.statistics import ratio
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.runtime import launch

BOXES, GBIT, EVERY = 2, 0.1, 50
CONFIG = GPTConfig(layers=2, width=192, heads=4, vocabulary=256, sequence_length=64)
"""A smaller GPT than the demo's, so that synchronous training at 0.1 Gbit/s ends within two minutes."""
LR, BEFORE, SYNC_STEPS, MOST_STEPS = 1e-3, 150, 240, 1200
"""The learning rate; steps that are made before in the second comparison, alike in all replicas and without exchange,
because DiLoCo goes on from a model that has learned already (Douillard et al. 2023, section 3); and steps."""
BLOCKS = 6
"""Blocks of ``EVERY`` steps that are timed, after one that is not; each has one exchange."""
FEWER_BYTES, SOONER = 10.0, 3.0
WINDOW = 20
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)
DILOCO, POST_LOCAL, TORCHFT = f"diloco({EVERY})", "PostLocalSGDOptimizer", "torchft's DiLoCo"
PATIENCE, POLL_S = timedelta(seconds=300), 0.002
LIGHTHOUSE_PORT, STORE_PORT, MANAGER_PORT = 29521, 29522, 29523


class BoxSteps(msgspec.Struct, frozen=True):
    """The ends of steps in seconds, their losses, and the bytes that this box has sent, of all steps."""

    ends_s: list[float]
    losses: list[float]
    sent_bytes: int


# --- two boxes --------------------------------------------------------------------------------------------------------


def link_bytes() -> int:
    """The bytes that this box has sent, as its kernel counts them."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            return int(numbers.split()[8])
    raise AssertionError(f"no {LINK}")


def batch(step: int) -> dict[str, Tensor]:
    """The batch of both replicas."""
    return {name: value[:, : CONFIG.sequence_length] for name, value in _subject().batch(step).items()}


def _subject() -> codec_steps.CodecSubject:
    if not _KEPT:
        _KEPT.append(codec_steps.gpt())
    return _KEPT[0]


_KEPT: list[codec_steps.CodecSubject] = []


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of each replica."""
    return torch.optim.AdamW(parameters, lr=LR)


def ours(rule: str, before: int, num_steps: int, goal: float) -> BoxSteps:
    """Make ``before`` steps without exchange. Then train for ``num_steps`` steps, or until the mean loss of
    ``2 * WINDOW`` steps is ``goal``."""
    torch.set_num_threads(1)
    trainer = _trainer(rule, before)
    begun, sent_before = begin_together(trainer, BOXES), link_bytes()
    ends, losses = list[float](), list[float]()
    for step in range(num_steps):
        losses.append(float(trainer.step(batch(step))))
        ends.append(time.monotonic() - begun)
        if len(losses) >= 2 * WINDOW and statistics.fmean(losses[-2 * WINDOW :]) <= goal:
            break
    sent = link_bytes() - sent_before
    if trainer.replica is not None:
        trainer.replica.leave()
    return BoxSteps(ends, losses, sent)


def _trainer(rule: str, before: int) -> mw.Trainer:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    step = eager_step(model, language_model_loss, adamw(model.parameters()))
    for number in range(before):
        step(batch(-1 - number))
    layout = mw.Layout(replicas=BOXES, consistency=rule)
    return mw.parallelize(model, language_model_loss, batch(0), plan=layout, optimizer=adamw, device="cpu")


def by_turns(sides: Sequence[str], directory: Path) -> None:
    """Ranks 2 s and 2 s + 1 train by side s, block after block, whenever it is its turn; the first writes the seconds
    of each block but the first to a file."""
    torch.set_num_threads(1)
    number, rank = divmod(launch.launched_rank(), BOXES)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{BOXES}", "MASTER_PORT": f"{launch.BOX_PORT + number}"}
    torch.manual_seed(0)
    step, finish = {DILOCO: _ours, POST_LOCAL: _post_local, TORCHFT: _torchft}[sides[number]](rank)
    parts = [{key: value.chunk(BOXES)[rank] for key, value in batch(step).items()} for step in range(EVERY)]
    seconds, losses = list[float](), list[float]()
    for block in range(1 + BLOCKS):
        turn = block * len(sides) + number
        while not (directory / f"{turn}").exists():
            time.sleep(POLL_S)
        begun = time.perf_counter()
        losses += [float(step(part)) for part in parts]
        seconds.append(time.perf_counter() - begun)
        if rank == 0:
            (directory / f"{turn + 1}").touch()
    if rank == 0:
        (directory / sides[number]).write_bytes(msgspec.json.encode((seconds[1:], losses[-1])))
    finish()


Side = tuple[Callable[[dict[str, Tensor]], Tensor], Callable[[], object]]
"""A step, and what ends the training."""


def _ours(rank: int) -> Side:
    trainer = _trainer(DILOCO, 0)
    assert trainer.replica is not None
    trainer.replica.connected()
    return partial(trainer.step, local=True), trainer.replica.leave


def _post_local(rank: int) -> Side:
    dist.init_process_group("gloo")
    model = GPT(CONFIG)
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    optimizer: Any = PostLocalSGDOptimizer(adamw(model.parameters()), averager)
    return eager_step(model, language_model_loss, optimizer), dist.barrier


def _torchft(rank: int) -> Side:
    torchft, coordination, local_sgd = map(import_module, ("torchft", "torchft.coordination", "torchft.local_sgd"))
    first, own = "10.77.0.1", f"10.77.0.{rank + 1}"
    lighthouse = None
    if rank == 0:
        lighthouse = coordination.LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=BOXES)
    store = dist.TCPStore(own, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE), min_replica_size=BOXES, use_async_quorum=False,
        load_state_dict=lambda state: None, state_dict=dict, replica_id=f"replica_{rank}", rank=0, world_size=1,
        store_addr=own, store_port=store.port, lighthouse_addr=f"http://{first}:{LIGHTHOUSE_PORT}", port=MANAGER_PORT,
        hostname=own, init_sync=False, timeout=PATIENCE, quorum_timeout=PATIENCE,
    )  # fmt: skip
    model = GPT(CONFIG)
    inner = adamw(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=EVERY).__enter__()
    kept = (store, lighthouse)

    def finish() -> None:
        time.sleep(1.0)  # the other replica may still ask the lighthouse
        manager.shutdown()
        if kept[1] is not None:
            kept[1].shutdown()

    return eager_step(model, language_model_loss, inner), finish


def _in_boxes(function: Callable[..., Any], *args: object) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        return run_in_boxes(
            function, *args, boxes=range(BOXES), rates_bits_per_s=BOXES * [GBIT * 1e9], directory=Path(directory),
            worlds=True,
        )  # fmt: skip


def diloco_findings() -> list[Finding]:
    """Bytes, time to equal loss, and time per step."""
    if missing := why_not():
        return [Check(target="diloco between boxes", verdict="reported", measured=f"not measured: {missing}")]
    place = f"2 boxes, emulated {GBIT:g} Gbit/s: {DILOCO}"
    results = [finding for before in (0, BEFORE) for finding in _to_equal_loss(place, before)]
    return [*results, *_beside_peers(place)]


def _to_equal_loss(place: str, before: int) -> list[Finding]:
    """Bytes, and time to equal loss. From random initial values it is judged; after some steps it is reported."""
    sync: BoxSteps = _in_boxes(ours, "sync", before, SYNC_STEPS, 0.0)
    samples = len(batch(0)["tokens"])
    goal = min(point.loss for point in smoothed(_run(sync, samples).ends, WINDOW * samples))
    diloco: BoxSteps = _in_boxes(ours, DILOCO, before, MOST_STEPS, goal)
    a_step = [each.sent_bytes / len(each.losses) for each in (sync, diloco)]
    fewer = a_step[0] / a_step[1]
    results: list[Finding] = [] if before else [_check(
        f"{place} sends at least {FEWER_BYTES:g} x fewer bytes a step than sync", fewer >= FEWER_BYTES,
        f"{fewer:.1f} x: {a_step[1]:,.0f} against {a_step[0]:,.0f} bytes that the kernel of box 0 sent",
    )]  # fmt: skip
    window, sync_run, diloco_run = WINDOW * samples, _run(sync, samples), _run(diloco, samples // BOXES)
    sooner = []
    for share in SHARES:
        loss = min(p.loss for p in smoothed(sync_run.ends, window) if p.time_s <= share * sync.ends_s[-1])
        reached, usual = time_to(diloco_run, loss, window), time_to(sync_run, loss, window)
        if reached is not None and usual is not None:
            sooner.append(usual / reached)
    soon = sum(times >= SOONER for times in sooner)
    text = f"{soon} of {len(SHARES)} losses, {len(SHARES) - len(sooner)} are not reached"
    text += f"; {min(sooner):.1f} x to {max(sooner):.1f} x" if sooner else ""
    text += f"; {len(diloco.losses)} against {len(sync.losses)} steps to {goal:.3f}"
    start = f"after {before} steps without exchange" if before else "from random values"
    verdict: Verdict = "pass" if soon == len(SHARES) else "undecided" if soon else "fail"
    target = f"{place}, {start}, is at least {SOONER:g} x as fast to equal loss as sync"
    verdict = "reported" if before else verdict
    return [*results, Check(target=target, verdict=verdict, measured=text, passed=soon, total=len(SHARES))]


def _beside_peers(place: str) -> list[Finding]:
    """The time per step beside PyTorch and torchft, by turns, a block of steps at a time."""
    names = [DILOCO, POST_LOCAL, *([TORCHFT] if find_spec("torchft") is not None else [])]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "turns")
        directory.mkdir()
        (directory / "0").touch()
        run_in_boxes(
            by_turns, names, directory, boxes=[*range(BOXES)] * len(names), rates_bits_per_s=BOXES * [GBIT * 1e9],
            directory=Path(name, "ranks"), worlds=True,
        )  # fmt: skip
        known = {
            side: msgspec.json.decode((directory / side).read_bytes(), type=tuple[list[float], float]) for side in names
        }
    seconds, loss = known[DILOCO]
    results: list[Finding] = []
    for side in (POST_LOCAL, TORCHFT):
        target = f"{place} takes at most as long for a step as {side}"
        if side not in known:
            results.append(Check(target=target, verdict="reported", measured="not measured: torchft is not installed"))
            continue
        slower = ratio(seconds, known[side][0])
        verdict = at_most(slower, 1.0)
        measured = f"{slower} of its time, {BLOCKS} blocks of {EVERY} steps with an exchange each, by turns"
        if side == TORCHFT:
            measured += f"; the last losses are {loss:.6f} and {known[side][1]:.6f}"
        results.append(
            Check(target=target, verdict=verdict, measured=measured, passed=int(verdict == "pass"), total=1)
        )  # fmt: skip
    return results


def _run(steps: BoxSteps, samples: int) -> RuleRun:
    run = ReplicaRun(replica=0, samples=samples, times_s=tuple(steps.ends_s), losses=tuple(steps.losses))
    return RuleRun(rule="", slow="", seed=0, seconds=0.0, replicas=(run,))


def _check(target: str, passed: bool, measured: str) -> Check:
    return Check(
        target=target, verdict="pass" if passed else "fail", measured=measured, passed=int(passed), total=1
    )  # fmt: skip


# --- parameter servers -----------------------------------------------------------------------------------------------

SCALE = 100
GRADIENT_BYTES, A_SECOND, SERVER_RATE = 97.5e6 / SCALE, 3.0, 50e9
"""The scaled example: bytes of the gradients, gradients of a worker in a second, bytes of a server in a second."""
WORKERS, FEW, FITTING, MOST_WORKERS = 256, 2, 4, 8
"""The number of emulated workers that one server can feed. In the example it is 171 of 256 workers."""
RATE = FITTING * GRADIENT_BYTES * A_SECOND
"""Bytes per second of an emulated server's link."""
COMPUTE_S = 1 / A_SECOND - 2 * GRADIENT_BYTES / RATE
"""A worker computes, pushes gradients and pulls parameters, one after the other: three times a second if alone."""
COUNTED_S, UNCOUNTED_S, OFF = 6.0, 2.0, 0.15
FAST = 2e9


class Weights(nn.Module):
    """Parameters whose gradients are cheap to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(round(GRADIENT_BYTES) // 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).mean()


def weights_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that is linear in the weights."""
    result: Tensor = model(batch["x"])
    return result


def work(rule: str, workers: int, directory: Path) -> None:
    """Train for some seconds. Write how many steps this worker has made while they were counted."""
    torch.set_num_threads(1)
    whole = {"x": torch.ones(2 * workers, round(GRADIENT_BYTES) // 4)}
    micro = 2 if rule == "sync" else 1
    trainer = mw.parallelize(
        Weights(), weights_loss, whole, plan=mw.Layout(replicas=workers, consistency=rule, microbatches=micro),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), device="cpu",
    )  # fmt: skip
    stretch(trainer.executor, lambda past_s: COMPUTE_S, "reduce" if rule == "sync" else "finish")
    begun, count = begin_together(trainer, workers), 0
    while not _is_over(trainer, time.monotonic() - begun > UNCOUNTED_S + COUNTED_S):
        trainer.step(whole)
        count += UNCOUNTED_S < time.monotonic() - begun <= UNCOUNTED_S + COUNTED_S
    if trainer.replica is not None:
        trainer.replica.leave()
    number = trainer.replica.number if trainer.replica is not None else trainer.rank
    (directory / f"{number}").write_text(str(count))


def _is_over(trainer: mw.Trainer, over: bool) -> bool:
    from meshwright.comm.groups import from_every_rank

    return any(from_every_rank(over))


def steps_a_second(workers: int, servers: int) -> float:
    """Steps per second of all workers together; without servers, they reduce their gradients among themselves."""
    rule = f"server(async, servers={servers}, place=own)" if servers else "sync"
    slow = 8 * RATE
    with tempfile.TemporaryDirectory() as name:
        counts = Path(name, "counts")
        counts.mkdir()
        run_in_boxes(
            work, rule, workers, counts, boxes=range(workers + servers),
            rates_bits_per_s=[*(workers * [FAST if servers else slow]), *(servers * [slow])],
            directory=Path(name, "ranks"), worlds=True,
        )  # fmt: skip
        return sum(int(path.read_text()) for path in counts.iterdir()) / COUNTED_S


def server_findings() -> list[Finding]:
    """Throughput over workers, relative to one worker, with one server, with two, and without."""
    if missing := why_not():
        return [Check(target="servers over links", verdict="reported", measured=f"not measured: {missing}")]
    rates = {workers: steps_a_second(workers, 1) for workers in (FEW, FITTING, MOST_WORKERS)}
    shards, ring = steps_a_second(MOST_WORKERS, 2), steps_a_second(MOST_WORKERS, 0)
    gains = {workers: rate / A_SECOND for workers, rate in rates.items()}
    fitting = SERVER_RATE / (SCALE * GRADIENT_BYTES * A_SECOND)
    text = ", ".join(f"{gain:.2f} with {workers}" for workers, gain in gains.items())
    place = f"ps-resnet50 scaled, emulated links and computing: {MOST_WORKERS} workers"
    flat, apart, without = gains[MOST_WORKERS], shards / A_SECOND, ring / A_SECOND
    return [
        _check(
            f"{place} and one server are as fast as the predicted {FITTING} workers, {OFF:.0%} off or less",
            abs(flat / FITTING - 1) <= OFF,
            f"{flat:.2f} workers' worth ({text}); {FITTING} stand for {fitting:.0f} of {WORKERS} in the example",
        ),
        _check(
            f"{place} and two servers, a half each, exceed one server by {OFF:.0%} or more",
            apart >= (1 + OFF) * flat,
            f"{apart:.2f} workers' worth, at most {min(MOST_WORKERS, 2 * FITTING)}",
        ),
        _check(
            f"{place} that reduce among themselves, over links of the server's rate, exceed one server by {OFF:.0%} "
            "or more",
            without >= (1 + OFF) * flat,
            f"{without:.2f} workers' worth",
        ),
    ]
