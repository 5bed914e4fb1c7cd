"""Faults of processes: killed, stopped, or told to end, at any moment of a run."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.campaign.checks import STOPPED
from benchmarks.campaign.site import LATER, SHORT_TIMEOUT_S, LateError, Site
from meshwright.runtime import manifest

AGAIN = r"all ranks start again from"
"""The words of a launcher that starts lost ranks again."""
OTHER_SIGNAL = 128
"""The exit code after signal N is 128 + N."""


def rank_killed(site: Site) -> None:
    """A rank is killed at a step that is drawn."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    site.kill(site.draw.choice(ranks))
    site.finish(codes={0}, words=AGAIN)


def ranks_killed(site: Site) -> None:
    """All ranks are killed at once."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    site.kill(*ranks)
    site.finish(codes={0}, words=AGAIN)


def rank_killed_twice(site: Site) -> None:
    """A rank is killed, and later one of the ranks that replaced the lost ranks."""
    site.start()
    for low in (5, 50):
        ranks = site.fresh_ranks()
        site.await_step(low, low + 20)
        site.kill(site.draw.choice(ranks))
        site.until(partial(_is_gone, ranks[0]), what="the ranks end")
    site.finish(codes={0}, words=AGAIN)


def _is_gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def rank_killed_while_starting(site: Site) -> None:
    """A rank is killed before its first step, some time after it began."""
    site.start()
    ranks = site.fresh_ranks()
    time.sleep(site.draw.random() * 0.5)
    site.kill(site.draw.choice(ranks))
    site.finish(codes={0}, words=AGAIN)


def rank_killed_while_planning(site: Site) -> None:
    """A rank is killed while it captures and plans."""
    site.start()
    ranks = site.fresh_ranks()
    rank = site.draw.randrange(len(ranks))
    site.await_doing("while capturing and planning", rank)
    time.sleep(site.draw.random() * 0.1)
    site.kill(ranks[rank])
    site.finish(codes={0}, words=AGAIN)


def rank_killed_while_loading(site: Site) -> None:
    """A rank is killed while a stopped run loads its checkpoint."""
    stopped(site)
    site.start()
    ranks = site.fresh_ranks()
    rank = site.draw.randrange(len(ranks))
    site.await_doing("while loading a checkpoint", rank)
    site.kill(ranks[rank])
    site.finish(codes={0}, words=AGAIN)


def rank_killed_while_saving(site: Site) -> None:
    """A rank is killed while files of a checkpoint are there, and its manifest is not."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    _await_save(site)
    site.kill(site.draw.choice(ranks))
    site.notes["unfinished"] = _is_saving(site)
    site.finish(codes={0}, words=AGAIN)


def launcher_killed(site: Site) -> None:
    """The launcher is killed: its ranks end by themselves, and the same command goes on."""
    site.start()
    site.await_step()
    site.kill(site.commands[-1].process)
    site.finish(codes={-signal.SIGKILL})


def launcher_killed_while_starting(site: Site) -> None:
    """The launcher is killed before its ranks have made a step."""
    command = site.start()
    time.sleep(site.draw.random() * 1.0)
    site.nobody_was_left = not (command.ranks() and all(map(site.doing, range(site.configuration.ranks))))
    site.kill(command.process)
    site.finish(codes={-signal.SIGKILL})


def launcher_killed_while_saving(site: Site) -> None:
    """The launcher is killed while a checkpoint is written."""
    site.start()
    site.await_step()
    _await_save(site)
    site.kill(site.commands[-1].process)
    site.finish(codes={-signal.SIGKILL})


def everything_killed(site: Site) -> None:
    """Launcher, server and ranks are killed together."""
    killed(site)
    site.finish()


def told_to_end(site: Site) -> None:
    """SIGTERM or SIGUSR1, to the launcher or to all processes: the run saves, and ends with the code for later."""
    site.start()
    at = site.await_step(saved=False)
    site.promise()
    number = site.draw.choice([signal.SIGTERM, signal.SIGUSR1])
    site.commands[-1].signal(number, everybody=site.draw.random() < 0.5)
    site.notes["signal"] = signal.Signals(number).name
    code = site.judge({0, LATER})
    if code == LATER and (saved := manifest.latest_step(site.checkpoints)) < at - 1:
        site.problem("lost", f"step {at} was reached before {number}, and step {saved} is the last that is saved")
    site.promise()
    site.settle()
    site.finish()


