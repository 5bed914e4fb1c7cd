"""The fields of Kubernetes objects that manifests of ours may have: a manifest with another field is an error.

Names and types are those of the public APIs, of which only what we write stands here:
TrainJob: kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go. JobSet: kubernetes-sigs/jobset,
api/jobset/v1alpha2/jobset_types.go. Job and Pod: batch/v1 and core/v1 of Kubernetes 1.31.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""A DNS label (RFC 1123)."""
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Object(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel", kw_only=True):
    """A part of a manifest. Fields are in camel case there; defaults are left out."""


class Metadata(Object, frozen=True, kw_only=True):
    """``metadata`` of an object."""

    name: Name
    namespace: Name = "default"


class FieldRef(Object, frozen=True, kw_only=True):
    """The place of a value in the pod's own description."""

    field_path: str


class ValueFrom(Object, frozen=True, kw_only=True):
    """The source of an environment variable."""

    field_ref: FieldRef


class EnvVar(Object, frozen=True, kw_only=True):
    """An environment variable."""

    name: str
    value: str = ""
    value_from: ValueFrom | None = None


class Resources(Object, frozen=True, kw_only=True):
    """Requests and limits, such as ``{"cpu": "4"}``."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


# --- TrainJob --------------------------------------------------------------------------------------------------------


class RuntimeRef(Object, frozen=True, kw_only=True):
    """The name of a ClusterTrainingRuntime."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]


class Trainer(Object, frozen=True, kw_only=True):
    """The container of every node."""

    image: Annotated[str, Meta(max_length=500)]
    command: Annotated[list[str], Meta(max_length=128)]
    env: list[EnvVar] = []
    num_nodes: Count
    num_proc_per_node: Count
    resources_per_node: Resources


class TrainJobSpec(Object, frozen=True, kw_only=True):
    """The specification of a TrainJob."""

    runtime_ref: RuntimeRef
    trainer: Trainer


class TrainJob(Object, frozen=True, kw_only=True):
    """A TrainJob of Kubeflow Trainer."""

    api_version: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: Metadata
    spec: TrainJobSpec


# --- JobSet ----------------------------------------------------------------------------------------------------------


class VolumeMount(Object, frozen=True, kw_only=True):
    """The place of a volume in a container."""

    name: Name
    mount_path: str


class Container(Object, frozen=True, kw_only=True):
    """The container of a pod."""

    name: Name
    image: str
    command: list[str]
    working_dir: str
    env: list[EnvVar]
    resources: Resources
    volume_mounts: list[VolumeMount] = []


class Claim(Object, frozen=True, kw_only=True):
    """The name of a claim of a volume."""

    claim_name: str


class Volume(Object, frozen=True, kw_only=True):
    """A volume of a pod."""

    name: Name
    persistent_volume_claim: Claim


class PodSpec(Object, frozen=True, kw_only=True):
    """The specification of a pod."""

    restart_policy: Literal["Never"]
    termination_grace_period_seconds: Count
    containers: list[Container]
    volumes: list[Volume] = []


class PodTemplate(Object, frozen=True, kw_only=True):
    """The template of a pod."""

    spec: PodSpec


class OnExitCodes(Object, frozen=True, kw_only=True):
    """Exit codes of containers."""

    operator: Literal["In", "NotIn"]
    values: Annotated[list[int], Meta(min_length=1, max_length=255)]


class PodFailureRule(Object, frozen=True, kw_only=True):
    """What a job does after an exit code."""

    action: Literal["FailJob", "Ignore", "Count"]
    on_exit_codes: OnExitCodes


class PodFailurePolicy(Object, frozen=True, kw_only=True):
    """What a job does after failures of pods."""

    rules: Annotated[list[PodFailureRule], Meta(max_length=20)]


class JobSpec(Object, frozen=True, kw_only=True):
    """The specification of a job: a pod a node."""

    completion_mode: Literal["Indexed"]
    parallelism: Count
    completions: Count
    backoff_limit: Annotated[int, Meta(ge=0)]
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Object, frozen=True, kw_only=True):
    """The template of a job."""

    spec: JobSpec


class ReplicatedJob(Object, frozen=True, kw_only=True):
    """A job of a JobSet."""

    name: Name
    replicas: Count
    template: JobTemplate


class FailureRule(Object, frozen=True, kw_only=True):
    """What a JobSet does after a reason why a job failed."""

    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    on_job_failure_reasons: list[Literal["BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded"]]


class FailurePolicy(Object, frozen=True, kw_only=True):
    """What a JobSet does after failures of jobs."""

    max_restarts: Annotated[int, Meta(ge=0)]
    rules: list[FailureRule] = []


class Network(Object, frozen=True, kw_only=True):
    """The names of pods."""

    enable_d_n_s_hostnames: bool = msgspec.field(name="enableDNSHostnames")


class JobSetSpec(Object, frozen=True, kw_only=True):
    """The specification of a JobSet."""

    replicated_jobs: list[ReplicatedJob]
    network: Network
    failure_policy: FailurePolicy


class JobSet(Object, frozen=True, kw_only=True):
    """A JobSet."""

    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


def checked(manifest: Any) -> TrainJob | JobSet:
    """The manifest, given as plain data, as an object of its kind. Raise a msgspec.ValidationError if it is none."""
    kind: type[TrainJob | JobSet] = JobSet if manifest.get("kind") == "JobSet" else TrainJob
    return msgspec.convert(manifest, kind)
