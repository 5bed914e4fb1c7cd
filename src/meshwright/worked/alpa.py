"""The evaluation of Alpa (Zheng et al., OSDI 2022): its published throughputs, its search spaces, and a comparison.

Alpa compares four planners on 21 pairs of a model and a number of V100 (section 8.1 and figure 7 of the paper):

- ``manual``: the best known system. For GPT, Megatron-LM v2 (the best uniform grid of data, tensor and pipeline
  parallelism); for the mixtures of experts, DeepSpeed (data and expert parallelism with ZeRO stage 2, no stages); for
  Wide-ResNet, pipelines with data parallelism but without operator parallelism ("PP-DP").
- ``intra``: operators are split, and there are no stages.
- ``inter``: every stage has one device, so there is neither operator nor data parallelism.
- ``both``: Alpa's own search.

``space_of`` describes the same planners as restrictions of our search. All planners use the schedule 1F1B. GPT and the
mixtures of experts recompute every layer, as in all published runs; Wide-ResNet recomputes only if memory requires it.
Alpa's ZeRO splits only optimizer state, because it sums gradients once a step (its XLA pass for gradient accumulation).
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from meshwright.cost.optimizer import MOMENTUM, OptimizerCost
from meshwright.ir.layout import Layout, ZeroStage
from meshwright.planner.candidates import Only, Space
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.worked.line import Line, held

Family = Literal["gpt", "moe", "wresnet"]
Kind = Literal["manual", "intra", "inter", "both"]
Published = tuple[float | None, float | None, float | None, float | None]
"""Throughputs in the order of ``KINDS``; None: out of memory."""
KINDS: tuple[Kind, ...] = ("manual", "intra", "inter", "both")
CLUSTER = "v100-16gb-p3-eth25"
"""Boxes of p3.16xlarge: 8 V100 of 16 GB with NVLink, 25 Gb/s between boxes."""
MEMORY = 0.9
"""The part of a device's memory that a plan may use. It is the part that Alpa lets XLA allocate
(``XLA_PYTHON_CLIENT_MEM_FRACTION`` in its ``global_env.py``). The PyTorch systems get the same part; their CUDA and
NCCL contexts need the rest."""
FEWEST_MICROBATCHES = 16
"""The published runs split a whole batch into at least 16 micro-batches."""
MASTER_ADAM = OptimizerCost(states=6, moved=14, kernels=1)
"""Adam over float16 parameters, in numbers of 2 bytes: it keeps a float32 copy and two float32 moments of each
parameter. One fused kernel reads the gradient, reads and writes the state, and writes the parameter."""
MASTER_ADAFACTOR = OptimizerCost(states=2, moved=7, kernels=2)
"""Adafactor without momentum over float16 parameters, in numbers of 2 bytes: it keeps a float32 copy of each parameter.
Its second moments, one row and one column for each matrix, are left out. One kernel reads the gradient for the moments;
the other reads the gradient, reads and writes the copy, and writes the parameter. Alpa uses it for the mixtures of
experts (``benchmark_3d_one_case_moe.py``), and Alpa's compiler splits the update over ranks like any other computation.
With Adam, 70 B parameters of 16 bytes each exceed the memory of 64 V100."""
SEQUENCE, GROUP = 1024, 2048
"""Tokens of a sequence, and of a group that is sent to experts together."""
EQUAL = 0.05
"""Published throughputs with a smaller relative difference count as equal: the three Alpa columns of GPT 350M are the
same program on one device, and differ by 4.5 %."""
BOX = 8


class Sizes(NamedTuple):
    """The sizes of a model. GPT: layers, hidden size, heads. Mixtures of experts: also experts. Wide-ResNet: layers,
    channels of the stem, factor of the 3x3 convolutions."""

    layers: int
    width: int
    heads: int = 0
    experts: int = 0
    widened: int = 0


class AlpaPair(NamedTuple):
    """A model and a number of devices, with the published throughputs in TFLOP/s per device (in the order of ``KINDS``;
    None: out of memory). ``flops`` are the FLOPs of a step, as Alpa counts them."""

    family: Family
    name: str
    sizes: Sizes
    devices: int
    published: Published
    batch: int = 1024
    counted: float = 0.0

    @property
    def title(self) -> str:
        """The model and the devices."""
        return f"{_FAMILIES[self.family]} {self.name} on {self.devices} V100"

    @property
    def flops(self) -> float:
        """The FLOPs of a step by Alpa's formula (``benchmark/alpa/util.py``), recomputation included. For Wide-ResNet,
        XLA has counted the FLOPs: ``counted`` is the published throughput times the published time of a step."""
        return {"gpt": _gpt_flops, "moe": _moe_flops}[self.family](self) if self.family != "wresnet" else self.counted


_FAMILIES = {"gpt": "GPT", "moe": "MoE", "wresnet": "Wide-ResNet"}
VOCABULARY = {"gpt": 51200, "moe": 32000, "wresnet": 0}


def _gpt_flops(pair: AlpaPair) -> float:
    layers, width = pair.sizes[:2]
    tokens = pair.batch * SEQUENCE
    blocks = 96.0 * tokens * width**2 * layers * (1 + SEQUENCE / (6 * width))
    return blocks + 6.0 * tokens * width * VOCABULARY["gpt"]


def _moe_flops(pair: AlpaPair) -> float:
    """Half of the layers are dense. The MLPs are eight times as wide as the model. Tokens are sent to the experts and
    back by products with one-hot matrices."""
    layers, width, _, experts = pair.sizes[:4]
    tokens, wider = pair.batch * SEQUENCE, 8
    attention = 8.0 * tokens * width**2 + 4.0 * tokens * SEQUENCE * width
    dense = attention + 4.0 * wider * tokens * width**2
    sparse = attention + 8.0 * wider * tokens * width**2 + 2.0 * tokens * width * experts
    sparse += 4.0 * tokens * GROUP + 8.0 * tokens * width * GROUP
    return 4.0 * layers / 2 * (dense + sparse) + 6.0 * tokens * width * VOCABULARY["moe"]


def _gpt(name: str, layers: int, width: int, heads: int, devices: int, *published: float | None) -> AlpaPair:
    return AlpaPair("gpt", name, Sizes(layers, width, heads), devices, _four(published))


def _moe(name: str, layers: int, width: int, experts: int, devices: int, *published: float | None) -> AlpaPair:
    return AlpaPair("moe", name, Sizes(layers, width, 16, experts), devices, _four(published))


def _wide(
    name: str, layers: int, width: int, widened: int, devices: int, counted: float, *published: float | None
) -> AlpaPair:
    batch = 1520 if layers == 101 else 1536
    return AlpaPair("wresnet", name, Sizes(layers, width, widened=widened), devices, _four(published), batch, counted)


def _four(published: Sequence[float | None]) -> Published:
    manual, intra, inter, both = published
    return manual, intra, inter, both


PAIRS: tuple[AlpaPair, ...] = (
    _gpt("350M", 24, 1024, 16, 1, 47.53, 46.20, 44.23, 45.07),
    _gpt("760M", 24, 1536, 16, 2, 55.53, 59.54, 57.94, 57.92),
    _gpt("1.3B", 24, 2048, 32, 4, 55.89, 58.36, 53.99, 58.21),
    _gpt("2.6B", 32, 2560, 32, 8, 50.44, 50.82, 56.57, 61.61),
    _gpt("6.7B", 32, 4096, 32, 16, 56.59, 48.42, 59.68, 60.00),
    _gpt("15B", 48, 5120, 40, 32, 58.24, 35.07, 49.80, 59.90),
    _gpt("39B", 48, 8192, 64, 64, 57.84, 2.11, 50.55, 57.00),
    _moe("380M", 8, 768, 8, 1, 34.24, 45.46, 45.46, 45.46),
    _moe("690M", 8, 768, 16, 2, 33.11, 42.17, 40.75, 43.03),
    _moe("1.3B", 16, 768, 16, 4, 34.67, 41.13, 37.52, 39.92),
    _moe("2.4B", 16, 1024, 16, 8, 40.01, 46.72, 39.80, 45.76),
    _moe("10B", 16, 1536, 32, 16, 12.91, 22.91, 31.12, 45.36),
    _moe("27B", 16, 2048, 48, 32, 3.82, 1.50, None, 38.84),
    _moe("70B", 32, 2048, 64, 64, None, 0.22, None, 36.55),
    _wide("250M", 50, 160, 2, 1, 3.687e14, 8.30, 8.37, 8.30, 8.30),
    _wide("500M", 50, 224, 2, 2, 7.208e14, 8.24, 8.48, 8.46, 8.46),
    _wide("1B", 50, 320, 2, 4, 1.469e15, 8.08, 8.15, 6.47, 8.16),
    _wide("2B", 50, 448, 2, 8, 2.877e15, 7.72, 7.71, 5.46, 8.04),
    _wide("4B", 50, 640, 2, 16, 5.867e15, 0.37, 4.72, 0.37, 6.76),
    _wide("6.8B", 50, 320, 16, 32, 9.693e15, None, 1.96, None, 6.60),
    _wide("13B", 101, 320, 16, 64, 1.954e16, None, 0.70, None, 5.30),
)
"""Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022,
figure 7, with the numbers and sizes of its artifact (``results_e2e.tsv`` and the suites of ``benchmark/alpa``). The
predictor was not fitted to these numbers. The intra-operator runs of GPT 15B and 39B, MoE 27B and 70B, and Wide-ResNet
6.8B and 13B had 16 to 256 samples. Their throughput is used for the whole batch, as in the artifact."""


def pairs_of(family: str = "") -> tuple[AlpaPair, ...]:
    """The pairs of a family; by default, all pairs."""
    return tuple(pair for pair in PAIRS if family in ("", pair.family))


# --- search spaces ----------------------------------------------------------------------------------------------------


def _plain(shape: Layout) -> bool:
    """Whether a layout has only dp, ep, tp and pp: Alpa and the systems of its time had no other axes."""
    return not shape.mixed and shape.cp == 1 and not shape.sequence_parallel and isinstance(shape.tp, int)


def _grid(shape: Layout) -> bool:
    return _plain(shape) and shape.ep == 1


def _experts(shape: Layout) -> bool:
    return _plain(shape) and shape.tp == 1


def _replicas(shape: Layout) -> bool:
    return _grid(shape) and shape.tp == 1


def space_of(family: Family, kind: Kind) -> tuple[Only, Space]:
    """The layouts that a planner of the evaluation may choose, as a restriction of our search."""
    if kind == "manual":
        only: Only = "intra" if family == "moe" else "both"
        zero: tuple[ZeroStage, ...] = (0, 1, 2) if family == "moe" else (0,)
        holds = {"gpt": _grid, "moe": _experts, "wresnet": _replicas}[family]
    else:
        only, zero, holds = kind, (0, 1), _plain
    return only, Space(
        schedules=("1f1b",),
        recompute=("none", "full") if family == "wresnet" else ("full",),
        zero=zero,
        unlike=kind == "both",
        fewest=FEWEST_MICROBATCHES,
        batch_statistics="microbatch" if family == "wresnet" else "global",
        holds=holds,
    )


def optimizer_of(family: Family, kind: Kind) -> OptimizerCost:
    """SGD with momentum for Wide-ResNet, otherwise Adam with float32 copies of float16 parameters. For mixtures of
    experts, Alpa uses Adafactor and DeepSpeed uses Adam."""
    if family == "wresnet":
        return MOMENTUM
    return MASTER_ADAFACTOR if family == "moe" and kind != "manual" else MASTER_ADAM


# --- the comparison ---------------------------------------------------------------------------------------------------


class PlannerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search: the layout, and the predicted seconds of a step. ``problem`` is the reason if no layout
    was found; ``step_s`` is then 0."""

    layout: str = ""
    step_s: float = 0.0
    problem: str = ""


