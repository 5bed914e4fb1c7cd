"""The plans of finished searches, kept in the user's cache: an equal request is answered without a search."""

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Self

import msgspec

import meshwright
from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling
from meshwright.ir.plan import Plan
from meshwright.ir.plan_check import check_fits
from meshwright.lower.plans import PlanLowering
from meshwright.planner.candidates import Only
from meshwright.planner.foretell import foretell
from meshwright.planner.time_limit import was_stopped
from meshwright.runtime import launch

log = logging.getLogger("meshwright")

MOST_PLANS = 200
"""Largest number of plans that are kept. The oldest are removed first."""
_DECIDING = ("torch", "numpy", "highspy")
"""Packages whose versions may change the result of a search."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """Everything that decides the result of a search, besides the code of the planner. The fields are arguments of
    ``mw.plan``."""

    graph: Graph
    cluster: Cluster
    devices: int
    memory_bytes: float | None
    optimizer: OptimizerCost
    clips: bool
    only: Only
    offload: bool
    codec: str = ""
    float8: Float8Scaling = ""

    @cached_property
    def file(self) -> Path:
        """The file in which the plan of this request is kept.

        Its name is a hash of the whole graph. ``Graph.fingerprint`` would not do: it is equal for other dtypes and
        batch sizes. The name does not depend on the numbers of the cluster. If a cluster was measured again, the old
        plan is therefore found and replaced."""
        graph = _comparable(self.graph)
        cluster = self.cluster.name, self.cluster.num_devices
        memory = None if self.memory_bytes is None else float(self.memory_bytes)
        options = self.clips, self.only, self.offload, self.codec, self.float8
        options_of_search = self.devices, memory, self.optimizer, options
        return launch.cache_directory() / "plans" / f"{_digest((graph, cluster, options_of_search))[:32]}.json"


class KeptPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of the cache. ``made_s`` is when the search ended, in seconds since 1970. ``cluster`` and ``code`` are
    hashes: the plan is stale if one of them has changed. ``checksum`` is a hash of the plan."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    made_s: float
    cluster: str
    code: str
    checksum: str
    plan: Plan

    @classmethod
    def of(cls, request: SearchRequest, plan: Plan) -> Self:
        """The kept form of a plan that was just found for a request."""
        return cls(
            made_s=time.time(),
            cluster=_digest(request.cluster),
            code=code_digest(),
            checksum=_checksum(plan),
            plan=plan,
        )

    @property
    def ended_at(self) -> str:
        """When the search ended, as local date and time."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.made_s))

    def changes(self, request: SearchRequest) -> Iterator[str]:
        """Yield what has changed since the plan was found."""
        if self.code != code_digest():
            yield "Meshwright's code, or a package that it plans with,"
        if self.cluster != _digest(request.cluster):
            yield f"the numbers of cluster {request.cluster.name}"


def find(request: SearchRequest) -> Plan | None:
    """The kept plan of an equal request; None if there is none, or if it is stale or damaged. In these cases the log
    gives the reason.

    The plan's costs are computed again. If they differ from the costs that the search found, the plan is not used."""
    path = request.file
    if not path.exists():
        return None
    try:
        kept = files.load(path, KeptPlan)
        if changed := " and ".join(kept.changes(request)):
            log.info("%s is stale: %s changed since %s; the search starts anew", path, changed, kept.ended_at)
            return None
        if not (problem := _problem(kept, request, str(path))):
            log.info(
                "the plan is from the cache: it was searched for at %s; to search again: `meshwright plan --fresh`, "
                "mw.plan(..., fresh=True), or remove %s", kept.ended_at, path,
            )  # fmt: skip
            return kept.plan
    except (MeshwrightError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
    log.warning("%s cannot be used: %s; the search starts anew", path, problem)
    return None


def keep(request: SearchRequest, plan: Plan) -> None:
    """Keep the plan that a search found, unless the search was stopped before its end. If the plan cannot be written,
    the log says so."""
    if was_stopped(plan):
        return
    try:
        files.save(KeptPlan.of(request, plan), request.file)
        _remove_oldest(request.file.parent)
    except OSError as error:
        log.warning("the plan is not kept for the next time: %s", error)


@cache
def code_digest() -> str:
    """A hash of Meshwright's own sources, and of the versions of the packages that affect the result of a search.

    All sources count, not only the planner's: a cost may come from any of them. Some changes make plans stale without
    need, which costs a search. A stale plan that seems valid would cost more."""
    root = Path(meshwright.__file__).parent
    digest = hashlib.sha256(" ".join(version(name) for name in _DECIDING).encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _problem(kept: KeptPlan, request: SearchRequest, where: str) -> str:
    """The reason why the kept plan does not answer the request; empty if it does."""
    plan, promised = kept.plan, kept.plan.prediction
    if kept.checksum != _checksum(plan):
        return "the plan is not the one that was kept"
    check_fits(plan, request.graph, where)
    if plan.mesh.world_size != request.devices or promised is None:
        return f"it is a plan for {plan.mesh.world_size} ranks"
    foretold = foretell(
        PlanLowering(request.graph), plan, request.cluster, optimizer=request.optimizer, clips=request.clips
    )
    prediction = foretold.prediction
    alike = (
        math.isclose(prediction.step_s, promised.step_s) and prediction.peak_memory_bytes == promised.peak_memory_bytes
    )
    return "" if alike and foretold.fits(request.memory_bytes) else "its costs differ from the search's costs"


def _comparable(graph: Graph) -> Graph:
    """The graph without the parts that differ between captures of the same step: source lines, and autograd's first
    sequence number."""
    numbers = sorted({operator.sequence for operator in graph.operators})
    place = {number: index for index, number in enumerate(numbers)}
    operators = (
        msgspec.structs.replace(operator, source="", sequence=place[operator.sequence]) for operator in graph.operators
    )
    return msgspec.structs.replace(graph, operators=tuple(operators))


def _remove_oldest(directory: Path) -> None:
    """Remove the oldest plans, so that at most ``MOST_PLANS`` stay. Another process may remove them at the same
    time."""
    with suppress(FileNotFoundError):
        paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[:-MOST_PLANS]:
            path.unlink(missing_ok=True)


def _checksum(plan: Plan) -> str:
    return hashlib.sha256(files.encode_json(plan)).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(value)).hexdigest()
