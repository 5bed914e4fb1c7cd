"""What is wrong with a workflow: numbers, names, the graph of operators, and accuracies."""

import math
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.ir.files import did_you_mean

if TYPE_CHECKING:
    from meshwright.serving.workflow import Workflow


def problems(workflow: "Workflow") -> Iterator[Problem]:
    """Everything that is wrong, with its place and what to do."""
    yield from _number_problems(workflow)
    yield from _name_problems(workflow)
    yield from _graph_problems(workflow)
    yield from _accuracy_problems(workflow)


def _number_problems(workflow: "Workflow") -> Iterator[Problem]:
    for where, value, least, meaning in _numbers(workflow):
        if not math.isfinite(value):
            yield where, f"it is {value}", f"give {meaning}"
        elif value < 0 or (least and value == 0):
            yield where, f"{value:g} is {'negative' if value < 0 else 'not above 0'}", f"give {meaning}"


def _numbers(workflow: "Workflow") -> Iterator[tuple[str, float, bool, str]]:
    """Every number: its place, its value, whether it must be above 0, and its meaning."""
    for worker in workflow.workers:
        yield f"workers.{worker.name}.usd_per_hour", worker.usd_per_hour, False, "a price of 0 or more"
    for link in workflow.links:
        where = f"links.{link.source}-{link.target}"
        yield f"{where}.usd_per_gib", link.usd_per_gib, False, "a price of 0 or more"
        yield f"{where}.bits_per_s", link.bits_per_s, False, "bits per second: 100 Mbit/s are 1e8"
        yield f"{where}.latency_s", link.latency_s, False, "seconds"
    for source in workflow.sources:
        yield f"sources.{source.name}.rate_per_s", source.rate_per_s, True, "items per second, above 0"
        yield f"sources.{source.name}.message_bytes", source.message_bytes, False, "bytes"
        for size in source.shape:
            yield f"sources.{source.name}.shape", size, True, "sizes of 1 or more"
    for operator in workflow.operators:
        for variant in operator.variants:
            where = f"operators.{operator.name}.{variant.name}"
            for device, seconds in variant.seconds.items():
                yield f"{where}.seconds.{device}", seconds, True, "seconds for an item, above 0"
            yield f"{where}.variation", variant.variation, False, "the standard deviation over the mean"
            yield f"{where}.message_bytes", variant.message_bytes, False, "bytes"
            if variant.accuracy is not None:
                yield f"{where}.accuracy", variant.accuracy, False, "a factor from 0 to 1"
    for index, row in enumerate(workflow.accuracies):
        yield f"accuracies[{index}].accuracy", row.accuracy, False, "an accuracy of 0 or more"
    yield "limits.accuracy", workflow.limits.accuracy, False, "an accuracy of 0 or more"
    yield "limits.latency_s", workflow.limits.latency_s, False, "seconds"


def _name_problems(workflow: "Workflow") -> Iterator[Problem]:
    tiers = [tier.name for tier in workflow.tiers]
    sources = [source.name for source in workflow.sources]
    nodes = [*sources, *(operator.name for operator in workflow.operators)]
    names_by_place = {
        "tiers": tiers,
        "workers and sources": [*sources, *(worker.name for worker in workflow.workers)],
        "workers": [worker.name for worker in workflow.workers], "sources and operators": nodes,
        "links": [f"{link.source}-{link.target}" for link in workflow.links],
    }  # fmt: skip
    names_by_place |= {
        f"operators.{operator.name}": [variant.name for variant in operator.variants] for operator in workflow.operators
    }
    for where, names in names_by_place.items():
        if not names and where != "links":
            yield where, "there are none", "name at least one"
        for name in {name for name in names if names.count(name) > 1}:
            yield where, f"{name!r} stands there twice", "give every one its own name"
    for where, parts in (("sources", workflow.sources), ("operators", workflow.operators)):
        if not parts:
            yield where, "there are none", "name at least one"
    for worker in workflow.workers:
        yield from _unknown(f"workers.{worker.name}.tier", "tier", worker.tier, tiers)
    for source in workflow.sources:
        yield from _unknown(f"sources.{source.name}.tier", "tier", source.tier, tiers)
    for link in workflow.links:
        where = f"links.{link.source}-{link.target}"
        for tier in (link.source, link.target):
            yield from _unknown(where, "tier", tier, tiers)
        if link.source in tiers and link.target in tiers and tiers.index(link.source) > tiers.index(link.target):
            yield where, "it leads back to an earlier tier", "leave it out: no traffic goes back"