class Compared(NamedTuple):
    """A pair with its predictions in TFLOP/s per device; None: no layout fits in memory."""

    pair: AlpaPair
    results: Mapping[Kind, PlannerResult]

    @property
    def predicted(self) -> dict[Kind, float | None]:
        """The predicted throughput of each planner."""
        each = self.pair.flops / self.pair.devices / 1e12
        return {kind: each / result.step_s if result.step_s else None for kind, result in self.results.items()}

    @property
    def published(self) -> dict[Kind, float | None]:
        """The published throughput of each planner."""
        return dict(zip(KINDS, self.pair.published, strict=True))

    @property
    def winner_is_right(self) -> bool:
        """Whether the planner with the best prediction is the fastest in the measurements. Predictions within ``ALIKE``
        of the best count as equal, and so do measurements within ``EQUAL``."""
        return not best_of(self.predicted, ALIKE).isdisjoint(best_of(self.published, EQUAL))

    @property
    def joint_ratio(self) -> float:
        """The predicted throughput of the joint plan, divided by the better of the other two searches."""
        predicted = self.predicted
        alone = max(predicted["intra"] or 0.0, predicted["inter"] or 0.0)
        return (predicted["both"] or 0.0) / alone if alone else 1.0


def best_of(throughputs: Mapping[Kind, float | None], tolerance: float) -> set[Kind]:
    """The planners whose throughput is at most ``tolerance`` below the best."""
    best = max((value for value in throughputs.values() if value is not None), default=0.0)
    return {kind for kind, value in throughputs.items() if value is not None and value >= (1 - tolerance) * best}


