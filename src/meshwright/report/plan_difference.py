"""The difference of two plans as text: layout, stages, strategies, storage, buckets and prediction."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from meshwright.ir.layout_text import layout_text
from meshwright.ir.placement import Placement
from meshwright.ir.plan import Plan, Stage, starred

_WHOLE, _RUNS_WHOLE = "whole", "runs whole"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that differs (``what``), with its value in the old and in the new plan."""

    what: str
    old: str
    new: str


class PlanDifference(msgspec.Struct, frozen=True):
    """All decisions in which two plans differ."""

    differences: tuple[Difference, ...]


def difference(old: Plan, new: Plan) -> PlanDifference:
    """All decisions in which two plans differ, the most general first."""
    return PlanDifference(tuple(_differences(old, new)))


def difference_text(difference: PlanDifference) -> str:
    """Lines for the terminal, one for each decision."""
    if not difference.differences:
        return "the plans are the same"
    width = max(len(each.what) for each in difference.differences)
    return "\n".join(f"  {each.what:<{width}}  {each.old} -> {each.new}" for each in difference.differences)


def _differences(old: Plan, new: Plan) -> Iterator[Difference]:
    pairs: list[tuple[str, str, str]] = [
        ("model", old.model, new.model),
        ("graph", old.graph_fingerprint, new.graph_fingerprint),
        ("batch", f"{old.batch_size}", f"{new.batch_size}"),
        ("cluster", old.cluster, new.cluster),
        ("layout", layout_text(old.layout), layout_text(new.layout)),
        ("mesh", f"{old.mesh}", f"{new.mesh}"),
        ("schedule", _scheduled(old), _scheduled(new)),
        ("precision", f"{old.precision}", f"{new.precision}"),
        ("offload", old.offload, new.offload),
        ("predicted step", *_predicted(old, new)),
        ("predicted peak memory", _peak(old), _peak(new)),
        ("stages", f"{len(old.stages)}", f"{len(new.stages)}"),
    ]
    for index, (before, after) in enumerate(zip(old.stages, new.stages, strict=False)):
        pairs += [
            (f"stage {index} begins at", before.first or "the beginning", after.first or "the beginning"),
            (f"stage {index} recomputes", _listed(before.recompute), _listed(after.recompute)),
            (f"stage {index} algorithms", _words(before.algorithms), _words(after.algorithms)),
            (
                f"stage {index} algorithms of operators",
                _words(before.operator_algorithms),
                _words(after.operator_algorithms),
            ),
            (f"stage {index} receives together", _receivers(before), _receivers(after)),
            (f"stage {index} reduces every micro-batch", _listed(before.gradients), _listed(after.gradients)),
            (f"stage {index} frees after each use", _listed(before.released), _listed(after.released)),
        ]
    pairs += _of_modules(_strategies(old), _strategies(new))
    pairs += _stored(_storage(old), _storage(new))
    pairs += [
        ("buckets of gradients", _buckets(old.buckets), _buckets(new.buckets)),
        ("buckets of gathers", _buckets(old.gathers), _buckets(new.gathers)),
        ("algorithms", _words(old.algorithms), _words(new.algorithms)),
        ("interiors first", _listed(old.interiors), _listed(new.interiors)),
        ("codecs", _codecs(old), _codecs(new)),
        ("consistency", old.consistency, new.consistency),
        ("amendments", f"{len(old.amendments)}", f"{len(new.amendments)}"),
    ]
    changed = [(what, before, after) for what, before, after in pairs if before != after]
    if not changed and old.digest != new.digest:
        changed = [("other decisions, such as the links that resharding is planned for", old.digest, new.digest)]
    for what, before_text, after_text in changed:
        yield Difference(what=what, old=before_text, new=after_text)


def _scheduled(plan: Plan) -> str:
    chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
    return f"{plan.schedule}{chunks}, {plan.microbatches} micro-batches"


def _of_modules(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The modules with operators whose strategies differ, with all old and all new strategies of these operators."""
    modules: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, _RUNS_WHOLE), new.get(name, _RUNS_WHOLE)
        if before != after:
            module = starred(name).rpartition(":")[0] or "(model)"
            olds, news = modules.setdefault(module, ({}, {}))
            olds[before] = news[after] = None
    return [(name, " / ".join(olds), " / ".join(news)) for name, (olds, news) in modules.items()]


def _stored(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The parameters whose storage differs. Parameters of repeated blocks are grouped if they changed alike."""
    groups: dict[tuple[str, tuple[str, str]], list[str]] = {}
    for name in dict.fromkeys((*old, *new)):
        texts = old.get(name, _WHOLE), new.get(name, _WHOLE)
        if texts[0] != texts[1]:
            groups.setdefault((starred(name), texts), []).append(name)
    return [
        (f"stored {names[0]}" if len(names) == 1 else f"stored {star} ({len(names)} of them)", *texts)
        for (star, texts), names in groups.items()
    ]


def _strategies(plan: Plan) -> dict[str, str]:
    strategies: dict[str, list[str]] = {}
    for stage in plan.stages:
        for name, strategy in stage.strategies.items():
            text = " ".join(f"{letter}@{axis}" for axis, letter in sorted(strategy.items()) if letter) or _RUNS_WHOLE
            if text not in strategies.setdefault(name, []):
                strategies[name].append(text)
    return {name: " | ".join(texts) for name, texts in strategies.items()}


def _storage(plan: Plan) -> dict[str, str]:
    return {
        name: " ".join(f"{_placed(placement)}@{axis}" for axis, placement in sorted(placements.items())) or _WHOLE
        for stage in plan.stages
        for name, placements in stage.storage.items()
    }


def _placed(placement: Placement) -> str:
    dim = getattr(placement, "dim", None)
    return f"dim {dim}" if dim is not None else type(placement).__name__.lower()


def _listed(names: Iterable[str]) -> str:
    """The names with ``*``, without repetitions."""
    return ", ".join(dict.fromkeys(map(starred, names))) or "nothing"


def _codecs(plan: Plan) -> str:
    """The codecs of the plan's buckets, each once, with their axes and algorithms."""
    codings = (coding for bucket in (*plan.buckets, *plan.gathers) for coding in bucket.codings)
    return _listed(f"{coding.codec} over {coding.axis} ({coding.algorithm})" for coding in codings)


def _words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))


def _receivers(stage: Stage) -> str:
    return _words({kind.value: " + ".join(map(str, sizes)) for kind, sizes in stage.receivers.items()}) or "as usual"


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
