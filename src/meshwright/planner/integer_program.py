"""Builds integer programs from rows and columns, and solves them with HiGHS.

Each column is a variable between 0 and its upper limit, with a cost. Each row limits a weighted sum of columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

TIME_LIMIT_S, GAP = 60.0, 1e-6


@dataclass
class Rows:
    """The rows of a program. Each row has the indices of its columns, with their weights."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """Add a row: the sum of ``terms`` (column, weight) lies from ``lower`` to ``upper``."""
        self.starts.append(len(self.columns))
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(lower)
        self.upper.append(upper)


class ColumnValues(NamedTuple):
    """The values of the columns (None: no solution exists, or none was found in time). ``bound`` is a lower bound on
    the cost of any solution; it is infinite if none exists. ``proven``: the solver finished in time."""

    values: NDArray[np.float64] | None
    bound: float
    proven: bool


def minimize(
    costs: Sequence[float], upper: Sequence[float], rows: Rows, num_integer: int, *, gap: float = GAP
) -> ColumnValues:
    """Minimize the cost within the relative ``gap`` or the time limit. The first ``num_integer`` columns must be whole
    numbers."""
    unit = max((cost for cost in costs if cost > 0), default=1.0)  # the tolerances of HiGHS are absolute
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), len(rows.lower)
    model.col_cost_ = np.array(costs) / unit
    model.col_lower_, model.col_upper_ = np.zeros(len(costs)), np.array(upper)
    model.row_lower_, model.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array([*rows.starts, len(rows.columns)])
    model.a_matrix_.index_, model.a_matrix_.value_ = np.array(rows.columns), np.array(rows.values)
    kinds = (highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous)
    model.integrality_ = [kinds[column >= num_integer] for column in range(len(costs))]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "time_limit": TIME_LIMIT_S, "mip_rel_gap": gap}
    for name, value in (options | {"mip_abs_gap": min(gap, GAP)}).items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ColumnValues(None, np.inf, True)
    bound = info.mip_dual_bound * unit
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return ColumnValues(None, bound, False)
    return ColumnValues(np.array(solver.getSolution().col_value), bound, status == highspy.HighsModelStatus.kOptimal)
