"""Starts a run as a Slurm job: writes the script, submits it, watches it.

A job that is told to end before the run is complete queues itself again. Slurm warns the ranks by SIGUSR1,
``nodes.warn_s`` before the time limit (``sbatch --signal``). They save and end with ``PreemptedError.CODE``, and the
script asks for ``scontrol requeue``. A preempted job, and a job that has lost a node, are queued again by Slurm itself
(``--requeue``); the ranks have then been warned by SIGTERM.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.engines.job import Job, called, shell
from meshwright.errors import PreemptedError
from meshwright.ir import files
from meshwright.runtime.restarts import MOST, TRIES

LATE_S = 60
"""Seconds by which Slurm's warning may be late (man sbatch, ``--signal``)."""
POLL_S = 5.0
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
_STATE = re.compile(r"\bJobState=(\S+)(?: Reason=(\S+))?")
_EXIT = re.compile(r"\bExitCode=(\d+):(\d+)")


class JobState(msgspec.Struct, frozen=True):
    """The state of a job in Slurm's words. ``code``: the exit code of its script."""

    state: str
    reason: str = ""
    code: int = 0

    @property
    def ended(self) -> bool:
        """Whether the job has ended and is not queued again."""
        return self.state in ENDED

    def __str__(self) -> str:
        return self.state + (f" ({self.reason})" if self.reason not in ("", "None") else "")


def described(job: Job) -> str:
    """The script that is submitted."""
    return script(job)


def script(job: Job) -> str:
    """The script of the job. Its options are those of sbatch 20.11 and later."""
    nodes, grace_s = job.nodes, job.run.train.grace_s
    warn_s = nodes.warn_s or round(grace_s) + LATE_S
    options = [
        f"--job-name={job.name}", f"--nodes={nodes.count}", f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={nodes.cpus_per_rank}",
        *([f"--gpus-per-task={nodes.gpus_per_rank}"] if nodes.gpus_per_rank else []),
        *([f"--mem={-(-nodes.memory_bytes // 2**20)}M"] if nodes.memory_bytes else []),
        *([f"--partition={nodes.partition}"] if nodes.partition else []),
        *([f"--account={nodes.account}"] if nodes.account else []),
        *([f"--time={_clock(nodes.time_limit_s)}", f"--signal=USR1@{warn_s}"] if nodes.time_limit_s else []),
        "--requeue", "--open-mode=append", f"--output={job.directory / 'slurm-%j.log'}", *nodes.options,
    ]  # fmt: skip
    failures, checkpoints = (shell([str(job.directory / name)]) for name in ("slurm-failures", "checkpoints"))
    # A rank that is warned before others must not take them along: they save together.
    # The only task of a step starts the ranks itself.
    command = job.command(ranks=1 if nodes.count * job.ranks_per_node == 1 else 0)
    ranks = shell(["srun", "--kill-on-bad-exit=0", "--wait=0", *command])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        *nodes.setup,
        ranks,
        "code=$?",
        "",
        "# 75: the ranks were told to end, and have saved. Above 128: a rank was killed.",
        "again=no",
        f'if [ "$code" -eq {PreemptedError.CODE} ]; then again=yes; fi',
        'if [ "$code" -gt 128 ]; then',
        f"  last=$(ls {checkpoints} 2>/dev/null | grep '^step-' | tail -n 1)",
        f'  echo "failed after $last" >> {failures}',
        f'  if [ "$(tail -n {TRIES} {failures} | grep -cxF "failed after $last")" -lt {TRIES} ]; then again=yes',
        f'  else echo "it has failed {TRIES} times after ${{last:-the beginning}}, and is not queued again"; fi',
        "fi",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {MOST} ]; then again=no; fi',
        'if [ "$again" = yes ]; then',
        '  echo "queued again after exit code $code"',
        '  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script here',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def submit(job: Job) -> int:
    """Write the script into the run's directory, submit it, and return the number of the job.

    Raises:
        LaunchError: there is no sbatch, or it refuses the job.
    """
    path = job.directory / "slurm.sh"
    files.write_atomically(path, script(job).encode())
    output = called(["sbatch", "--parsable", str(path)], "--on slurm")
    return int(output.strip().partition(";")[0])


def state_of(number: int) -> JobState:
    """The state of a job.

    Raises:
        LaunchError: Slurm does not know the job (it forgets jobs some minutes after their end).
    """
    output = called(["scontrol", "show", "job", f"{number}", "--oneliner"], "--on slurm")
    state, code = _STATE.search(output), _EXIT.search(output)
    if state is None or code is None:
        return JobState("UNKNOWN")
    return JobState(state[1], state[2] or "", int(code[1]))


def watch(job: Job, number: int, say: Callable[[str], object], wait: Callable[[float], object] = time.sleep) -> int:
    """Print the states of a job and what its ranks print, until it has ended; return the exit code of its script."""
    log, seen, read = job.directory / f"slurm-{number}.log", "", 0
    while True:
        state = state_of(number)
        read = _print_new(log, read, say)
        if str(state) != seen:
            seen = str(state)
            say(f"job {number}: {seen}")
        if state.ended:
            _print_new(log, read, say)
            return state.code or int(state.state != "COMPLETED")
        wait(POLL_S)


def start(job: Job, say: Callable[[str], object], *, detach: bool) -> int:
    """Submit the job, and watch it unless ``detach``. Return its exit code, or 0."""
    number = submit(job)
    say(f"job {number} is submitted: {job.directory / 'slurm.sh'}; `scancel {number}` ends it")
    return 0 if detach else watch(job, number, say)


def _print_new(log: Path, read: int, say: Callable[[str], object]) -> int:
    """Print whole lines of ``log`` from the byte ``read`` on; return the byte after them."""
    if not log.exists():
        return read
    with log.open("rb") as file:
        file.seek(read)
        text, newline, _ = file.read().rpartition(b"\n")
    if newline:
        say(text.decode(errors="replace"))
    return read + len(text) + len(newline)


def _clock(seconds: int) -> str:
    """Seconds as Slurm's days-hours:minutes:seconds."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"
