"""Replaces the calls of opaque regions while a step is traced: each call becomes one operator."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.capture.opaque import TENSOR, OpaqueRegions, RegionCall, refusal, same, without_tensors
from meshwright.capture.provenance import Provenance
from meshwright.errors import CaptureError
from meshwright.ir.opaque import OpaqueCall, OpaqueResult
from meshwright.ops import opaque as operators
from meshwright.torch_private import disable_current_modes, pytree


class StandIns:
    """Replaces the calls of a model's opaque regions, whose results are known from eager runs or from ``outputs``."""

    def __init__(self, model: nn.Module, regions: OpaqueRegions) -> None:
        self._model, self._regions = model, regions
        self._paths = {id(model.get_submodule(path)): path for path in regions.settings}
        self._counts: Counter[str] = Counter()

    @contextmanager
    def in_place(self, provenance: Provenance, size: int) -> Iterator[None]:
        """Replace regions in a trace of a batch of ``size`` samples."""
        plain = nn.Module.__call__
        self._counts.clear()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None:
                return plain(module, *args, **kwargs)
            with provenance.inside(module):
                provenance.see()
                return self._called(path, module, (args, kwargs), size)

        with patch.object(nn.Module, "__call__", call):
            yield

    def _called(self, path: str, module: nn.Module, given: Any, size: int) -> Any:
        leaves, spec = pytree.tree_flatten(given)
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        key = path, self._counts[path]
        self._counts[path] += 1
        tensors = [*arguments, *parameters.values(), *buffers.values()]
        differs = [index for index, value in enumerate(tensors) if value.requires_grad]
        setting = self._regions.settings[path]
        if (sampled := self._regions.samples.get(key)) is not None:
            modes = {name: part.training for name, part in module.named_modules()}
            region = replace(sampled.region, modes=modes)
            if spec != region.spec or not same(without_tensors(leaves), region.constants):
                raise _unlike(path, "with other arguments than on the example batch")
            call = OpaqueCall(
                region=path, number=key[1], results=sampled.results_at(size), batch_dim=sampled.batch_dim,
                rows=sampled.rows, samples=size if sampled.rows else 0, reason=sampled.reason, random=sampled.random,
                needs=tuple(differs) if sampled.given else (), given=sampled.given if differs else (),
            )  # fmt: skip
        elif setting.outputs is not None:
            region, stated = self._given_by_user(path, module, (leaves, spec), [*parameters, *buffers])
            floats = tuple(at for at, each in enumerate(stated) if getattr(torch, each.dtype).is_floating_point)
            call = OpaqueCall(
                region=path, number=key[1], results=stated, needs=tuple(differs) if floats else (),
                given=floats if differs else (),
                reason="opaque region, not split by samples: it was not run on an example batch",
            )  # fmt: skip
        elif self._regions.samples:
            raise _unlike(path, f"{key[1] + 1} times, and was called {key[1]} times on the example batch")
        else:
            raise refusal(
                path,
                "the shapes of its results are not known: the model or the batch is on the meta device, and "
                "cannot be run",
                remedy="give them: mw.opaque(module, outputs=lambda x: torch.empty_like(x)), or pass real tensors",
            )
        self._regions.calls[key] = region
        results = operators.run(call, tensors)
        outputs, new = results[: len(results) - len(region.changes)], results[len(results) - len(region.changes) :]
        for name, value in zip(region.changes, new, strict=True):
            self._replace_buffer(buffers[name], value)
        filled = iter(outputs)
        return pytree.tree_unflatten(
            [next(filled) if leaf is TENSOR else leaf for leaf in region.out_constants], region.out_spec
        )

    def _replace_buffer(self, old: Tensor, new: Tensor) -> None:
        """Put the new value of a buffer into each module that holds the buffer."""
        for module in self._model.modules():
            for name, value in module._buffers.items():
                if value is old:
                    module._buffers[name] = new

    def _given_by_user(
        self, path: str, module: nn.Module, given: tuple[list[Any], pytree.TreeSpec], names: list[str]
    ) -> tuple[RegionCall, tuple[OpaqueResult, ...]]:
        """The call and its results, by the user's function ``outputs``."""
        leaves, spec = given
        outputs = self._regions.settings[path].outputs
        assert outputs is not None
        with disable_current_modes():
            like = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(like, spec)
            try:
                out_leaves, out_spec = pytree.tree_flatten(outputs(*args, **kwargs))
            except Exception as error:
                raise refusal(
                    path,
                    f"outputs= fails: {type(error).__name__}: {error}",
                    remedy="make it return tensors like the region's results from tensors like its arguments",
                ) from error
        results = tuple(
            OpaqueResult(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
            for leaf in out_leaves if isinstance(leaf, Tensor)
        )  # fmt: skip
        modes = {name: part.training for name, part in module.named_modules()}
        constants, out_constants = without_tensors(leaves), without_tensors(out_leaves)
        precision = self._regions.precision
        return RegionCall(path, module, spec, constants, out_spec, out_constants, names, (), modes, precision), results


def _unlike(path: str, how: str) -> CaptureError:
    return refusal(
        path,
        f"it is called {how}",
        remedy="mark the module around it, whose arguments do not change",
    )
