"""Checks before every step: the captured model has not changed, and training still uses the caller's tensors."""

import logging
from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, not_
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture import refusals
from meshwright.capture.values import CONTAINERS, MISSING, Read, is_fixed, state_of
from meshwright.comm.groups import from_every_rank
from meshwright.errors import ChangedModelError, RankError
from meshwright.runtime.state import LocalParameters

log = logging.getLogger("meshwright")

_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODE = itemgetter("training")
_VERSION = attrgetter("_version")
_TENSOR_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class Guard:
    """Compares the values that a capture has read, which are now constants of its step, with their current values.

    Nearly all comparisons test identity, in loops that run in C. A comparison takes about 0.1 microseconds.
    """

    def __init__(self, model: nn.Module, training: bool, reads_found: Sequence[Read]) -> None:
        stays = [not read.has_changed() for read in reads_found]  # a change would cause a capture in every step
        reads = list(compress(reads_found, stays))
        for read in compress(reads_found, map(not_, stays)):
            log.warning("%s: capturing the step changes it; it is not compared before steps", read.where)
        self._in_dicts = [read for read in reads if type(read.owner) is dict]
        self._dicts = [read.owner for read in self._in_dicts]
        self._names = [read.name for read in self._in_dicts]
        self._values = [read.value for read in self._in_dicts]
        # values whose contents may change in place, and values that no dict holds
        self._others = [
            read
            for read in reads
            if type(read.owner) is not dict
            or (isinstance(read.value, (Tensor, *CONTAINERS)) and not is_fixed(read.value))
        ]
        self._spaces = [vars(part) for part in model.modules()]
        self._modes = self._modes_now(training)
        members, hooks = ([space[name] for space in self._spaces for name in names] for names in (_MEMBERS, _HOOKS))
        self._empty = [registry for registry in (*members, *hooks) if not registry]
        self._members = [registry for registry in members if registry]
        self._hooks = [registry for registry in hooks if registry]
        self._held = list(chain.from_iterable(map(dict.values, self._members)))
        self._hooked = list(map(tuple, self._hooks))
        self._dtype = torch.get_default_dtype()

    def changed(self, training: bool) -> str:
        """Return in words what has changed since the step was captured; an empty text if the step may run."""
        if (
            any(self._empty)
            or sum(map(len, self._members)) != len(self._held)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._members)), self._held))
            or list(map(tuple, self._hooks)) != self._hooked
        ):
            return "the modules or hooks of the model"
        if self._modes_now(training) != self._modes:
            return "the mode (training or not) of a module"
        if torch.get_default_dtype() is not self._dtype:
            return "the default dtype"
        now = list(map(dict.get, self._dicts, self._names, repeat(MISSING)))
        if not all(map(is_, now, self._values)):
            for index, (read, value, known) in enumerate(zip(self._in_dicts, now, self._values, strict=True)):
                if value is not known:
                    if state_of(value, read.own) != read.state:
                        return _change_text(read, value)
                    self._values[index] = value  # an equal object: expect this one from now on
        return next((_change_text(read, read.now()) for read in self._others if read.has_changed()), "")

    def _modes_now(self, training: bool) -> list[bool]:
        """For each module, whether it is in training mode. If the model itself is not in the mode ``training``, all its
        modules count as switched to that mode, as ``model.train(training)`` would do."""
        modes = list(map(_MODE, self._spaces))
        return modes if modes[0] == training else [training] * len(modes)


