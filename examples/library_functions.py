"""Real code for the examples: the functions of this Python's own standard library, as rows of tokens."""

import ast
import re
from collections import Counter
from functools import cache

import torch
from torch import Tensor

from meshwright.models.losses import IGNORED
from meshwright.runtime.corpus import by_hash, library_sources

TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\sA-Za-z\d_]")
FILL, OTHER, MARK, END = range(4)
VOCABULARY, BODY, NAME = 1500, 40, 4
"""Tokens that have a number, and tokens of the body and of the name in a row."""
Function = tuple[tuple[str, ...], tuple[str, ...]]
"""The tokens of the body, and of the name."""


def words(text: str) -> list[str]:
    """The tokens of a piece of code."""
    return [token.lower() for token in TOKEN.findall(text)]


def functions(source: str) -> list[Function]:
    """The functions of a file. Docstrings are left out."""
    pairs, lines = [], source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            first = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            code = "\n".join(lines[first[0].lineno - 1 : node.end_lineno]) if first else "pass"
            arguments = " ".join(argument.arg for argument in node.args.args)
            pairs.append((tuple(words(f"{arguments}: {code}")[:BODY]), tuple(words(node.name)[:NAME])))
    return [(body, name) for body, name in pairs if name]


@cache
def data(files: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out functions of so many files, as rows: ``tokens`` and ``targets`` [n, 45]."""
    parts: tuple[list[Function], ...] = ([], [])
    for number, (_, source) in enumerate(by_hash(library_sources())[:files]):
        parts[number % 8 == 0].extend(functions(source.decode()))
    seen = set(parts[0])
    counts = Counter(word for body, name in parts[0] for word in (*body, *name))
    numbers = {word: 4 + place for place, (word, _) in enumerate(counts.most_common(VOCABULARY - 4))}

    def rows(part: list[Function]) -> dict[str, Tensor]:
        table = torch.full((len(part), BODY + NAME + 2), FILL)
        for row, (body, name) in zip(table, part, strict=True):
            row[: len(body)] = torch.tensor([numbers.get(word, OTHER) for word in body])
            row[BODY] = MARK
            row[BODY + 1 : BODY + 2 + len(name)] = torch.tensor([*(numbers.get(word, OTHER) for word in name), END])
        targets = table[:, 1:].masked_fill((table[:, 1:] == FILL) | (table[:, 1:] == MARK), IGNORED)
        return {"tokens": table[:, :-1].contiguous(), "targets": targets.contiguous()}

    return rows(parts[0]), rows([part for part in parts[1] if part not in seen])
