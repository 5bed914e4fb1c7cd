"""The difference of two plans as text: layout, stages, strategies, storage, buckets and prediction."""

from collections.abc import Iterator, Mapping

import msgspec

from meshwright.ir.layout import layout_text
from meshwright.ir.placement import Placement
from meshwright.ir.plan import Plan, Stage, starred

_WHOLE, _RUNS_WHOLE = "whole", "runs whole"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs (``what``), with its value in the old and in the new plan."""

    what: str
    old: str
    new: str


class PlanDifference(msgspec.Struct, frozen=True):
    """All decisions in which two plans differ."""

    differences: tuple[Difference, ...]


def difference(old: Plan, new: Plan) -> PlanDifference:
    """All decisions in which two plans differ, the most general first. Operators and parameters of repeated blocks are
    grouped by their starred names if all of a group changed alike."""
    return PlanDifference(tuple(_differences(old, new)))


def difference_text(found: PlanDifference) -> str:
    """Lines for the terminal, one for each decision."""
    if not found.differences:
        return "the plans are the same"
    width = max(len(each.what) for each in found.differences)
    return "\n".join(f"  {each.what:<{width}}  {each.old} -> {each.new}" for each in found.differences)


def _differences(old: Plan, new: Plan) -> Iterator[Difference]:
    pairs: list[tuple[str, str, str]] = [
        ("model", old.model, new.model),
        ("graph", old.graph_fingerprint, new.graph_fingerprint),
        ("batch", f"{old.batch_size}", f"{new.batch_size}"),
        ("cluster", old.cluster, new.cluster),
        ("layout", layout_text(old.layout), layout_text(new.layout)),
        ("predicted step", *_predicted(old, new)),
        ("predicted peak memory", _peak(old), _peak(new)),
        ("stages", f"{len(old.stages)}", f"{len(new.stages)}"),
    ]
    for index, (before, after) in enumerate(zip(old.stages, new.stages, strict=False)):
        pairs += [
            (f"stage {index} begins at", before.first or "the beginning", after.first or "the beginning"),
            (
                f"stage {index} recomputes",
                ", ".join(before.recompute) or "nothing",
                ", ".join(after.recompute) or "nothing",
            ),
            (f"stage {index} submesh", _sizes(before), _sizes(after)),
        ]
    pairs += _of_modules(_strategies(old), _strategies(new))
    pairs += _of_names(_storage(old), _storage(new), _WHOLE, "stored ")
    pairs += [
        ("buckets of gradients", _buckets(old.buckets), _buckets(new.buckets)),
        ("buckets of gathers", _buckets(old.gathers), _buckets(new.gathers)),
        ("algorithms", _words(old.algorithms), _words(new.algorithms)),
        ("codec", f"{old.codec}", f"{new.codec}"),
        ("consistency", old.consistency, new.consistency),
    ]
    for what, before_text, after_text in pairs:
        if before_text != after_text:
            yield Difference(what=what, old=before_text, new=after_text)


def _of_modules(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The modules with operators whose strategies differ: all old and all new strategies of these operators."""
    modules: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, _RUNS_WHOLE), new.get(name, _RUNS_WHOLE)
        if before != after:
            module = starred(name).rpartition(":")[0] or "(model)"
            olds, news = modules.setdefault(module, ({}, {}))
            olds[before] = news[after] = None
    return [(name, " / ".join(olds), " / ".join(news)) for name, (olds, news) in modules.items()]


def _of_names(
    old: Mapping[str, str], new: Mapping[str, str], missing: str, prefix: str = ""
) -> list[tuple[str, str, str]]:
    """The names whose texts differ, grouped by starred names."""
    changed = {
        name: (old.get(name, missing), new.get(name, missing))
        for name in dict.fromkeys((*old, *new))
        if old.get(name, missing) != new.get(name, missing)
    }
    groups: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for name, texts in changed.items():
        groups.setdefault((starred(name), texts), []).append(name)
    return [(prefix + (names[0] if len(names) == 1 else star), *texts) for (star, texts), names in groups.items()]


def _strategies(plan: Plan) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for stage in plan.stages:
        for name, strategy in stage.strategies.items():
            text = " ".join(f"{letter}@{axis}" for axis, letter in sorted(strategy.items()) if letter) or _RUNS_WHOLE
            if text not in found.setdefault(name, []):
                found[name].append(text)
    return {name: " | ".join(texts) for name, texts in found.items()}


def _storage(plan: Plan) -> dict[str, str]:
    return {
        name: " ".join(f"{_placed(placement)}@{axis}" for axis, placement in sorted(placements.items())) or _WHOLE
        for stage in plan.stages
        for name, placements in stage.storage.items()
    }


def _placed(placement: Placement) -> str:
    dim = getattr(placement, "dim", None)
    return f"dim {dim}" if dim is not None else type(placement).__name__.lower()


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


def _sizes(stage: Stage) -> str:
    return _words({axis: f"{size}" for axis, size in stage.axes.items()}) or "as all"


def _words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))


def _buckets(buckets: tuple[object, ...]) -> str:
    sizes = [getattr(bucket, "num_bytes", 0) for bucket in buckets]
    return f"{len(sizes)} of at most {max(sizes) / 2**20:.3g} MiB" if sizes else "none"


def _predicted(old: Plan, new: Plan) -> tuple[str, str]:
    if old.prediction is None or new.prediction is None:
        return "", ""
    before, after = old.prediction.step_s, new.prediction.step_s
    if before == after:
        return "", ""
    return f"{before * 1e3:.4g} ms", f"{after * 1e3:.4g} ms ({after / before - 1:+.1%})"


def _peak(plan: Plan) -> str:
    return f"{plan.prediction.peak_memory_bytes / 2**30:.3g} GiB" if plan.prediction is not None else ""
