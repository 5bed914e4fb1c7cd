"""The part of a trainer that takes the weights of other programs, and gives its own to them."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import OptimizerError
from meshwright.ir.graph import Graph
from meshwright.runtime import safetensors_files
from meshwright.runtime.agree import everywhere, same_path
from meshwright.runtime.guards import CallersTensors
from meshwright.runtime.loss_check import LossCheck
from meshwright.runtime.object_path import place_of
from meshwright.runtime.offload import Offloader
from meshwright.runtime.precision import LossScale
from meshwright.runtime.replica import Replica
from meshwright.runtime.safetensors_files import Weight
from meshwright.runtime.saving import Saver
from meshwright.runtime.state import LocalParameters, full_state_dict, load_state_dict
from meshwright.runtime.weights import config_of, load_weights, named_in, open_weights
from meshwright.runtime.whole_optimizer import full_optimizer_state, load_optimizer_state

log = logging.getLogger("meshwright")

Path_ = str | os.PathLike[str]


class Interchange:
    """Whole weights under any layout. All ranks must call each method."""

    graph: Graph
    parameters: LocalParameters
    rank: int
    saver: Saver
    losses: LossCheck
    loss_scale: LossScale | None
    replica: Replica | None
    _optimizer: torch.optim.Optimizer | None
    _offloader: Offloader | None
    _callers: CallersTensors

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer over this rank's parameters.

        Raises:
            OptimizerError: the trainer was made without an optimizer.
        """
        if self._optimizer is None:
            remedy = "pass optimizer= to parallelize, or only evaluate"
            raise OptimizerError("this trainer has no optimizer", where="trainer", remedy=remedy)
        return self._optimizer

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Return whole tensors on the CPU by the model's own names, on rank 0. Other ranks get an empty dict, unless
        ``all_ranks``. The ``load_state_dict`` of the plain model takes this dict."""
        if self.replica is not None:
            self.replica.settle()
        return full_state_dict(self.parameters, all_ranks=all_ranks)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the whole tensors of a plain model's state dict, under any layout: the inverse of ``full_state_dict``.
        Only rank 0's tensors are used. The optimizer's state does not change.

        ``strict=False`` ignores names that the model does not have, and leaves tensors without a new value unchanged.

        Raises:
            CheckpointError: a tensor is missing, unknown or of another shape. All ranks raise it, and nothing has
                changed.
        """
        self._check_may_load()
        self._settle()
        self.saver.hold_update()
        load_state_dict(self.parameters, state_dict, strict=strict)
        self._callers.accept()

    def full_optimizer_state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return the optimizer's state as the ``state_dict()`` of the plain optimizer over the whole model has it, on
        rank 0. Other ranks get an empty dict, unless ``all_ranks``. Rank 0 must have room for whole tensors."""
        self._settle()
        return full_optimizer_state(self.parameters, self.optimizer, all_ranks=all_ranks)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the ``state_dict()`` of a plain optimizer over the whole model, under any layout: the inverse of
        ``full_optimizer_state_dict``. Only rank 0's state is used.

        Raises:
            CheckpointError: it is the state of other parameters or groups. All ranks raise it; nothing has changed.
        """
        self._check_may_load()
        self._settle()
        self.saver.hold_update()
        load_optimizer_state(self.parameters, self.optimizer, state_dict)

    def load_weights(self, path: Path_, *, strict: bool = True) -> None:
        """Load the model's tensors from weights of other programs: a folder of Hugging Face, a safetensors file, or a
        checkpoint of torch.distributed.checkpoint or of another trainer. Each rank reads the slices that it holds.
        Dtypes may differ. The optimizer's state does not change.

        ``strict=False`` leaves tensors that the weights lack unchanged.

        Raises:
            CheckpointError: there are no weights at ``path``, or they are of another model. Nothing has changed then.
                Or they cannot be read. All ranks raise it.
        """
        self._check_may_load()
        self._settle()
        self.saver.hold_update()
        names = self.names_of_weights(self.parameters.model, path, strict=strict)
        place, where = place_of(path), os.fspath(path)

        def load() -> int:
            with open_weights(place) as source:
                load_weights(self.parameters, source, names)
                return source.num_bytes

        num_bytes = everywhere(where, load)
        self._callers.accept()
        log.info("weights are loaded from %s: this rank has read %s bytes", where, f"{num_bytes:,}")

    def names_of_weights(self, model: nn.Module, path: Path_, *, strict: bool) -> dict[str, str]:
        """The name of each tensor of a model in weights that are loaded later. All ranks must call it, and raise the
        errors of ``load_weights``."""
        place, where = same_path(path)

        def look() -> dict[str, str]:
            with open_weights(place) as source:
                return named_in(model, self.graph, source, where, strict=strict)

        return everywhere(where, look)

    def save_pretrained(
        self,
        folder: Path_,
        *,
        config: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = safetensors_files.MAX_FILE_BYTES,
    ) -> None:
        """Write the model as a folder that ``from_pretrained`` of Hugging Face loads: safetensors files of at most
        ``max_file_bytes``, their index, and the config. Tensors are gathered one after the other on rank 0, which
        writes them.

        Args:
            config: the contents of config.json. Default: those of a model of Hugging Face; no file for other models.
            dtype: the dtype of floating-point tensors in the files. Default: their own.

        Raises:
            CheckpointError: the folder holds weights already, or cannot be written. All ranks raise it.
        """
        self._settle()
        place, where = same_path(folder)
        persistent = self.parameters.model.state_dict().keys()
        names = [*self.graph.parameters, *(name for name in self.graph.buffers if name in persistent)]
        left = list(names)

        def gather() -> Tensor:
            name = left.pop(0)
            return self.parameters.whole(
                name, self.parameters[name].detach() if self.parameters.holds(name) else None
            ).cpu()

        def weight(name: str) -> Weight:
            own: torch.dtype = getattr(torch, self.graph.tensors[name].dtype)
            kind = dtype if dtype is not None and own.is_floating_point else own
            return Weight(name, self.graph.tensors[name].shape, kind, gather)

        def write() -> None:
            try:
                if self.rank == 0:
                    known = config if config is not None else config_of(self.parameters.model)
                    safetensors_files.write_folder(Path(place), [*map(weight, names)], known, max_file_bytes)
            finally:
                while left:  # on ranks that do not write, and after an error: all ranks gather all tensors
                    gather()

        everywhere(where, write)

    def _check_may_load(self) -> None:
        if self.replica is not None:
            self.replica.check_may_load()

    def _settle(self) -> None:
        self.losses.settle()
        if self.loss_scale is not None:
            self.loss_scale.settle()
        if self.replica is not None:
            self.replica.settle()
        if self._offloader is not None:
            self._offloader.settle()