class CallersTensors:
    """Checks that training still uses the parameters and buffers of the caller's module.

    If a parameter is whole on this rank, the caller's own tensor is trained, and training sees every write to it. If a
    parameter is split, the caller's module holds a meta tensor instead, and a write to this tensor would be lost.
    """

    def __init__(self, parameters: LocalParameters) -> None:
        self._local = parameters
        self._known = _named(parameters.model)
        standing = {name: value for name, value in parameters.given.items() if name in parameters.own}
        self._split, self._standing = list(standing), list(standing.values())
        self.accept()
        self._whole = {name: value for name, value in self._known.items() if not value.is_meta}
        self._pointers = list(map(Tensor.data_ptr, self._whole.values()))
        reads_found = {
            id(value): value
            for value in (*dict(parameters.model.named_parameters()).values(), *parameters.own.values())
        }
        self._leaves = list(reads_found.values())
        self._autocast = torch.is_autocast_enabled(parameters.device.type)

    def accept(self) -> None:
        """Accept all earlier writes to split parameters, because a load of whole tensors has now replaced all
        values."""
        self._versions = list(map(_VERSION, self._standing))

    def check(self) -> None:
        """Check before every step. Raise a ChangedModelError if the caller has written to a split parameter's meta
        tensor, or has changed a dtype, shape, device or autocast. Raise a CaptureError if a parameter has a new
        hook."""
        if list(map(_VERSION, self._standing)) != self._versions:
            now = zip(self._split, self._standing, self._versions, strict=True)
            name = next(name for name, value, version in now if value._version != version)
            raise ChangedModelError(
                "it was written to, but is split over ranks: the module holds a meta tensor in its place, and training "
                "would not see it",
                where=f"parameter {name}",
                remedy="give whole tensors to trainer.load_state_dict(...), or write to the model before parallelize",
            )
        pointers = list(map(Tensor.data_ptr, self._whole.values()))
        if pointers != self._pointers:
            self._check_kinds()
            self._pointers = pointers
        if any(any(map(hooks, self._leaves)) for hooks in _TENSOR_HOOKS):
            refusals.hooks(self._local.model, self._known)
            refusals.hooks(self._local.model, self._local.own)
        if torch.is_autocast_enabled(self._local.device.type) != self._autocast:
            raise ChangedModelError(
                f"autocast is {'off' if self._autocast else 'on'}, and was not when the step was captured",
                where="trainer",
                remedy="call steps outside of torch.autocast, and give parallelize a precision",
            )

    def check_members(self) -> None:
        """Check before a step is captured again. Raise a ChangedModelError if a parameter or buffer was added, removed
        or replaced."""
        now = _named(self._local.model)
        for name in [*self._known, *now]:
            if now.get(name) is not self._known.get(name):
                kind = "parameter" if isinstance(self._known.get(name, now.get(name)), nn.Parameter) else "buffer"
                happened = "is gone" if name not in now else "is new"
                if name in now and name in self._known:
                    happened = "is another tensor than the one that is trained"
                raise ChangedModelError(
                    f"it {happened}: the model was given other tensors after parallelize",
                    where=f"{kind} {name}",
                    remedy="give new values to trainer.load_state_dict(...); call parallelize again for other tensors",
                )

    def _check_kinds(self) -> None:
        tensors = self._local.graph.tensors
        for name, value in self._whole.items():
            known = tensors[name]
            kind = str(value.dtype).removeprefix("torch.")
            if (kind, tuple(value.shape), value.device.type) != (known.dtype, known.shape, self._local.device.type):
                raise ChangedModelError(
                    f"it is {list(value.shape)} {kind} on {value.device.type} now, and was captured as "
                    f"{list(known.shape)} {known.dtype} on {self._local.device.type}",
                    where=f"parameter or buffer {name}",
                    remedy="convert the plain model before parallelize (or use precision=), and make the trainer anew",
                )


def check_same_change(changed: str) -> None:
    """Raise a RankError on every rank if ranks capture again for different reasons. The error names the first rank
    whose reason differs from rank 0's. Every rank must call this function."""
    by_rank = from_every_rank(changed)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise RankError(
                f"{other or 'nothing'}; rank 0: {by_rank[0] or 'nothing'}. Ranks changed the model differently",
                where=f"rank {rank}",
                remedy="change the model and the numbers that it reads in the same way on every rank",
            )


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _change_text(read: Read, value: Any) -> str:
    return f"{read.where}: {read.change(value)}"
