"""Results of operators that are alike, made without running them; and rules found once."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture import builder
from meshwright.capture.outputs import Outputs
from meshwright.capture.rules import Rules
from meshwright.errors import CaptureError
from meshwright.ops.base import Call

aten = torch.ops.aten


class Ran(TorchDispatchMode):
    """Counts the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def ran() -> Iterator[Ran]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Ran() as mode:
        yield mode


def layout(value: Tensor) -> tuple[object, ...]:
    keys = torch._C._dispatch_keys(value)
    return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, keys, [
        *value.__dict__
    ]  # fmt: skip


CALLS = {
    "product": (aten.mm.default, lambda: (torch.empty(4, 6), torch.empty(6, 8)), {}),
    "transposed": (aten.t.default, lambda: (torch.empty(4, 6),), {}),
    "part": (aten.slice.Tensor, lambda: (torch.empty(4, 6), 1, 2, 5), {}),
    "cast": (aten._to_copy.default, lambda: (torch.empty(4, 6).t(),), {"dtype": torch.bfloat16}),
    "joined": (aten.cat.default, lambda: ([torch.empty(2, 3), torch.empty(4, 3)],), {}),
    "several": (aten.max.dim, lambda: (torch.empty(4, 6), 1), {}),
    "parts": (aten.split.Tensor, lambda: (torch.empty(4, 6), 2), {}),
    "not all there": (aten.native_layer_norm_backward.default, lambda: (
        torch.empty(4, 6), torch.empty(4, 6), [6], torch.empty(4, 1), torch.empty(4, 1), torch.empty(6), torch.empty(6),
        [True, False, True],
    ), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_makes_what_running_the_operator_would(ran: Ran, name: str) -> None:
    function, args, kwargs = CALLS[name]
    outputs = Outputs()
    outputs(function, args(), kwargs)
    again = args()
    before = ran.count
    made = outputs(function, again, kwargs)
    assert ran.count == before
    wanted = function(*again, **kwargs)
    assert type(made) is type(wanted)
    for one, other in zip(*[[x] if isinstance(x, Tensor) else x for x in (made, wanted)], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert layout(one) == layout(other)
            given = {x.untyped_storage()._cdata for x in again if isinstance(x, Tensor)}
            assert (one.untyped_storage()._cdata in given) == (other.untyped_storage()._cdata in given)


def test_numbers_that_are_equal_but_not_of_one_type_are_other_calls(ran: Ran) -> None:
    outputs, counts = Outputs(), torch.empty(4, dtype=torch.int64)
    dtypes = [outputs(aten.mul.Tensor, (counts, number), {}).dtype for number in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_is_a_part_of_a_call(ran: Ran) -> None:
    outputs, counts = Outputs(), torch.empty(4, dtype=torch.int64)
    first = outputs(aten.mul.Tensor, (counts, 0.5), {})
    torch.set_default_dtype(torch.float64)
    try:
        second = outputs(aten.mul.Tensor, (counts, 0.5), {})
    finally:
        torch.set_default_dtype(torch.float32)
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)


def test_what_works_in_place_runs_each_time(ran: Ran) -> None:
    outputs, value = Outputs(), torch.empty(4)
    before, version = ran.count, value._version
    assert all(outputs(aten.add_.Tensor, (value, 1), {}) is value for _ in range(3))
    assert (ran.count - before, value._version - version) == (3, 3)


def test_a_known_value_is_no_fake_tensor_like_others(ran: Ran) -> None:
    outputs = Outputs()
    one, two = torch.tensor(1), torch.tensor(2)
    assert isinstance(one, FakeTensor)
    assert one.constant is not None
    assert [outputs(aten._local_scalar_dense.default, (value,), {}) for value in (one, two)] == [1, 2]


def test_views_of_one_tensor_are_told_from_two_tensors(ran: Ran) -> None:
    outputs, value = Outputs(), torch.empty(4)
    outputs(aten.add.Tensor, (value, value), {})
    apart = outputs(aten.add.Tensor, (torch.empty(4), torch.empty(4)), {})
    assert apart.untyped_storage()._cdata != value.untyped_storage()._cdata


def test_the_rule_of_a_call_is_found_once_for_its_shapes(ran: Ran) -> None:
    rules = Rules({})

    def call(rows: int) -> Call:
        args = (torch.empty(rows, 6), torch.empty(6, 8))
        return Call(aten.mm.default, args, {}, (aten.mm.default(*args),))

    first, second, other = rules.of(call(4)), rules.of(call(4)), rules.of(call(5))
    assert first is second
    assert (first.flops, other.flops) == (2.0 * 4 * 6 * 8, 2.0 * 5 * 6 * 8)
    assert first.num_bytes == 4 * (4 * 6 + 6 * 8 + 4 * 8)


@pytest.mark.parametrize("collects", [True, False])
def test_a_capture_leaves_garbage_collection_as_it_was(collects: bool) -> None:
    model, batch = nn.Linear(4, 1), torch.zeros(3, 4)
    seen: list[bool] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return model(batch).mean()

    try:
        gc.enable() if collects else gc.disable()
        builder.capture(model, loss, batch)
        after = gc.isenabled()
        with pytest.raises(CaptureError):
            builder.capture(model, lambda model, batch: model(batch), batch)
        assert (seen, after, gc.isenabled()) == ([False, False], collects, collects)
    finally:
        gc.enable()
