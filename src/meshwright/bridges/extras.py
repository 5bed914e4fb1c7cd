"""The error for a library that a bridge needs and that is not installed."""

from meshwright.errors import LaunchError


def missing(package: str, extra: str) -> LaunchError:
    """Return the error that names the extra which brings ``package`` along."""
    return LaunchError(
        f"{package} is not installed",
        where=f"meshwright.bridges.{extra if extra != 'hf' else 'hugging_face'}",
        remedy=f"pip install 'meshwright[{extra}]'",
    )
