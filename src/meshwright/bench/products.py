"""Time matrix products on grids of ranks for several sizes: named grids and the grid that the planner chooses, with the
lower bound."""

import statistics
import tempfile
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright import api
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.repeat import alternate, measuring
from meshwright.bench.scaling import check_alone
from meshwright.catalog import load_cluster
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives, from_every_rank, from_rank_0, groups_once, process_group
from meshwright.cost.collective import Network
from meshwright.cost.product import LocalProducts, product_s
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.errors import LaunchError, LayoutError
from meshwright.ir.cluster import CollectiveTiming
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Comparison, Finding, Result, Series, Settings
from meshwright.ir.statistics import ratio
from meshwright.planner.products import plan_product
from meshwright.runtime import launch
from meshwright.runtime.loop import Progress, Silent
from meshwright.runtime.products import GridProduct, matmul
from meshwright.schedules.collectives.hierarchy import written
from meshwright.schedules.products.bounds import lower_bound
from meshwright.schedules.products.choose import named_grid
from meshwright.schedules.products.grid import Grid, ProductPlan, most_words
from meshwright.schedules.products.memory import peak_words

Sizes = tuple[int, int, int]
"""m, k and n of a product."""
CHOSEN = "chosen"
TEXTBOOK = ("1d-column", "1d-row", "1d-inner", "summa", "2.5d", "3d")
"""Named grids in their textbook form: ranks in the order of their numbers, each collective with the faster of a star
and a ring, and no panels (except SUMMA, which has panels over k)."""
AT_BEST = ("1d-column", "1d-row")
"""The grids with one axis are also run at their best: with hierarchical algorithms and the panels of the least
predicted time."""
BEST = " at its best"
TABLE_BYTES = tuple(3 * 2**power for power in range(10, 24, 2))
"""Sizes, in bytes, of the collectives that are measured in advance. Predictions interpolate between them."""
BLOCKS = (96, 192, 384, 768)
"""Sides of the square products that are measured in advance, on all ranks at the same time."""
THIN: Sizes = (1280, 24, 1280)
"""A product whose speed is limited by memory, because it moves many bytes per multiplication."""
PROBE, PANELS = 768, 6
"""Side and number of panels of a product that is timed with and without its collectives. The difference shows which
part of the collectives' time is hidden by products, and how much time a round adds."""
LEVELS = ("box", "network")


