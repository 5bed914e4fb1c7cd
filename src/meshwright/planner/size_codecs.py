"""Choose the codec of gradients for a model that is planned by its sizes."""

import msgspec

from meshwright.cost.exchange import data_group, exchange_s, shares_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import KnownCosts, estimate_step, stage_parameters
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import CANDIDATES
from meshwright.planner.codecs import AUTO, GAIN, NONE, exact_codecs


def with_codec(setup: Setup, codec: str, cluster: Cluster, known: KnownCosts | None = None) -> Setup:
    """The setup, which has no codec, with a codec for gradients. ``auto`` gives the codec that sums the gradients of
    the largest stage in the least time, if the step becomes shorter by more than ``GAIN``, or else no codec. An empty
    text considers only ``lossless``, if it was measured. ``known``: costs on this cluster that are kept for other
    setups."""
    if codec not in ("", AUTO, NONE):
        return msgspec.structs.replace(setup, codec=codec)
    texts = (*exact_codecs(cluster), *(CANDIDATES if codec == AUTO else ()))
    if codec == NONE or not texts:
        return setup
    known = known or KnownCosts(cluster)
    network, group = known.network, data_group(setup)
    if group.size < 2 or shares_memory(network, group):
        return setup
    num_bytes = max(stage_parameters(setup, stage) for stage in range(setup.pp)) * setup.element_bytes / setup.depth
    setups = [msgspec.structs.replace(setup, codec=text) for text in texts]
    coded = min(setups, key=lambda each: exchange_s(each, network, num_bytes))
    plain_s = estimate_step(setup, cluster, known).step_s
    gains = estimate_step(coded, cluster, known).step_s < (1 - GAIN) * plain_s
    return coded if gains else setup
