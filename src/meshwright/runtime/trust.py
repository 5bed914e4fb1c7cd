"""What a job trusts: the token with which its processes know each other, and the code that a run file may name.

A run file is data, and may come from anywhere. Code that it names (``package.module:function``) is imported from the
project's own folder, the one in which the command runs, and from ``meshwright.models``. Any other code needs the user's
word: ``--trust``.
"""

import secrets
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from meshwright.errors import FileFormatError, LaunchError
from meshwright.runtime import launch

TOKEN, TRUST = "MESHWRIGHT_TOKEN", "MESHWRIGHT_TRUST"
"""Environment variables: the job's token, and ``1`` after ``--trust``."""
OURS = "meshwright.models"
_INSTALLED = ("site-packages", "dist-packages")


# --- the token -------------------------------------------------------------------------------------------------------


def token(store: dist.Store) -> str:
    """The token of this job: that of the environment, or a random one that its processes agree on in a store."""
    launched = launch.environment().get(TOKEN, "")
    return launched or store.compare_set(TOKEN, "", secrets.token_hex(16)).decode()


def launched_token() -> str:
    """The token that this process's launcher has set.

    Raises:
        LaunchError: there is none.
    """
    launched = launch.environment().get(TOKEN, "")
    if not launched:
        raise LaunchError("is not set", where=f"environment variable {TOKEN}", remedy="start the job with meshwright")
    return launched


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with a new random token if they have none."""
    launched = environment.get(TOKEN, "") or secrets.token_hex(16)
    return {**environment, TOKEN: launched}


def passed_on() -> dict[str, str]:
    """The variables with which the processes of a job on other machines trust what this one trusts."""
    return {name: value for name, value in with_token(launch.environment()).items() if name in (TOKEN, TRUST)}


# --- code ------------------------------------------------------------------------------------------------------------


def imported(name: str, key: str) -> Callable[..., Any]:
    """The function or class that a run file names at ``key``, as ``package.module:function``.

    Raises:
        FileFormatError: it cannot be imported; or it is not the project's own, and the user has not said ``--trust``.
    """
    module, _, attribute = name.partition(":")
    folder = Path.cwd()
    if "" not in sys.path and str(folder) not in sys.path:
        sys.path.append(str(folder))
    trusted = launch.environment().get(TRUST) == "1"
    if not trusted and not is_own(module, folder):
        raise _foreign(name, module, folder, key)
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise FileFormatError(
            f"{name!r} cannot be imported: {error}",
            where=key,
            remedy="write package.module:function; run where the package is installed, or in its folder",
        ) from None
    if not callable(function):
        raise FileFormatError(f"{name!r} is a {type(function).__name__}", where=key, remedy="name a function or class")
    origin = str(getattr(function, "__module__", None) or module)
    if not trusted and not is_own(origin, folder):  # a module's own name for another module's function
        raise _foreign(name, origin, folder, key)
    return cast(Callable[..., Any], function)


def is_own(module: str, folder: Path) -> bool:
    """Whether a module lies in a folder, and not among the packages that are installed there; or is one of our models.
    Nothing is imported. A module that is not found counts as own: importing it fails."""
    if module == OURS or module.startswith(f"{OURS}."):
        return True
    top = module.partition(".")[0]
    try:
        spec = find_spec(top) if top else None
    except (ImportError, ValueError):  # a module without a place, such as __main__
        return False
    if spec is None:
        return True
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    return bool(places) and all(_lies_in(Path(place), folder) for place in places)


def _lies_in(place: Path, folder: Path) -> bool:
    resolved = place.resolve()
    library = [Path(sysconfig.get_paths()[kind]).resolve() for kind in ("stdlib", "platstdlib")]
    is_installed = any(part in _INSTALLED for part in resolved.parts) or any(map(resolved.is_relative_to, library))
    return not is_installed and resolved.is_relative_to(folder.resolve())


def _foreign(name: str, module: str, folder: Path, key: str) -> FileFormatError:
    return FileFormatError(
        f"{name!r} is code of {module}, which does not lie in this project's folder ({folder})",
        where=key,
        remedy="add --trust if you trust this run file (MESHWRIGHT_TRUST=1 where a command has no such option), or "
        "name a function of a module in this folder",
    )
