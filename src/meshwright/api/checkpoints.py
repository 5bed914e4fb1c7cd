"""Checkpoints as files, for the command line: listed, verified, written anew, exported."""

from pathlib import Path

import torch

from meshwright.catalog.models.hugging_face import load_config
from meshwright.errors import CheckpointError
from meshwright.runtime import checkpoint_files
from meshwright.runtime.checkpoint_files import CheckpointSummary
from meshwright.runtime.object_path import place_of


def list_checkpoints(path: str) -> list[CheckpointSummary]:
    """The checkpoint at a path or URL, or those in a directory of checkpoints or of a run, the latest first.

    Raises:
        CheckpointError: there is none.
    """
    return checkpoint_files.summaries(path)


def verify_checkpoint(path: str) -> int:
    """Compare all checksums of one checkpoint. Return the number of bytes that were read.

    Raises:
        CheckpointError: it is damaged, or is no checkpoint.
    """
    return checkpoint_files.verify_files(place_of(path))


def reshard_checkpoint(path: str, target: str, num_ranks: int) -> str:
    """Write a checkpoint, or the latest of a directory, anew with a file for each of ``num_ranks`` ranks. Return the
    path of the checkpoint that was read.

    Raises:
        CheckpointError: it is damaged, ``target`` holds other files, or the disk has no room.
    """
    chosen = checkpoint_files.chosen(path)
    checkpoint_files.reshard(chosen, place_of(target), num_ranks)
    return f"{chosen}"


def export_checkpoint(
    path: str, folder: Path, *, config: str = "", dtype: str = "", max_file_bytes: int = checkpoint_files.MAX_FILE_BYTES
) -> tuple[str, int]:
    """Write the weights of a checkpoint, or of the latest of a directory, as a folder of Hugging Face. Return the path
    of the checkpoint that was read, and the number of tensors.

    Args:
        config: path of the config.json to put beside the weights; empty: none.
        dtype: the dtype of floating-point tensors in the files; empty: their own.

    Raises:
        CheckpointError: the checkpoint is damaged, the folder holds weights already, or the dtype is unknown.
        FileFormatError: the config cannot be read.
    """
    kind = getattr(torch, dtype, None) if dtype else None
    if dtype and (not isinstance(kind, torch.dtype) or not kind.is_floating_point):
        remedy = "write float32, bfloat16 or float16"
        raise CheckpointError(f"{dtype!r} is no floating-point dtype", where="--dtype", remedy=remedy)
    known = load_config(config) if config else None
    chosen = checkpoint_files.chosen(path)
    count = checkpoint_files.export(chosen, folder, config=known, dtype=kind, max_file_bytes=max_file_bytes)
    return f"{chosen}", count
