"""The rule, FLOPs and bytes of a call, computed once for all equal calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.capture.outputs import UnlikeError, described
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, Unsplit
from meshwright.ops.table import is_random, operator_rule, rule_of
from meshwright.ops.view import VIEWS


@dataclass(frozen=True)
class RuleOfCall:
    """The rule of a call, or the reason why it has none. ``num_bytes`` are the bytes that the call reads and writes (0
    for a view). ``random`` says that the call draws random numbers."""

    rule: Rule | Unsplit
    contiguous: frozenset[str]
    flops: float
    num_bytes: int
    random: bool


class Rules:
    """Finds the rules of calls. The rules in ``own`` take precedence over the rules of ``ops``."""

    def __init__(self, own: Mapping[Target, OperatorRule]) -> None:
        self._own = own
        self._known: dict[Any, RuleOfCall] = {}

    def of(self, call: Call) -> RuleOfCall:
        """Return the rule, FLOPs and bytes of a call.

        Raises:
            RuleError: the rule's pattern does not fit the call, or the call draws random numbers without a key.
        """
        try:
            key = (call.target, described((call.args, dict(call.kwargs), call.outputs), []))
        except UnlikeError:
            return self._rule_of_call(call)
        if key not in self._known:
            self._known[key] = self._rule_of_call(call)
        return self._known[key]

    def _rule_of_call(self, call: Call) -> RuleOfCall:
        rule, operator = rule_of(call, self._own), operator_rule(call.target, self._own)
        touched = () if call.target in VIEWS else (*call.tensors, *call.outputs)
        return RuleOfCall(
            rule,
            operator.contiguous if operator else frozenset(),
            operator.flops(call, None if isinstance(rule, Unsplit) else rule) if operator else 0.0,
            sum(value.numel() * value.element_size() for value in touched),
            is_random(call.target, self._own),
        )
