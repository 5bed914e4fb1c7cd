"""Results of operators that are alike, made without running them; and rules found once."""

import gc
import itertools
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture import builder, outputs
from meshwright.capture.outputs import outputs_of
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
    outputs._forms.cache_clear()
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
    "joined, of a tuple": (aten.cat.default, lambda: ((torch.empty(2, 3), torch.empty(4, 3)),), {}),
    "several": (aten.max.dim, lambda: (torch.empty(4, 6), 1), {}),
    "parts": (aten.split.Tensor, lambda: (torch.empty(4, 6), 2), {}),
    "not all there": (aten.native_layer_norm_backward.default, lambda: (
        torch.empty(4, 6), torch.empty(4, 6), [6], torch.empty(4, 1), torch.empty(4, 1), torch.empty(6), torch.empty(6),
        [True, False, True],
    ), {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_statistics_of_batch_norm_are_made_without_their_kernel(ran: Ran, dtype: torch.dtype) -> None:
    """PyTorch has no meta kernel for them, and on fake tensors would compute on zeros of the full size: here 4 TiB."""
    real = aten.batch_norm_update_stats.default
    with torch.utils._python_dispatch._disable_current_modes():
        expected = real(torch.zeros(2, 3, 4, 4, dtype=dtype), None, None, 0.0)
    results = outputs_of(real, (torch.empty(2**20, 3, 2**10, 2**10, dtype=dtype), None, None, 0.0), {})
    assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in expected]
    assert all(type(each) is FakeTensor for each in results)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_makes_what_running_the_operator_would(ran: Ran, name: str) -> None:
    function, args, kwargs = CALLS[name]
    outputs_of(function, args(), kwargs)
    again = args()
    before = ran.count
    results = outputs_of(function, again, kwargs)
    assert ran.count == before
    wanted = function(*again, **kwargs)
    assert type(results) is type(wanted)
    for result, other in zip(*[[x] if isinstance(x, Tensor) else x for x in (results, wanted)], strict=True):
        assert (result is None) == (other is None)
        if result is not None:
            assert layout(result) == layout(other)
            given = {x.untyped_storage()._cdata for x in again if isinstance(x, Tensor)}
            assert (result.untyped_storage()._cdata in given) == (other.untyped_storage()._cdata in given)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def norm_arguments(x: Tensor, *tail: Any) -> tuple[Any, ...]:
    return x, *[torch.empty(x.shape[1], dtype=x.dtype) for _ in range(4)], *tail


def norm_gradient(x: Tensor) -> tuple[Any, ...]:
    gain, *_ = vectors = [torch.empty(x.shape[1], dtype=x.dtype) for _ in range(5)]
    return torch.empty_like(x), x, gain, *vectors[1:], True, 1e-5, [True, False, True]


def per_row(x: Tensor) -> list[Tensor]:
    return [torch.empty(*x.shape[:-1], 1, dtype=x.dtype) for _ in range(2)]


def dense(x: Tensor) -> Tensor:
    """The image as autograd gives it to the gradient of a group norm."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


GROUPS = 4, 6, 80, 3
"""The sizes of the image, as group norm takes them, and its number of groups."""
ON_META = {
    aten._native_batch_norm_legit.default: lambda x: norm_arguments(x, True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda x: (*norm_arguments(x)[:3], True, 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: lambda x: norm_arguments(x, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: norm_gradient,
    aten.native_layer_norm.default: lambda x: (x, [x.shape[-1]], image(x.shape[-1], dtype=x.dtype), None, 1e-5),
    aten.native_layer_norm_backward.default: lambda x: (
        x, x, [x.shape[-1]], *per_row(x), image(x.shape[-1], dtype=x.dtype), None, [True, True, False],
    ),
    aten.native_group_norm.default: lambda x: (x, image(6, dtype=x.dtype), None, *GROUPS, 1e-5),
    aten.native_group_norm_backward.default: lambda x: (
        dense(x), dense(x), image(4, 3, dtype=x.dtype), image(4, 3, dtype=x.dtype), image(6, dtype=x.dtype), *GROUPS,
        [True, True, False],
    ),
    aten.threshold_backward.default: lambda x: (x, x, 0),
    aten.gelu_backward.default: lambda x: (x, x),
    aten.hardtanh.default: lambda x: (x, 0.0, 6.0),
    aten.hardtanh_backward.default: lambda x: (x, x, 0.0, 6.0),
    aten.nll_loss_forward.default: lambda x: (x[:, :, 0, 0], image(len(x), dtype=torch.int64), None, 1, -100),
    aten.nll_loss_backward.default: lambda x: (
        x[0, 0, 0, 0], x[:, :, 0, 0], image(len(x), dtype=torch.int64), None, 1, -100, x[0, 0, 0, 0],
    ),
    aten.nll_loss2d_forward.default: lambda x: (
        x, image(len(x), *x.shape[2:], dtype=torch.int64), None, 1, -100,
    ),
    aten._log_softmax.default: lambda x: (x, 1, False),
    aten._log_softmax_backward_data.default: lambda x: (x, x, 1, x.dtype),
    aten._softmax_backward_data.default: lambda x: (x, x, 1, x.dtype),
    aten.upsample_bilinear2d.default: lambda x: (x, [12, 16], False),
    **{
        function: lambda x: (x,)
        for function in (
            aten.relu.default, aten.silu.default, aten.gelu.default, aten.tanh.default, aten.exp.default,
            aten.rsqrt.default, aten.neg.default, aten.clone.default,
        )
    },
    **{
        function: lambda x: (x, x[:, :1])
        for function in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.silu_backward.default)
    },
    aten.pow.Tensor_Scalar: lambda x: (x, 3),
    aten._softmax.default: lambda x: (x, 1, False),
    aten.mm.default: lambda x: (x[0, 0], x[0, 1].t()),
    aten.bmm.default: lambda x: (x[0], x[1].mT),
    aten.addmm.default: lambda x: (x[0, 0, 0, :8], x[0, 0], x[0, 1].t()),
    aten.sum.dim_IntList: lambda x: (x, [0, 2], True),
    aten.mean.dim: lambda x: (x, [1]),
    aten.view.default: lambda x: (x, [2, 2, *x.shape[1:], 1]),
    aten._unsafe_view.default: lambda x: (x, [2, 2, *x.shape[1:]]),
    aten.t.default: lambda x: (x[1, 2],),
    aten.transpose.int: lambda x: (x[1:], 0, 2),
    aten.permute.default: lambda x: (x[:, 1:], [2, 0, 3, 1]),
    aten.expand.default: lambda x: (x[:, 1:2], [-1, 5, -1, -1]),
    aten.slice.Tensor: lambda x: (x[:, 1:], 2, 1, 7, 2),
    aten.select.int: lambda x: (x[:, 1:], 1, -1),
    aten.unsqueeze.default: lambda x: (x[:, 1:], -1),
    aten.reshape.default: lambda x: (x[:, 1:], [4, 40, 10]),
    aten.detach.default: lambda x: (x[:, 1:],),
    aten.new_empty.default: lambda x: (x, [3, 5]),
    aten.masked_fill.Scalar: lambda x: (x, image(4, 1, 8, 10, dtype=torch.bool), 0.0),
    **{
        function: lambda x: (x, 2)
        for function in (
            aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.eq.Scalar, aten.ne.Scalar,
            aten.lt.Scalar, aten.gt.Scalar, aten.clamp_min.default, aten.argmax.default, aten.max.dim,
        )
    },
    aten.embedding.default: lambda x: (x[0, 0], image(3, 4, dtype=torch.int64)),
    aten.embedding_dense_backward.default: lambda x: (x, image(4, 6, 8, dtype=torch.int64), 12, -1, False),
    aten.tanh_backward.default: lambda x: (x, x),
    aten.sigmoid.default: lambda x: (x,),
    aten.sigmoid_backward.default: lambda x: (x, x),
    aten.addcmul.default: lambda x: (x, x, x[:, :1]),
    aten.amax.default: lambda x: (x, [1], True),
    aten.sum.default: lambda x: (x,),
    aten.scatter_add.default: lambda x: (x, 1, image(4, 2, 8, 10, dtype=torch.int64), x),
    aten.max_pool2d_with_indices.default: lambda x: (x, [2, 2], [2, 2]),
    aten.max_pool2d_with_indices_backward.default: lambda x: (
        x[:, :, ::2, ::2], x, [2, 2], [2, 2], [0, 0], [1, 1], False, image(4, 6, 4, 5, dtype=torch.int64),
    ),
    aten.cat.default: lambda x: ([x, x[:, :1]], 1),
    aten.index.Tensor: lambda x: (x, [None, image(3, 2, dtype=torch.int64), image(2, dtype=torch.int64)]),
}  # fmt: skip
"""Arguments from an image [4, 6, 8, 10]."""
FORMS = {
    "contiguous": lambda dtype: image(4, 6, 8, 10, dtype=dtype),
    "channels last": lambda dtype: image(4, 8, 10, 6, dtype=dtype).permute(0, 3, 1, 2),
    "transposed": lambda dtype: image(4, 6, 10, 8, dtype=dtype).transpose(2, 3),
    "expanded": lambda dtype: image(1, 6, 1, 10, dtype=dtype).expand(4, 6, 8, 10),
}


def shared(tensor: Tensor, args: tuple[Any, ...]) -> list[bool]:
    """Whose memory a result has."""
    storage = tensor.untyped_storage()._cdata
    return [argument.untyped_storage()._cdata == storage for argument in args if isinstance(argument, Tensor)]


def test_every_operator_that_is_run_on_the_meta_device_is_compared() -> None:
    assert ON_META.keys() == outputs._AS_ON_META


@pytest.mark.parametrize("function", ON_META, ids=str)
def test_what_is_found_on_the_meta_device_is_what_pytorch_finds_with_fake_tensors(ran: Ran, function: Any) -> None:
    for form, dtype in itertools.product(FORMS, (torch.float32, torch.float64, torch.bfloat16, torch.float16)):
        outputs._forms.cache_clear()
        args = ON_META[function](FORMS[form](dtype))
        before = ran.count
        results = outputs_of(function, args, {})
        assert (ran.count == before) == (dtype in (outputs._WIDE if function in outputs._NORMS else outputs._FLOATS))
        wanted = function(*args)
        for result, other in zip(*[[x] if isinstance(x, Tensor) else x for x in (results, wanted)], strict=True):
            assert (result is None) == (other is None), (form, dtype)
            if result is not None:
                assert layout(result) == layout(other), (form, dtype)
                assert shared(result, args) == shared(other, args), (form, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [*FORMS, "two dims"])
def test_a_normalization_by_given_statistics_is_not_run_as_many_operators(
    ran: Ran, form: str, dtype: torch.dtype
) -> None:
    source = image(4, 6, dtype=dtype) if form == "two dims" else FORMS[form](dtype)
    for tail, kind in itertools.product(((0.1, 1e-5), (0.0, 0.0)), {dtype, torch.float32}):
        vectors = [torch.empty(source.shape[1], dtype=kind) for _ in range(4)]
        for weight, bias in ((vectors[0], vectors[1]), (None, None)):
            args = source, weight, bias, *vectors[2:], *tail
            before = ran.count
            results = outputs_of(aten._native_batch_norm_legit_no_training.default, args, {})
            assert ran.count == before
            wanted = aten._native_batch_norm_legit_no_training.default(*args)
            assert [layout(result) for result in results] == [layout(result) for result in wanted]
            assert shared(results[0], args) == shared(wanted[0], args)


@pytest.mark.parametrize(
    "function", [aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default], ids=str
)
def test_a_batch_norm_with_given_statistics_is_not_as_on_the_meta_device(ran: Ran, function: Any) -> None:
    args = norm_arguments(image(4, 6, 8, 10), False, 0.1, 1e-5)
    assert [result.shape for result in outputs_of(function, args, {})] == [result.shape for result in function(*args)]


def test_tensors_on_several_devices_are_refused(ran: Ran) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        outputs_of(aten.add.Tensor, (torch.empty(4), torch.empty(4, device="cuda")), {})


def test_attributes_of_an_argument_are_not_the_results(ran: Ran) -> None:
    value = torch.empty(4)
    value.__dict__["scale"] = 2.0
    assert not hasattr(outputs_of(aten.relu.default, (value,), {}), "scale")


def test_numbers_that_are_equal_but_not_of_one_type_are_other_calls(ran: Ran) -> None:
    counts = torch.empty(4, dtype=torch.int64)
    dtypes = [outputs_of(aten.mul.Tensor, (counts, number), {}).dtype for number in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_is_a_part_of_a_call(ran: Ran) -> None:
    counts = torch.empty(4, dtype=torch.int64)
    first = outputs_of(aten.mul.Tensor, (counts, 0.5), {})
    torch.set_default_dtype(torch.float64)
    try:
        second = outputs_of(aten.mul.Tensor, (counts, 0.5), {})
    finally:
        torch.set_default_dtype(torch.float32)
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)


def test_what_works_in_place_runs_each_time(ran: Ran) -> None:
    value = torch.empty(4)
    before, version = ran.count, value._version
    assert all(outputs_of(aten.add_.Tensor, (value, 1), {}) is value for _ in range(3))
    assert (ran.count - before, value._version - version) == (3, 3)


def test_a_known_value_is_no_fake_tensor_like_others(ran: Ran) -> None:
    first, second = torch.tensor(1), torch.tensor(2)
    assert isinstance(first, FakeTensor)
    assert first.constant is not None
    assert [outputs_of(aten._local_scalar_dense.default, (value,), {}) for value in (first, second)] == [1, 2]


def test_views_of_one_tensor_are_told_from_two_tensors(ran: Ran) -> None:
    value = torch.empty(4)
    outputs_of(aten.add.Tensor, (value, value), {})
    apart = outputs_of(aten.add.Tensor, (torch.empty(4), torch.empty(4)), {})
    assert apart.untyped_storage()._cdata != value.untyped_storage()._cdata


def test_what_is_made_belongs_to_the_mode_of_the_call() -> None:
    for _ in range(2):
        with FakeTensorMode() as mode:
            assert outputs_of(aten.relu.default, (torch.empty(2, 7),), {}).fake_mode is mode


class Narrow(TorchFunctionMode):
    """Makes all casts casts to float16."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"dtype": torch.float16} if "dtype" in (kwargs or {}) else {})})


def test_what_a_user_does_with_functions_does_not_reach_into_operators(ran: Ran) -> None:
    value = torch.empty(3, 11, dtype=torch.bfloat16)
    with Narrow():
        assert outputs_of(aten._to_copy.default, (value,), {"dtype": torch.float32}).dtype is torch.float32
    assert outputs_of(aten._to_copy.default, (value,), {"dtype": torch.float32}).dtype is torch.float32


def test_a_users_operator_may_be_defined_anew(ran: Ran) -> None:
    with torch.library._scoped_library("tests_outputs", "FRAGMENT") as library:
        library.define("grown(Tensor value) -> Tensor")
        rows = 4
        torch.library.register_fake("tests_outputs::grown", lambda value: value.new_empty(rows), lib=library)
        operator = torch.ops.tests_outputs.grown.default
        assert outputs_of(operator, (torch.empty(2),), {}).shape == (4,)
        rows = 5
        assert outputs_of(operator, (torch.empty(2),), {}).shape == (5,)


def test_too_many_calls_are_forgotten(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outputs._forms.cache_info().maxsize == outputs.MOST_KNOWN
    monkeypatch.setattr(outputs, "_forms", lru_cache(maxsize=2)(outputs._forms.__wrapped__))
    for size in (3, 4, 5, 3):
        outputs_of(aten.neg.default, (torch.empty(size),), {})
    assert outputs._forms.cache_info().currsize == 2


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
    seen = array("B")  # a capture leaves lists as they were

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return model(batch).mean()

    try:
        gc.enable() if collects else gc.disable()
        builder.capture(model, loss, batch)
        after = gc.isenabled()
        with pytest.raises(CaptureError):
            builder.capture(model, lambda model, batch: model(batch), batch)
        assert (list(seen), after, gc.isenabled()) == ([False, False], collects, collects)
    finally:
        gc.enable()


def test_an_index_by_places_is_known_and_an_index_by_a_mask_is_not(ran: Ran) -> None:
    value, places, mask = torch.empty(4, 6), torch.empty(3, dtype=torch.int64), torch.empty(4, dtype=torch.bool)
    for _ in range(2):
        before = ran.count
        assert outputs_of(aten.index.Tensor, (value, [places]), {}).shape == (3, 6)
        assert ran.count == before
    with pytest.raises(DynamicOutputShapeException):
        outputs_of(aten.index.Tensor, (value, [mask]), {})