def rank_told_to_end(site: Site) -> None:
    """SIGTERM to a single rank: all save and end with it."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step(saved=False)
    site.kill(site.draw.choice(ranks), number=signal.SIGTERM)
    site.finish()


def told_to_end_twice(site: Site) -> None:
    """A second signal, later than the first by more than a second, ends all at once."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    site.kill(site.draw.choice(ranks), number=signal.SIGSTOP)  # so that the first signal does not end the run
    for _ in range(2):
        site.commands[-1].signal(signal.SIGTERM)
        time.sleep(1.3)
    site.finish(codes={0, LATER, OTHER_SIGNAL + signal.SIGTERM})


def interrupted(site: Site) -> None:
    """Ctrl-C in a terminal reaches all processes; or the terminal is gone (SIGHUP)."""
    site.start()
    site.await_step()
    site.promise()
    number = site.draw.choice([signal.SIGINT, signal.SIGHUP])
    site.notes["signal"] = signal.Signals(number).name
    site.commands[-1].signal(number, everybody=number == signal.SIGINT)
    site.finish(codes={0, STOPPED, OTHER_SIGNAL + signal.SIGHUP})


def told_to_end_while_starting(site: Site) -> None:
    """SIGTERM before the first step."""
    site.start()
    time.sleep(site.draw.random() * 1.5)
    site.commands[-1].signal(signal.SIGTERM)
    site.finish(codes={0, LATER, OTHER_SIGNAL + signal.SIGTERM, -signal.SIGTERM})


def rank_stopped_for_a_while(site: Site) -> None:
    """A rank is stopped for less than the timeout: nobody ends, and the run goes on."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    rank = site.draw.choice(ranks)
    site.kill(rank, number=signal.SIGSTOP)
    time.sleep(0.3 + site.draw.random() * 1.5)
    os.kill(rank, signal.SIGCONT)
    site.finish(codes={0})
    if site.run.joinpath("ranks", "failed-1").exists():
        site.problem("unexplained", "a rank that was stopped for less than the timeout counts as lost")


def rank_stopped_for_good(site: Site) -> None:
    """A rank is stopped for longer than the timeout: the others say so, and all start again."""
    site.timeout_s = SHORT_TIMEOUT_S
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    site.kill(site.draw.choice(ranks), number=signal.SIGSTOP)
    site.finish(words=AGAIN)


def launcher_stopped_for_a_while(site: Site) -> None:
    """The launcher is stopped for a while. Its ranks go on meanwhile."""
    site.start()
    site.await_step()
    site.kill(site.commands[-1].process, number=signal.SIGSTOP)
    time.sleep(0.3 + site.draw.random() * 1.5)
    site.commands[-1].signal(signal.SIGCONT)
    site.finish(codes={0})


def everything_stopped_for_a_while(site: Site) -> None:
    """All processes are stopped, as on a machine that sleeps, and go on."""
    site.timeout_s = SHORT_TIMEOUT_S
    site.start()
    site.await_step()
    site.promise()
    site.commands[-1].signal(signal.SIGSTOP, everybody=True)
    time.sleep(0.5 + site.draw.random() * 1.5)
    site.commands[-1].signal(signal.SIGCONT, everybody=True)
    site.finish(codes={0})


def replica_killed(site: Site) -> None:
    """A replica under a rule is killed. The others go on, and it joins them again."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step(saved=False)
    site.kill(site.draw.choice(ranks))
    site.finish()


def server_killed(site: Site) -> None:
    """A parameter server, which runs beside a replica, is killed. A copy of its range of parameters takes its place."""
    replica_killed(site)


def stopped(site: Site, least: int = 0) -> None:
    """Run the first part of a run. It is told to end once it has at least ``least`` checkpoints."""
    site.start()
    site.await_step(saved=False)
    site.until(lambda: len(manifest.steps_in(site.checkpoints)) >= least or None, what=f"{least} checkpoints")
    site.commands[-1].signal(signal.SIGTERM)
    if site.judge({0, LATER}) == 0:
        raise LateError("the run was complete before it was told to end")
    site.settle()
    site.promise()


def killed(site: Site) -> None:
    """Run the first part of a run. Launcher, server and ranks are killed together at a step that is drawn."""
    site.start()
    site.await_step()
    site.kill_session()
    site.judge({-signal.SIGKILL})
    site.settle()


def _is_saving(site: Site) -> bool:
    return any(not (path.parent / manifest.MANIFEST).is_file() for path in site.checkpoints.glob("step-*/data-*"))


def _await_save(site: Site) -> None:
    site.until(lambda: _is_saving(site) or None, what="a save")
