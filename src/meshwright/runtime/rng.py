"""Seeds: of a module by its path, of a step by its number."""

import zlib

from meshwright.ops.library import mix


def named_seed(seed: int, name: str) -> int:
    """The seed of something with a name, the same on every rank."""
    return mix(seed, zlib.crc32(name.encode()))


def step_key(seed: int, step: int, microbatch: int = 0) -> int:
    """The random key of one micro-batch of one step; operators mix their own salt into it."""
    return mix(seed, step, microbatch)
