"""Results of an export and of reading a configuration: files, command, gaps, assumptions."""

import shlex
from importlib import metadata

import msgspec

from meshwright.export.form import Form
from meshwright.export.narrowing import Gap
from meshwright.ir.plan import Prediction


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration for a target. ``files`` maps names to contents. ``form`` is the form that the target runs, and
    ``gaps`` are the differences to the form that was asked for. ``in_code`` lists the settings that the target takes in
    the user's program. ``assumptions`` lists facts that the export could not check."""

    target: str
    form: Form
    files: dict[str, str]
    command: str
    gaps: tuple[Gap, ...] = ()
    in_code: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    planned: Prediction | None = None
    """The prediction of the plan before the export."""
    predicted: Prediction | None = None
    """The prediction of the exported form. Both predictions are for the same software."""
    software: str = ""
    """The software profile of these predictions."""
    own_software: str = ""
    """The software profile of the target, if the model is described by its sizes."""
    own_predicted: Prediction | None = None
    """The prediction of the exported form with the target's software profile."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of another trainer, as a form. ``assumptions`` lists values that the file does not give.
    ``unread`` names settings of the parallel layout that have no equivalent here."""

    source: str
    form: Form
    assumptions: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def launch(num_ranks: int, per_node: int, *words: str) -> str:
    """The torchrun command that starts ``num_ranks`` ranks on nodes of at most ``per_node`` devices."""
    each = min(num_ranks, max(1, per_node))
    while num_ranks % each:
        each -= 1
    nodes = num_ranks // each
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"] if nodes > 1 else ["--standalone"]
    start = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(each), *meet]
    return " ".join((shlex.join(start), *words))


def version_assumption(package: str, known: str) -> tuple[str, ...]:
    """The assumption about the version of a package: the export is written for version ``known``. If another version is
    installed here, the assumption names it."""
    try:
        here = metadata.version(package)
    except metadata.PackageNotFoundError:
        return (f"{package} {known}; it is not installed here, so its version was not compared",)
    if here == known:
        return ()
    return (f"{package} {known}; {here} is installed here, and may read the settings differently",)
