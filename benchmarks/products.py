"""Are grids of products right, and fast? ``python -m benchmarks.products [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

words      Counted words beside the closed form on every grid of 1 to 16 ranks with ragged sizes; the chosen grid beside
           brute force in 10,000 random cases; published volumes.
boxes      Products on 4 ranks in two emulated boxes (network namespaces joined by links of 1 Gbit/s,
           ``emulation/network.py``; as root, else nothing is judged), in float32, one thread a rank. Named grids are
           those of books: ranks in the order of their numbers, each collective by the faster of a star and a ring, and
           no panels, but for SUMMA, which has 4. The 1D grids are also run at their best: with our collectives along
           levels, and panels. All take turns in the same processes. Ranks wait for links most of the time, so that they
           may share cores.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

from benchmarks import report
from meshwright.bench.products import AT_BEST, BEST, CHOSEN, ProductRow, described, products
from meshwright.emulation.network import why_not
from meshwright.errors import LayoutError
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ir.statistics import ratio
from meshwright.schedules.products.bounds import lower_bound
from meshwright.schedules.products.choose import OVERS, choose_grid, grids
from meshwright.schedules.products.grid import ProductPlan, most_words, words_received
from meshwright.schedules.products.rounds import backward, count_words, forward
from tests.pure.test_products import by_brute_force

COMMAND = "python -m benchmarks.products"
ROUNDS, CASES, MOST_RANKS = 15, 10_000, 16
SHAPES = {"tall": (256, 16384, 256), "flat": (2048, 256, 2048), "square": (1024, 1024, 1024)}
"""m, k and n: tall has a long inner dim, flat a short one."""
MEMORY = {"tall": 2_500_000, "flat": 2_500_000, "square": 2_000_000}
"""S, in words, of the chosen plan in each shape: less than what several of the named grids take."""
PUBLISHED = (((4096, 4096, 4096), 64, 2_359_296), ((1024, 256, 64), 64, 6_912), ((4096, 16, 256), 16, 3_840))
NEVER_SLOWER, FASTER, OFF = 1.05, 1.5, 1.2
"""Equal plans differ by a few percent from round to round."""
SETTINGS = "2 boxes x 2 ranks, emulated 1 Gbit/s"


# --- words ------------------------------------------------------------------------------------------------------------


def word_findings(rounds: int) -> list[Finding]:
    """Counts beside closed forms and brute force; nothing is timed."""
    return [_counted(), _chosen(), _published()]


def _counted() -> Check:
    draw, equal, total = random.Random(0), 0, 0
    for grid in grids(MOST_RANKS, MOST_RANKS, MOST_RANKS, MOST_RANKS):
        m, k, n = (draw.randrange(MOST_RANKS, 60) for _ in range(3))
        for over in OVERS:
            plan = ProductPlan(m, k, n, grid, over)
            ranks = range(grid.num_ranks)
            there, back = count_words(plan, forward(plan)), count_words(plan, backward(plan))
            total += 2
            equal += there == [words_received(plan, rank) for rank in ranks]
            both = [words_received(plan, rank, gradients=True) for rank in ranks]
            equal += [
                forward_words + backward_words for forward_words, backward_words in zip(there, back, strict=True)
            ] == both
    return report.share(
        f"words counted in the steps of every grid of 1 to {MOST_RANKS} ranks with ragged sizes equal the closed form, "
        "forward and backward", equal, total, f"{equal} of {total}",
    )  # fmt: skip


def _chosen() -> Check:
    draw, equal = random.Random(1), 0
    for _ in range(CASES):
        m, k, n = (round(2 ** draw.uniform(0, 9)) for _ in range(3))
        num_ranks = draw.randrange(1, MOST_RANKS + 1)
        gradients = draw.random() < 0.5
        memory = None if draw.random() < 0.5 else draw.uniform(0.2, 4) * (m * k + k * n + m * n) / num_ranks
        expected = by_brute_force(m, k, n, num_ranks, memory, gradients=gradients)
        try:
            plan = choose_grid(m, k, n, num_ranks, memory, gradients=gradients)
        except LayoutError:
            equal += expected is None
        else:
            equal += expected == (most_words(plan, gradients=gradients), -plan.grid.num_ranks)
    return report.share(
        f"the chosen grid equals brute force over all grids, with and without a limit of memory, 1 to {MOST_RANKS} "
        "ranks", equal, CASES, f"{equal:,} of {CASES:,} random cases",
    )  # fmt: skip


def _published() -> Check:
    volumes = [most_words(choose_grid(*sizes, num_ranks)) for sizes, num_ranks, _ in PUBLISHED]
    equal = sum(
        words == expected == round(lower_bound(*sizes, num_ranks))
        for words, (sizes, num_ranks, expected) in zip(volumes, PUBLISHED, strict=True)
    )
    return report.share(
        "published volumes (arXiv 2205.13407) equal the chosen grid's words and the lower bound", equal, len(PUBLISHED),
        ", ".join(f"{words:,}" for words in volumes),
    )  # fmt: skip


# --- boxes ------------------------------------------------------------------------------------------------------------


def box_findings(rounds: int) -> list[Finding]:
    """The chosen plan beside named grids, its prediction, and its memory."""
    if missing := why_not():
        return [Check(target="products in boxes", verdict="reported", measured=f"not measured: {missing}")]
    results: list[Finding] = []
    shapes: dict[str, dict[str, ProductRow]] = {}
    for shape, sizes in SHAPES.items():
        timed = products([sizes], ranks=4, boxes=2, gbit=1.0, repetitions=rounds, memory_words=MEMORY[shape])
        shapes[shape] = {row.name: row for row in timed}
        print(*(f"{shape} {row.name}: {row.median_s * 1e3:.1f} ms, predicted {row.predicted_s * 1e3:.1f} ms, "
                f"{described(row)}" for row in timed), sep="\n", flush=True)  # fmt: skip
    for shape, rows in shapes.items():
        results += _of_a_shape(shape, rows)
    faster = {
        shape: ratio(rows[_fastest(rows, AT_BEST)].seconds, rows[CHOSEN].seconds) for shape, rows in shapes.items()
    }
    reached = sum(estimate.low >= FASTER for estimate in faster.values())
    results.append(report.share(
        f"{SETTINGS}: the chosen plan is at least {FASTER:g} x as fast as the better of 1D column and 1D row, on two "
        "of the three shapes", min(reached, 2), 2,
        ", ".join(f"{shape} {estimate}" for shape, estimate in faster.items()),
    ))  # fmt: skip
    return results


def _of_a_shape(shape: str, rows: dict[str, ProductRow]) -> list[Finding]:
    chosen, where = rows[CHOSEN], f"{SETTINGS}, {shape} {'x'.join(map(str, SHAPES[shape]))}"
    named = _fastest(rows, ("1d-column", "1d-row", "summa"))
    against = ratio(chosen.seconds, rows[named].seconds)
    off = max(chosen.median_s / chosen.predicted_s, chosen.predicted_s / chosen.median_s)
    others = ", ".join(
        f"{name} {row.median_s / chosen.median_s:.2f}"
        for name, row in sorted(rows.items(), key=lambda item: item[1].median_s)
    )
    at_best = _fastest(rows, [name + BEST for name in AT_BEST])
    return [
        Check(
            target=f"{where}: the chosen plan takes at most {NEVER_SLOWER:g} x as long as the fastest of 1D column, "
            "1D row and SUMMA",
            verdict=report.at_most(against, NEVER_SLOWER),
            measured=f"{against} against {named}; beside the chosen plan: {others}",
            passed=int(against.high <= NEVER_SLOWER), total=1,
            notes={name: {key: value for key, value in described(row).items() if not key.endswith("_s")}
                   for name, row in rows.items()},
        ),
        report.share(
            f"{where}: the chosen plan takes its predicted time within {OFF:g} x", int(off <= OFF), 1,
            f"measured over predicted {chosen.median_s / chosen.predicted_s:.2f}",
        ),
        report.share(
            f"{where}: its ranks hold at most S = {MEMORY[shape]:,} words, counted",
            int(chosen.peak_words <= MEMORY[shape]), 1, f"{chosen.peak_words:,}",
        ),
        Check(
            target=f"{where}: beside the better of 1D column and 1D row at its best, with algorithms along levels and "
            "panels",
            verdict="reported", measured=f"{ratio(chosen.seconds, rows[at_best].seconds)} against {at_best}",
        ),
    ]  # fmt: skip


def _fastest(rows: dict[str, ProductRow], names: Sequence[str]) -> str:
    return min((name for name in names if name in rows), key=lambda name: rows[name].median_s)


PARTS: dict[str, Callable[[int], list[Finding]]] = {"words": word_findings, "boxes": box_findings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    results, _, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        timed = (
            "A matrix product, from when all ranks have met until the slowest has its part of the result; all grids "
            "take turns."
        )
        settings = {
            shape: Settings(dtype="float32", ranks=4, threads=1, sizes={"m": m, "k": k, "n": n})
            for shape, (m, k, n) in SHAPES.items()
        }
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("products", "Products on grids", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
