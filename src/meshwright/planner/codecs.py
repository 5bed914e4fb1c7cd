"""Give buckets the codecs that a layout asks for. For each, choose the algorithm that carries the coded elements in the
least time."""

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.cost.coded import coded_s, is_cut
from meshwright.cost.collective import Network
from meshwright.cost.exchange import algorithms, elements_of, fastest
from meshwright.cost.fabric import axis_group
from meshwright.errors import Problem
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import CANDIDATES, LOSSLESS, codec_of
from meshwright.ir.layout import DATA_AXES, Layout
from meshwright.ir.mesh import Mesh, members
from meshwright.ir.plan import Bucket, Coding, Note, Plan
from meshwright.ir.program import CollectiveKind
from meshwright.planner.algorithms import in_a_box

AUTO, NONE, FACTORS = "auto", "none", "factors"
UNNAMED = ("", AUTO, NONE)
"""Values of ``Layout.codec`` that do not name a codec."""
GAIN = 0.02
"""The least saving for which codecs are used, as a fraction of the step: codecs of all buckets together must shorten
the time that computing waits by more than this. Of n buckets, each must save an n-th part."""


def codec_problems(layout: Layout) -> Iterator[Problem]:
    """Codecs that are not possible where the layout asks for them, or that would have nothing to encode.

    Raises:
        PlanError: a text names no codec.
    """
    for field in ("codec", "parameter_codec", "activation_codec"):
        text = getattr(layout, field)
        if not text or (text in UNNAMED and field == "codec"):
            continue
        if text == AUTO:
            yield "layout", f"{field}='auto'", "name a codec: the planner chooses only the codec of gradients"
            continue
        codec = codec_of(text)
        if field != "codec" and (codec.exchange != "hops" or codec.feedback or codec.momentum):
            problem = f"{field}={text!r}: only sums of gradients can make up for its errors"
            yield "layout", problem, "use fp16, bf16, qsgd, or onebit(feedback=off)"
        elif field == "activation_codec" and not codec.is_fixed:
            problem = f"activation_codec={text!r}: the size of its messages is not known to the next stage"
            yield "layout", problem, "use fp16, bf16, qsgd, or onebit(feedback=off)"
    asked = codec_of(layout.codec) if layout.codec not in UNNAMED else None
    if asked is not None and asked.needs_whole_sum and layout.zero and not layout.zero_ranks and layout.depth == 1:
        problem = f"codec={layout.codec!r} with zero={layout.zero}: its sums are whole on every rank"
        yield "layout", problem, "use another codec, or zero=0, or zero_ranks: groups of ranks then hold copies"
    counts = asked is not None and bool(asked.momentum or asked.warmup)
    if counts and layout.zero >= 2 and layout.microbatches > 1:
        problem = f"codec={layout.codec!r} with zero={layout.zero} and micro-batches: it would count each as a step"
        yield "layout", problem, "use zero=1, microbatches=1, or a codec without momentum and warm-up"
    if layout.codec == FACTORS and layout.microbatches > 1:
        # A rank's samples are cut into micro-batches, so the rows of a micro-batch are not neighbours in the batch.
        problem = (
            f"codec='factors' with {layout.microbatches} micro-batches: a rank gathers the rows of the whole batch"
        )
        yield "layout", problem, "use microbatches=1, or another codec"
    if layout.parameter_codec and layout.zero == 0:
        yield "layout", "parameter_codec with zero=0: no parameter is gathered", "leave it out, or give zero 1, 2 or 3"
    if layout.activation_codec and layout.pp == 1:
        yield "layout", "activation_codec with pp=1: nothing crosses between stages", "leave it out"


def undecided(plan: Plan, cluster: Cluster | None) -> Plan:
    """Add a note to the plan if its layout asks for a choice of codecs that cannot be made: without a cluster, or for
    stages that are planned separately."""
    if plan.layout.codec != AUTO:
        return plan
    reason = "without a cluster, nobody knows what gradients and codecs would take"
    if cluster is not None:
        reason = "stages of different sizes are planned one by one, without a timeline for codecs"
    return msgspec.structs.replace(plan, notes=(*plan.notes, Note(module="gradients", split="no codec", reason=reason)))