class Summary(NamedTuple):
    """The accuracy of the predictions. Errors are |predicted / published - 1| of the runs that were published and are
    predicted to fit.

    ``median`` is the median error, and ``one_box`` is the median error of the runs in one box. ``scaled`` is the median
    error of the other runs after a correction: a factor for each family, fitted to the runs in one box. ``memory`` is
    the number of runs, out of ``runs``, for which it is predicted correctly whether they fit in memory. ``winners`` is
    the number of pairs for which the fastest planner is predicted correctly. ``ordered`` counts pairs of planners in
    the published order, out of ``orders`` pairs whose throughputs differ by more than ``EQUAL``. ``joint_ratio`` is the
    smallest ratio of a joint plan's throughput to the better of intra and inter.
    """

    median: float
    one_box: float
    scaled: float
    memory: int
    runs: int
    winners: int
    ordered: int
    orders: int
    joint_ratio: float


def summary_of(results: Sequence[Compared]) -> Summary:
    """Compare all predictions with the published throughputs."""
    both = [(result, kind) for result in results for kind in KINDS]
    fits = sum((result.predicted[kind] is None) == (result.published[kind] is None) for result, kind in both)
    errors = [abs(ratio - 1) for result in results for ratio in _ratios(result)]
    one_box = [result for result in results if result.pair.devices <= BOX]
    ordered = [right for result in results for right in _orders(result)]
    return Summary(
        median=statistics.median(errors),
        one_box=_median_error(one_box, {}),
        scaled=_median_error([result for result in results if result.pair.devices > BOX], factors_of(one_box)),
        memory=fits,
        runs=len(both),
        winners=sum(result.winner_is_right for result in results),
        ordered=sum(ordered),
        orders=len(ordered),
        joint_ratio=min(result.joint_ratio for result in results),
    )


