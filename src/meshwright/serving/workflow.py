"""Workflows as data: operators with model variants, sources with rates, tiers of workers with prices, links, limits."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import msgspec

from meshwright.errors import WorkflowError, refuse
from meshwright.ir.run_model import Model
from meshwright.serving.check import problems

GIB_BYTES, HOUR_S = 2**30, 3600.0


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A table of a workflow file. Unknown keys are errors."""


class Tier(_Part, frozen=True, kw_only=True):
    """A tier of workers, such as the edge or the cloud. Tiers stand in order; traffic never goes to an earlier tier."""

    name: str
    """The tier's name."""
    labels: dict[str, str] = {}
    """Labels that a Ray node must have to hold workers of this tier."""


class Worker(_Part, frozen=True, kw_only=True):
    """A worker, which runs one variant of one operator, or nothing."""

    name: str
    """The worker's name."""
    tier: str
    """The tier that holds the worker."""
    device: str
    """The kind of device; ``seconds`` of a variant are by kind of device."""
    usd_per_hour: float
    """The price of the worker for an hour, if it is used."""


class Link(_Part, frozen=True, kw_only=True):
    """The link from a tier to a later tier. Inside a tier, messages cost nothing unless a link says so."""

    source: str
    """The tier that sends."""
    target: str
    """The tier that receives."""
    usd_per_gib: float = 0.0
    """The price of traffic."""
    bits_per_s: float = 0.0
    """The rate, which all messages on the link share; 0: no limit."""
    latency_s: float = 0.0
    """Seconds until the first bit arrives."""

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of a message on the idle link."""
        return self.latency_s + self.occupied_s(num_bytes)

    def occupied_s(self, num_bytes: float) -> float:
        """Seconds for which a message occupies the link."""
        return 8 * num_bytes / self.bits_per_s if self.bits_per_s else 0.0


class Source(_Part, frozen=True, kw_only=True):
    """A source of items, such as a camera."""

    name: str
    """The source's name."""
    tier: str
    """The tier in which the items arise."""
    rate_per_s: float
    """Items per second."""
    message_bytes: float = 0.0
    """Bytes of an item. If ``shape`` is given and this is not, the bytes of a float32 tensor of this shape."""
    shape: tuple[int, ...] = ()
    """The shape of an item, for runs with models. The tensors are random."""

    @property
    def item_bytes(self) -> float:
        """Bytes of an item."""
        return self.message_bytes or (4.0 * math.prod(self.shape) if self.shape else 0.0)


class Variant(_Part, frozen=True, kw_only=True):
    """A model that an operator may run. It handles one item at a time."""

    name: str
    """The variant's name."""
    seconds: dict[str, float] = {}
    """Maps a kind of device to the mean seconds for an item. A variant cannot run on other devices."""
    variation: float = 0.0
    """The standard deviation of the seconds, divided by their mean."""
    accuracy: float | None = None
    """The factor by which the variant multiplies the workflow's accuracy, from 0 to 1; left out: 1."""
    message_bytes: float = 0.0
    """Bytes of the result for an item."""
    model: Model | None = None
    """The PyTorch model, as in the table ``[model]`` of a run file."""


class Operator(_Part, frozen=True, kw_only=True):
    """A step of the workflow. It runs one of its variants, on one or more workers, once for each item."""

    name: str
    """The operator's name."""
    inputs: tuple[str, ...]
    """The sources and operators whose results for an item it needs, in the order of the model's arguments."""
    variants: tuple[Variant, ...]
    """The models among which a plan chooses."""

    def variant(self, name: str) -> Variant:
        """The variant of this name."""
        return next(variant for variant in self.variants if variant.name == name)


class MeasuredAccuracy(_Part, frozen=True, kw_only=True):
    """The measured accuracy of the whole workflow with some models."""

    models: dict[str, str]
    """Maps operators to variants. All rows name the same operators; the others do not change the accuracy."""
    accuracy: float
    """The accuracy, in any unit that all rows and the limit share."""


class Limits(_Part, frozen=True, kw_only=True):
    """What a plan must keep. The rates of the sources are limits too."""

    accuracy: float = 0.0
    """The least accuracy."""
    latency_s: float = 0.0
    """The longest time from an item's start to its last result, for 99 % of the items; 0: no limit."""


