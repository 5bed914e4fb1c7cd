"""Lower bounds on the words (elements) that ranks exchange for a matrix product."""

import math


def lower_bound(m: int, k: int, n: int, num_ranks: int) -> float:
    """The words that at least one rank must receive if each operand is stored once, in equal shares, and the work is
    divided equally (Al Daas et al. 2022, arXiv 2205.13407, theorem 3). Grids with equal parts reach this bound."""
    a, b, c = sorted((m, k, n), reverse=True)
    if num_ranks <= a / b:
        touched = (a * b + a * c) / num_ranks + b * c
    elif num_ranks <= a * b / c**2:
        touched = 2 * math.sqrt(a * b * c**2 / num_ranks) + a * b / num_ranks
    else:
        touched = 3 * (a * b * c / num_ranks) ** (2 / 3)
    return touched - (a * b + a * c + b * c) / num_ranks


def cosma_bound(m: int, k: int, n: int, num_ranks: int, memory_words: float) -> float:
    """The words that at least one rank must read or write with a memory of S words (COSMA, theorem 2). This is the
    smaller of 2 mnk / (P sqrt(S)) + S and 3 (mnk / P)^(2/3); the first term counts only if S is at most (mnk /
    P)^(2/3)."""
    volume = m * k * n / num_ranks
    square = math.pow(volume, 2 / 3)
    cubic = 3 * square
    if memory_words > square:
        return cubic
    return min(2 * volume / math.sqrt(memory_words) + memory_words, cubic)
