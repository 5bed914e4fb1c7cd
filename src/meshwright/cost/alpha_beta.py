"""Published times of collectives on equal links: latency α, seconds per element β, seconds per addition γ.

One message of n elements takes α + nβ, and nγ where it is added; a rank sends one and takes one at a time. p ranks, of
which the star's server is one more, all to all; n elements a vector. For powers of two.
"""

import math
from collections.abc import Callable, Mapping

Formula = Callable[[int, float, float, float, float], float]
"""(p, n, α, β, γ) to seconds."""


def star_s(p: int, n: float, alpha_s: float, beta_s: float, gamma_s: float) -> float:
    """2pα + 2pnβ + pnγ: a parameter server beside the p ranks."""
    return 2 * p * alpha_s + 2 * p * n * beta_s + p * n * gamma_s


def tree_s(p: int, n: float, alpha_s: float, beta_s: float, gamma_s: float) -> float:
    """2α lg p + 2βn lg p + γn lg p: up and down a binomial tree."""
    return math.log2(p) * (2 * alpha_s + 2 * n * beta_s + n * gamma_s)


def butterfly_s(p: int, n: float, alpha_s: float, beta_s: float, gamma_s: float) -> float:
    """α lg p + βn lg p + γn lg p: recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.4)."""
    return math.log2(p) * (alpha_s + n * beta_s + n * gamma_s)


def rabenseifner_s(p: int, n: float, alpha_s: float, beta_s: float, gamma_s: float) -> float:
    """2α lg p + 2((p-1)/p)nβ + ((p-1)/p)nγ: recursive halving and doubling (the same)."""
    return 2 * math.log2(p) * alpha_s + (p - 1) / p * n * (2 * beta_s + gamma_s)


def ring_s(p: int, n: float, alpha_s: float, beta_s: float, gamma_s: float) -> float:
    """2(p-1)α + 2((p-1)/p)nβ + ((p-1)/p)nγ (Patarasuk, Yuan 2009)."""
    return 2 * (p - 1) * alpha_s + (p - 1) / p * n * (2 * beta_s + gamma_s)


ALL_REDUCE_S: Mapping[str, Formula] = {
    "star": star_s,
    "tree": tree_s,
    "butterfly": butterfly_s,
    "rabenseifner": rabenseifner_s,
    "ring": ring_s,
}
"""By the names of ``schedules.collectives``."""
