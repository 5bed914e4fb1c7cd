"""A vertex that trains: its run file with changed keys, the training itself, and its weights as a file."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import config
from meshwright.errors import JobError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.job_graph import TrainVertex
from meshwright.ir.run import Run

if TYPE_CHECKING:
    from meshwright.api import Trained

MAIN = "import sys; from meshwright.jobs.training import main; sys.exit(main(sys.argv[1]))"
"""The program that a process of a training vertex runs; its argument is the path of a ``Training``."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What to train: the tables of a run file, the number of ranks, the directory of the run, and the paths of the
    outputs by name."""

    run: dict[str, Any]
    where: str
    ranks: int
    directory: str
    outputs: dict[str, str]


def run_of(vertex: TrainVertex, folder: Path, paths: Mapping[str, str]) -> dict[str, Any]:
    """The tables of the vertex's run file with the keys of ``set``, in which ``{NAME}`` stands for the path of an
    input.

    Raises:
        FileFormatError: the run file cannot be read.
        JobError: a key of ``set`` lies below a key that is no table.
    """
    raw = config.read(folder / vertex.run)
    for key, value in vertex.set.items():
        *outer, last = key.split(".")
        table: Any = raw
        for name in outer:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise JobError(f"{name} is no table", where=f"set.{key}", remedy="write SECTION.KEY of the run file")
        table[last] = value.format(**paths) if isinstance(value, str) else value
    if vertex.plan:
        raw["layout"] = {"plan": str(folder / vertex.plan)}
    return raw


def main(path: str) -> int:
    """Train, and write the outputs. The exit code: 0, or 2 after an error, which is printed."""
    _show_log()
    try:
        _train(files.load(path, Training))
    except MeshwrightError as error:
        sys.stderr.write(f"meshwright: {error}\n")
        return 2
    return 0


def _train(training: Training) -> None:
    from meshwright import api, report

    directory = Path(training.directory)
    run = config.make(training.run, where=training.where)
    settings = msgspec.structs.replace(run.train, directory=str(directory), ranks=training.ranks)
    run = msgspec.structs.replace(run, train=settings)
    again = api.Restarts(directory / "checkpoints", logging.getLogger("meshwright").warning)
    api.run_ranks(_on_rank, run, num_ranks=training.ranks, directory=directory, again=again)
    outputs = {name: Path(path) for name, path in training.outputs.items()}
    if "losses" in outputs:
        metrics = report.read_run(directory).metrics
        value = {"losses": metrics.losses, "held_out": metrics.held_out}
        files.write_atomically(outputs["losses"], msgspec.json.encode(value))
    if "weights" in outputs:
        _export(run, directory, outputs["weights"])
    if "run" in outputs:
        outputs["run"].symlink_to(directory, target_is_directory=True)


def _on_rank(run: Run) -> "Trained":
    """Train as one rank; rank 0 shows the log."""
    from meshwright import api

    if api.launched_rank() == 0:
        _show_log()
    return api.train(run)


def _show_log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)


def _export(run: Run, directory: Path, path: Path) -> None:
    """Write the whole parameters and buffers of the run's last checkpoint to a file, by their names in the model."""
    from meshwright import api, build
    from meshwright.ir.layout import Layout

    trainer = api.trainer_of(run, next(iter(build.DataSource(run).training())), Layout())
    trainer.load_latest(directory / "checkpoints")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.full_state_dict().items()}
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise JobError(
                "safetensors is not installed", where=path.name, remedy="pip install safetensors, or write weights.npz"
            ) from None
        save_file(weights, path)
        return
    if narrow := [name for name, tensor in weights.items() if "bfloat16" in str(tensor.dtype)]:
        remedy = 'write weights = "weights.safetensors"'
        raise JobError(f"{narrow[0]} is in bfloat16, which .npz files cannot hold", where=path.name, remedy=remedy)
    from meshwright.jobs.values import encode

    path.write_bytes(encode({name: tensor.numpy() for name, tensor in weights.items()}, "arrays"))
