"""Reads what other launchers than torchrun say in the environment: Open MPI, Slurm, and PET variables of Kubernetes."""

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping

import msgspec

from meshwright.errors import LaunchError

MPI_RANK, SLURM_RANK = "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"
RANKS = (MPI_RANK, SLURM_RANK)
"""Variables that hold a process's rank."""
KEEPS_STORE = "MESHWRIGHT_KEEPS_STORE"
"""Set on the process that keeps the store of all ranks, where this is neither rank 0 nor torchrun's agent."""
ATTEMPT = "MESHWRIGHT_ATTEMPT"
"""How often our launcher has started these ranks, this time included."""
_MPI = {
    "RANK": MPI_RANK, "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}  # fmt: skip
"""Maps torchrun's environment variables to Open MPI's names for them."""
_SLURM = {"RANK": SLURM_RANK, "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""Maps torchrun's environment variables to Slurm's names for them (man srun, "output environment variables")."""
_SLURM_STEP = ("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_ID")
PORTS = range(10000, 30000)
"""Ports at which ranks of a Slurm job meet: below those that Linux gives to outgoing connections."""
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"\[(\d+)")


class Meeting(msgspec.Struct, frozen=True):
    """The place where the launchers of several hosts meet: the address and port of one of them (``is_host``: of this
    one). ``name`` is the same on all hosts of a run, and differs from that of other runs."""

    num_hosts: int
    is_host: bool
    address: str
    port: int
    name: str
    timeout_s: float = 60.0
    ranks_per_host: int = 0
    """The ranks to start here; 0: as many as there are devices."""
    is_kept: bool = False
    """Whether the host's process keeps the store of the meeting already."""

    def again(self, attempt: int) -> "Meeting":
        """The meeting of the attempt of this number."""
        return msgspec.structs.replace(self, name=f"{self.name}-{attempt}")


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether mpirun or srun has started this process beside others. The script of a Slurm job has a rank, too, but no
    step; a step of one process is no launcher's: its ranks are yet to be started."""
    return MPI_RANK in environment or _of_step(environment)


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from those of mpirun or srun; empty if neither has started this process.

    Raises:
        LaunchError: a variable of srun is missing, or its node cannot be found.
    """
    if MPI_RANK in environment:
        return {name: environment[mpi_name] for name, mpi_name in _MPI.items() if mpi_name in environment}
    return _from_slurm(environment) if _of_step(environment) else {}


def meeting_of(environment: Mapping[str, str], timeout_s: float) -> Meeting | None:
    """Where the launchers of several hosts meet, by the variables that Kubeflow Trainer sets for torchrun; None if
    there is one host, or torchrun has started this process.

    Raises:
        LaunchError: a variable is missing or no number.
    """
    hosts = environment.get("PET_NNODES", "1").rpartition(":")[2]  # `2:4`: the most that may come
    if "RANK" in environment or hosts == "1":
        return None
    missing = [
        f"PET_{name}" for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if f"PET_{name}" not in environment
    ]
    if missing:
        raise LaunchError(
            f"PET_NNODES is {environment['PET_NNODES']}, but {' and '.join(missing)} is not set",
            where="environment",
            remedy="let Kubeflow Trainer set them, or unset PET_NNODES",
        )
    each = environment.get("PET_NPROC_PER_NODE", "auto")
    return Meeting(
        num_hosts=_number("PET_NNODES", hosts),
        is_host=_number("PET_NODE_RANK", environment["PET_NODE_RANK"]) == 0,
        address=environment["PET_MASTER_ADDR"],
        port=_number("PET_MASTER_PORT", environment["PET_MASTER_PORT"]),
        name=environment.get("PET_RDZV_ID", "meshwright"),
        timeout_s=timeout_s,
        ranks_per_host=0 if each in ("auto", "cpu", "gpu") else _number("PET_NPROC_PER_NODE", each),
    )


def _of_step(environment: Mapping[str, str]) -> bool:
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The store of all ranks is kept by the first process of the step's first node. Its rank may be any: the
    distribution of ranks over nodes is the user's."""
    if missing := [name for name in (*_SLURM.values(), *_SLURM_STEP) if name not in environment]:
        raise LaunchError(
            f"SLURM_STEP_NUM_TASKS is {environment['SLURM_STEP_NUM_TASKS']}, but {' and '.join(missing)} is not set",
            where="environment",
            remedy="start the ranks with srun, or unset SLURM_STEP_NUM_TASKS",
        )
    variables = {name: environment[slurm_name] for name, slurm_name in _SLURM.items()}
    node = _number("SLURM_NODEID", environment["SLURM_NODEID"])
    variables["LOCAL_WORLD_SIZE"] = f"{tasks_per_node(environment['SLURM_STEP_TASKS_PER_NODE'])[node]}"
    if "MASTER_ADDR" in environment:  # the user's choice, where rank 0 keeps the store
        return variables
    job, step = (_number(name, environment[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables["MASTER_ADDR"] = slurm_address(first_node(environment["SLURM_STEP_NODELIST"]))
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", f"{PORTS[(job * 101 + step) % len(PORTS)]}")
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # PyTorch: no rank keeps the store
    if node == 0 and variables["LOCAL_RANK"] == "0":
        variables[KEEPS_STORE] = "1"
    return variables


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node of a step, from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        LaunchError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"{text!r} does not say how many tasks each node has",
                where="environment variable SLURM_STEP_TASKS_PER_NODE",
                remedy="start the ranks with srun",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """The first name of a list of nodes in Slurm's short form: ``n[08-11,14],m3`` begins with ``n08``."""
    name = nodes
    while match := _RANGE.search(name):
        after = name[name.index("]", match.end()) + 1 :]
        name = name[: match.start()] + match[1] + after
    return name.partition(",")[0]


def slurm_address(node: str, asked: Callable[[str], str] | None = None) -> str:
    """The address of a Slurm node: its name if it has one, or else what Slurm knows.

    Raises:
        LaunchError: neither the system nor Slurm knows the node's address.
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError as error:
        description = (asked or _scontrol)(node)
        match = re.search(r"\bNodeAddr=(\S+)", description)
        if match is None:
            raise LaunchError(
                f"the name {node!r} has no address ({error.strerror or error}), and scontrol does not know it",
                where="environment variable SLURM_STEP_NODELIST",
                remedy="set MASTER_ADDR to an address of rank 0's host",
            ) from None
        return match[1]


def _scontrol(node: str) -> str:
    path = shutil.which("scontrol")
    if path is None:
        return ""
    return subprocess.run([path, "show", "node", node], capture_output=True, text=True, check=False).stdout


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise LaunchError(f"{text!r} is not a number", where=f"environment variable {name}", remedy="correct it")
    return int(text)
