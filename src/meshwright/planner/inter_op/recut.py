"""Cut options anew: move the borders of stages as long as the simulated step becomes shorter.

The program of stages judges a cut by its slowest stage and the sum of all stages. With few micro-batches that is rough:
which collectives hide behind kernels, and when a rank waits, follow from the order of actions. So the cuts of the
fastest options are tried in the simulator, from the work of layers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from meshwright.cost.occupancy import peak_memory
from meshwright.ir.cluster import Cluster
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import Pipelines
from meshwright.planner.inter_op.rounds import periods, simulated_s
from meshwright.planner.inter_op.works import LayerWorks

NEAR, MOST_SIMULATED, MOST_CUT = 1.1, 12, 3
"""At most ``MOST_SIMULATED`` options are simulated: those that take at most ``NEAR`` times as long as the fastest. Of
these, the ``MOST_CUT`` fastest are cut anew."""
MOST_PASSES = 16
"""Largest number of stages times micro-batches for which cuts are simulated. With more, a step is long enough for the
program of stages to judge it, and many simulations take long."""
FAR = (1, 2, 4)
"""Numbers of layers by which a border is moved."""
MOST_TRIED = 8
"""Number of cuts that are simulated before a border is moved: those that the closed form finds fastest."""
LEAST_GAIN = 1e-3
"""Smallest relative gain for which a border is moved."""


@dataclass(frozen=True)
class Recut:
    """Cuts an option anew. ``works`` has the work of the layers for each stage, on the devices where the stage lies;
    ``limits`` has the memory of each pipeline rank."""

    pipelines: Pipelines
    cluster: Cluster
    option: Option
    works: Sequence[LayerWorks]
    limits: Sequence[float]

    @property
    def before(self) -> list[range]:
        """The layers of each stage as they are."""
        return self.pipelines.chain.stages_of(self.option.firsts)

    def estimated(self, stages: Sequence[range]) -> Option | None:
        """The option with these stages, with its time in closed form; None if it does not fit in memory."""
        pipelines, layout = self.pipelines, self.option.layout
        work = assemble(
            self.works, pipelines.chain.priced(stages), layout.pipeline, pipelines.prices.optimizer,
            accumulates=layout.microbatches > 1, codecs=pipelines.prices.codecs,
        )  # fmt: skip
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
        """The best option that is found from these stages on. In every round, the one move is made that makes the
        step shortest. None if these stages do not fit in memory, and no border that moves helps."""
        found = self.at(stages)
        while len(stages) * self.option.layout.microbatches <= MOST_PASSES:
            others = [(other, cut) for cut in moved(stages) if (other := self.estimated(cut)) is not None]
            others.sort(key=lambda other: other[0].step_s)
            tried = [(self.simulated(other), cut) for other, cut in others[:MOST_TRIED]]
            if not tried:
                break
            fastest, cut = min(tried, key=lambda other: other[0].step_s)
            if found is not None and fastest.step_s > (1 - LEAST_GAIN) * found.step_s:
                break
            found, stages = fastest, cut
        return found


def moved(stages: Sequence[range], far: Sequence[int] = FAR) -> Iterator[list[range]]:
    """All cuts in which one border, or two neighbours together, lie some layers before or behind, such as one layer.

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
    """The options, the fastest first, of which the fastest are simulated and have the best borders of stages that are
    found. Options without stages are simulated already. ``options`` has the fastest first."""
    result = {option.name: option for option in reversed(options)}  # of equal names, the fastest
    near = [option for option in options[:MOST_SIMULATED] if option.likely_s <= NEAR * options[0].likely_s]
    cuts: dict[str, Recut] = {}
    for option in near:
        layout = option.layout
        passes = layout.pp * layout.chunks * layout.microbatches
        # The strategies of a memory limit are not those of priced layers.
        if layout.pp > 1 and not layout.stage_sizes and option.memory_bytes is None and passes <= MOST_PASSES:
            works = [pipelines.prices.of(msgspec.structs.replace(layout, recompute=kind)) for kind in option.recompute]
            anew = Recut(pipelines, pipelines.cluster, option, works, [pipelines.limit_bytes] * layout.pp)
            cuts[option.name], result[option.name] = anew, anew.at(anew.before) or option
    for name in sorted(cuts, key=lambda name: result[name].likely_s)[:MOST_CUT]:
        result[name] = cuts[name].best(cuts[name].before) or result[name]
    return sorted(result.values(), key=lambda option: option.likely_s)
