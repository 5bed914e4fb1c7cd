"""A description of the nodes on which ``meshwright launch`` starts a run, for every engine that starts it."""

from typing import Annotated, Literal

from msgspec import Meta

from meshwright.ir.run_model import Count, Positive, Section

Engine = Literal["local", "torchrun", "slurm", "ray", "kubernetes"]


class Nodes(Section, frozen=True, kw_only=True):
    """The nodes on which a run is started. Engines leave out what they have no word for."""

    count: Positive = 1
    """The number of nodes."""
    ranks_per_node: Count = 0
    """The ranks on each node; 0: one for each core or GPU of the node that starts them, which must be the only node."""
    cpus_per_rank: Positive = 1
    """The cores of a rank."""
    gpus_per_rank: Count = 0
    """The GPUs of a rank."""
    memory_bytes: Count = 0
    """The memory of a node; 0: what the engine gives."""
    addresses: tuple[str, ...] = ()
    """``torchrun``: names or addresses of the nodes; launchers meet at the first."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 29500
    """``torchrun``, ``kubernetes``: the port at which launchers meet."""
    partition: str = ""
    """``slurm``: the partition."""
    account: str = ""
    """``slurm``: the account that pays."""
    time_limit_s: Count = 0
    """``slurm``: seconds after which the job is ended; 0: the limit of the partition. The job is warned before, saves,
    and is queued again."""
    warn_s: Count = 0
    """``slurm``: seconds from the warning to the time limit; 0: 60 seconds more than ``train.grace_s``, because Slurm
    may be late by as much."""
    options: tuple[str, ...] = ()
    """``slurm``: more options of sbatch, such as ``--qos=high``."""
    setup: tuple[str, ...] = ()
    """``slurm``: lines of shell before the ranks start, such as ``module load cuda``."""
    cluster_address: str = ""
    """``ray``: the address of the cluster; empty: the one that runs on this machine."""
    kind: Literal["trainjob", "jobset"] = "trainjob"
    """``kubernetes``: a TrainJob (Kubeflow Trainer) or a JobSet."""
    image: str = ""
    """``kubernetes``: the container's image, in which Meshwright is installed."""
    namespace: str = "default"
    """``kubernetes``: the namespace."""
    runtime: str = "torch-distributed"
    """``kubernetes``, TrainJob: the name of the ClusterTrainingRuntime."""
    volume_claim: str = ""
    """``kubernetes``, JobSet: the claim of the volume that all nodes share, for checkpoints and data."""
    mount: str = "/work"
    """``kubernetes``: the folder in which the run is started; in a JobSet also the place of the volume."""
