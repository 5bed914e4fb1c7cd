"""Why each module of a plan is split as it is, in lines for people."""

from collections import defaultdict
from collections.abc import Mapping, Set

from meshwright.ir.graph import Graph
from meshwright.ir.plan import Note, starred


def module_notes(
    graph: Graph, notes: Mapping[str, Mapping[str, str]], missed: Set[str], data_parallel: bool
) -> tuple[Note, ...]:
    """One line a module with weights, repeated ones once if all agree.

    Args:
        notes: by module and axis, how it is split and why, with a NUL between.
        missed: operators that the data-parallel axis leaves whole.
        data_parallel: whether there is such an axis.
    """
    owners: dict[str, None] = {}
    whole: set[str] = set()
    parameters = set(graph.parameters)
    for operator in graph.operators:
        if not operator.backward and (parameters & set(operator.inputs) or operator.module in notes):
            owners.setdefault(operator.module)
            whole |= {operator.module} if operator.name in missed else set()
    lines: dict[str, tuple[str, str]] = {}
    groups: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for module in owners:
        splits, reasons = [], []
        if data_parallel and module not in whole and "dp" not in notes.get(module, {}):
            splits.append("batch@dp")
        for text in notes.get(module, {}).values():
            split, reason = text.split("\0")
            splits.append(split)
            reasons.append(reason)
        lines[module] = " ".join(splits) or "whole", "; ".join(reasons)
        groups[starred(module)].add(lines[module])
    named = [(starred(one) if len(groups[starred(one)]) == 1 else one, *line) for one, line in lines.items()]
    return tuple(Note(module=a or "(model)", split=b, reason=c) for a, b, c in dict.fromkeys(named))