def factors_of(results: Sequence[Compared]) -> dict[Family, float]:
    """A factor for each family: the median of published over predicted throughput."""
    families = {result.pair.family for result in results}
    return {
        family: 1 / statistics.median(
            ratio for result in results if result.pair.family == family for ratio in _ratios(result)
        )
        for family in families
    }  # fmt: skip


def _median_error(results: Sequence[Compared], factors: Mapping[Family, float]) -> float:
    errors = [abs(ratio * factors.get(result.pair.family, 1.0) - 1) for result in results for ratio in _ratios(result)]
    return statistics.median(errors) if errors else 0.0


def _ratios(result: Compared) -> Iterator[float]:
    """Predicted over published throughput of each planner that has both."""
    for kind in KINDS:
        predicted, published = result.predicted[kind], result.published[kind]
        if predicted is not None and published is not None:
            yield predicted / published


def _orders(result: Compared) -> Iterator[bool]:
    """For each two planners whose published throughputs differ: whether the predictions have the same order."""
    for first, second in itertools.combinations(KINDS, 2):
        published = [result.published[kind] or 0.0 for kind in (first, second)]
        if max(published) > (1 + EQUAL) * min(published):
            predicted = [result.predicted[kind] or 0.0 for kind in (first, second)]
            yield (predicted[0] < predicted[1]) == (published[0] < published[1]) and predicted[0] != predicted[1]