class BucketCodecs:
    """Gives codecs to the buckets of a plan. ``item_bytes`` is the size of an element of gradients."""

    def __init__(self, mesh: Mesh, cluster: Cluster | None, item_bytes: int = 4) -> None:
        self._mesh, self._item_bytes = mesh, item_bytes
        self._network = Network(cluster) if cluster is not None else None

    def of(self, plan: Plan) -> Plan:
        """The plan with the codecs that its layout names."""
        text = "" if plan.layout.codec in UNNAMED else plan.layout.codec
        buckets = (self.reduced(bucket, text, cut=is_cut(plan, bucket)) for bucket in plan.buckets)
        gathers = (self.gathered(bucket, plan.layout.parameter_codec) for bucket in plan.gathers)
        return msgspec.structs.replace(plan, buckets=tuple(buckets), gathers=tuple(gathers))

    def gathered(self, bucket: Bucket, text: str) -> Bucket:
        """A bucket of parameters with the codec ``text``; empty: no codec."""
        return self._coded(bucket, bucket.axis, text, "all_gather") if text else bucket

    def reduced(self, bucket: Bucket, text: str, *, cut: bool) -> Bucket:
        """A bucket of gradients with the codec ``text``; empty: no codec. ``cut``: the gradients are reduce-scattered
        over ``Bucket.axis``."""
        axis = coded_axis(bucket) if text not in ("", FACTORS) else ""
        if not axis:
            return bucket
        return self._coded(bucket, axis, text, "reduce_scatter" if cut and axis == bucket.axis else "all_reduce")

    def _coded(self, bucket: Bucket, axis: str, text: str, operation: CollectiveKind) -> Bucket:
        coding = Coding(axis, text, self.algorithm(text, axis, operation, bucket.num_bytes))
        return msgspec.structs.replace(bucket, codings=(*bucket.codings, coding))

    def algorithm(self, text: str, axis: str, operation: CollectiveKind, num_bytes: int) -> str:
        """The algorithm that carries the coded elements in the least time."""
        if self._network is None:
            return next(algorithms(codec_of(text), operation, self._mesh.size(axis)))
        group = axis_group(self._mesh, axis)
        return fastest(self._network, text, operation, num_bytes, group, self._item_bytes).algorithm

    def seconds(self, coding: Coding, operation: CollectiveKind, num_bytes: float) -> float:
        """The seconds that a coded collective takes."""
        assert self._network is not None
        elements = elements_of(coding.codec, coding.algorithm, num_bytes, self._item_bytes)
        return coded_s(self._network, operation, num_bytes, axis_group(self._mesh, coding.axis), elements)


def coded_axis(bucket: Bucket) -> str:
    """The axis over which the elements of a bucket are coded: its outermost data-parallel axis, whose links are the
    slowest. Empty if the bucket has no such axis."""
    axes = [axis for axis in (bucket.axis, *bucket.across) if not {*members(axis)}.isdisjoint(DATA_AXES)]
    return next((axis for axis in axes if "dp" in members(axis)), next(iter(axes), ""))


def follow_codings(plan: Plan, base: Plan) -> Plan:
    """The plan with the codings in ``base``, for buckets that hold the same parameters."""
    return msgspec.structs.replace(
        plan, buckets=_follow(plan.buckets, base.buckets), gathers=_follow(plan.gathers, base.gathers)
    )


def _follow(buckets: Sequence[Bucket], base: Sequence[Bucket]) -> tuple[Bucket, ...]:
    home = {name: bucket.codings for bucket in base for name in bucket.parameters}
    return tuple(msgspec.structs.replace(bucket, codings=home.get(bucket.parameters[0], ())) for bucket in buckets)


def candidates(layout: Layout, buckets: Sequence[Bucket], mesh: Mesh, cluster: Cluster) -> tuple[str, ...]:
    """The codecs to compare for gradients; the empty text stands for no codec. If the layout names no codec,
    ``lossless`` is a candidate, provided that its time was measured. Between ranks that share memory, codecs are not
    considered: encoding reads all elements, which takes as long as sending them."""
    if layout.codec not in ("", AUTO):
        return ("" if layout.codec == NONE else layout.codec,)
    axes = {axis for bucket in buckets if (axis := coded_axis(bucket))}
    if all(in_a_box(mesh, axis, cluster) for axis in axes):
        return ("",)
    return ("", *exact_codecs(cluster), *(CANDIDATES if layout.codec == AUTO else ()))


def exact_codecs(cluster: Cluster) -> tuple[str, ...]:
    """``lossless`` if the ranks are CPUs and a calibration has measured it, because such machines have the compression
    library."""
    measured = cluster.device.kind == "cpu" and any(row.codec == LOSSLESS for row in cluster.codecs)
    return (LOSSLESS,) if measured else ()
