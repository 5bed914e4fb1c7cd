"""Choose the bucket sizes for which computing waits least for communication, within the memory of a rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

import msgspec

from meshwright.cost.collective import Network
from meshwright.cost.exposed import Actions, BucketTransfer, computed_s, exposed_s, stage_actions
from meshwright.cost.fabric import axis_group
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import CANDIDATES
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.placement import Flat
from meshwright.ir.plan import Bucket, Note, Plan
from meshwright.ir.program import CollectiveKind, Lower
from meshwright.planner.algorithms import in_a_box
from meshwright.planner.buckets import BUCKET_BYTES, BucketMember, filled
from meshwright.planner.codecs import AUTO, GAIN, BucketCodecs, candidates
from meshwright.schedules.collectives.choice import NATIVE, chosen
from meshwright.schedules.pipeline import schedule_of

LADDER_BYTES = tuple(2**power for power in range(20, 27))
"""Bucket sizes that are compared: the powers of two from 1 to 64 MiB."""
ALIKE = 0.005
"""Two bucket sizes count as equally good if the times that computing waits for communication differ by less than this
fraction of a stage's compute time. Of equally good sizes, the size nearest to ``BUCKET_BYTES`` is taken."""
_MIB = 2**20


@dataclass(frozen=True)
class BucketSizes:
    """A bucket size for gradients (``reduced_bytes``) and one for parameters (``gathered_bytes``). ``exposed_s`` is the
    seconds per step that computing waits for these buckets, on the stage that waits longest."""

    reduced_bytes: int
    gathered_bytes: int
    exposed_s: float

    @property
    def unusual(self) -> float:
        """Distance from the default bucket size: the sum of ``|log2(size / BUCKET_BYTES)|``."""
        return sum(abs(log2(size / BUCKET_BYTES)) for size in (self.reduced_bytes, self.gathered_bytes))


def fit_buckets(
    lower: Lower,
    plan: Plan,
    cluster: Cluster,
    reduced: Sequence[BucketMember],
    gathered: Sequence[BucketMember],
    optimizer: OptimizerCost,
    memory_bytes: float,
) -> Plan:
    """Give ``plan`` the codec of its layout, or with ``auto`` the best codec or none, and the bucket sizes of
    ``LADDER_BYTES`` for which computing waits least for communication.

    ``reduced`` are the members of the gradient buckets, and ``gathered`` those of the parameter buckets. Notes in the
    plan say how much longer computing would wait with other sizes. The peak memory of a rank stays within
    ``memory_bytes``. If even buckets of ``BUCKET_BYTES`` need more memory, their peak is the limit instead.
    """
    layout, actions = plan.layout, list[tuple[Actions, ...]]()
    item_bytes = ITEM_BYTES[reduced[0].key[-1].split()[0]] if reduced else 4

    def scale_of(text: str) -> _Scale:
        codecs = BucketCodecs(text, layout.parameter_codec, plan.mesh, cluster, item_bytes)
        return _Scale(lower, plan, cluster, reduced, gathered, codecs)

    scales = [scale_of(text) for text in candidates(layout, plan.buckets, plan.mesh, cluster)]
    if len(scales) == 1 and not scales[0].differ:
        return _noted(scales[0].codecs.of(plan))
    for scale in scales:  # the codec changes no compute of the step: one lowering serves all
        scale.actions = actions = actions or scale.lowered()
    least = [min(choice.exposed_s for choice in scale.weighed()) for scale in scales]
    step_s = scales[0].computed_s + least[0]
    order = sorted(
        zip(scales, least, strict=True), key=lambda pair: pair[1] + GAIN * step_s * bool(pair[0].codecs.text)
    )
    scale, waits_s = next(pair for pair in order if len(order) == 1 or _fits(pair[0], optimizer, memory_bytes))
    choices = ranked(scale.weighed(), scale.computed_s)
    usual_bytes = 0.0
    while scale.holds_more(choices[0]):
        needed = peak_bytes(lower, scale.plan_of(choices[0]), cluster, optimizer)
        if needed > memory_bytes:
            usual_bytes = usual_bytes or peak_bytes(lower, plan, cluster, optimizer)
        if needed <= max(memory_bytes, usual_bytes):
            break
        largest = choices[0]
        choices = [
            choice
            for choice in choices
            if choice.reduced_bytes < largest.reduced_bytes or choice.gathered_bytes < largest.gathered_bytes
        ]
    fitted = scale.plan_of(choices[0])
    notes = [*fitted.notes, *scale.notes(choices[0])]
    if len(scales) > 1:
        others = sorted((seconds, each.codecs.text or "no codec") for each, seconds in zip(scales, least, strict=True))
        words = ", ".join(
            f"{text} {seconds * 1e3:.3g} ms" for seconds, text in others if text != (scale.codecs.text or "no codec")
        )
        reason = f"computing waits {waits_s * 1e3:.3g} ms; with {words}"
        notes.append(Note(module="gradients", split=scale.codecs.text or "no codec", reason=reason))
    return _noted(msgspec.structs.replace(fitted, notes=tuple(notes)))


