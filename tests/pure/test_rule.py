"""Patterns: what they mean, that they are printed as they are read, and what is said about one that cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import RuleError
from meshwright.ir import files
from meshwright.ir.placement import Partial, Shard, input_placements, output_placements
from meshwright.ir.rule import Factor, Pattern, PatternOperand, Rule, parse_pattern

MATMUL = Rule(pattern="^b s k, ^^k f -> b s f", sizes={"b": 4, "s": 6, "k": 8, "f": 10})
SOFTMAX = Rule(pattern="b !v -> b !v", sizes={"b": 4, "v": 8}, decompositions={"v": "gather"})


def test_a_letter_is_a_factor_of_every_operand_it_stands_in() -> None:
    pattern = parse_pattern("b s k, k f -> b s f")
    assert pattern.inputs == (
        PatternOperand((factor("b"), factor("s"), factor("k"))),
        PatternOperand((factor("k"), factor("f"))),
    )
    assert pattern.outputs == (PatternOperand((factor("b"), factor("s"), factor("f"))),)
    assert pattern.factor_names() == ("b", "s", "k", "f")


def test_brackets_join_factors_into_one_dim_outermost_first() -> None:
    fused = parse_pattern("b s (3 h d) -> b s 3 h d").inputs[0]
    assert fused.dims[2] == (Factor("", size=3), Factor("h"), Factor("d"))
    assert fused.find("h") == (2, 1)
    assert fused.find("b") == (0, 0)
    assert fused.find("f") is None


def test_marks() -> None:
    pattern = parse_pattern("^n c ~y !x, ^^f c !p1 -> n f ~y !x")
    assert [operand.linear for operand in (*pattern.inputs, *pattern.outputs)] == [1, 2, 0]
    assert pattern.fixed_names() == {"x", "p1"}
    assert pattern.inputs[0].dims[2] == (Factor("y", stencil=True),)


def test_a_dot_is_a_scalar_and_nothing_is_no_operand() -> None:
    assert parse_pattern("^., b -> .") == Pattern(
        (PatternOperand((), 1), PatternOperand((factor("b"),))), (PatternOperand(()),)
    )
    assert parse_pattern(" -> b").inputs == ()


def test_a_factor_that_is_missing_on_the_right_is_reduced() -> None:
    assert MATMUL.reduced("k", 0)
    assert not MATMUL.reduced("f", 0)
    vectors = Rule(pattern="b k -> b k, k", sizes={"b": 4, "k": 8})
    assert not vectors.reduced("b", 0)
    assert vectors.reduced("b", 1)


def test_what_can_be_split() -> None:
    assert all(map(MATMUL.splittable, "bskf"))
    assert not MATMUL.splittable("z")
    assert not Rule(pattern="a !b -> a", sizes={"a": 2, "b": 2}).splittable("b")


def test_a_decomposition_lets_a_fixed_factor_be_split_and_reduces_it_itself() -> None:
    assert SOFTMAX.splittable("v")
    total = Rule(pattern="b !v -> b", sizes={"b": 4, "v": 8}, decompositions={"v": "sum"})
    assert not total.reduced("v", 0)


def test_statistics_of_each_rank_are_its_own_and_other_outputs_terms() -> None:
    norm = Rule(
        pattern="!n c, c -> !n c, c, c",
        sizes={"n": 4, "c": 8, "own": 4},
        decompositions={"n": "gather", "own": "own 1"},
        joint={"own": ("n",)},
    )
    assert norm.splittable("own")
    assert [norm.owns("own", output) for output in range(3)] == [False, True, False]
    assert [norm.reduced("own", output) for output in range(3)] == [False, False, True]
    placements = [output_placements(norm, {"dp": "own"}, output, {"dp": 2}) for output in range(3)]
    assert placements == [{"dp": Shard(0)}, {}, {"dp": Partial("sum")}]
    assert input_placements(norm, {"dp": "own"}, 0, {"dp": 2}) == {"dp": Shard(0)}


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("a b", "pattern 'a b' has no '->'", "write 'inputs -> outputs'"),
        ("a (b (c)) -> a", "nested '(' in pattern 'a (b (c)) -> a'", "a dim is one flat group of factors"),
        ("a (b -> a", "unbalanced '(' in pattern 'a (b -> a'", "balance the brackets"),
        ("a b) -> a", "unbalanced ')' in pattern 'a b) -> a'", "balance the brackets"),
        ("a + b -> a", "cannot read '+ b' in pattern 'a + b -> a'", "use letters, numbers, ! ~ ^ ( )"),
        ("a ? -> a", "cannot read '?' in pattern 'a ? -> a'", "use letters, numbers, ! ~ ^ ( )"),
        ("a ! -> a", "cannot read '!' in pattern 'a ! -> a'", "use letters, numbers, ! ~ ^ ( )"),
        ("a, -> a", "an operand of 'a, -> a' is empty", "write '.' for a scalar"),
        (
            "a a -> a",
            "factor 'a' stands twice in one operand of 'a a -> a'",
            "give the second dim a letter of its own",
        ),
        (
            "(a b) a -> a",
            "factor 'a' stands twice in one operand of '(a b) a -> a'",
            "give the second dim a letter of its own",
        ),
    ],
)
def test_what_is_said_about_a_pattern_that_cannot_be_read(text: str, problem: str, remedy: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_pattern(text)
    assert str(caught.value) == f"{problem}\n  -> {remedy}"


# --- printed as read -----------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,2}", fullmatch=True)


@st.composite
def operands(draw: st.DrawFn) -> PatternOperand:
    names = iter(draw(st.lists(NAMES, unique=True, min_size=9, max_size=9)))
    dims = []
    for width in draw(st.lists(st.integers(1, 3), max_size=3)):
        factors = []
        for _ in range(width):
            mark = draw(st.sampled_from(["", "", "!", "~", "number"]))
            if mark == "number":
                factors.append(Factor("", size=draw(st.integers(1, 99))))
            else:
                factors.append(Factor(next(names), fixed=mark == "!", stencil=mark == "~"))
        dims.append(tuple(factors))
    return PatternOperand(tuple(dims), draw(st.integers(0, 2)))


PATTERNS = st.builds(
    lambda inputs, outputs: Pattern(tuple(inputs), tuple(outputs)),
    st.lists(operands(), max_size=3),
    st.lists(operands(), min_size=1, max_size=2),
)


@given(PATTERNS)
def test_a_pattern_is_printed_as_it_is_read(pattern: Pattern) -> None:
    assert parse_pattern(str(pattern)) == pattern


@given(PATTERNS)
def test_spaces_do_not_matter(pattern: Pattern) -> None:
    text = str(pattern).replace("(", " ( ").replace(")", " ) ").replace(",", " , ").replace("->", "  ->  ")
    assert parse_pattern(f"  {text} ") == pattern


@pytest.mark.parametrize("rule", [MATMUL, SOFTMAX])
def test_a_rule_survives_json(rule: Rule) -> None:
    assert files.decode(files.encode_json(rule), Rule, where="rule") == rule


def factor(name: str) -> tuple[Factor, ...]:
    return (Factor(name),)
