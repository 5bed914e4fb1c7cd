"""Texts of operator algorithms: pieces of samples, each with the algorithm that computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.ir.operator_algorithm import CONVOLUTIONS, divide, parse, piece_sizes, text_of


@pytest.mark.parametrize(
    ("text", "samples", "pieces"),
    [
        ("fft", 5, [("fft", 5)]),
        ("2x4 fft", 8, [("fft", 4), ("fft", 4)]),
        ("7x32 winograd(2) + 1x16 gemm", 240, [("winograd(2)", 32)] * 7 + [("gemm", 16)]),
        ("2x4 fft + 1x2 gemm", 7, [("fft", 4), ("fft", 3)]),
        ("1x4 fft + 1x2 gemm", 9, [("fft", 4), ("gemm", 2), ("gemm", 2), ("gemm", 1)]),
        ("native", 0, []),
    ],
)
def test_pieces_follow_one_another_and_fit_fewer_or_more_samples(
    text: str, samples: int, pieces: list[tuple[str, int]]
) -> None:
    assert list(divide(text, samples)) == pieces


@given(st.lists(st.tuples(st.sampled_from(CONVOLUTIONS), st.integers(1, 9)), min_size=1, max_size=9))
def test_a_text_names_the_pieces_that_it_was_made_of(pieces: list[tuple[str, int]]) -> None:
    assert list(divide(text_of(pieces), sum(size for _, size in pieces))) == pieces


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fast", "'fast' is no algorithm"),
        ("8 fft", "'8 fft' is no algorithm"),
        ("8x0 fft", "'8x0 fft' computes nothing"),
        ("8x2 fft + gemm", "a piece of several has no size"),
        ("", "'' is no algorithm"),
    ],
)
def test_other_texts_are_refused(text: str, problem: str) -> None:
    with pytest.raises(PlanError, match="operator_algorithms") as error:
        parse(text)
    assert error.value.problem == problem


def test_pieces_are_powers_of_two_and_the_whole() -> None:
    assert piece_sizes(12) == [1, 2, 4, 8, 12]
    assert piece_sizes(8) == [1, 2, 4, 8]
