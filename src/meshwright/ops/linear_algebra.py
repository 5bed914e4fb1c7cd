"""Decompositions of matrices, and linear systems. A batch of matrices is split, a matrix is not."""

from itertools import count

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, Unsplit, arguments, make_rule
from meshwright.ops.patterns import letters, operand

aten = torch.ops.aten

_RIGHT_SIDE: dict[Target, int] = {
    aten.linalg_solve_triangular.default: 1, aten.linalg_lu_solve.default: 2, aten.linalg_ldl_solve.default: 2,
    aten.cholesky_solve.default: 0, aten.ormqr.default: 2,
}  # fmt: skip
"""Maps a solution or product to the position of its right side. It is linear there, and treats each column alone."""
_SOLUTIONS = frozenset({*_RIGHT_SIDE, aten.triangular_solve.default})
_BROADCAST = Unsplit("its matrices are broadcast over a batch")


def matrix_rule(call: Call) -> Rule | Unsplit:
    """``b !m !n, b !m k -> b !m k``: dims before the matrices may be split, and columns of a right side."""
    first, last = call.tensors[0], call.tensors[-1]
    batch, names, number = first.shape[:-2], letters(first.dim() - 2), count()
    is_right_side = last.dim() == first.dim() or last.shape == first.shape[:-1]
    if call.target is aten._linalg_solve_ex.default and not is_right_side:
        return _BROADCAST
    if call.target in _SOLUTIONS and last.dim() != first.dim():
        return _BROADCAST

    def dims(tensor: Tensor) -> list[str] | None:
        of_batch = tensor.shape[: len(batch)] == batch
        if not of_batch and tensor.numel() and tensor.dim():
            return None
        whole = tensor.dim() - (len(batch) if of_batch else 0)
        return [*(names if of_batch else []), *(f"!m{next(number)}" for _ in range(whole))]

    inputs, outputs = ([dims(tensor) for tensor in tensors] for tensors in (call.tensors, call.outputs))
    if None in inputs or None in outputs:
        return _BROADCAST
    right_side = _RIGHT_SIDE.get(call.target, -1)
    if right_side >= 0:
        free = -1 if arguments(call).get("left", True) else -2
        for operand_dims in (inputs[right_side], outputs[0]):
            operand_dims[free] = "k"  # type: ignore[index]
    texts = ["^" * (index == right_side) + operand(of or []) for index, of in enumerate(inputs)]
    return make_rule(call, f"{', '.join(texts)} -> {', '.join(operand(of or []) for of in outputs)}")


def _flops(call: Call, rule: Rule | None) -> float:
    """Count two operations for each element of the first matrix and each of its columns."""
    return 2.0 * call.tensors[0].numel() * call.tensors[0].shape[-1]


def trace_rule(call: Call) -> Rule:
    """The sum of a diagonal: rows and columns stay whole."""
    return make_rule(call, "^!m !n -> .")


_MATRIX = OperatorRule(matrix_rule, flops=_flops)
_NAMES = (
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky_inverse",
    "cholesky_solve", "geqrf", "linalg_cholesky_ex", "linalg_eig", "linalg_householder_product", "linalg_inv_ex",
    "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular", "lu_unpack", "ormqr", "triangular_solve",
)  # fmt: skip

RULES: dict[Target, OperatorRule] = {
    **{getattr(aten, name).default: _MATRIX for name in _NAMES},
    aten.linalg_pinv.atol_rtol_tensor: _MATRIX,
    aten.trace.default: OperatorRule(trace_rule),
}


def dot_conjugate(self: Tensor, other: Tensor) -> Tensor:
    """Capture ``vdot`` as the dot product with the conjugate of its first operand."""
    return aten.dot.default(self.conj() if self.is_complex() else self, other)


CANONICAL = {aten.vdot.default: dot_conjugate}
