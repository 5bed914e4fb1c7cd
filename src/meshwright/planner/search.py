"""Search the layouts of a catalog model: estimate all in closed form, then rehearse the best (``planner.rehearse``)."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.cost.memory import Memory, estimate_memory, verdict
from meshwright.cost.occupancy import SURE, Occupancy, fit_chance
from meshwright.cost.setup import Inner, Precision, Setup, precision_on
from meshwright.cost.step import KnownCosts, StepEstimate, estimate_step
from meshwright.cost.uncertainty import estimate_deviation
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.interval import Interval, interval
from meshwright.ir.layout import RECOMPUTE, Recompute
from meshwright.ir.pipeline import CHUNKED, V_SHAPED, ScheduleName
from meshwright.ir.transformer import Transformer
from meshwright.planner.candidates import divisors
from meshwright.planner.codecs import UNNAMED
from meshwright.planner.grids import RankGrid, promising_grids
from meshwright.planner.rehearse import rehearse
from meshwright.planner.size_codecs import with_codec
from meshwright.schedules.pipeline import least_microbatches

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (2, 3, 4, 6, 8)
SEARCHED: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
"""The pipeline schedules that a search considers by default. ``gpipe`` takes the same time as ``1f1b`` with more
memory. For models that are described by sizes, ``zb-h2`` and ``dualpipe-v`` take the same time as ``zb-h1`` and
``zb-v`` with more memory."""


THINNED = 0.97
"""A slower option stays on the ``front`` only if, compared with each faster option there, it either costs less or needs
less than this fraction of the memory."""

REHEARSED = 12
"""Number of options that are rehearsed action by action (``planner.rehearse``). These are the best options of the best
combinations of dp, tp, pp, cp and ep."""


GridSearch = Literal["also", "only", "none"]
"""Whether a search considers grids of tensor-parallel ranks: in addition to other layouts, exclusively, or not at
all."""


class SetupOption(msgspec.Struct, frozen=True, kw_only=True):
    """A setup with its estimated time, memory and price."""

    setup: Setup
    estimate: StepEstimate
    memory: Memory
    verdict: Occupancy
    fit_chance: float
    """The chance that the setup fits in memory."""
    deviation: float
    """The standard deviation of the logarithm of the step's time (``interval_s``)."""
    usd: float | None = None
    """Price of a step in US dollars; None if the price of the device is unknown."""
    rehearsed_s: float | None = None
    """Seconds of a step, computed action by action (``planner.rehearse``); None for options that were not rehearsed."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: ``rehearsed_s`` if the option was rehearsed, else the closed-form estimate."""
        return self.estimate.step_s if self.rehearsed_s is None else self.rehearsed_s

    @property
    def interval_s(self) -> Interval:
        """The interval that holds 80 % of the times of such steps."""
        return interval(self.step_s, self.deviation)

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s of all devices together."""
        return self.estimate.model_flops_per_s * self.estimate.step_s / self.step_s

    @property
    def sequence_s(self) -> float:
        """Seconds of a step divided by the number of sequences in the batch."""
        return self.step_s / self.setup.global_batch

    @property
    def sequence_usd(self) -> float | None:
        """Price of a step in US dollars, divided by the number of sequences in the batch; None if unknown."""
        return None if self.usd is None else self.usd / self.setup.global_batch

    @property
    def peak_bytes(self) -> float:
        """Peak memory of a device in bytes."""
        return self.memory.peak_bytes

    def slower_than(self, best: "SetupOption") -> str:
        """Text that says by how much this option is slower than ``best``, and which part of its step takes the most
        extra time."""
        parts = [(getattr(self.estimate, key) - getattr(best.estimate, key), name) for key, name in PARTS.items()]
        most_s, name = max(parts)
        return f"{100 * (self.step_s / best.step_s - 1):.1f} % slower, most of all {name} (+{most_s:.3g} s)"

    @property
    def text(self) -> str:
        """The layout as one line of text, such as ``dp=2 tp=8 pp=4 micro_batch=1 1f1b recompute=full``."""
        setup, axes = self.setup, ("dp", "tp", "pp", "cp", "ep")
        sizes = {axis: getattr(setup, axis) for axis in axes} | {"dp": setup.dp // setup.depth}
        shown = sizes | ({"tp": "x".join(map(str, setup.grid))} if setup.grid else {})
        words = [f"{axis}={shown[axis]}" for axis in axes if sizes[axis] > 1 or (axis == "tp" and setup.grid)]
        words = words or ["dp=1"]
        words.append(f"micro_batch={setup.micro_batch}")
        if setup.pp > 1:
            words.append(setup.schedule + (f" x{setup.chunks}" if setup.chunks > 1 else ""))
        if setup.inner == "pp":
            words.append("inner=pp")
        if setup.recompute != "none":
            words.append(f"recompute={setup.recompute}")
        if setup.sequence_parallel:
            words.append("sequence_parallel")
        if setup.zero:
            words.append(f"zero={setup.zero}")
        if setup.codec:
            words.append(f"codec={setup.codec}")
        return " ".join(words)


_RunsOf = Callable[[Setup], Iterator[Setup]]
"""Yields the setups of given sizes of axes."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. ``considered`` is the number of setups that were estimated. ``options`` has, for each
    combination of dp, tp, pp, cp and ep, the best setup that fits; the best options come first. ``front`` has the
    options that no other option beats in step time, memory and price together. If nothing fits, ``nearest`` is the
    option that needs the least memory."""

    considered: int
    options: tuple[SetupOption, ...]
    front: tuple[SetupOption, ...]
    nearest: SetupOption | None = None

    def explain(self) -> str:
        """Text that says why the first option is best. For each of the next five options, it names the part of the step
        that takes the most extra time."""
        if not self.options:
            return "nothing fits"
        best = self.options[0]
        lines = [f"{best.text}: {best.step_s:.4g} s"]
        lines += [f"{other.text}: {other.slower_than(best)}" for other in self.options[1:6]]
        return "\n".join(lines)


PARTS = {
    "compute_s": "compute",
    "tensor_comm_s": "tensor-parallel communication",
    "host_s": "launching kernels",
    "bubble_s": "the pipeline's bubble",
    "pipeline_comm_s": "messages between stages",
    "data_comm_s": "gradients over dp",
    "optimizer_s": "the optimizer",
    "other_s": "the rest of a step",
}
"""Readable names of the parts of an estimate."""


def search(
    model: Transformer | str,
    cluster: Cluster | str,
    *,
    devices: int | None = None,
    global_batch: int = 512,
    sequence: int = 0,
    precision: Precision | None = None,
    flash: bool = True,
    memory_bytes: float | None = None,
    usd_per_hour: float | None = None,
    schedules: Sequence[ScheduleName] = SEARCHED,
    codec: str = "",
    grids: GridSearch = "also",
    recompute: Recompute | Literal["any"] = "any",
) -> SearchResult:
    """Estimate all setups of a model on a cluster, and sort the setups that fit in memory.

    ``devices`` is the number of devices of a cluster that is given by name. ``sequence`` is the sequence length of a
    model that is given by name (0: the length in the catalog). ``usd_per_hour`` is the price of a device (default: the
    price in the catalog). ``precision`` of matrix products: by default that of the device (``precision_on``).
    ``schedules`` are the pipeline schedules to consider. ``codec`` is the codec of gradients; ``auto``: for each setup
    the fastest codec that fits, or none. ``grids``: whether to consider grids of tensor-parallel ranks
    (``planner.grids``): ``also``, ``only``, or ``none``. ``recompute``: the only kind of recomputation to consider, or
    ``any``.

    Raises:
        PlanError: ``codec`` names no codec.
        LayoutError: the model is unknown, no layout divides the model, the batch and the devices, or the device does
            not compute in ``precision``.
        ClusterError: the cluster is unknown, or cannot have that many devices.
    """
    model = load_model(model, sequence=sequence) if isinstance(model, str) else model
    cluster = load_cluster(cluster, devices) if isinstance(cluster, str) else cluster
    precision = precision_on(cluster.device, precision)
    best: dict[tuple[int, ...], SetupOption] = {}
    everything: list[SetupOption] = []
    nearest: SetupOption | None = None
    considered, known = 0, KnownCosts(cluster)
    price = cluster.device.usd_per_hour if usd_per_hour is None else usd_per_hour
    whole = codec not in UNNAMED and codec_of(codec).needs_whole_sum
    runs = partial(_runs, schedules=schedules, recompute=recompute)
    every = _setups(model, cluster, global_batch, precision, flash, runs) if grids != "only" else iter(())
    beside: Iterable[RankGrid] = ()
    if grids != "none":
        beside = promising_grids(model, cluster, global_batch, known, precision, every=grids == "only")
    base = Setup(model=model, precision=precision, flash=flash)
    on_grids = (run for grid in beside for run in _on_grid(base, grid, global_batch, runs))
    for plain in itertools.chain(every, on_grids):
        considered += 1
        if whole and plain.zero:
            continue
        setup = with_codec(plain, codec, cluster, known)
        memory = estimate_memory(setup, cluster)
        fits = verdict(memory, cluster, memory_bytes) != "does not fit"
        if not fits and setup.codec and codec in UNNAMED:
            setup, memory = plain, estimate_memory(plain, cluster)
            fits = verdict(memory, cluster, memory_bytes) != "does not fit"
        if not fits and nearest is not None and memory.peak_bytes >= nearest.memory.peak_bytes:
            continue
        option = _option(setup, memory, cluster, memory_bytes, price, known)
        if not fits:
            nearest = option
            continue
        everything.append(option)
        key = (setup.dp, setup.tp, setup.pp, setup.cp, setup.ep, *setup.grid)
        if key not in best or _rank(option) < _rank(best[key]):
            best[key] = option
    if not considered:
        raise LayoutError(
            f"no layout of {cluster.num_devices} devices divides {model.heads} heads, {model.layers} layers and a "
            f"batch of {global_batch}",
            where=f"model {model.name}",
            remedy="take another number of devices, or a batch that they divide",
        )
    screened = sorted(best.values(), key=_rank)
    rehearsed = [_rehearsed(option, cluster, known) for option in screened[:REHEARSED]]
    options = (*sorted(rehearsed, key=_rank), *screened[REHEARSED:])
    timed = {id(before): after for before, after in zip(screened, rehearsed, strict=False)}
    weighed = [timed.get(id(option), option) for option in everything]
    return SearchResult(
        considered=considered, options=options, front=front(weighed), nearest=None if options else nearest
    )


def weigh(
    setup: Setup, cluster: Cluster, *, memory_bytes: float | None = None, usd_per_hour: float | None = None
) -> SetupOption:
    """The option of one setup, rehearsed action by action, as a search weighs its best setups. ``usd_per_hour``: the
    price of a device; default: the price in the catalog."""
    price = cluster.device.usd_per_hour if usd_per_hour is None else usd_per_hour
    known = KnownCosts(cluster)
    option = _option(setup, estimate_memory(setup, cluster), cluster, memory_bytes, price, known)
    return _rehearsed(option, cluster, known)


def front(options: Iterable[SetupOption]) -> tuple[SetupOption, ...]:
    """The options that no other option beats in time, memory and price together, fastest first. Options may be for
    different devices, batches and clusters. If the price of one of two options is unknown, time and memory decide."""
    kept: list[SetupOption] = []
    for option in sorted(
        options, key=lambda candidate: (candidate.sequence_s, candidate.peak_bytes, candidate.sequence_usd or 0.0)
    ):
        if not any(_beats(faster, option) for faster in kept):
            kept.append(option)
    return tuple(kept)


def _beats(faster: SetupOption, other: SetupOption) -> bool:
    known, asked = faster.sequence_usd, other.sequence_usd
    as_dear = known is None or asked is None or asked >= known
    return as_dear and other.peak_bytes >= THINNED * faster.peak_bytes


def preference(chance: float, step_s: float) -> tuple[bool, float, float]:
    """Sort key of a layout that fits with ``chance``: layouts that surely fit come first, the fastest of them first;
    then layouts that may fit, the likeliest first."""
    sure = chance >= SURE
    return not sure, 0.0 if sure else -chance, step_s


def _rank(option: SetupOption) -> tuple[bool, float, float]:
    return preference(option.fit_chance, option.step_s)


def _option(
    setup: Setup, memory: Memory, cluster: Cluster, memory_bytes: float | None, price: float | None, known: KnownCosts
) -> SetupOption:
    """The option of a setup. ``price``: US dollars per device and hour; None if unknown."""
    estimate, spread = estimate_step(setup, cluster, known), cluster.software.spread
    return SetupOption(
        setup=setup,
        estimate=estimate,
        memory=memory,
        verdict=verdict(memory, cluster, memory_bytes),
        fit_chance=fit_chance(memory.peak_bytes, memory_bytes or cluster.device.memory_bytes, spread.memory),
        deviation=estimate_deviation(estimate, spread),
        usd=None if price is None else estimate.step_s / 3600 * cluster.num_devices * price,
    )


def _rehearsed(option: SetupOption, cluster: Cluster, known: KnownCosts) -> SetupOption:
    step_s = rehearse(option.setup, cluster, known)
    if step_s is None:
        return option
    usd = None if option.usd is None else option.usd * step_s / option.estimate.step_s
    return msgspec.structs.replace(option, rehearsed_s=step_s, usd=usd)


def _setups(
    model: Transformer, cluster: Cluster, global_batch: int, precision: Precision, flash: bool, runs: _RunsOf
) -> Iterator[Setup]:  # fmt: skip
    devices = cluster.num_devices
    box = cluster.box_size
    contexts = (1, 2, 4, 8) if model.sequence >= 16384 else (1,)
    for tp in divisors(math.gcd(math.gcd(box, model.heads), model.ffn)):
        for pp in divisors(devices // tp):
            if pp > model.layers or model.layers % pp:
                continue
            for cp in contexts:
                dp, rest = divmod(devices, tp * pp * cp)
                if rest or global_batch % dp:
                    continue
                # The order of dp and pp matters only if a box has room for more than the tp ranks.
                inner: tuple[Inner, ...] = ("dp", "pp") if dp > 1 < pp and cp == 1 and tp < box else ("dp",)
                for nearer in inner:
                    axes = Setup(
                        model=model, dp=dp, tp=tp, pp=pp, cp=cp, inner=nearer, precision=precision, flash=flash,
                        global_batch=global_batch,
                    )  # fmt: skip
                    yield from runs(axes)


def _on_grid(base: Setup, grid: RankGrid, global_batch: int, runs: _RunsOf) -> Iterator[Setup]:
    """Yield the setups of a grid, without pipelines."""
    axes = msgspec.structs.replace(
        base, dp=grid.z * grid.dp, tp=grid.x * grid.y, grid=grid.sizes, global_batch=global_batch
    )
    yield from runs(axes)


def _runs(axes: Setup, schedules: Sequence[ScheduleName], recompute: Recompute | Literal["any"]) -> Iterator[Setup]:
    """Yield the setups of ``axes`` with all combinations of micro-batch size, schedule, chunks, recomputation kind
    (only ``recompute``, unless it is ``any``), ZeRO stage and size of ``ep``."""
    model, dp, pp = axes.model, axes.dp, axes.pp
    chunked: list[tuple[ScheduleName, int]] = [("1f1b", 1)]
    if pp > 1:
        chunked = [(name, 1) for name in schedules if name not in CHUNKED]
        for name in schedules:
            allowed = (2,) if name in V_SHAPED else CHUNKS if name == "interleaved" else ()
            chunked += [(name, chunks) for chunks in allowed if model.layers % (pp * chunks) == 0]
    zeros = (0,) if dp * axes.cp == 1 or axes.depth > 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
    between = axes.tp > 1 and not axes.grid and model.sequence % (axes.tp * axes.cp) == 0
    experts = divisors(math.gcd(model.experts, dp * axes.cp)) if model.experts else [1]
    whole: tuple[Recompute, ...] = ("none", "full")
    for micro_batch in MICRO_BATCHES:
        if axes.global_batch % (dp * micro_batch):
            break
        microbatches = axes.global_batch // (dp * micro_batch)
        for (schedule, chunks), zero, ep in itertools.product(chunked, zeros, experts):
            if (schedule == "interleaved" and microbatches % pp) or microbatches < least_microbatches(schedule, pp):
                continue
            # Fused attention keeps so few activations that selective recomputation is not worth its time.
            tried = RECOMPUTE if zero == 3 or not axes.flash else whole
            for kind in tried if recompute == "any" else (recompute,):
                yield msgspec.structs.replace(
                    axes, ep=ep, chunks=chunks, micro_batch=micro_batch, schedule=schedule, recompute=kind,
                    zero=zero, sequence_parallel=between,
                )  # fmt: skip
