"""Make a layout lighter that does not fit in memory: by ZeRO, recomputation, other strategies, or offload."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from meshwright.errors import LayoutError, PlanError
from meshwright.ir.layout import Layout
from meshwright.planner.finalists import WholeModel
from meshwright.planner.inter_op.pipelines import RECOMPUTE, Option, Pipelines
from meshwright.planner.reasons import complexity


@dataclass
class Lighter:
    """Finds the fastest variant of a layout that fits in the limit of ``pipelines``.

    ``whole``: all layers of the model are priced one by one. ``offloads``: optimizer state may lie on the host if
    nothing else fits.
    """

    pipelines: Pipelines
    model: WholeModel
    whole: bool
    offloads: bool

    def lightest_that_fits(self, layout: Layout) -> Option:
        """The layout itself if it fits; else its fastest variant that fits; else the variant that needs the least
        memory."""
        plain = self.pipelines.option(layout, RECOMPUTE[:1])
        return plain if self._fits(plain) else self.of(plain)

    def of(self, plain: Option) -> Option:
        """The fastest variant of a layout that does not fit. If ZeRO stage 1 or 2 fits, it is taken at once, because it
        moves no more bytes than the sums of gradients. Otherwise, all ZeRO stages are compared, each with the least
        recomputation that fits. If nothing fits, the variant that needs the least memory."""
        layout = plain.layout
        zeros = (0, 1, 2, 3) if layout.dp > 1 else (0,)
        every = [msgspec.structs.replace(layout, zero=zero) for zero in zeros]
        if not self.whole and not self.offloads:  # the smallest variant says whether the others need to be priced
            smallest = self.pipelines.option(every[-1], RECOMPUTE)
            if not self._fits(smallest):
                return smallest
        levels = [level for level in every if self.pipelines.least_held_bytes(level) <= self.pipelines.limit_bytes]
        options = [plain] if layout in levels else []
        for level in levels:
            if level != layout:
                options.append(self.pipelines.option(level, RECOMPUTE[:1]))
            if self._fits(options[-1]):
                break
        if options and self._fits(options[-1]) and options[-1].layout.zero < 3:
            return options[-1]
        for option in tuple(options):
            options += self._recomputed(option)
        if self.offloads and not any(map(self._fits, options)):
            for level in every:
                moved = msgspec.structs.replace(level, offload="optimizer")
                options.append(self.pipelines.option(moved, RECOMPUTE[:1]))
                options += self._recomputed(options[-1])
        if not options:
            return self.pipelines.option(every[-1], RECOMPUTE)
        fitting = list(filter(self._fits, options))
        if not fitting:
            return min(options, key=lambda option: option.peak_bytes)
        return min(fitting, key=lambda option: (option.step_s, complexity(option.layout)))

    def _fits(self, option: Option) -> bool:
        return option.peak_bytes <= self.pipelines.limit_bytes

    def _recomputed(self, option: Option) -> Iterator[Option]:
        """An option that does not fit, with more and more recomputation until it fits; and the option whose strategies
        need less memory (see ``_careful``). Nothing for an option that fits."""
        if self._fits(option):
            return
        if (careful := self._careful(option)) is not None:
            yield careful
        for number in range(2, len(RECOMPUTE) + 1):
            again = self.pipelines.option(option.layout, RECOMPUTE[:number])
            yield again
            if self._fits(again):
                return

    def _careful(self, option: Option) -> Option | None:
        """The option with strategies that the integer program chooses under the memory limit.

        The result is None if no strategies fit, for layouts whose strategies the integer program does not choose, and
        for models whose equal blocks are priced once.
        """
        layout = option.layout
        by_rule = layout.cp > 1 or layout.ep > 1 or layout.sequence_parallel
        if not self.whole or by_rule or (layout.tp == 1 and not layout.mixed):
            return None
        light = msgspec.structs.replace(
            option, recompute=("none",) * len(option.recompute), memory_bytes=self.pipelines.limit_bytes
        )
        try:
            _, foretold = self.model.planned(light, explains=False)
        except (LayoutError, PlanError):
            return None
        found = msgspec.structs.replace(light, work=foretold.work, memory=foretold.peak, step_s=foretold.played.step_s)
        return found if self._fits(found) else None