def _unknown(where: str, kind: str, name: str, known: list[str]) -> Iterator[Problem]:
    if name not in known:
        yield where, f"unknown {kind} {name!r}", did_you_mean(name, known, f"known: {', '.join(known)}")


def _graph_problems(workflow: "Workflow") -> Iterator[Problem]:
    nodes = [*(source.name for source in workflow.sources), *(operator.name for operator in workflow.operators)]
    for operator in workflow.operators:
        where = f"operators.{operator.name}.inputs"
        if not operator.inputs:
            yield where, "there are none", "name the sources and operators whose results it needs"
        if len(set(operator.inputs)) < len(operator.inputs):
            yield where, "an input stands there twice", "name it once"
        for name in operator.inputs:
            yield from _unknown(where, "source or operator", name, nodes)
    inputs = {operator.name: list(operator.inputs) for operator in workflow.operators}
    if circle := _circle(inputs):
        yield "operators", f"they form a circle: {' -> '.join(circle)}", "remove one of these inputs"
        return
    for source in workflow.sources:
        if not any(source.name in names for names in inputs.values()):
            yield f"sources.{source.name}", "no operator reads it", "remove it, or name it among some inputs"
    rates = {source.rate_per_s for source in workflow.sources}
    if len(rates) > 1:
        rates_text = ", ".join(f"{source.name} {source.rate_per_s:g}" for source in workflow.sources)
        yield "sources", f"their rates differ: {rates_text} items per second", (
            "item k of all sources belongs together: give one rate, or make two workflows"
        )  # fmt: skip
    yield from _twice_joined(inputs)


def _circle(inputs: Mapping[str, list[str]]) -> list[str]:
    """A circle of operators, in the order of the data, with its first operator again at the end; empty: none."""
    try:
        TopologicalSorter(inputs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _twice_joined(inputs: Mapping[str, list[str]]) -> Iterator[Problem]:
    """Results of an operator must not meet again on two ways: workers would have to be chosen for both at once."""
    group = {name: name for name in inputs}

    def root(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for name, before in inputs.items():
        for source in before:
            if source not in inputs:
                continue
            if root(source) == root(name):
                remedy = "join the operators on these ways into one, or read a source in place of an operator"
                yield f"operators.{name}.inputs", f"the same results come on two ways, one over {source}", remedy
            group[root(source)] = root(name)


def _accuracy_problems(workflow: "Workflow") -> Iterator[Problem]:
    own = {
        f"operators.{operator.name}.{variant.name}.accuracy": variant.accuracy
        for operator in workflow.operators
        for variant in operator.variants
        if variant.accuracy is not None
    }
    for where, accuracy in own.items():
        if workflow.accuracies:
            yield where, "it stands beside the table accuracies", "leave one of them out"
        if accuracy > 1:
            yield where, f"{accuracy:g} is above 1", "give a factor from 0 to 1"
    variants = {operator.name: [variant.name for variant in operator.variants] for operator in workflow.operators}
    for index, row in enumerate(workflow.accuracies):
        where = f"accuracies[{index}].models"
        for operator, model in row.models.items():
            yield from _unknown(where, "operator", operator, [*variants])
            if operator in variants:
                yield from _unknown(f"{where}.{operator}", "variant", model, variants[operator])
    for (before, row), index in zip(pairwise(workflow.accuracies), range(1, len(workflow.accuracies)), strict=True):
        if row.models.keys() != before.models.keys():
            yield f"accuracies[{index}].models", f"it names {', '.join(row.models)}, the row before names others", (
                "name the same operators in all rows"
            )  # fmt: skip
    seen = [tuple(sorted(row.models.items())) for row in workflow.accuracies]
    for index, models in enumerate(seen):
        if models in seen[:index]:
            yield f"accuracies[{index}].models", "these models stand there twice", "keep one of the rows"
