"""Starts replicas on this machine. Each is a separate job, so that the death of one replica does not stop the
others."""

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import FailedRankError, LostRankError, MeshwrightError
from meshwright.runtime import launch, trust
from meshwright.runtime.meeting_point import kept_store
from meshwright.runtime.ranks import run_ranks

log = logging.getLogger("meshwright")

T = TypeVar("T")

POLL_S, LINGER_S = 0.1, 5.0
"""Seconds between two checks of the threads, and seconds that the other replicas have to end after an error in one
replica."""
RESTARTS = 3
"""The largest number of times that a replica is restarted after its death."""


def folder_of(directory: Path, replica: int) -> Path:
    """The folder of a replica in the directory of a run: the directory itself for the first replica."""
    return directory / f"replica-{replica}" if replica > 0 else directory


def run_replicas(
    function: Callable[..., T],
    *args: Any,
    num_replicas: int,
    num_ranks: int,
    directory: Path,
    restarts: int = RESTARTS,
    tell: Callable[[str], None] = log.warning,
) -> T:
    """Run ``function(*args)`` on ``num_ranks`` ranks of each replica. Return the result of the first replica that
    returns a result. The others end too.

    Ranks find the number of their replica, and the store at which replicas meet, in their environment variables
    (``runtime/worlds.py``). A replica that dies is restarted up to ``restarts`` times, and joins the others again.

    Raises:
        MeshwrightError: no replica has returned a result; the error is the error of the first failed replica.
    """
    cores = {"OMP_NUM_THREADS": f"{max(1, launch.num_cores() // (num_replicas * num_ranks))}"}
    cores |= {name: value for name, value in launch.environment().items() if name in cores} | trust.passed_on()
    store = kept_store(launch.HOST, 0, launch.timeout(), "replicas")
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    stopped = threading.Event()

    def live(replica: int) -> None:
        meet = f"{launch.HOST}:{store.port}"
        place = folder_of(directory, replica)
        environment = cores | {"MESHWRIGHT_REPLICA": f"{replica}", "MESHWRIGHT_MEET": meet}
        attempt = 0
        while True:
            try:
                results[replica] = run_ranks(
                    function, *args, num_ranks=num_ranks, directory=place, environment=environment
                )
                return
            except (FailedRankError, LostRankError) as error:
                errors.append((replica, error))
                if stopped.is_set():
                    return
                attempt, again = attempt + 1, attempt < restarts
                what = "it is started again" if again else "the others go on"
                tell(f"replica {replica} has died ({error.problem}); {what}")
                if not again:
                    return
            except Exception as error:  # noqa: BLE001 - the caller's thread raises it
                errors.append((replica, error))
                stopped.set()  # a user's mistake, which affects all replicas
                return

    threads = [
        threading.Thread(target=live, args=(replica,), name=f"replica {replica}") for replica in range(num_replicas)
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not stopped.wait(POLL_S):
            pass
        for thread in threads:
            thread.join(LINGER_S)
    finally:  # after Ctrl-C or a mistake, the threads end with their ranks
        stopped.set()
        while any(thread.is_alive() for thread in threads):
            for process in multiprocessing.active_children():
                process.kill()
            time.sleep(POLL_S)
    wrong = next((error for _, error in errors if not isinstance(error, FailedRankError | LostRankError)), None)
    if wrong is not None:
        raise wrong
    if not results:
        raise errors[0][1] if errors else MeshwrightError("no replica was started", where="replicas")
    complete = min(results)
    if complete:
        folder = folder_of(directory, complete)
        tell(f"replica 0 has not made its last step; the result is that of replica {complete}, in {folder}")
    return results[complete]