def _fits(scale: "_Scale", optimizer: OptimizerCost, memory_bytes: float) -> bool:
    """Whether what the codec keeps between steps fits in the memory of a rank; without a codec, nothing is kept."""
    if not scale.codecs.text:
        return True
    plan = scale.plan_of(ranked(scale.weighed(), scale.computed_s)[0])
    return peak_bytes(scale.lower, plan, scale.cluster, optimizer) <= memory_bytes


def _noted(plan: Plan) -> Plan:
    """The plan with a note if ``auto`` had nothing to choose from."""
    if plan.layout.codec != AUTO or any(note.split in ("no codec", *CANDIDATES) for note in plan.notes):
        return plan
    reason = "ranks share memory: encoding would take as long as sending"
    return msgspec.structs.replace(plan, notes=(*plan.notes, Note(module="gradients", split="no codec", reason=reason)))


def ranked(choices: Sequence[BucketSizes], computed_s: float) -> list[BucketSizes]:
    """Sort pairs of bucket sizes from the best to the worst.

    First come the choices that are about as good as the best (see ``ALIKE``), sorted by their distance from the default
    bucket size. Then come the others, sorted by ``exposed_s``.
    """
    most = min(choice.exposed_s for choice in choices) + ALIKE * computed_s
    return sorted(choices, key=lambda choice: (max(choice.exposed_s, most), choice.unusual, choice.exposed_s))


def peak_bytes(lower: Lower, plan: Plan, cluster: Cluster, optimizer: OptimizerCost) -> int:
    """The peak memory, in bytes, of the rank that needs the most memory."""
    peaks = peak_memory(step_work(lower(plan), plan, cluster, optimizer=optimizer), schedule_of(plan))
    return max(memory.peak_bytes for memory in peaks)


