"""The private parts of PyTorch that Meshwright uses. They are in one module, so that a new version of PyTorch is easy
to check.

A missing name is found when this module is imported. Only Inductor, symmetric memory and checkpoints are imported on
first use, because these imports take a second. Attributes of objects that begin with an underscore
(``tensor._version``, ``module._parameters``, ``operator._schema``) are read where they are needed.
"""

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

try:
    from torch import _amp_foreach_non_finite_check_and_unscale_ as unscale_and_check
    from torch import _amp_update_scale_ as update_scale
    from torch import _scaled_mm as scaled_mm
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import _DisableTorchDispatch as DisableTorchDispatch
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
    from torch._C import _dispatch_keys as dispatch_keys
    from torch._C import _distributed_c10d
    from torch._C import _EnableTorchFunction as EnableTorchFunction
    from torch._C import _set_throw_on_mutable_data_ptr as throw_on_data_pointer
    from torch._C import _set_warn_deprecated_on_mutable_data_ptr as warn_on_data_pointer
    from torch._C._distributed_c10d import Work as Work
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
    from torch.autograd import _get_sequence_nr as sequence_number
    from torch.autograd import _profiler_enabled as is_profiling
    from torch.autograd import _record_function_with_args_enter as record_begin
    from torch.autograd import _record_function_with_args_exit as record_end
    from torch.cuda import _sleep as keep_gpu_busy
    from torch.distributed.distributed_c10d import _get_object_coll_device as _device_of_objects
    from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
    from torch.distributed.distributed_c10d import _world
    from torch.nn.modules import transformer as _transformer
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.nn.modules.transformer import _detect_is_causal_mask
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils import _pytree as pytree
    from torch.utils import checkpoint as _checkpoint
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

    make_subclass: Any = torch.Tensor._make_subclass
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"Meshwright works with PyTorch 2.13 to 2.15; this is {torch.__version__}, which lacks an internal: {error}"
    ) from error

FAKE_DEVICE = "_fake_device" if "fake_device" in vars(FakeTensor) else "fake_device"
"""The attribute of a fake tensor that holds its device: it is a property of the class since 2.12."""
CHECKPOINT_GENERATORS = tuple(
    name
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    if hasattr(_checkpoint, name)
)
"""The generators that a non-reentrant ``torch.utils.checkpoint.checkpoint`` may call: the first in 2.13, the second in
2.15."""
__all__ = [
    "CHECKPOINT_GENERATORS", "FAKE_DEVICE",
    "BatchNorm", "DisableTorchDispatch", "DisableTorchFunction", "Dropout", "EnableTorchFunction", "FakeStore",
    "FakeTensor", "FakeTensorMode", "OpOverload", "TorchDispatchMode", "UnsupportedOperatorException", "Work",
    "define_symmetric_memory", "device_of_objects", "disable_current_modes", "dispatch_keys", "dump_flight_recorder",
    "enable_symmetric_memory", "has_kernel", "inductor", "is_profiling", "is_registered", "keep_gpu_busy",
    "make_subclass", "pytree", "record_begin", "record_end", "resolve_process_group", "scaled_mm", "sequence_number",
    "storage_info", "symmetric_memory_bytes", "throw_on_data_pointer", "unread_masks", "unscale_and_check",
    "update_scale", "warn_on_data_pointer",
]  # fmt: skip


def device_of_objects(group: torch.distributed.ProcessGroup) -> torch.device:
    """The device on which a group carries objects: the CPU if the group has a backend for it."""
    return torch.device(_device_of_objects(group))


def is_registered(group: torch.distributed.ProcessGroup) -> bool:
    """Whether torch.distributed has made the group, and knows its backends."""
    return group in _world.pg_backend_config


def define_symmetric_memory() -> None:
    """Define the operators of ``torch.ops.symm_mem``."""


def enable_symmetric_memory(group_name: Any) -> None:
    """Let ``torch.ops.symm_mem`` work in a group."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions of PyTorch need no such call
        enable_symm_mem_for_group(group_name)


def symmetric_memory_bytes() -> int:
    """The bytes of the memory that this process shares with other GPUs for ``torch.ops.symm_mem``. PyTorch keeps them
    for each group, outside of its allocator's counts."""
    module = sys.modules.get("torch.distributed._symmetric_memory")  # not imported: there is none
    workspaces = {} if module is None else module._group_name_to_workspace_tensor
    return sum(each.nbytes for each in workspaces.values() if each is not None)


def storage_info(file: str, offset: int, length: int) -> Any:
    """The place of a tensor's bytes, as torch.distributed.checkpoint's index holds it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


@contextmanager
def unread_masks() -> Iterator[None]:
    """Inside the context, torch.nn's transformer layers do not test whether a mask is causal, because this test reads
    the mask's values. The mask is causal if the caller passes ``is_causal=True``."""
    layers: Any = _transformer
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        layers._detect_is_causal_mask = _detect_is_causal_mask


def dump_flight_recorder() -> str:
    """The operations that PyTorch's own flight recorder holds, as JSON; empty if it records none."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    data = dump()
    return data.decode(errors="replace") if isinstance(data, bytes) else str(data)


@functools.cache
def inductor() -> SimpleNamespace:
    """The functions of PyTorch's compiler that Meshwright uses; ``patch`` sets compiler options temporarily."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # modules that Inductor imports cause it
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.config import patch
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

    return SimpleNamespace(
        compile_fx=compile_fx, compile_fx_inner=compile_fx_inner, get_cpp_compiler=get_cpp_compiler,
        InvalidCxxCompiler=InvalidCxxCompiler, patch=patch,
    )  # fmt: skip
