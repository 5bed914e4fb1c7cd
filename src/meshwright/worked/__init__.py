"""Worked numbers of lectures on parallel deep learning, computed again with this project's formulas."""

from collections.abc import Callable, Iterator

import msgspec

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.worked import planning, sizes, traffic
from meshwright.worked.line import Line

__all__ = ["Line", "Worked", "recompute", "worked_names"]


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """A worked example: what it is about, and its claims."""

    id: str
    about: str
    lines: tuple[Line, ...]


_EXAMPLES: dict[str, tuple[Callable[[], Iterator[Line]], ...]] = {
    "ps-resnet50": (sizes.parameter_server,),
    "years-412": (sizes.years_412,),
    "years-172": (sizes.years_172,),
    "footprint": (sizes.footprint,),
    "gpt4-layer": (sizes.gpt4_layer,),
    "nvlink-1.75": (traffic.nvlink,),
    "tp-vs-pp": (traffic.tensor_or_pipeline,),
    "dp-vs-tp": (traffic.data_or_tensor,),
    "allreduce-table": (traffic.all_reduces,),
    "bubbles": (traffic.bubbles,),
    "alexnet": (planning.alexnet,),
    "megatron-scaling": (planning.megatron_scaling,),
    "percent-of-peak": (sizes.percent_of_peak, planning.large_runs),
    "alpa": (planning.alpa,),
}


def worked_names() -> list[str]:
    """The names of the examples."""
    return list(_EXAMPLES)


def recompute(name: str) -> Worked:
    """One example, computed now.

    Raises:
        LayoutError: no example has this name; the message suggests similar names.
    """
    if name not in _EXAMPLES:
        remedy = files.did_you_mean(name, _EXAMPLES, f"examples: {', '.join(_EXAMPLES)}")
        raise LayoutError(f"there is no worked example {name!r}", remedy=remedy)
    parts = _EXAMPLES[name]
    about = " ".join((part.__doc__ or "").strip() for part in parts)
    return Worked(id=name, about=about, lines=tuple(line for part in parts for line in part()))
