"""A call of an opaque region as data: its results, its rows of samples, and its measured cost."""

import ast
from functools import lru_cache
from typing import ClassVar

import msgspec

TARGETS = ("meshwright.opaque.default", "meshwright.opaque_backward.default")
"""The names of the operators of opaque regions: forward and backward."""


class OpaqueResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A result of a region. ``rows`` is the number of rows that each sample has in the batch dim; 0 if no dim is the
    batch."""

    dtype: str
    shape: tuple[int, ...]
    rows: int = 0


class MeasuredCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured seconds of a region, and bytes of its temporary tensors, for the whole batch. ``half_s`` are the seconds
    for half of the batch (0: not measured)."""

    whole_s: float
    half_s: float = 0.0
    scratch_bytes: int = 0

    def seconds(self, share: float) -> float:
        """Seconds for a share of the batch: a line through both measured points."""
        if not self.half_s:
            return self.whole_s
        slope = max(0.0, 2 * (self.whole_s - self.half_s))
        return max(self.whole_s - slope, 0.0) + slope * share


class OpaqueCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured cost of a call of a region. ``device`` is the name of the device that was measured."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    device: str
    forward: MeasuredCost
    backward: MeasuredCost


class OpaqueCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Call number ``number`` of the region ``region`` (the path of its module) within a step.

    The inputs are the tensors among the call's arguments, then the parameters and buffers of the module. ``results``
    are the tensors that it returns, and then the new values of the buffers that it changes. ``needs`` has the indices
    of the inputs whose gradients backward makes, ``given`` those of the results that have a gradient. If the batch may
    be split, ``rows`` has for each input its rows of a sample in dim ``batch_dim`` (0: the input is equal for all
    samples), and ``samples`` is the batch size; otherwise ``rows`` is empty, and ``reason`` says why. ``share`` is the
    part of the batch that this rank computes. ``random``: the region draws random numbers."""

    region: str
    number: int
    results: tuple[OpaqueResult, ...]
    needs: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    batch_dim: int = 0
    rows: tuple[int, ...] = ()
    samples: int = 0
    reason: str = ""
    random: bool = False
    share: float = 1.0
    cost: OpaqueCost | None = None

    @property
    def text(self) -> str:
        """The call as JSON: an argument of its operator."""
        return msgspec.json.encode(self).decode()

    @property
    def name(self) -> str:
        """The region with the number of the call."""
        return f"{self.region}#{self.number}"

    def of_part(self, samples: int) -> "OpaqueCall":
        """The same call for ``samples`` of the batch."""
        if not self.rows:
            return self

        def part(result: OpaqueResult) -> OpaqueResult:
            shape = list(result.shape)
            shape[self.batch_dim] = result.rows * samples
            return msgspec.structs.replace(result, shape=tuple(shape))

        return msgspec.structs.replace(
            self, results=tuple(map(part, self.results)), share=samples / self.samples if self.samples else 1.0
        )

    def measured(self, backward: bool) -> MeasuredCost | None:
        """The cost of the forward or the backward of the whole batch; None if it was not measured."""
        if self.cost is None:
            return None
        return self.cost.backward if backward else self.cost.forward


@lru_cache(maxsize=2**12)
def read_call(text: str) -> OpaqueCall:
    """The call from its text."""
    return msgspec.json.decode(text, type=OpaqueCall)


def call_of(arguments: str) -> OpaqueCall:
    """The call in the text of an operator's arguments (``Operator.arguments``)."""
    begin, end = arguments.index("'{"), arguments.rindex("}'")
    return read_call(ast.literal_eval(arguments[begin : end + 2]))
