"""How many random cases hypothesis tries: few, and always the same, in `make test`; other and more in `make matrix`."""

from hypothesis import settings

PROFILE, FEW, TIMES = "test", 25, 10
"""The profile of `make test`, its cases of a test that says nothing else, and how many times more `make matrix` has."""

settings.register_profile(PROFILE, max_examples=FEW, deadline=None, derandomize=True)
settings.register_profile("matrix", max_examples=TIMES * FEW, deadline=None)


def tries(few: int) -> settings:
    """Settings of a test that tries ``few`` cases in `make test`."""
    return settings(max_examples=few * settings().max_examples // FEW)