class Workflow(_Part, frozen=True, kw_only=True, dict=True):
    """A workflow, the tiers on which it may run, and the limits that a plan must keep.

    Raises:
        WorkflowError: a number is impossible, or names contradict each other; names the key.
    """

    VERSION: ClassVar[int] = 1
    version: int = msgspec.field(default_factory=lambda: 1)  # omit_defaults would drop a plain default from the file
    """The version of the format."""
    name: str
    """The workflow's name."""
    tiers: tuple[Tier, ...]
    """Tiers, from the edge to the cloud."""
    workers: tuple[Worker, ...]
    """Workers."""
    sources: tuple[Source, ...]
    """Sources. Item number k of all sources belongs together, so that all rates are equal."""
    operators: tuple[Operator, ...]
    """Operators."""
    links: tuple[Link, ...] = ()
    """Links between tiers. Without a link, no traffic goes from one tier to another."""
    accuracies: tuple[MeasuredAccuracy, ...] = ()
    """Measured accuracies. Combinations that are not measured are not chosen. If the table is left out, the accuracy
    is the product of the variants' accuracies."""
    limits: Limits = Limits()
    """What a plan must keep."""

    def __post_init__(self) -> None:
        refuse(WorkflowError, problems(self))

    # --- names -------------------------------------------------------------------------------------------------------

    @cached_property
    def rate_per_s(self) -> float:
        """Items per second, of every source and so of every operator."""
        return self.sources[0].rate_per_s

    @cached_property
    def tier_index(self) -> dict[str, int]:
        """Maps a tier to its place in the order."""
        return {tier.name: index for index, tier in enumerate(self.tiers)}

    @cached_property
    def worker_of(self) -> dict[str, Worker]:
        """Maps a name to its worker."""
        return {worker.name: worker for worker in self.workers}

    @cached_property
    def source_of(self) -> dict[str, Source]:
        """Maps a name to its source."""
        return {source.name: source for source in self.sources}

    @cached_property
    def tier_of(self) -> dict[str, str]:
        """Maps each worker and source to its tier. Stations of runs have these names."""
        workers = {worker.name: worker.tier for worker in self.workers}
        return workers | {source.name: source.tier for source in self.sources}

    @cached_property
    def operator_of(self) -> dict[str, Operator]:
        """Maps a name to its operator."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The operators, each after its inputs."""
        done: list[str] = []
        left = list(self.operators)
        while left:
            ready = next(
                operator for operator in left if all(name in done or name in self.source_of for name in operator.inputs)
            )
            done.append(ready.name)
            left.remove(ready)
        return tuple(done)

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a source or operator and an operator that reads its results."""
        return tuple((name, operator) for operator in self.order for name in self.operator_of[operator].inputs)

    @cached_property
    def consumers(self) -> dict[str, list[str]]:
        """Maps sources and operators to the operators that read their results."""
        return {
            name: [to for of, to in self.edges if of == name] for name in (*self.source_of, *self.operator_of)
        }  # fmt: skip

    @cached_property
    def sinks(self) -> tuple[str, ...]:
        """The operators whose results no operator reads."""
        return tuple(name for name in self.order if not self.consumers[name])

    # --- links and accuracy ------------------------------------------------------------------------------------------

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        inside = {(tier.name, tier.name): Link(source=tier.name, target=tier.name) for tier in self.tiers}
        return inside | {(link.source, link.target): link for link in self.links}

    def link(self, source: str, target: str) -> Link | None:
        """The link from one tier to another; None: no traffic can go there."""
        return self._links.get((source, target))

    def usd_per_hour(self, link: Link, num_bytes: float, rate_per_s: float) -> float:
        """The price of an hour of messages on a link: price * rate * bytes * 3600 / 1024^3."""
        return link.usd_per_gib * rate_per_s * num_bytes * HOUR_S / GIB_BYTES

    def message_bytes(self, name: str, models: Mapping[str, str]) -> float:
        """Bytes of a message of a source, or of an operator with its variant in ``models``."""
        if name in self.source_of:
            return self.source_of[name].item_bytes
        return self.operator_of[name].variant(models[name]).message_bytes

    def accuracy(self, models: Mapping[str, str]) -> float | None:
        """The accuracy with these variants of the operators; None: it was not measured."""
        if self.accuracies:
            rows = (row for row in self.accuracies if row.models.items() <= models.items())
            return next((row.accuracy for row in rows), None)
        return math.prod(
            1.0 if (own := self.operator_of[name].variant(model).accuracy) is None else own
            for name, model in models.items()
        )

    @property
    def most_accurate(self) -> float:
        """The highest accuracy of any choice of models."""
        if self.accuracies:
            return max(row.accuracy for row in self.accuracies)
        return math.prod(
            max(1.0 if variant.accuracy is None else variant.accuracy for variant in operator.variants)
            for operator in self.operators
        )
