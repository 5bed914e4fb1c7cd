"""What the backward pass computes again, instead of keeping it from the forward pass."""

import re

import msgspec

from meshwright.ir.plan import starred

_BLOCK = re.compile(r"^(?:[^.\d][^.]*\.)*?\d+(?=\.|$)")


class Recomputation(msgspec.Struct, frozen=True):
    """What backward computes again: ``names`` are operators, or blocks (``blocks.*``); ``modules`` are by operator."""

    names: tuple[str, ...]
    modules: dict[str, str]

    def block(self, operator: str) -> str:
        """The block that holds an operator (``blocks.3``), or nothing."""
        found = _BLOCK.match(self.modules.get(operator, ""))
        return found[0] if found else ""

    def holds(self, operator: str) -> bool:
        """Whether the operator's results are computed again."""
        block = self.block(operator)
        in_block = bool(block) and starred(block + ".").rstrip(".") in self.names
        return in_block or not self.whole_block(operator)

    def whole_block(self, operator: str) -> bool:
        """Whether it is computed again as a part of its block, so that only what enters the block is kept."""
        return starred(operator) not in self.names and operator not in self.names
