"""A matrix product on a grid of ranks: the parts of A, B and C that each rank holds, and the number of words (elements)
that it receives and holds.

C = A B, with A of m x k and B of k x n, is computed on a grid (p_m, p_k, p_n): the rank at (i, l, j) multiplies block
(i, l) of A by block (l, j) of B. Each operand is stored once: the ranks that need the same block divide it among
themselves.

                 block of      is divided over     collective
    A  m x k     (i, l)        the p_n ranks       all-gather over n
    B  k x n     (l, j)        the p_m ranks       all-gather over m
    C  m x n     (i, j)        the p_k ranks       reduce-scatter over k

Parts differ by at most one row or column. SUMMA is the grid (q, 1, q), 2.5D is (q, c, q), 3D is (q, q, q). Grids with a
single axis divide rows (p_m), the inner dim (p_k) or columns (p_n). Panels over one dim are exchanged one after the
other. The operand without that dim is *stationary*: it is exchanged whole (van de Geijn, Watts 1997; Solomonik, Demmel
2011; Kwasniewski et al. 2019, COSMA).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from meshwright.errors import LayoutError, Problem, refuse
from meshwright.ir.mesh import Mesh
from meshwright.schedules.collectives.steps import Span, cut

Dim = Literal["m", "k", "n"]
Operand = Literal["a", "b", "c"]

DIMS: Mapping[Operand, tuple[Dim, Dim]] = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}
"""The dims of each operand: rows, then columns."""
AXIS: Mapping[Operand, Dim] = {"a": "n", "b": "m", "c": "k"}
"""The axis of the grid whose ranks divide a block of the operand. It is the axis of the dim that the operand lacks."""
STATIONARY: Mapping[Dim, Operand] = {dim: operand for operand, dim in AXIS.items()}
"""Maps the dim of the panels to the operand without this dim."""
_CUT: Mapping[Dim, Mapping[Operand, Dim]] = {
    "k": {"a": "m", "b": "n", "c": "m"}, "n": {"a": "m", "b": "k", "c": "m"}, "m": {"a": "k", "b": "n", "c": "n"},
}  # fmt: skip
"""Maps the dim of the panels to the dim in which the blocks of each operand are divided. It differs from the dim of the
panels, so that every rank holds a part of every panel."""


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The numbers of parts of m, k and n, which are the sizes of the grid's axes. ``order`` names the axes, outermost
    first: ranks along the last axis are consecutive.

    Raises:
        LayoutError: a size is below 1, or ``order`` does not name each axis once.
    """

    m: int
    k: int
    n: int
    order: str = "mkn"

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for dim, size in self.sizes.items():
            if size < 1:
                yield f"grid {self}", f"axis {dim} has size {size}", "give 1 or more"
        if sorted(self.order) != ["k", "m", "n"]:
            yield "order", f"{self.order!r} is no order of the axes m, k and n", "write each once, such as mkn"

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def sizes(self) -> dict[Dim, int]:
        """The size of each axis."""
        return {"m": self.m, "k": self.k, "n": self.n}

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the grid."""
        return self.m * self.k * self.n

    @property
    def mesh(self) -> Mesh:
        """The ranks of the grid, with the axes in their order."""
        sizes = self.sizes
        return Mesh.of(**{str(axis): sizes[axis] for axis in self.order})  # type: ignore[index]

    def stride(self, axis: Dim) -> int:
        """The distance of two neighbouring ranks along an axis."""
        inner = self.order[self.order.index(axis) + 1 :]
        return math.prod(size for axis, size in self.sizes.items() if axis in inner)

    def coordinates(self, rank: int) -> dict[Dim, int]:
        """The rank's index on each axis."""
        return {dim: rank // self.stride(dim) % size for dim, size in self.sizes.items()}


class ProductPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A product of an m x k by a k x n matrix, the grid that computes it, and the panels in which blocks are exchanged.

    ``over`` is the dim of the panels, and ``panels`` is their number in each block. ``algorithms`` maps an axis of the
    grid to the algorithm of its collectives (default: ``star``).

    Raises:
        LayoutError: an operand is empty, an axis has more parts than its dim has units, or there are more panels than
            units in a block.
    """

    m: int
    k: int
    n: int
    grid: Grid
    over: Dim = "k"
    panels: int = 1
    algorithms: dict[Dim, str] = {}

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for dim, size in self.sizes.items():
            parts = self.grid.sizes[dim]
            if size < 1:
                yield str(self), f"{dim} is {size}, so that operands are empty", "give 1 or more"
            elif parts > size:
                yield str(self), f"{dim} = {size} cannot have {parts} parts", f"give axis {dim} at most {size} ranks"
        if self.over not in ("m", "k", "n"):
            yield "over", f"{self.over!r} is no dim of a product", "write m, k or n"
        elif not 1 <= self.panels <= self.largest(self.over):
            problem = f"{self.panels} panels over {self.over}, of which a block has {self.largest(self.over)}"
            yield "panels", problem, f"give 1 to {self.largest(self.over)}"

    def __str__(self) -> str:
        return f"product {self.m}x{self.k}x{self.n} on grid {self.grid}"

    @property
    def sizes(self) -> dict[Dim, int]:
        """The whole length of each dim."""
        return {"m": self.m, "k": self.k, "n": self.n}

    @property
    def stationary(self) -> Operand:
        """The operand that is exchanged whole."""
        return STATIONARY[self.over]

    def cut_dim(self, operand: Operand) -> Dim:
        """The dim in which the ranks that share a block of the operand divide it."""
        return _CUT[self.over][operand]

    def other_dim(self, operand: Operand) -> Dim:
        """The other dim of the operand. It is the dim of the panels, unless the operand is stationary."""
        first, second = DIMS[operand]
        return second if self.cut_dim(operand) == first else first

    def sharing(self, operand: Operand) -> int:
        """The number of ranks that divide a block of the operand."""
        return self.grid.sizes[AXIS[operand]]

    def largest(self, dim: Dim) -> int:
        """The length of the largest block in a dim."""
        return -(-self.sizes[dim] // self.grid.sizes[dim])

    def algorithm(self, operand: Operand) -> str:
        """The algorithm of the collectives of an operand."""
        return self.algorithms.get(AXIS[operand], "star")


def block(plan: ProductPlan, dim: Dim, index: int) -> Span:
    """The units of a dim that belong to the ranks with this index on its axis."""
    return cut((0, plan.sizes[dim]), plan.grid.sizes[dim])[index]


def part(plan: ProductPlan, operand: Operand, rank: int) -> tuple[Span, Span]:
    """The rows and the columns of an operand that a rank stores. Ranks beyond the grid store nothing."""
    if rank >= plan.grid.num_ranks:
        return (0, 0), (0, 0)
    at = plan.grid.coordinates(rank)
    spans = {dim: block(plan, dim, at[dim]) for dim in DIMS[operand]}
    divided = plan.cut_dim(operand)
    spans[divided] = cut(spans[divided], plan.sharing(operand))[at[AXIS[operand]]]
    rows, columns = DIMS[operand]
    return spans[rows], spans[columns]


def words_received(plan: ProductPlan, rank: int, *, gradients: bool = False) -> int:
    """The words that a rank receives in the forward product, in closed form: the parts of its blocks of A and B that
    other ranks store, and its part of C from each other rank along k. The number of panels does not change them.

    ``gradients``: include the backward products. They gather A and B again, and the gradient of C; they reduce-scatter
    the gradients of A and B.
    """
    if rank >= plan.grid.num_ranks:
        return 0
    at, total = plan.grid.coordinates(rank), 0
    for operand, (rows, columns) in DIMS.items():
        stored = _area(part(plan, operand, rank))
        gathered = _area((block(plan, rows, at[rows]), block(plan, columns, at[columns]))) - stored
        reduced = (plan.sharing(operand) - 1) * stored
        if operand == "c":
            total += reduced + (gathered if gradients else 0)
        else:
            total += gathered + (gathered + reduced if gradients else 0)
    return total


def most_words(plan: ProductPlan, *, gradients: bool = False) -> int:
    """The words that the busiest rank receives. ``gradients`` is defined as in ``words_received``."""
    return max(words_received(plan, rank, gradients=gradients) for rank in range(plan.grid.num_ranks))


def mean_words(m: int, k: int, n: int, grid: Grid, *, gradients: bool = False) -> float:
    """The mean of the words that the ranks of a grid receive in the forward product: mk / (p_m p_k) + kn / (p_k p_n) +
    mn / (p_m p_n) - (mk + kn + mn) / P. If all parts are equal, every rank receives this number of words.

    ``gradients``: include the backward products, so that A and B count three times and C counts twice.
    """
    inputs, output = (3, 2) if gradients else (1, 1)
    total = inputs * (m * k * (grid.n - 1) + k * n * (grid.m - 1)) + output * m * n * (grid.k - 1)
    return total / grid.num_ranks


def _area(spans: tuple[Span, Span]) -> int:
    (first, second), (third, fourth) = spans
    return (second - first) * (fourth - third)


def following(plan: ProductPlan, n: int, panels: int = 1) -> ProductPlan:
    """A plan for the product of C with a matrix of n columns. It uses C as its operand A in the parts that ``plan``
    leaves, so that nothing is sent between the two products. The axes of k and n swap their roles, as alternate layers
    do in AxoNN."""
    grid = plan.grid
    order = grid.order.translate(str.maketrans("kn", "nk"))
    over: Dim = "m" if plan.over == "m" else "k"
    swapped: Mapping[Dim, Dim] = {"m": "m", "k": "n", "n": "k"}
    algorithms = {swapped[axis]: name for axis, name in plan.algorithms.items()}
    return ProductPlan(plan.m, plan.n, n, Grid(grid.m, grid.n, grid.k, order), over, panels, algorithms)
