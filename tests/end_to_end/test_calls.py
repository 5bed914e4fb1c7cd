"""Arguments of operators as text: what is read is what was written."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from meshwright.capture.calls import read, target_of, written
from meshwright.errors import CaptureError

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from([torch.float32, torch.int64, torch.strided, torch.contiguous_format, torch.device("cuda", 1)]),
)
VALUES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)), max_leaves=8
)


@given(st.lists(VALUES, max_size=4), st.dictionaries(st.sampled_from(["dim", "dtype", "out"]), VALUES))
def test_what_is_read_is_what_was_written(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert read(written(args, kwargs, "here"), []) == (tuple(args), kwargs)


def test_tensors_are_numbered_in_order_of_appearance() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    text = written((second, [first, None]), {"weight": second, "eps": math.inf}, "here")
    assert text == "t0, [t1, None], weight=t2, eps=inf"
    assert read(text, ["x", "y", "z"]) == (("x", ["y", None]), {"weight": "z", "eps": math.inf})
    assert math.isnan(read(written((math.nan,), {}, "here"), [])[0][0])


def test_an_object_without_text_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"layers.0:op#0: an argument of this operator is a Generator"):
        written((torch.Generator(),), {}, "layers.0:op#0")


def test_operators_are_found_by_name() -> None:
    assert target_of("aten.mm.default") is torch.ops.aten.mm.default
    with pytest.raises(CaptureError, match=r"nowhere\.op\.default"):
        target_of("nowhere.op.default")
