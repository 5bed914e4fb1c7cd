"""Numbers from lectures on parallel deep learning, recomputed with this project's formulas."""

from collections.abc import Callable, Iterator

import msgspec

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.worked import exchange, planning, servers, sizes, traffic
from meshwright.worked.line import Line

__all__ = ["SEARCHED", "Line", "Worked", "recompute", "worked_names"]


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """A worked example: its topic, and its claims."""

    id: str
    about: str
    lines: tuple[Line, ...]


_EXAMPLES: dict[str, tuple[Callable[[], Iterator[Line]], ...]] = {
    "ps-resnet50": (sizes.parameter_server, servers.flattening),
    "years-412": (sizes.years_412,),
    "years-172": (sizes.years_172,),
    "footprint": (sizes.footprint,),
    "gpt4-layer": (sizes.gpt4_layer,),
    "nvlink-1.75": (traffic.nvlink,),
    "tp-vs-pp": (traffic.tensor_or_pipeline,),
    "dp-vs-tp": (traffic.data_or_tensor,),
    "allreduce-table": (traffic.all_reduces,),
    "bubbles": (traffic.bubbles,),
    "sparcml": (exchange.sparcml,),
    "alexnet": (planning.alexnet,),
    "megatron-scaling": (planning.megatron_scaling,),
    "percent-of-peak": (sizes.percent_of_peak, planning.large_runs),
}
SEARCHED: dict[str, str] = {"alpa": "", "alpa-gpt": "gpt", "alpa-moe": "moe", "alpa-wresnet": "wresnet"}
"""Maps the names of the examples that plan captured models to the family of these models (empty: all families). These
examples need torch, and take minutes: ``api.recompute_alpa`` computes them."""


def worked_names() -> list[str]:
    """The names of the examples that are computed in seconds."""
    return list(_EXAMPLES)


def recompute(name: str) -> Worked:
    """Compute an example now.

    Raises:
        LayoutError: no example has this name; the message suggests similar names.
    """
    if name not in _EXAMPLES:
        known = (*_EXAMPLES, *SEARCHED)
        remedy = files.did_you_mean(name, known, f"examples: {', '.join(known)}")
        raise LayoutError(f"there is no worked example {name!r}", remedy=remedy)
    parts = _EXAMPLES[name]
    about = " ".join((part.__doc__ or "").strip() for part in parts)
    return Worked(id=name, about=about, lines=tuple(line for part in parts for line in part()))
