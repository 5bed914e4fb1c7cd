"""The memory of a product on a grid: the words (elements) that a rank holds, and the number of panels that keeps them
within a limit."""

import msgspec

from meshwright.schedules.products.grid import DIMS, Operand, ProductPlan


class Needs(msgspec.Struct, frozen=True):
    """The words that the busiest rank holds: ``fixed`` words, and ``each`` words for each unit of the largest panel.
    With several panels, the next panel is exchanged during a product, so two panels are held."""

    fixed: int
    each: int

    def words(self, width: int, panels: int) -> int:
        """The words with panels of ``width`` units."""
        return self.fixed + self.each * width * (2 if panels > 1 else 1)


def needs(plan: ProductPlan, *, gradients: bool = False) -> Needs:
    """Upper limit on the words of all operands on a rank, from its largest blocks: the stored parts, and buffers for
    blocks and panels that other ranks store. Buffers in the transport are not counted.

    ``gradients``: count the backward products, which hold A, B, the three gradients, and buffers for all of them. They
    never hold less than the forward product.
    """
    stored = {operand: _largest_part(plan, operand) for operand in DIMS}
    fixed, each = sum(stored.values()), 0
    uses: list[Operand] = [*DIMS]
    if gradients:
        fixed += stored["a"] + stored["b"]
        uses += ["a", "b"]
    for operand in uses:
        if plan.sharing(operand) == 1:
            continue
        divided = plan.largest(plan.cut_dim(operand))
        if operand == plan.stationary:
            fixed += divided * plan.largest(plan.other_dim(operand))
        else:
            each += divided
    return Needs(fixed, each)


def peak_words(plan: ProductPlan, *, gradients: bool = False) -> int:
    """Upper limit on the words that a rank holds at the same time. With ``gradients``, the backward products are
    included."""
    width = -(-plan.largest(plan.over) // plan.panels)
    return needs(plan, gradients=gradients).words(width, plan.panels)


def fewest_panels(plan: ProductPlan, memory_words: float, *, gradients: bool = False) -> int:
    """The smallest number of panels with which a rank holds at most ``memory_words``; 0 if no number suffices."""
    required, length = needs(plan, gradients=gradients), plan.largest(plan.over)
    if required.words(length, 1) <= memory_words:
        return 1
    width = int((memory_words - required.fixed) // (2 * required.each)) if required.each else 0
    return -(-length // width) if width > 0 else 0


def least_words(plan: ProductPlan, *, gradients: bool = False) -> int:
    """The smallest memory that suffices with some number of panels."""
    required, length = needs(plan, gradients=gradients), plan.largest(plan.over)
    return min(required.words(length, 1), required.words(1, 2))


def _largest_part(plan: ProductPlan, operand: Operand) -> int:
    divided, other = plan.largest(plan.cut_dim(operand)), plan.largest(plan.other_dim(operand))
    return -(-divided // plan.sharing(operand)) * other
