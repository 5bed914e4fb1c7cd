"""The worked numbers of lectures that need captured models, by the name of the example."""

from collections.abc import Callable, Iterator, Mapping

from meshwright.api import worked_models, worked_plans
from meshwright.worked import Line

_EXAMPLES: Mapping[str, Callable[[], Iterator[Line]]] = {
    "sobel": worked_models.sobel,
    "xor": worked_models.exclusive_or,
    "inter-intra": worked_plans.inter_and_intra,
    "chain": worked_plans.chain,
    "softmax-784x10": worked_models.softmax_regression,
    "cross-entropy-cat": worked_models.cross_entropy,
}


def recompute_captured(name: str) -> Iterator[Line]:
    """The lines of an example in ``worked.CAPTURED``. Models are captured, planned and trained now, on up to two ranks
    of this machine."""
    yield from _EXAMPLES[name]()
