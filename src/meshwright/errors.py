"""Every error a user can cause: it names the value, the place and the remedy."""

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Self

Problem = tuple[str, str, str]
"""Where something is wrong, what is wrong (with the value), and what to do about it."""


class MeshwrightError(Exception):
    """Base of all errors a user can cause.

    The message has up to three parts: what is wrong (with the value), where the fault is (file and key, module path,
    tensor, rank), and what to do about it.
    """

    def __init__(self, problem: str, *, where: str = "", remedy: str = "") -> None:
        self.problem = problem
        self.where = where
        self.remedy = remedy
        super().__init__(problem)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the three texts: other attributes may be objects that cannot be sent to other ranks."""
        return partial(type(self), where=self.where, remedy=self.remedy), (self.problem,)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}\n  -> {self.remedy}" if self.remedy else text

    def within(self, place: str, separator: str = ": ") -> Self:
        """The same error, with ``place`` put before its own place."""
        where = f"{place}{separator}{self.where}" if self.where else place
        return type(self)(self.problem, where=where, remedy=self.remedy)


def refuse(kind: type[MeshwrightError], problems: Iterable[Problem], within: str = "") -> None:
    """Raise the first of ``problems``, if any, as an error of type ``kind``. ``within`` is put before the problem's
    place."""
    for where, problem, remedy in problems:
        raise kind(problem, where=": ".join(filter(None, (within, where))), remedy=remedy)


class FileFormatError(MeshwrightError):
    """A file (plan, graph, cluster, RUN.toml, ...) that cannot be read or has a wrong key, type or version."""


class CaptureError(MeshwrightError):
    """A model or loss function that cannot be traced into a graph."""


class ChangedModelError(MeshwrightError):
    """A model that was changed after ``parallelize`` in a way that training cannot follow."""


class CompileError(MeshwrightError):
    """A step that cannot be compiled, because there is no compiler or the device is not supported."""


class GraphError(MeshwrightError):
    """A phase whose kernels the device cannot capture as a graph."""


class RuleError(MeshwrightError):
    """An operator's split rule that cannot be parsed or does not fit its operator."""


class LayoutError(MeshwrightError):
    """A layout that does not fit the model, the number of ranks, or the size of a batch."""


class PlanError(MeshwrightError):
    """A plan that belongs to another model or contradicts itself."""


class ClusterError(MeshwrightError):
    """A cluster description that is unknown or impossible."""


class ScheduleError(MeshwrightError):
    """A schedule that is not well formed, cannot be built for the given numbers, or cannot be run."""


class TraceError(MeshwrightError):
    """A trace that is compared with a trace of another run, plan or number of ranks."""


class DataError(MeshwrightError):
    """A data set that is missing, empty or too short, or a batch that is not like the captured one."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, damaged, or of another model."""


class DiskError(CheckpointError):
    """A checkpoint that could not be written or read: disk full or gone, no permission. A later try may succeed."""


class OptimizerError(MeshwrightError):
    """An optimizer that cannot be used with the plan."""


class WorkflowError(MeshwrightError):
    """A workflow that contradicts itself, or whose limits no plan keeps."""


class LaunchError(MeshwrightError):
    """Ranks that could not be started or could not meet (port, rendezvous, environment)."""


class RankError(MeshwrightError):
    """A rank that failed, was killed, stopped answering, or disagrees with the others.

    Only the launcher sets the attributes. ``doing`` says what the rank did when it ended, such as ``at step 3``;
    ``in_memory`` is the latest step that ranks have copied to the launcher's memory (-1: none).
    """

    doing = ""
    in_memory = -1


class FailedRankError(RankError):
    """A rank that was killed, or failed with an error that is not one of Meshwright's."""


class LostRankError(RankError):
    """A rank that ended or no longer answers, as another rank noticed."""


class DeviceMemoryError(MeshwrightError):
    """A device without room for a step: what holds its memory, and the smallest change that makes room."""


class DeviceError(RankError):
    """A device that failed within a run: it is lost, or one of its kernels read out of bounds."""


class PreemptedError(MeshwrightError):
    """A run that was asked to end (SIGTERM, SIGUSR1) and could not save first: it goes on from its last checkpoint.

    ``CODE`` is the exit code of every run that was asked to end, also of those that have saved: a program that started
    it may start it again. sysexits.h calls it EX_TEMPFAIL.
    """

    CODE: ClassVar[int] = os.EX_TEMPFAIL


class NonFiniteLossError(MeshwrightError):
    """A loss that became NaN or infinite."""


class LossScaleError(MeshwrightError):
    """Gradients in a low precision that are not finite at any scale of the loss."""


class JobError(MeshwrightError):
    """A job graph that cannot run, or a vertex of it that failed."""
