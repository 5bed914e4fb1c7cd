"""Numbers from lectures on parallel deep learning, recomputed with this project's own parts."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.worked import algorithms, divisions, exchange, kept, planning, pruning, servers, sizes, traffic
from meshwright.worked.kept import KeptResult
from meshwright.worked.line import Line

__all__ = ["CAPTURED", "LECTURES", "RESULTS", "SEARCHED", "Line", "Worked", "recompute", "worked_names"]

RESULTS = Path("benchmarks/results")
"""The folder of result files in a checkout."""
LECTURES = "lectures"
"""The name of the result file with the lines of examples that need captured models (``make bench-lectures``)."""


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """A worked example: its topic, and its claims."""

    id: str
    about: str
    lines: tuple[Line, ...]


class _Example(NamedTuple):
    """The ways in which an example is recomputed, beside what ``kept.FILES`` has of it. ``formulas`` take seconds and
    need no torch. ``captured`` describes what is done with captured models (empty: nothing);
    ``api.recompute_captured`` does it."""

    formulas: tuple[Callable[[], Iterator[Line]], ...] = ()
    captured: str = ""


_EXAMPLES: dict[str, _Example] = {
    "ps-resnet50": _Example((sizes.parameter_server, servers.flattening)),
    "years-412": _Example((sizes.years_412,)),
    "years-172": _Example((sizes.years_172,)),
    "footprint": _Example((sizes.footprint,)),
    "gpt4-layer": _Example((sizes.gpt4_layer,)),
    "nvlink-1.75": _Example((traffic.nvlink,)),
    "tp-vs-pp": _Example((traffic.tensor_or_pipeline,)),
    "dp-vs-tp": _Example((traffic.data_or_tensor,)),
    "allreduce-table": _Example((traffic.all_reduces,)),
    "staged": _Example((algorithms.staged,)),
    "alpha-beta": _Example((algorithms.alpha_beta,)),
    "tree-7": _Example((algorithms.tree_of_seven,)),
    "bubbles": _Example((traffic.bubbles,)),
    "sobel": _Example(captured="A Sobel filter on an image whose rows are divided over two ranks."),
    "xor": _Example(captured="Exclusive-or of two bits, learned by one layer and by two."),
    "alexnet": _Example((planning.alexnet,)),
    "alexnet-two-gpus": _Example((planning.alexnet_on_two_gpus,)),
    "megatron-scaling": _Example((planning.megatron_scaling,)),
    "weak-scaling-axonn": _Example((planning.weak_scaling,)),
    "percent-of-peak": _Example((sizes.percent_of_peak, planning.large_runs)),
    "percent-more": _Example((sizes.more_of_peak,)),
    "cards-petaflop": _Example((sizes.cards_for_a_petaflop,)),
    "alpa-pruning": _Example((pruning.pruning,)),
    "inter-intra": _Example(captured="The same model, planned with stages only and with divided operators only."),
    "chain": _Example(captured="A model whose operators wait for each other, on several devices."),
    "mu-cudnn": _Example((divisions.mu_cudnn,)),
    "sparcml": _Example((exchange.sparcml,)),
    "jellybean": _Example(),
    "utilization": _Example(),
    "softmax-784x10": _Example(captured="Softmax regression on handwritten digits, on one rank and on two."),
    "cross-entropy-cat": _Example(captured="The loss of a classifier that gives the label a probability of 0.54."),
}
SEARCHED: dict[str, str] = {"alpa": "", "alpa-gpt": "gpt", "alpa-moe": "moe", "alpa-wresnet": "wresnet"}
"""Maps the names of the examples that plan captured models to the family of these models (empty: all families). These
examples need torch, and take minutes: ``api.recompute_alpa`` computes them."""
CAPTURED = tuple(name for name, example in _EXAMPLES.items() if example.captured)
"""The examples with captured models of small size. They need torch, and up to a minute: ``api.recompute_captured``
computes them."""


def worked_names() -> list[str]:
    """The names of all examples except those in ``SEARCHED``."""
    return list(_EXAMPLES)


def recompute(name: str, *, results: Path = RESULTS, captured: Callable[[str], Iterable[Line]] | None = None) -> Worked:
    """Compute an example now, and read its measured numbers from the result files in ``results``.

    ``captured`` computes the lines of an example in ``CAPTURED`` (``api.recompute_captured``). By default, these lines
    are read from the result file ``lectures``.

    Raises:
        LayoutError: no example has this name; the message suggests similar names.
        FileFormatError: a result file is damaged, or lacks a finding.
    """
    if name not in _EXAMPLES:
        known = (*_EXAMPLES, *SEARCHED)
        remedy = files.did_you_mean(name, known, f"examples: {', '.join(known)}")
        raise LayoutError(f"there is no worked example {name!r}", remedy=remedy)
    example, measured = _EXAMPLES[name], kept.FILES.get(name)
    parts = (*example.formulas, *([measured.lines] if measured else []))
    abouts = [inspect.getdoc(part) or "" for part in parts]
    lines = [line for part in example.formulas for line in part()]
    if example.captured:
        abouts.append(example.captured)
        own = KeptResult(
            LECTURES, "make bench-lectures", lambda result: kept.example_of(name, result), (example.captured,)
        )
        lines += captured(name) if captured is not None else kept.read(own, results)
    if measured:
        lines += kept.read(measured, results)
    return Worked(id=name, about=" ".join(" ".join(abouts).split()), lines=tuple(lines))
