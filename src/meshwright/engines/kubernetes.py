"""Starts a run on Kubernetes: writes a TrainJob (Kubeflow Trainer) or a JobSet, and hands it to kubectl.

In each pod, ``meshwright train`` starts the ranks of the node. Their launchers meet where the variables ``PET_*`` say:
Kubeflow Trainer sets them for torchrun, and the JobSet sets them itself. A pod that is evicted gets SIGTERM: its ranks
and those of all other pods save and end with ``PreemptedError.CODE``, and the JobSet starts all again.
"""

from collections.abc import Callable

import msgspec

from meshwright.engines import kubernetes_schema as schema
from meshwright.engines.job import Job, called
from meshwright.errors import LaunchError, PreemptedError
from meshwright.runtime.restarts import TRIES

JOB, CONTAINER, VOLUME = "ranks", "node", "shared"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""The place of a pod's number, which is that of its node."""
AFTER_S = 15
"""Seconds after the time for a save, in which a pod ends by itself."""


def described(job: Job) -> str:
    """The manifest, as JSON, which kubectl takes like YAML."""
    return msgspec.json.format(msgspec.json.encode(manifest(job)), indent=2).decode() + "\n"


def start(job: Job, say: Callable[[str], object]) -> int:
    """Hand the manifest to kubectl, and say how to look at the job.

    Raises:
        LaunchError: there is no kubectl, or the cluster refuses the manifest.
    """
    resource = manifest(job)
    say(called(["kubectl", "apply", "-f", "-"], "--on kubernetes", described(job)).strip())
    say(f"kubectl -n {job.nodes.namespace} get {resource.kind.lower()} {job.name} shows its state")
    return 0


def manifest(job: Job) -> schema.TrainJob | schema.JobSet:
    """The manifest of the job, checked against its schema.

    Raises:
        LaunchError: no image is named, or a value is not what Kubernetes permits.
    """
    if not job.nodes.image:
        raise LaunchError("no image is named", where="nodes.image", remedy="name one that has Meshwright installed")
    resource = _jobset(job) if job.nodes.kind == "jobset" else _train_job(job)
    try:
        return schema.checked(msgspec.to_builtins(resource))
    except msgspec.ValidationError as error:
        raise LaunchError(f"{error}", where=resource.kind, remedy="correct [nodes]") from None


def _train_job(job: Job) -> schema.TrainJob:
    nodes = job.nodes
    if nodes.volume_claim:
        raise LaunchError(
            "a TrainJob takes its volumes from its runtime",
            where="nodes.volume_claim",
            remedy='add the volume to the ClusterTrainingRuntime, or write nodes.kind = "jobset"',
        )
    return schema.TrainJob(
        api_version="trainer.kubeflow.org/v1alpha1",
        kind="TrainJob",
        metadata=schema.Metadata(name=job.name, namespace=nodes.namespace),
        spec=schema.TrainJobSpec(
            runtime_ref=schema.RuntimeRef(name=nodes.runtime),
            trainer=schema.Trainer(
                image=nodes.image, command=_command(job), num_nodes=nodes.count,
                num_proc_per_node=job.ranks_per_node, resources_per_node=_resources(job),
            ),
        ),
    )  # fmt: skip


def _jobset(job: Job) -> schema.JobSet:
    nodes = job.nodes
    where = schema.ValueFrom(field_ref=schema.FieldRef(field_path=INDEX))
    env = [
        schema.EnvVar(name="PET_NNODES", value=f"{nodes.count}"),
        schema.EnvVar(name="PET_NPROC_PER_NODE", value=f"{job.ranks_per_node}"),
        schema.EnvVar(name="PET_NODE_RANK", value_from=where),
        schema.EnvVar(name="PET_MASTER_ADDR", value=f"{job.name}-{JOB}-0-0.{job.name}"),
        schema.EnvVar(name="PET_MASTER_PORT", value=f"{nodes.port}"),
    ]
    mounts, volumes = [], []
    if nodes.volume_claim:
        mounts = [schema.VolumeMount(name=VOLUME, mount_path=nodes.mount)]
        volumes = [schema.Volume(name=VOLUME, persistent_volume_claim=schema.Claim(claim_name=nodes.volume_claim))]
    pod = schema.PodSpec(
        restart_policy="Never",
        termination_grace_period_seconds=round(job.run.train.grace_s) + AFTER_S,
        containers=[
            schema.Container(
                name=CONTAINER, image=nodes.image, command=_command(job), working_dir=nodes.mount, env=env,
                resources=_resources(job), volume_mounts=mounts,
            )
        ],
        volumes=volumes,
    )  # fmt: skip
    told_to_end = schema.OnExitCodes(operator="In", values=[PreemptedError.CODE])
    return schema.JobSet(
        api_version="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        metadata=schema.Metadata(name=job.name, namespace=nodes.namespace),
        spec=schema.JobSetSpec(
            replicated_jobs=[
                schema.ReplicatedJob(
                    name=JOB,
                    replicas=1,
                    template=schema.JobTemplate(
                        spec=schema.JobSpec(
                            completion_mode="Indexed",
                            parallelism=nodes.count,
                            completions=nodes.count,
                            backoff_limit=0,
                            pod_failure_policy=schema.PodFailurePolicy(
                                rules=[schema.PodFailureRule(action="FailJob", on_exit_codes=told_to_end)]
                            ),
                            template=schema.PodTemplate(spec=pod),
                        )
                    ),
                )
            ],
            network=schema.Network(enable_d_n_s_hostnames=True),
            failure_policy=schema.FailurePolicy(
                max_restarts=TRIES,  # those after a warning do not count
                rules=[
                    schema.FailureRule(
                        name="later",
                        action="RestartJobSetAndIgnoreMaxRestarts",
                        on_job_failure_reasons=["PodFailurePolicy"],
                    )
                ],
            ),
        ),
    )


def _command(job: Job) -> list[str]:
    """The command in a pod: the run file is named as it is here, from ``nodes.mount`` on. The launcher of a single pod
    meets no other, and reads no ``PET_*``."""
    return job.command(python="python", file=str(job.file), ranks=job.ranks_per_node if job.nodes.count == 1 else 0)


def _resources(job: Job) -> schema.Resources:
    nodes, each = job.nodes, job.ranks_per_node
    taken = {"cpu": f"{nodes.cpus_per_rank * each}"}
    if nodes.memory_bytes:
        taken["memory"] = f"{nodes.memory_bytes}"
    limits = {"nvidia.com/gpu": f"{nodes.gpus_per_rank * each}"} if nodes.gpus_per_rank else {}
    return schema.Resources(requests=taken, limits=limits)