MEDIAN, WINNERS = 0.12, 18 / 21
"""The targets: the largest median error, and the least share of winners."""


def lines_of(results: Sequence[Compared]) -> Iterator[Line]:
    """One line for each pair, and the summary."""
    for result in results:
        named = " = ".join(kind for kind in KINDS if kind in best_of(result.published, EQUAL))
        yield Line(
            claim=f"{result.pair.title}: {named} fastest",
            ours=", ".join(
                f"{kind} {_text(result.predicted[kind])} ({_text(result.published[kind])})" for kind in KINDS
            ),
            verdict="agrees" if result.winner_is_right else "we differ",
            why="; ".join(f"{kind}: {result.results[kind].layout or result.results[kind].problem}" for kind in KINDS),
        )
    summary = summary_of(results)
    yield held(
        "predicted within 12 % (median of all runs)",
        f"{summary.median:.1%}",
        summary.median <= MEDIAN,
        "TFLOP/s for each V100, predicted (published); nothing was fitted to V100 or to these runs",
    )
    if len({result.pair.devices > BOX for result in results}) > 1:
        yield Line(
            claim="with one factor for each family, fitted on one box",
            ours=f"{summary.scaled:.1%} on several boxes",
            verdict="agrees" if summary.scaled <= MEDIAN else "we differ",
            why=f"in one box {summary.one_box:.1%} without factors; the factors (published over predicted) are "
            + ", ".join(
                f"{_FAMILIES[family]} {factor:.2f}"
                for family, factor in sorted(factors_of([row for row in results if row.pair.devices <= BOX]).items())
            ),
        )
    yield held(
        "the fastest of the four, at least 18 of 21",
        f"{summary.winners} of {len(results)}",
        summary.winners >= WINNERS * len(results),
        f"predictions within {ALIKE:.0%} and measurements within {EQUAL:.0%} of the best count as equal; "
        f"{summary.ordered} of {summary.orders} pairs of planners that differ by more are in the published order",
    )
    yield held(
        "the joint plan is never below intra-only or inter-only",
        f"at least {summary.joint_ratio:.3f} times the better",
        summary.joint_ratio >= 1 - ALIKE,
        f"of plans within {ALIKE:.0%} of the fastest the planner takes the simplest",
    )
    yield Line(
        claim="which runs fit in memory",
        ours=f"{summary.memory} of {summary.runs} right",
        verdict="agrees" if summary.memory == summary.runs else "we differ",
        why=f"limit: {MEMORY:.0%} of a device's memory",
    )


def _text(throughput: float | None) -> str:
    return "out of memory" if throughput is None else f"{throughput:.3g}"
