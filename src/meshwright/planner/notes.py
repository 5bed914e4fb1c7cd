"""Notes: one line for each module of a plan that says how the module is split, and why."""

from collections import defaultdict
from collections.abc import Mapping, Set

from meshwright.cost.node_costs import NodeCosts
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.ir.opaque import TARGETS
from meshwright.ir.plan import Note, starred
from meshwright.ir.program import Lower

ModuleNotes = dict[str, dict[str, tuple[str, str]]]
"""Maps a module and an axis to the split and its reason."""


def module_notes(graph: Graph, notes: ModuleNotes, missed: Set[str], data_parallel: bool) -> tuple[Note, ...]:
    """One note for each module with weights; repeated modules share one note if their notes are equal.

    Args:
        missed: operators that the data-parallel axis does not split.
        data_parallel: whether the mesh has a data-parallel axis.
    """
    owners: dict[str, None] = {}
    whole: set[str] = set()
    parameters = set(graph.parameters)
    for operator in graph.operators:
        if not operator.backward and (parameters & set(operator.inputs) or operator.module in notes):
            owners.setdefault(operator.module)
            whole |= {operator.module} if operator.name in missed else set()
    lines: dict[str, tuple[str, str]] = {}
    for module in owners:
        splits, reasons = [], []
        if data_parallel and module not in whole and "dp" not in notes.get(module, {}):
            splits.append("batch@dp")
        for split, reason in notes.get(module, {}).values():
            splits.append(split)
            reasons.append(reason)
        lines[module] = " ".join(splits) or "whole", "; ".join(dict.fromkeys(reasons))
    return merged(lines)


def merged(lines: Mapping[str, tuple[str, str]]) -> tuple[Note, ...]:
    """A note for every module with its split and the reason; repeated modules share one note if their notes are
    equal."""
    groups: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for module, line in lines.items():
        groups[starred(module)].add(line)
    named = [(starred(path) if len(groups[starred(path)]) == 1 else path, *line) for path, line in lines.items()]
    return tuple(Note(module=a or "(model)", split=b, reason=c) for a, b, c in dict.fromkeys(named))


def unsplit_notes(graph: Graph, mesh: Mesh, cluster: Cluster | None, lower: Lower | None) -> tuple[Note, ...]:
    """One note for every operator that has no rule, except opaque regions. Repeated operators share one note. The note
    says why there is no rule, and what the operator costs on every rank: in bytes and, if the cluster is known, in
    seconds."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    costs = NodeCosts(mesh, cluster) if cluster is not None else None
    for operator in graph.operators:
        if operator.rule is None and operator.target not in TARGETS:  # opaque_notes reports opaque regions
            sums = totals[starred(operator.name), operator.reason]
            sums[0] += 1
            sums[1] += operator.bytes
            if costs is not None and lower is not None:
                sums[2] += costs.of(lower.operator(operator, {}, {}).nodes).seconds
    return tuple(
        Note(module=name, split="replicated", reason=f"{reason}; {_cost_text(*sums)}")
        for (name, reason), sums in totals.items()
    )


def _cost_text(count: float, num_bytes: float, seconds: float) -> str:
    times = f"{count:.0f} times, " if count > 1 else ""
    took = f" in {seconds * 1e6:.3g} us" if seconds else ""
    return f"{times}every rank works through {num_bytes / 2**20:.3g} MiB{took}"
