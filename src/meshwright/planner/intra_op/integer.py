"""The integer program: one binary variable for each choice of each decision, solved by HiGHS.

x[i, c] = 1: decision i takes choice c. y[t, h, w] = 1: a copy brings tensor t from placement h to placement w.
z[r, h, w] = 1: reader r of the tensor uses this copy.

    minimize    sum of costs[i, c] x[i, c]  +  sum of prices[t, h, w] y[t, h, w]
    such that   for each decision i:               sum over c of x[i, c] = 1
                for each reader r of a tensor t:   sum over w of z[r, h, w] = 1 if its maker leaves t in h, else 0
                                                   sum over h of z[r, h, w] = 1 if r wants t in w, else 0
                                                   y[t, h, w] >= z[r, h, w]
                for each moment:                   sum of bytes <= limit

Because of the constraint y >= z, readers that want the same placement share one copy and pay once. This is the program
of Alpa (Zheng et al. 2022, section 4.2), extended by tensors with several readers and by memory limits at several
moments. Because of the two sums over z, the linear relaxation of the program is the local polytope, which is exact on
trees.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.integer_program import Rows, minimize
from meshwright.planner.intra_op.eliminate import Core, Table
from meshwright.planner.intra_op.problem import Costs, ProblemTensor


@dataclass(frozen=True)
class CoreSolution:
    """The solution of a ``Core``. ``chosen`` maps the nodes of the core to their choices (None: no choices exist, or
    none were found in time). ``bound`` is a lower bound, in seconds, on the cost of any choices. ``proven``: the solver
    finished in time."""

    chosen: dict[int, int] | None
    bound: float
    proven: bool


class _Program:
    def __init__(self, core: Core, limited: bool) -> None:
        self.problem = core.problem
        limits = core.problem.limits if limited else core.problem.limits[:0]
        for node, decision in enumerate(core.problem.nodes):
            if node not in core.nodes and limited:  # its memory is equal for all choices
                limits = limits - decision.memory[:, 0]
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.rows = Rows()
        self.bytes: list[list[tuple[int, float]]] = [[] for _ in limits]
        self.columns: dict[int, list[int]] = {}
        for node in core.nodes:
            columns = self.columns[node] = self._columns(np.zeros(self.problem.nodes[node].num_choices)).tolist()
            self.rows.add([(column, 1.0) for column in columns], 1.0, 1.0)
            for moment, sizes in enumerate(self.problem.nodes[node].memory[: len(limits)]):
                self.bytes[moment] += [
                    (column, float(size)) for column, size in zip(columns, sizes, strict=True) if size
                ]
        self.binaries = len(self.costs)
        for table in core.tables:
            self._table(table)
        for tensor in core.tensors:
            self._tensor(tensor)
        for terms, limit in zip(self.bytes, limits, strict=True):
            unit = max(1.0, abs(float(limit)))
            self.rows.add([(column, size / unit) for column, size in terms], -np.inf, float(limit) / unit)

    def _columns(self, costs: Costs) -> NDArray[np.int64]:
        """Add a column for each cost and return the column numbers. Columns of infinite cost are fixed at 0."""
        first = len(self.costs)
        finite = np.isfinite(costs)
        self.costs += np.where(finite, costs, 0.0).ravel().tolist()
        self.upper += finite.ravel().astype(float).tolist()
        return first + np.arange(costs.size).reshape(costs.shape)

    def _table(self, table: Table) -> None:
        if len(table.scope) == 1:
            for column, cost in zip(self.columns[table.scope[0]], table.costs, strict=True):
                self.costs[column] += float(cost) if np.isfinite(cost) else 0.0
                self.upper[column] = self.upper[column] if np.isfinite(cost) else 0.0
            return
        entries = self._columns(table.costs)
        for axis, node in enumerate(table.scope):
            for choice, column in enumerate(self.columns[node]):
                inside = entries.take(choice, axis=axis).ravel()
                self.rows.add([*((int(entry), 1.0) for entry in inside), (column, -1.0)], 0.0, 0.0)

    def _tensor(self, tensor: ProblemTensor) -> None:
        shape = tensor.prices.shape
        copies = self._columns(tensor.prices)
        if tensor.memory is not None:
            for moment, sizes in enumerate(tensor.memory[: len(self.bytes)]):
                held = zip(copies.ravel().tolist(), sizes.ravel(), strict=True)
                self.bytes[moment] += [(column, float(size)) for column, size in held if size]
        maker = self.columns[tensor.maker]
        for node, wants in tensor.readers:
            reader = self.columns[node]
            if node == tensor.maker:
                for have, want in np.ndindex(shape):
                    inside = [c for c, h, w in zip(maker, tensor.have, wants, strict=True) if h == have and w == want]
                    if inside:
                        terms = [(int(copies[have, want]), 1.0), *((column, -1.0) for column in inside)]
                        self.rows.add(terms, 0.0, np.inf)
                continue
            if len(tensor.readers) == 1:
                pairs = copies
            else:
                pairs = self._columns(np.where(np.isfinite(tensor.prices), 0.0, np.inf))
                for column, pair in zip(copies.ravel().tolist(), pairs.ravel().tolist(), strict=True):
                    self.rows.add([(column, 1.0), (pair, -1.0)], 0.0, np.inf)
            for have in range(shape[0]):
                terms = [(pair, 1.0) for pair in pairs[have].tolist()]
                terms += [(column, -1.0) for column, h in zip(maker, tensor.have, strict=True) if h == have]
                self.rows.add(terms, 0.0, 0.0)
            for want in range(shape[1]):
                terms = [(pair, 1.0) for pair in pairs[:, want].tolist()]
                terms += [(column, -1.0) for column, w in zip(reader, wants, strict=True) if w == want]
                self.rows.add(terms, 0.0, 0.0)


def solve_core(core: Core, limited: bool = False) -> CoreSolution:
    """Find the best choices of the nodes that elimination left, within the gap or the time limit of
    ``integer_program``.

    With ``limited``, the choices respect the memory limits. The core must then still have all nodes whose memory
    depends on the choice.
    """
    if not core.nodes:
        return CoreSolution({} if np.isfinite(core.seconds) else None, core.seconds, True)
    program = _Program(core, limited)
    values, bound, proven = minimize(program.costs, program.upper, program.rows, program.binaries)
    if values is None:
        return CoreSolution(None, np.inf if proven else core.seconds + max(0.0, bound), proven)
    chosen = {node: int(np.argmax(values[program.columns[node]])) for node in core.nodes}
    return CoreSolution(chosen, core.seconds + bound, proven)
