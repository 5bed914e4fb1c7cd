"""Explicit rules for sequences and experts.

The axis ``cp`` splits sequences, and ``ep`` splits experts. With sequence parallelism, ``tp`` splits the sequences of
operators in which it splits nothing else.

With ``required``, it is an error if an axis cannot split the model. Otherwise (to follow a given plan), the model stays
whole on that axis.
"""

from meshwright.errors import LayoutError
from meshwright.ir.graph import Operator
from meshwright.ir.plan import Strategy
from meshwright.planner.factors import FactorChoices, repeated_heads


def split_experts(factors: FactorChoices, axis: str, *, required: bool) -> None:
    """Split the experts of mixture-of-experts operators over ``axis``, on which all other operators split the batch."""
    mixtures = [operator for operator in factors.graph.operators if operator.target.startswith("meshwright.experts")]
    for operator in mixtures:
        if axis in factors.strategies[operator.name]:
            continue
        experts = operator.rule.joint if operator.rule is not None else ()
        letter = next((factor for factor in experts if factors.fits(operator, factor, axis)), None)
        if letter is not None:
            factors.strategies[operator.name][axis] = letter
        elif required:
            tokens, weights = factors.graph.tensors[operator.inputs[0]], factors.graph.tensors[operator.inputs[-1]]
            raise LayoutError(
                f"{weights.shape[0]} experts or {tokens.shape[0]} tokens do not divide over ep={factors.sizes[axis]}",
                where=f"module {operator.module or '(model)'}",
                remedy="use an ep that divides the experts, and a batch that dp divides",
            )
    if not mixtures and required:
        raise LayoutError(f"{axis}={factors.sizes[axis]}, and there are no experts", where="layout", remedy="use ep=1")


def split_attention(factors: FactorChoices, axis: str, context: str, *, required: bool) -> None:
    """Split the queries of attention over ``axis``. ``context`` says how each rank gets all keys and values: by a
    gather (``gather``), or in rounds from rank to rank (``ring``)."""
    sequences = factors.sequences()
    for operator in factors.graph.operators:
        if axis in factors.strategies[operator.name] or not operator.target.startswith("meshwright.attention"):
            continue
        letter = factors.letter_of(operator, sequences, axis)
        if context == "ring" and letter:
            rings = operator.rule.joint if operator.rule is not None else {}
            rounds = next((ring for ring in rings if factors.fits(operator, ring, axis)), None)
            if rings and rounds is None and required:
                raise _unequal(factors, operator, axis, "use a sequence that it divides, or context='gather'")
            letter = rounds or letter
        if letter is not None:
            factors.strategies[operator.name][axis] = letter
        elif operator.target.startswith("meshwright.attention.") and required:
            raise _unequal(factors, operator, axis, "use a longer sequence")


def split_sequence(factors: FactorChoices, axis: str, context: str, *, required: bool) -> None:
    """Split every operator's sequence over ``axis``; attention as in ``split_attention``."""
    sequences = factors.sequences()
    whole = repeated_heads(factors.graph) if context == "gather" else set()
    split_attention(factors, axis, context, required=required)
    for operator in factors.graph.operators:
        if axis not in factors.strategies[operator.name] and not operator.prologue and operator.name not in whole:
            letter = factors.letter_of(operator, sequences, axis)
            if letter is not None:
                factors.strategies[operator.name][axis] = letter


def _unequal(factors: FactorChoices, operator: Operator, axis: str, remedy: str) -> LayoutError:
    length, parts = factors.graph.tensors[operator.inputs[0]].shape[2], factors.sizes[axis]
    problem = f"is too short for {axis}={parts}" if length < parts else f"does not divide over {axis}={parts}"
    return LayoutError(
        f"a sequence of {length} {problem}", where=f"module {operator.module or '(model)'}", remedy=remedy
    )


def sequences_between(factors: FactorChoices, axis: str, *, required: bool) -> dict[str, Strategy]:
    """Strategies that split the sequence over ``axis``, for all operators with a batch and a sequence. The planner uses
    these strategies for operators that ``axis`` would otherwise leave whole."""
    sequences = factors.sequences()
    strategies: dict[str, Strategy] = {}
    for operator in factors.graph.operators:
        has_batch = any(factors.is_batch(name) for name in operator.classes.values())
        letter = factors.letter_of(operator, sequences, axis)
        if letter is not None and has_batch and not operator.prologue:
            strategies[operator.name] = {axis: letter}
    if not strategies and required:
        sizes = sorted({factors.graph.factor_classes[name].size for name in sequences})
        raise LayoutError(
            f"no sequence fits {axis}={factors.sizes[axis]}: sizes are {', '.join(map(str, sizes)) or 'none'}",
            where="layout: sequence_parallel",
            remedy="use a longer sequence, or leave sequence_parallel out",
        )
    return strategies
