"""A worker process of this machine: ``python -m meshwright.jobs.worker`` runs assignments that it reads as lines.

It answers each assignment with a line. It ends when its input ends, so also when the scheduler is killed.
"""

import os
import queue
import threading
from typing import BinaryIO

from meshwright.jobs.execute import execute


def main() -> None:
    """Run assignments until there are no more."""
    assignments: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(2, 1)
    threading.Thread(target=_read, args=(orders, assignments), daemon=True).start()
    while True:
        answers.write(execute(assignments.get()) + b"\n")
        answers.flush()


def _read(orders: BinaryIO, assignments: "queue.SimpleQueue[bytes]") -> None:
    """Hand over what comes, and end this process with its input: its commands are killed with it."""
    for line in orders:
        assignments.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
