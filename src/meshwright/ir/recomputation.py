"""The operators that the backward pass computes again, instead of keeping their results from the forward pass."""

import re

import msgspec

from meshwright.ir.plan import starred

_BLOCK = re.compile(r"^(?:[^.\d][^.]*\.)*?\d+(?=\.|$)")


class Recomputation(msgspec.Struct, frozen=True):
    """The operators whose results backward computes again.

    ``names`` are names of operators, of single blocks (``blocks.3``), or of all blocks of a kind (``blocks.*``).
    ``modules`` maps an operator to its module."""

    names: tuple[str, ...]
    modules: dict[str, str]

    def block(self, operator: str) -> str:
        """The block that holds an operator (``blocks.3``); empty if no block holds it."""
        match = _BLOCK.match(self.modules.get(operator, ""))
        return match[0] if match else ""

    def holds(self, operator: str) -> bool:
        """Whether backward computes the operator's results again."""
        block = self.block(operator)
        return self._is_named(operator) or (
            bool(block) and (block in self.names or starred(block + ".").rstrip(".") in self.names)
        )

    def whole_block(self, operator: str) -> bool:
        """Whether an operator is computed again as a part of its block. Then only the inputs of the block are kept.

        ``holds`` must be true for the operator."""
        return not self._is_named(operator)

    def _is_named(self, operator: str) -> bool:
        return starred(operator) in self.names or operator in self.names