class ProductRow(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one plan for one product. ``seconds``: the time of each repetition. ``words``: the words
    (elements) that the busiest rank receives. ``bound_words``: the words that at least one rank must receive.
    ``bound_s``: the time of the local products alone. ``peak_words``: the counted maximum of words that a rank held.
    ``planned_words``: the limit in the plan."""

    sizes: Sizes
    name: str
    plan: ProductPlan
    seconds: tuple[float, ...]
    predicted_s: float
    words: int
    bound_words: float
    bound_s: float
    peak_words: int
    planned_words: int

    @property
    def median_s(self) -> float:
        """The median seconds."""
        return statistics.median(self.seconds)


def products(
    sizes: Sequence[Sizes], *, ranks: int = 4, boxes: int = 1, gbit: float = 1.0, repetitions: int = 7,
    memory_words: float | None = None, progress: Progress | None = None,
) -> tuple[ProductRow, ...]:  # fmt: skip
    """Time every product with the named grids and with the chosen plan, in turns, in float32, with one thread per rank.

    Args:
        boxes, gbit: the number of emulated boxes that hold the ranks, and the rate of the links between them in Gbit/s.
            With one box, ranks share memory.
        memory_words: the largest number of words that a rank may hold under the chosen plan.

    Raises:
        LayoutError: there are fewer than two ranks, the boxes do not divide the ranks, an operand is empty, or nothing
            fits in the memory.
        LaunchError: this process is a rank itself, or networks cannot be emulated here.
    """
    progress = progress or Silent()
    check_alone("bench products")
    if ranks < 2:
        raise LayoutError(f"{ranks} ranks", where="ranks", remedy="give 2 or more")
    if ranks % boxes:
        raise LayoutError(f"{ranks} ranks in {boxes} boxes", where="boxes", remedy="give boxes that divide the ranks")
    if boxes > 1 and (missing := why_not()):
        raise LaunchError(missing, where="boxes", remedy="give one box")
    arguments = (measure, tuple(sizes), boxes, repetitions, memory_words)
    with measuring(progress), tempfile.TemporaryDirectory() as name:
        progress.begin(f"{len(sizes)} products on {ranks} ranks")
        if boxes == 1:
            return api.run_ranks(*arguments, num_ranks=ranks)
        return run_in_boxes(
            *arguments, boxes=[rank * boxes // ranks for rank in range(ranks)],
            rates_bits_per_s=[gbit * 1e9] * boxes, directory=Path(name, "ranks"),
        )  # fmt: skip


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(sizes: Sequence[Sizes], boxes: int, repetitions: int, memory_words: float | None) -> tuple[ProductRow, ...]:
    """Measure collectives and local products, then plan and time every product."""
    torch.set_num_threads(1)
    launch.start("cpu")
    with torch.inference_mode():
        network, local = calibrated(boxes)
        rows: list[ProductRow] = []
        for each in sizes:
            rows += _timed(each, network, local, repetitions, memory_words)
        return tuple(rows)


def _timed(
    sizes: Sizes, network: Network, local: LocalProducts, repetitions: int, memory_words: float | None
) -> list[ProductRow]:
    num_ranks = dist.get_world_size()
    plans = from_rank_0(lambda: plans_of(sizes, num_ranks, network, local, memory_words))
    draw = torch.Generator().manual_seed(0)
    m, k, n = sizes
    a, b = torch.randn(m, k, generator=draw), torch.randn(k, n, generator=draw)
    expected = a @ b
    tolerance = 1e-5 * k**0.5 * float(expected.abs().max())
    by_plan: dict[str, GridProduct] = {}
    sides: dict[str, Callable[[], object]] = {}
    for name, plan in plans.items():
        by_plan[name] = GridProduct(plan)
        operands = by_plan[name].shard("a", a), by_plan[name].shard("b", b)
        off = float((matmul(*operands).gather() - expected).abs().max())
        if not off <= tolerance:
            raise AssertionError(f"{name} differs from a serial product by {off:.2g}")
        by_plan[name].peak_words = 0
        sides[name] = partial(matmul, *operands)
    del expected
    seconds = alternate(sides, rounds=repetitions, steps=1, warmup_steps=2)
    peaks = {name: max(from_every_rank(product.peak_words)) for name, product in by_plan.items()}
    bound_s = min(product_s(_alone(plan), network, local, 4) for plan in plans.values())
    return [
        ProductRow(
            sizes=sizes, name=name, plan=plan, seconds=tuple(seconds[name]),
            predicted_s=product_s(plan, network, local, 4), words=most_words(plan),
            bound_words=lower_bound(m, k, n, num_ranks), bound_s=bound_s, peak_words=peaks[name],
            planned_words=peak_words(plan),
        )
        for name, plan in plans.items()
    ]  # fmt: skip


def _alone(plan: ProductPlan) -> ProductPlan:
    """A plan for the local product of the largest block, without any exchange."""
    return ProductPlan(plan.largest("m"), plan.largest("k"), plan.largest("n"), Grid(1, 1, 1))


def plans_of(
    sizes: Sizes, num_ranks: int, network: Network, local: LocalProducts, memory_words: float | None
) -> dict[str, ProductPlan]:
    """The plans to time, by name. A grid is left out if a dim is too small for it."""
    m, k, n = sizes
    plans: dict[str, ProductPlan] = {}
    for name in TEXTBOOK:
        grid = named_grid(name, num_ranks)
        if grid in (plan.grid for plan in plans.values()) or grid.m > m or grid.k > k or grid.n > n:
            continue
        panels = (4,) if name == "summa" else (1,)
        variants = [
            ProductPlan(m, k, n, grid, "k", count, {"m": algorithm, "k": algorithm, "n": algorithm})
            for count in panels
            for algorithm in ("star", "ring")
        ]
        plans[name] = min(variants, key=lambda plan: product_s(plan, network, local, 4))
        if name in AT_BEST:
            plans[name + BEST] = plan_product(m, k, n, num_ranks, network, local, only=(grid,))
    plans[CHOSEN] = plan_product(m, k, n, num_ranks, network, local, memory_words=memory_words)
    return plans


# --- calibration -----------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """A group whose collectives are measured: its mesh axis, level, fan-outs and algorithms."""

    axis: str
    level: str
    fan_outs: tuple[int, ...]
    algorithms: tuple[str, ...]


def calibrated(boxes: int) -> tuple[Network, LocalProducts]:
    """Measure the collectives of all groups along the levels, and local products on all ranks at the same time. All
    ranks must call this, and all get the times of the slowest rank."""
    each = dist.get_world_size() // boxes
    mesh = Mesh.of(across=boxes, inside=each)
    groups = groups_once(mesh, dist.get_rank())
    cases = []
    if each > 1:
        cases.append(_Case("inside", LEVELS[0], (each,), ("star", "ring") if each > 2 else ("star",)))
    if boxes > 1:
        cases.append(_Case("across", LEVELS[1], (boxes,), ("star", "ring") if boxes > 2 else ("star",)))
    if boxes > 1 and each > 1:
        along = tuple(written("star", across, f"{each}x{boxes}") for across in ("star", "ring"))
        cases.append(_Case("all", LEVELS[1], (each, boxes), ("star", "ring", *along)))
    world = dist.group.WORLD
    assert world is not None
    rows: list[CollectiveTiming] = []
    for case in cases:
        ours = collectives(world if case.axis == "all" else process_group(groups[case.axis].name))
        for num_bytes in TABLE_BYTES:
            rows += _timings(ours, case, num_bytes)
    base = load_cluster("cpu-local")
    levels = tuple(
        _level(rows, name, size, senders)
        for name, size, senders in zip(LEVELS, (each, boxes), (1, each), strict=True)
        if size > 1
    )
    cluster = msgspec.structs.replace(
        base, name="measured", num_devices=boxes * each, levels=levels, collectives=tuple(rows), open_ended=False
    )
    network, local = Network(cluster), _rates()
    return network, _with_rounds(network, local)


def _with_rounds(network: Network, local: LocalProducts) -> LocalProducts:
    """The speed of local products, with the fraction of collectives that products hide, and the additional time of a
    round. Both follow from the difference between the times of a product in panels and of the same product in one
    panel."""
    num_ranks = dist.get_world_size()
    plans = [ProductPlan(PROBE, PROBE, PROBE, named_grid("summa", num_ranks), "k", count) for count in (1, PANELS)]
    whole, sides = torch.zeros(PROBE, PROBE), dict[str, Callable[[], object]]()
    for plan in plans:
        product = GridProduct(plan)
        sides[str(plan.panels)] = partial(matmul, product.shard("a", whole), product.shard("b", whole))
    medians = [statistics.median(each) for each in alternate(sides, rounds=15, steps=1, warmup_steps=2).values()]
    shown, hidden = (product_s(plans[1], network, local._replace(overlap=share), 4) for share in (0.0, 1.0))
    expected = product_s(plans[0], network, local, 4) + medians[1] - medians[0]
    overlap = (shown - expected) / (shown - hidden) if shown > hidden else 0.0
    return local._replace(overlap=min(1.0, max(0.0, overlap)), round_s=max(0.0, expected - shown) / (PANELS - 1))


def _level(rows: Sequence[CollectiveTiming], name: str, size: int, senders: int) -> Level:
    """A level for groups without measurements. Its latency and rate follow from the smallest and the largest all-gather
    in one round. ``senders``: the number of ranks in a unit, which share its link."""
    times = {
        row.bytes: row.time_s
        for row in rows
        if (row.level, row.algorithm, row.operation, row.fan_outs) == (name, "star", "all_gather", ())
    }
    least, most = min(times), max(times)
    per_byte = max(0.0, times[most] - times[least]) / (most - least)
    alpha_s = max(1e-6, times[least] - per_byte * least) / (size - 1)
    return Level(name=name, fan_out=size, alpha_s=alpha_s, beta_s_per_byte=per_byte * size / (size - 1) / senders)


def _timings(collectives: Collectives, case: _Case, num_bytes: int) -> list[CollectiveTiming]:
    size = collectives.num_ranks
    counts = [num_bytes // 4 // size] * size
    memory = torch.zeros(sum(counts))
    sides: dict[str, Callable[[], object]] = {}
    for name in case.algorithms:
        sides[f"all_gather {name}"] = lambda name=name: collectives.all_gather_parts(memory, counts, name).wait()  # type: ignore[misc]
        sides[f"reduce_scatter {name}"] = lambda name=name: collectives.reduce_scatter_parts(
            memory, counts, name
        ).wait()  # type: ignore[misc]
    steps = 20 if num_bytes < 2**18 else 2
    seconds = alternate(sides, rounds=5, steps=steps, warmup_steps=1)
    rows = []
    for key, values in seconds.items():
        operation, _, name = key.partition(" ")
        rows.append(CollectiveTiming(
            operation=operation, algorithm=name, level=case.level, ranks=size, bytes=4 * sum(counts),  # type: ignore[arg-type]
            time_s=statistics.median(values), fan_outs=case.fan_outs if len(case.fan_outs) > 1 else (),
        ))  # fmt: skip
    return rows


def _rates() -> LocalProducts:
    """The speed of local products on 1, 2, 4, ... ranks and on all ranks at once."""
    world_size = dist.get_world_size()
    counts = sorted({world_size, *(2**power for power in range(world_size.bit_length() - 1))})
    rates = {count: _rate(count) for count in counts}

    def multiply_s(m: int, k: int, n: int, num_ranks: int) -> float:
        return rates[next(count for count in counts if count >= num_ranks)](m, k, n)

    return LocalProducts(multiply_s)


def _rate(num_ranks: int) -> Callable[[int, int, int], float]:
    """The seconds of a product of m x k by k x n on each of the first ``num_ranks`` ranks at once, while the others are
    idle: seconds per FLOP of square products, interpolated, and seconds per byte of operands and result, by a product
    with a short inner dim."""
    seconds = {sizes: _multiplied_s(sizes, num_ranks) for sizes in (*((side,) * 3 for side in BLOCKS), THIN)}
    largest = (BLOCKS[-1],) * 3
    byte_s = max(0.0, seconds[THIN] - _flops(*THIN) * seconds[largest] / _flops(*largest)) / _bytes(*THIN)
    points = [
        (_flops(*sizes), (seconds[sizes] - byte_s * _bytes(*sizes)) / _flops(*sizes))
        for sizes in ((side,) * 3 for side in BLOCKS)
    ]

    def multiply_s(m: int, k: int, n: int) -> float:
        flops = _flops(m, k, n)
        return flops * _interpolated(points, flops) + byte_s * _bytes(m, k, n)

    return multiply_s


def _multiplied_s(sizes: Sizes, num_ranks: int) -> float:
    m, k, n = sizes
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.zeros(m, n)
    steps = max(1, round(4e8 / _flops(m, k, n)))
    multiply: Callable[[], object] = partial(c.addmm_, a, b) if dist.get_rank() < num_ranks else lambda: None
    return statistics.median(alternate({"": multiply}, rounds=7, steps=steps, warmup_steps=1)[""])


def _flops(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n


def _bytes(m: int, k: int, n: int) -> float:
    """Bytes that a product reads and writes. The result also counts as read if the product is added to it."""
    return 4.0 * (m * k + k * n + 2 * m * n)


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a position, linear between points, and constant beyond them."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, least), (high, most) in pairwise(points):
        if at <= high:
            return least + (most - least) * (at - low) / (high - low)
    return points[-1][1]


# --- result ----------------------------------------------------------------------------------------------------------


def result_of(
    rows: Sequence[ProductRow], *, ranks: int, boxes: int, gbit: float, repetitions: int, command: str
) -> Result:
    """The result file of ``products``, which was called with the same arguments. For each product, it has the time of
    the chosen plan divided by that of the fastest named grid, including named grids at their best."""
    run, findings = uuid.uuid4().hex[:12], list[Finding]()
    settings: dict[str, Settings] = {}
    for sizes in dict.fromkeys(row.sizes for row in rows):
        here = {row.name: row for row in rows if row.sizes == sizes}
        name = "x".join(map(str, sizes))
        m, k, n = sizes
        settings[name] = Settings(dtype="float32", ranks=ranks, threads=1, sizes={"m": m, "k": k, "n": n})
        baseline = min((each for each in here if each != CHOSEN), key=lambda each: here[each].median_s)
        time_ratio = ratio(here[CHOSEN].seconds, here[baseline].seconds)
        findings.append(Comparison(
            target=f"{name}: the chosen plan over the fastest other one", verdict="reported",
            measured=f"{time_ratio} against {baseline}; predicted {here[CHOSEN].predicted_s * 1e3:.4g} ms",
            series={each: Series.of(row.seconds, settings=name, run=run) for each, row in here.items()},
            ours=CHOSEN, baseline=baseline, ratio=time_ratio.value, interval=time_ratio.interval,
            notes={each: described(row) for each, row in here.items()},
        ))  # fmt: skip
    where = f"in {boxes} emulated boxes joined at {gbit:g} Gbit/s" if boxes > 1 else "that share memory"
    return Result(
        date=today(), name="products", command=command, machine=this_machine(), versions=versions(),
        timed=f"A matrix product in float32 on {ranks} ranks {where}, each with one thread, from when all ranks have "
        f"met until the slowest has its part of the result; all grids by turns, {repetitions} times.",
        settings=settings, findings=tuple(findings),
    )  # fmt: skip


def described(row: ProductRow) -> dict[str, str | float]:
    """A row's plan and its numbers except the time, for the notes of a result."""
    plan = row.plan
    return {
        "grid": f"{plan.grid} ({plan.grid.order})", "panels": f"{plan.panels} over {plan.over}",
        "algorithms": ", ".join(f"{axis}: {name}" for axis, name in plan.algorithms.items()) or "star",
        "words": row.words, "bound_words": round(row.bound_words), "predicted_s": row.predicted_s,
        "bound_s": row.bound_s, "peak_words": row.peak_words, "planned_words": row.planned_words,
    }  # fmt: skip
