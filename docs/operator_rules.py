"""The page of operator rules: every operator's pattern for one example call, from the rules and their docstrings."""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops import pointwise, random, table
from meshwright.ops.base import Call, OperatorRule, Unsplit
from meshwright.torch_private import pytree
from tests.distributed.rule_cases import CASES, POINTWISE, Draw

aten = torch.ops.aten
_HEAD = """# Operators and their rules

{generated}

This page lists the ways in which each operator may be split. The rule of an operator makes a pattern for each call;
the page shows the pattern of an example call. A letter is a factor. A factor that is missing on the right is reduced.
`!` marks a factor that cannot be split by the pattern alone. `~` marks a factor for which the operator also reads rows
next to its part. `^` marks operands in which the operator is linear
([patterns](how-to/add-an-operator-rule.md#patterns)). The column *decomposed* lists the factors that are split in a
form with collectives inside, and the way in which parts are combined. `yy` splits the rows `y` that are read together
with the rows `y1` that are computed; `parts` need no communication, but must be runs of consecutive rows. Tests run
every rule on shards, and check that a change of any mark in a pattern makes them fail
(`tests/distributed/test_rules.py`, `test_mutants.py`). {count} operators have their own rules. The operators that
PyTorch tags as pointwise (some hundreds) share one rule. An operator that is not listed here runs whole on every rank:
the plan names it with its cost, and `strict` refuses it."""


class _Example(Draw):
    """Draws that always give the same small call: the first choices, two dims, and the sizes 4, 6, 2, 3 in turn."""

    def __init__(self) -> None:
        super().__init__(lambda strategy: 0)
        self._sizes = iter([4, 6, 2, 3] * 9)

    def pick(self, *options: Any) -> Any:
        return options[0]

    def flag(self) -> bool:
        return False

    def size(self) -> int:
        return next(self._sizes)

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return self.sizes(max(least, min(2, most)))

    def dim(self, rank: int) -> int:
        return rank - 1

    def dims(self, rank: int) -> list[int]:
        return [rank - 1]


def operators_page(generated: str) -> str:
    """Markdown: one table for each file of ``ops``."""
    count = len(table.RULES)
    lines = _HEAD.format(generated=generated, count=count).split("\n")
    for module in (*table.FILES, pointwise):
        rows = list(_rows(module))
        if rows:
            lines += ["", f"## {module.__name__.rpartition('.')[2]}", "", (inspect.getdoc(module) or "").split("\n")[0]]
            lines += ["", "| operator | pattern | decomposed | how |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _rows(module: ModuleType) -> Iterator[str]:
    rules: dict[Any, OperatorRule] = getattr(module, "RULES", {})
    if module is pointwise:
        rules = dict.fromkeys(POINTWISE, pointwise.POINTWISE)
    for target, operator in rules.items():
        if module is random:
            yield f"| `{target}` | as its shape | | draws numbers that are the same under every layout |"
            continue
        how = (inspect.getdoc(operator.rule) or "").split("\n")[0].replace("``", "`").replace("|", "\\|")
        rule = _example(target, operator)
        if rule is None:
            yield f"| `{target}` | as its shape | | {how} |"
            continue
        within = ", ".join(f"`{name}`: {what}" for name, what in rule.decompositions.items())
        how = f"{how} Reduces by {rule.reduction}." if rule.reduction != "sum" else how
        yield f"| `{target}` | `{_readable(rule)}` | {within} | {how} |"


def _example(target: Any, operator: OperatorRule) -> Rule | None:
    build = CASES.get(target) or POINTWISE.get(target)
    if build is None:
        return None
    args, kwargs = build(_Example())
    result = target(*args, **kwargs)
    outputs = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    rule = operator.rule(Call(target, args, kwargs, outputs))
    assert not isinstance(rule, Unsplit), f"{target}: {rule}"
    return rule


def _readable(rule: Rule) -> str:
    """The pattern with letters of the alphabet in place of neutral ones."""
    taken = set(re.findall(r"[A-Za-z]\w*", rule.pattern))
    free = iter([letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in taken])
    names: dict[str, str] = {}
    return re.sub(r"_\d+", lambda match: names.setdefault(match[0], next(free)), rule.pattern).replace("|", "\\|")
