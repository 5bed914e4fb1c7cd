"""A program in which rank 1 leaves while the others go on: ``leaving.py COMMUNICATION HOW``, on three ranks.

Without arguments it is a server that has imported all that a rank needs: for each line of its input, ``COMMUNICATION,
HOW, DIRECTORY, PORT``, three forks of it are the ranks. What they say is in files, their exit codes are a line of its
output.
"""

import json
import os
import signal
import sys
import time

import msgspec
import torch
import torch._dynamo
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn

import meshwright as mw
import meshwright.api  # what otherwise every fork would import
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.errors import LostRankError

STEPS, LEAVES_AT = 200, 3
WAITS_S = 200.0
"""After which ranks that have not ended are killed."""


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return (model(batch["inputs"]) - batch["targets"]).square().mean(), {}


def leave(how: str) -> None:
    print(f"leaves at {time.time()}", file=sys.stderr, flush=True)
    if how == "raise":
        raise KeyError("what the rank itself says")
    if how == "_exit":
        os._exit(7)
    sys.exit(int(how))


def train(communication: str, how: str) -> None:
    if communication == "messages by gloo":
        SharedMemory.connect = classmethod(lambda *args: None)  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh())]
    batch = {"inputs": torch.randn(12, 8), "targets": torch.randn(12, 8)}
    staged = communication.startswith("messages")

    def trainer_of(plan: object) -> mw.Trainer:
        return mw.parallelize(
            nn.Sequential(*layers), loss_of, batch, plan=plan, device="cpu",  # type: ignore[arg-type]
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip

    trainer = trainer_of(mw.Layout(pp=3, microbatches=4) if staged else mw.Layout(dp=3))
    if communication == "shared memory":
        plan = trainer.plan
        buckets = tuple(msgspec.structs.replace(bucket, algorithm="ring") for bucket in plan.buckets)
        trainer = trainer_of(msgspec.structs.replace(plan, algorithms={"dp": "ring"}, buckets=buckets))
    last = LEAVES_AT if how == "at the end" else STEPS
    while trainer.step_number < last:
        if trainer.rank == 1 and trainer.step_number == LEAVES_AT and how != "at the end":
            leave(how)
        try:
            trainer.step(batch)
        except LostRankError:
            print(f"hears at {time.time()}", flush=True)
            raise
    if how == "at the end" and trainer.rank == 1:
        leave("3")


def ranks_end(directory: str, port: str) -> bool:
    """In the server: start the ranks, and say how they ended; in a rank: False at once."""
    processes = []
    for rank in range(3):
        if (process := os.fork()) == 0:
            os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            file = os.open(f"{directory}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            return False
        processes.append(process)
    ends, deadline = dict[int, int](), time.monotonic() + WAITS_S
    while len(ends) < 3:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            ends[processes.index(process)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for rank in {0, 1, 2} - ends.keys():
                os.kill(processes[rank], signal.SIGKILL)
        time.sleep(0.02)
    print(json.dumps([ends[rank] for rank in range(3)]), flush=True)
    return True


def main() -> None:
    if sys.argv[1:]:
        return train(*sys.argv[1:])
    for line in sys.stdin:
        communication, how, directory, port = line.strip().split(", ")
        if not ranks_end(directory, port):
            return train(communication, how)
    return None


if __name__ == "__main__":
    main()
