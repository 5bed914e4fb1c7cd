"""Choose bucket sizes and codecs so that computing waits as little as possible for communication, within the memory of
a rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

import msgspec

from meshwright.cost.coded import CodecCosts, is_cut
from meshwright.cost.collective import Network
from meshwright.cost.exposed import Actions, BucketTransfer, computed_s, exposed_s, least_exposed, stage_actions
from meshwright.cost.fabric import axis_group
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.graph import ITEM_BYTES
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
fraction of a stage's compute time. Among equally good sizes, the size nearest to ``BUCKET_BYTES`` is taken."""
_MIB = 2**20


@dataclass(frozen=True)
class BucketSizes:
    """A bucket size for gradients (``reduced_bytes``) and a bucket size for parameters (``gathered_bytes``).
    ``exposed_s`` is the time per step, in seconds, that computing waits for these buckets, on the stage that waits
    longest. It includes the least saving that is asked of codecs (``GAIN``)."""

    reduced_bytes: int
    gathered_bytes: int
    exposed_s: float

    @property
    def unusual(self) -> float:
        """Distance from the default bucket size: the sum of ``|log2(size / BUCKET_BYTES)|``."""
        return _unusual(self.reduced_bytes) + _unusual(self.gathered_bytes)


def fit_buckets(
    lower: Lower,
    plan: Plan,
    cluster: Cluster,
    reduced: Sequence[BucketMember],
    gathered: Sequence[BucketMember],
    optimizer: OptimizerCost,
    memory_bytes: float,
) -> Plan:
    """Return ``plan`` with bucket sizes and codecs. The bucket sizes are those in ``LADDER_BYTES`` for which computing
    waits least for communication. The codecs are those of the layout; with ``auto``, the best codecs or none.

    ``reduced`` are the members of gradient buckets, and ``gathered`` are the members of parameter buckets. If several
    codecs are allowed (``codecs.candidates``), each bucket may have a different codec. Notes in the plan say how much
    longer computing would wait with other sizes and codecs. The peak memory of a rank stays within ``memory_bytes``. If
    even buckets of ``BUCKET_BYTES`` need more memory, their peak is the limit instead.
    """
    texts = candidates(plan.layout, plan.buckets, plan.mesh, cluster)
    item_bytes = ITEM_BYTES[reduced[0].key[-1].split()[0]] if reduced else 4
    codecs = BucketCodecs(plan.mesh, cluster, item_bytes)
    scale = _Scale(lower, plan, cluster, reduced, gathered, codecs, texts[0])
    if len(texts) == 1 and not scale.differ:
        return with_notes(codecs.of(plan), [declined()] if plan.layout.codec == AUTO else [])
    scale.actions = scale.lowered()
    charge_s = GAIN * (scale.computed_s + min(choice.exposed_s for choice in scale.weighed()))
    choices: list[BucketSizes] = []
    for allowed in (texts, [text for text in texts if not text or not codec_of(text).feedback], texts[:1]):
        if len(texts) > 1:
            scale.choose(allowed, charge_s)
        choices = ranked(scale.weighed(), scale.computed_s)
        if not any(bucket.codings for bucket in scale.plan_of(choices[0]).buckets) or len(texts) == 1:
            break
        if peak_bytes(lower, scale.plan_of(choices[0]), cluster, optimizer) <= memory_bytes:
            break
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
    notes = scale.notes(choices[0])
    if plan.layout.codec == AUTO and len(texts) == 1:
        notes.append(declined())
    elif len(texts) > 1:
        coded = any(bucket.codings for bucket in scale.reduced[choices[0].reduced_bytes])
        notes += [scale.codec_note(choices[0], texts)] if coded or plan.layout.codec == AUTO else []
        if assumed := CodecCosts(cluster).assumed(text for text in texts if text):
            reason = (
                f"to encode and to decode; assumed, because `meshwright calibrate` has not measured them: {assumed}"
            )
            notes.append(Note(module="gradients", split="rates of codecs", reason=reason))
    return with_notes(scale.plan_of(choices[0]), notes)


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
    """Computes how long computing waits for buckets, for each bucket size. For this, ``weighed`` lowers the plan only
    once, with a bucket for each parameter."""

    def __init__(
        self,
        lower: Lower,
        plan: Plan,
        cluster: Cluster,
        reduced: Sequence[BucketMember],
        gathered: Sequence[BucketMember],
        codecs: BucketCodecs,
        text: str,
    ) -> None:
        self.lower, self.plan, self.cluster, self.network = lower, plan, cluster, Network(cluster)
        self.codecs = codecs
        self.dense = _distinct(reduced, plan.algorithms)
        self.reduced, self.reductions = dict(self.dense), dict[int, list[BucketTransfer]]()
        for size, buckets in self.dense.items():
            coded = [self._reduced(bucket, text) for bucket in buckets]
            self.reduced[size] = tuple(bucket for bucket, _ in coded)
            self.reductions[size] = [transfer for _, transfer in coded]
        self.gathered = {
            size: tuple(codecs.gathered(bucket, plan.layout.parameter_codec) for bucket in buckets)
            for size, buckets in _distinct(gathered, plan.algorithms).items()
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
        """Whether different bucket sizes lead to different buckets."""
        return len(self.reduced) > 1 or len(self.gathered) > 1

    def weighed(self) -> list[BucketSizes]:
        """The ``BucketSizes`` of every pair of a gradient bucket size and a parameter bucket size. If several sizes
        lead to equal buckets, only one of them is included."""
        return [
            BucketSizes(size, other, self._exposed_s(gathers, reductions))
            for size, reductions in self.reductions.items()
            for other, gathers in self.gathers.items()
        ]

    def lowered(self) -> list[tuple[Actions, ...]]:
        """The actions of all stages, with a bucket for each parameter."""
        return [stage_actions(program, self.singles, self.cluster) for program in self.lower(self.singles)]

    @property
    def computed_s(self) -> float:
        """The compute time, in seconds, of the stage that computes longest."""
        return max(computed_s(actions) for actions in self.actions)

    def choose(self, texts: Sequence[str], charge_s: float) -> None:
        """For each bucket size, give each bucket the codec in ``texts`` with which its stage waits least. ``charge_s``
        is the time that a stage must save if codecs are used in all of its buckets. Each bucket must save an equal part
        of it."""
        usual = min(self.gathers, key=_unusual)
        for size, buckets in self.dense.items():
            options_of = {bucket.parameters: self._options(bucket, texts) for bucket in buckets}
            taken: dict[tuple[str, ...], tuple[Bucket, BucketTransfer]] = {}
            for actions in self.actions:
                computed = _computed_gradients(actions)
                own = {names: options for names, options in options_of.items() if names[0] in computed}
                charged = {
                    names: {
                        transfer._replace(charge_s=charge_s / len(own) * bool(bucket.codings)): bucket
                        for bucket, transfer in options
                    }
                    for names, options in own.items()
                }
                for best in least_exposed(actions, self.gathers[usual], [[*each] for each in charged.values()]):
                    taken[best.parameters] = charged[best.parameters][best], best
            chosen = [taken.get(bucket.parameters, options_of[bucket.parameters][0]) for bucket in buckets]
            self.reduced[size] = tuple(bucket for bucket, _ in chosen)
            self.reductions[size] = [transfer for _, transfer in chosen]

    def _options(self, bucket: Bucket, texts: Sequence[str]) -> list[tuple[Bucket, BucketTransfer]]:
        """The bucket without a codec, and with the codec that takes the least time."""
        dense, *coded = (self._reduced(bucket, text) for text in texts)
        fastest = min(coded, key=lambda option: option[1].seconds + option[1].after_s, default=dense)
        return [dense, fastest] if fastest[0].codings else [dense]

    def _exposed_s(self, gathers: Sequence[BucketTransfer], reductions: Sequence[BucketTransfer]) -> float:
        """The seconds that the slowest stage waits, including the charges for codecs."""
        waits = []
        for actions in self.actions:
            computed = _computed_gradients(actions)
            charges = sum(transfer.charge_s for transfer in reductions if transfer.parameters[0] in computed)
            waits.append(exposed_s(actions, gathers, reductions) + charges)
        return max(waits)

    def _waits_s(self, gathers: Sequence[BucketTransfer], reductions: Sequence[BucketTransfer]) -> float:
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
        cut = any(is_cut(self.plan, bucket) for bucket in self.plan.buckets)
        return more or (choice.reduced_bytes > BUCKET_BYTES and cut)

    # --- collectives of buckets --------------------------------------------------------------------------------------

    def _hides(self, operation: str, bucket: Bucket) -> bool:
        """Whether a rank computes while the collective of a bucket runs.

        On devices other than CPUs, this is always true. On CPUs, it is false for collectives inside a box. On CPUs, a
        collective between boxes overlaps with computing in two cases: threads of torch.distributed carry it out, or it
        has only one round, because it then sends most of its bytes at its start.
        """
        if self.cluster.device.kind != "cpu":
            return True
        if in_a_box(self.plan.mesh, bucket.axis, self.cluster):
            return False
        if bucket.codings:  # the rank itself encodes and decodes
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

    def _reduced(self, bucket: Bucket, text: str) -> tuple[Bucket, BucketTransfer]:
        """A bucket of gradients with the codec ``text``, and its collective."""
        cut = is_cut(self.plan, bucket)
        coded = self.codecs.reduced(bucket, text, cut=cut)
        return coded, self._transfer(coded, "reduce_scatter" if cut else "all_reduce")

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
        """Notes on the sizes of gradient buckets and of parameter buckets, if there was a choice."""
        notes = []
        for module, size, buckets, transfers in (
            ("gradients", choice.reduced_bytes, self.reduced, self.reductions),
            ("parameters", choice.gathered_bytes, self.gathered, self.gathers),
        ):
            if len(buckets) < 2:
                continue
            still_s = {
                other: self._waits_s((), other_transfers)
                if module == "gradients"
                else self._waits_s(other_transfers, ())
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

    def codec_note(self, choice: BucketSizes, texts: Sequence[str]) -> Note:
        """A note on the codecs of gradients: for each codec, the time that computing would wait if all buckets used
        it."""
        gathers, dense = self.gathers[choice.gathered_bytes], self.dense.values()
        waits_s = {
            text: min(self._waits_s(gathers, [self._reduced(each, text)[1] for each in buckets]) for buckets in dense)
            for text in texts
        }
        buckets = self.reduced[choice.reduced_bytes]
        names = [next((coding.codec for coding in bucket.codings), "no codec") for bucket in buckets]
        taken = Counter(names).most_common()
        split = ", ".join(f"{text} in {count} of {len(names)} buckets" for text, count in taken)
        alone = taken[0][0] if len(taken) == 1 else ""
        others = sorted((seconds, text or "no codec") for text, seconds in waits_s.items())
        words = ", ".join(f"{text} {seconds * 1e3:.3g} ms" for seconds, text in others if text != alone)
        waited_s = self._waits_s(gathers, self.reductions[choice.reduced_bytes])
        reason = f"computing waits {waited_s * 1e3:.3g} ms; with {words}"
        return Note(module="gradients", split=alone or split, reason=reason)


def declined() -> Note:
    """A note for plans in which no codec is considered between the ranks."""
    reason = "ranks share memory: encoding would take as long as sending"
    return Note(module="gradients", split="no codec", reason=reason)


def with_notes(plan: Plan, notes: Sequence[Note]) -> Plan:
    """The plan with additional notes."""
    return msgspec.structs.replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _computed_gradients(actions: Sequence[Actions]) -> set[str]:
    """The parameters whose gradients a stage computes."""
    return {name for action in actions for moment in action.moments for name in moment.gradients}


def _distinct(members: Sequence[BucketMember], algorithms: Mapping[str, str]) -> dict[int, tuple[Bucket, ...]]:
    """Maps each bucket size to the buckets that it leads to. If several sizes lead to equal buckets, only the size
    nearest to ``BUCKET_BYTES`` is kept."""
    by_size = {size: filled(members, size, algorithms) for size in LADDER_BYTES}
    size_of: dict[tuple[Bucket, ...], int] = {}
    for size in sorted(by_size, key=_unusual):
        size_of.setdefault(by_size[size], size)
    return {size: by_size[size] for size in sorted(size_of.values())}


def _unusual(num_bytes: int) -> float:
    return abs(log2(num_bytes / BUCKET_BYTES))


def _text(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB"