class _Scale:
    """Computes how long computing waits for buckets of each size. For this, ``weighed`` lowers the plan only once, with
    one parameter in each bucket."""

    def __init__(
        self,
        lower: Lower,
        plan: Plan,
        cluster: Cluster,
        reduced: Sequence[BucketMember],
        gathered: Sequence[BucketMember],
        codecs: BucketCodecs,
    ) -> None:
        self.lower, self.plan, self.cluster, self.network = lower, plan, cluster, Network(cluster)
        self.codecs = codecs
        self.reduced = {
            size: tuple(codecs.reduced(bucket, self._is_cut(bucket)) for bucket in buckets)
            for size, buckets in _distinct(reduced, plan.algorithms).items()
        }
        self.gathered = {
            size: tuple(map(codecs.gathered, buckets)) for size, buckets in _distinct(gathered, plan.algorithms).items()
        }
        self.reductions = {
            size: [
                self._transfer(bucket, "reduce_scatter" if self._is_cut(bucket) else "all_reduce") for bucket in buckets
            ]
            for size, buckets in self.reduced.items()
        }
        self.gathers = {
            size: [self._transfer(bucket, "all_gather") for bucket in buckets]
            for size, buckets in self.gathered.items()
        }
        self.singles = msgspec.structs.replace(
            plan, buckets=filled(reduced, 0, plan.algorithms), gathers=filled(gathered, 0, plan.algorithms)
        )
        self.actions: list[tuple[Actions, ...]] = []

    @property
    def differ(self) -> bool:
        """Whether different sizes give different buckets."""
        return len(self.reduced) > 1 or len(self.gathered) > 1

    def weighed(self) -> list[BucketSizes]:
        """The ``BucketSizes`` of every pair of a gradient bucket size and a parameter bucket size. Of several sizes
        that give equal buckets, only one is included."""
        return [
            BucketSizes(size, other, self._exposed_s(gathers, reductions))
            for size, reductions in self.reductions.items()
            for other, gathers in self.gathers.items()
        ]

    def lowered(self) -> list[tuple[Actions, ...]]:
        """The actions of all stages, with one parameter in each bucket."""
        return [stage_actions(program, self.singles, self.cluster) for program in self.lower(self.singles)]

    @property
    def computed_s(self) -> float:
        """Seconds of compute of the stage that computes longest."""
        return max(computed_s(actions) for actions in self.actions)

    def _exposed_s(self, gathers: Sequence[BucketTransfer], reductions: Sequence[BucketTransfer]) -> float:
        return max(exposed_s(actions, gathers, reductions) for actions in self.actions)

    def plan_of(self, choice: BucketSizes) -> Plan:
        """The plan with the bucket sizes of ``choice``."""
        return msgspec.structs.replace(
            self.plan, buckets=self.reduced[choice.reduced_bytes], gathers=self.gathered[choice.gathered_bytes]
        )

    def holds_more(self, choice: BucketSizes) -> bool:
        """Whether ``choice`` may need more memory than buckets of ``BUCKET_BYTES``. Only larger buckets that are
        gathered or reduce-scattered need more memory."""
        more = choice.gathered_bytes > BUCKET_BYTES and bool(self.plan.gathers)
        return more or (choice.reduced_bytes > BUCKET_BYTES and any(map(self._is_cut, self.plan.buckets)))

    def _is_cut(self, bucket: Bucket) -> bool:
        """Whether the bucket's gradients are reduce-scattered, because their parameters are stored Flat."""
        return isinstance(self.plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)

    # --- collectives of buckets --------------------------------------------------------------------------------------

    def _hides(self, operation: str, bucket: Bucket) -> bool:
        """Whether a rank computes while the collective of a bucket runs.

        On devices other than CPUs, a rank always does. On CPUs, a rank never does during a collective inside a box. A
        collective between boxes runs beside computing if threads of torch.distributed carry it out. It also does so if
        it has only one round, because it then sends most of its bytes at its start.
        """
        if self.cluster.device.kind != "cpu":
            return True
        if in_a_box(self.plan.mesh, bucket.axis, self.cluster):
            return False
        if bucket.codings:  # this rank encodes and decodes
            return False
        name = chosen(bucket.algorithm, operation, bucket.num_bytes)
        if operation == "all_reduce":
            return name == NATIVE or (name == "butterfly" and self.plan.mesh.size(bucket.axis) == 2)
        return name in (NATIVE, "star")

    def _seconds(self, bucket: Bucket, collective: CollectiveKind, axis: str, num_bytes: float) -> float:
        coding = bucket.coding(axis)
        if coding is not None:
            return self.codecs.seconds(coding, collective, num_bytes)
        algorithm = bucket.algorithm if axis == bucket.axis else NATIVE
        name, group = chosen(algorithm, collective, int(num_bytes)), axis_group(self.plan.mesh, axis)
        return self.network.collective_s(collective, num_bytes, group, name)

    def _transfer(self, bucket: Bucket, operation: CollectiveKind) -> BucketTransfer:
        cut = operation == "reduce_scatter"
        left = bucket.num_bytes // self.plan.mesh.size(bucket.axis) if cut else bucket.num_bytes
        return BucketTransfer(
            bucket.axis,
            bucket.parameters,
            self._seconds(bucket, operation, bucket.axis, bucket.num_bytes),
            after_s=sum(self._seconds(bucket, "all_reduce", axis, left) for axis in bucket.across),
            alone=cut,
            hides=self._hides(operation, bucket),
        )

    # --- notes -------------------------------------------------------------------------------------------------------

    def notes(self, choice: BucketSizes) -> list[Note]:
        """Notes on the sizes of gradient buckets and of parameter buckets, where different sizes are possible."""
        notes = []
        for module, size, buckets, transfers in (
            ("gradients", choice.reduced_bytes, self.reduced, self.reductions),
            ("parameters", choice.gathered_bytes, self.gathered, self.gathers),
        ):
            if len(buckets) < 2:
                continue
            still_s = {
                other: self._exposed_s((), other_transfers)
                if module == "gradients"
                else self._exposed_s(other_transfers, ())
                for other, other_transfers in transfers.items()
            }
            whole_s = sum(transfer.seconds + transfer.after_s for transfer in transfers[size])
            sizes = list(buckets)
            where, count = sizes.index(size), len(buckets[size])
            others = (*sizes[:where][-1:], *sizes[where + 1 :][:1])
            words = [f"{_text(other)} {(still_s[other] - still_s[size]) * 1e3:+.3g} ms" for other in others]
            reason = f"stands still {still_s[size] * 1e3:.3g} ms for {whole_s * 1e3:.3g} ms of it; {', '.join(words)}"
            split = f"{count} bucket{'s' * (count > 1)} of at most {_text(size)}"
            notes.append(Note(module=module, split=split, reason=reason))
        return notes


def _distinct(members: Sequence[BucketMember], algorithms: Mapping[str, str]) -> dict[int, tuple[Bucket, ...]]:
    """Maps each bucket size to its buckets. Of sizes that give the same buckets, only the size nearest to
    ``BUCKET_BYTES`` is kept."""
    by_size = {size: filled(members, size, algorithms) for size in LADDER_BYTES}
    size_of: dict[tuple[Bucket, ...], int] = {}
    for size in sorted(by_size, key=lambda num_bytes: abs(log2(num_bytes / BUCKET_BYTES))):
        size_of.setdefault(by_size[size], size)
    return {size: by_size[size] for size in sorted(size_of.values())}


def _text(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB"
