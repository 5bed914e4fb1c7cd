"""Collectives as pure data: steps of every algorithm, their cost by counting, and a check by symbols."""

from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.hierarchy import Boxes, nested
from meshwright.schedules.collectives.operations import ALGORITHMS, all_reduce, build
from meshwright.schedules.collectives.steps import Count, Move, Steps, count, programs

__all__ = [
    "ALGORITHMS",
    "Boxes",
    "Count",
    "Move",
    "Steps",
    "all_reduce",
    "build",
    "check",
    "count",
    "nested",
    "programs",
]
