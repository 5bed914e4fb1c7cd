"""What one rank runs for one stage: functions by phase, and the names of the values that flow between them."""

from dataclasses import dataclass, field

import torch

from meshwright.ir.placement import Placements
from meshwright.lower.partition import Phase


@dataclass(frozen=True)
class Slice:
    """A micro-batch's part of a value of the whole step: of dim ``dim``, made of ``blocks`` equal blocks, each cut."""

    source: str
    dim: int
    blocks: int


@dataclass(frozen=True)
class Transfer:
    """A tensor that crosses a border: its name in the graph, the value in the program, the shape of its part on this
    rank, and that of the whole micro-batch."""

    tensor: str
    value: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Accumulator:
    """Where a parameter's gradient is summed up: memory of its own, or in ``bucket`` from element ``offset`` on."""

    parameter: str
    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bucket: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Join:
    """A value of each micro-batch, how those of all are joined (``sum``, ``max``, ``min``, ``last``), and the value of
    the step that this becomes."""

    value: str
    join: str
    joined: str


@dataclass
class StageProgram:
    """What one rank runs for one stage. Values are named; ``phases`` say which they take and return.

    ``parameters``, ``buffers`` and ``inputs`` are by value name, in their order of the graph. ``scalars`` (loss and
    metrics), ``gradients`` and ``buffers_after`` (buffers that a step updates once) name the values that a step gives;
    ``buffer_updates`` those that every micro-batch leaves in a buffer for the next.
    """

    stage: int
    phases: dict[str, Phase] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    input_placements: dict[str, Placements] = field(default_factory=dict)
    random_key: str = ""
    slices: dict[str, Slice] = field(default_factory=dict)
    received_up: list[Transfer] = field(default_factory=list)
    received_down: list[Transfer] = field(default_factory=list)
    sent_up: list[Transfer] = field(default_factory=list)
    sent_down: list[Transfer] = field(default_factory=list)
    accumulators: list[Accumulator] = field(default_factory=list)
    buckets: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    joins: list[Join] = field(default_factory=list)
    scalars: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    buffer_updates: dict[str, str] = field(default_factory=dict)
    buffers_after: dict[str, str] = field(default_factory=dict)
