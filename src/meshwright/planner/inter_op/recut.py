"""Improve the cuts of options: move the borders of stages as long as the simulated step becomes shorter.

The dynamic program of stages judges a cut by its slowest stage and by the sum of all stages. With few micro-batches,
this is inaccurate: the order of actions decides which collectives are hidden and when a rank waits. So the simulator
tries other cuts of the fastest options, with the work of layers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from meshwright.cost.occupancy import peak_memory
from meshwright.ir.cluster import Cluster
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods, simulated_s
from meshwright.planner.inter_op.works import LayerWorks

NEAR, MOST_SIMULATED, MOST_CUT = 1.1, 12, 3
"""At most ``MOST_SIMULATED`` options are simulated. They take at most ``NEAR`` times as long as the fastest option. The
cuts of the ``MOST_CUT`` fastest options are improved."""
MOST_PASSES = 16
"""The largest product of stages and micro-batches for which cuts are simulated. Beyond it, the dynamic program is
accurate enough, because steps are long, and many simulations would take long."""
FAR = (1, 2, 4)
"""The numbers of layers by which a border is moved."""
MOST_TRIED = 8
"""The number of cuts that are simulated before a border is moved. They are the fastest cuts by the closed form."""
LEAST_GAIN = 1e-3
"""The smallest relative gain for which a border is moved."""


@dataclass(frozen=True)
class Recut:
    """Improves the cut of an option. ``works`` has, for each stage, the work of the layers on the devices of this
    stage. ``limits`` has the memory of each pipeline rank."""

    pipelines: Pipelines
    cluster: Cluster
    option: Option
    works: Sequence[LayerWorks]
    limits: Sequence[float]

    @property
    def before(self) -> list[range]:
        """The layers of each stage before the cut is changed."""
        return self.pipelines.chain.stages_of(self.option.firsts)

    def estimated(self, stages: Sequence[range]) -> Option | None:
        """The option with these stages, with its time by the closed form; None if it does not fit in memory."""
        pipelines, layout = self.pipelines, self.option.layout
        work = pipelines.assembled(layout, stages, self.works)
        memory = peak_memory(work, periods(layout)[0])
        if any(rank.peak_bytes > limit for rank, limit in zip(memory, self.limits, strict=True)):
            return None
        predicted = pipelines.predicted(layout, work, self.cluster)
        return msgspec.structs.replace(
            self.option,
            firsts=pipelines.chain.firsts_of(stages),
            work=work,
            predicted=predicted,
            step_s=predicted.step_s,
            memory=max(memory, key=lambda rank: rank.peak_bytes),
        )

    def simulated(self, option: Option) -> Option:
        """The option with its simulated time."""
        return msgspec.structs.replace(option, step_s=simulated_s(option.layout, option.work, self.cluster))

    def at(self, stages: Sequence[range]) -> Option | None:
        """The option with these stages, simulated; None if it does not fit in memory."""
        estimated = self.estimated(stages)
        return None if estimated is None else self.simulated(estimated)

    def best(self, stages: Sequence[range]) -> Option | None:
        """The best option that can be reached from these stages. Each round makes the single move that shortens the
        step the most. None if these stages do not fit in memory, and no single move makes them fit."""
        best_option = self.at(stages)
        while len(stages) * self.option.layout.microbatches <= MOST_PASSES:
            others = [(other, cut) for cut in moved(stages) if (other := self.estimated(cut)) is not None]
            others.sort(key=lambda other: other[0].step_s)
            tried = [(self.simulated(other), cut) for other, cut in others[:MOST_TRIED]]
            if not tried:
                break
            fastest, cut = min(tried, key=lambda other: other[0].step_s)
            if best_option is not None and fastest.step_s > (1 - LEAST_GAIN) * best_option.step_s:
                break
            best_option, stages = fastest, cut
        return best_option


def moved(stages: Sequence[range], far: Sequence[int] = FAR) -> Iterator[list[range]]:
    """All cuts in which one border, or two neighbouring borders together, are moved by some layers up or down.

    For a distance of one layer:

    0 1 2 | 3 4 | 5      becomes      0 1 | 2 3 4 | 5      0 1 2 3 | 4 | 5      0 1 2 | 3 | 4 5      0 1 | 2 3 | 4 5
    """
    firsts = [stage.start for stage in stages]
    for together, distance in itertools.product((1, 2), far):
        for number, way in itertools.product(range(1, len(stages) - together + 1), (-distance, distance)):
            ends = [*firsts, stages[-1].stop]
            for border in range(number, number + together):
                ends[border] += way
            if all(first < end for first, end in itertools.pairwise(ends)):
                yield [range(first, end) for first, end in itertools.pairwise(ends)]


def recut(options: Sequence[Option], pipelines: Pipelines) -> list[Option]:
    """The options, the fastest first. The fastest of them are simulated, with the best borders of stages that were
    found. Options without stages are already simulated. ``options`` must begin with the fastest."""
    result = {option.name: option for option in reversed(options)}  # if names are equal, the fastest option is kept
    near = [option for option in options[:MOST_SIMULATED] if option.likely_s <= NEAR * options[0].likely_s]
    cuts: dict[str, Recut] = {}
    for option in near:
        layout = option.layout
        passes = layout.pp * layout.chunks * layout.microbatches
        # Strategies that were chosen under a memory limit differ from those of the priced layers.
        if layout.pp > 1 and not layout.stage_sizes and option.memory_bytes is None and passes <= MOST_PASSES:
            works = [pipelines.prices.of(msgspec.structs.replace(layout, recompute=kind)) for kind in option.recompute]
            anew = Recut(pipelines, pipelines.cluster, option, works, [pipelines.limit_bytes] * layout.pp)
            cuts[option.name], result[option.name] = anew, anew.at(anew.before) or option
    for name in sorted(cuts, key=lambda name: result[name].likely_s)[:MOST_CUT]:
        result[name] = cuts[name].best(cuts[name].before) or result[name]
    return sorted(result.values(), key=lambda option: option.likely_s)
