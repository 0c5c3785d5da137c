"""The evaluator of LaTeX arithmetic beside Python's fractions, and its limits."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reef_harness.graders.latex import Ambiguous, NotEvaluated, NotReal, TooLarge, Undefined, Unreadable, evaluate
from reef_harness.graders.notation import clean


def exact(text: str) -> Fraction:
    number = evaluate(text).number
    assert isinstance(number, Fraction)
    return number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-2^{2}", "-4"),
        ("(-2)^2", "4"),
        ("1-2-3", "-4"),
        ("2+3\\cdot4", "14"),
        ("\\frac{1}{2}+\\frac{1}{3}", "5/6"),
        ("\\frac12", "1/2"),
        ("2(3+4)", "14"),
        ("(1+2)(3+4)", "21"),
        ("\\sqrt{\\frac{9}{4}}", "3/2"),
        ("\\sqrt[3]{-27}", "-3"),
        ("4^{1/2}", "2"),
        ("8^{-\\frac{2}{3}}", "1/4"),
        ("2^{3^{2}}", "512"),
        ("6\\div 4", "3/2"),
        ("2*-3", "-6"),
        ("0.1+0.2", "3/10"),
        ("\\pi-\\pi", "0"),
        ("2^{10000}/2^{9999}", "2"),
    ],
)
def test_arithmetic_is_exact(text: str, value: str) -> None:
    assert exact(text) == Fraction(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\sqrt{2}", 1.4142135623730951),
        ("\\pi^2", 9.869604401089358),
        ("e", 2.718281828459045),
        ("2^{\\pi}", 8.824977827076287),
    ],
)
def test_irrational_numbers_have_their_value(text: str, value: float) -> None:
    assert float(evaluate(text).number) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", Unreadable),
        ("1+", Unreadable),
        ("(1", Unreadable),
        ("1)", Unreadable),
        ("(1]", Unreadable),
        ("x", Unreadable),
        ("１", Unreadable),
        ("1_000", Unreadable),
        ("\\foo{1}", Unreadable),
        ("\\sqrt[0]{2}", Unreadable),
        ("\\sqrt[\\pi]{2}", Unreadable),
        ("1..2", Unreadable),
        ("1 2", Ambiguous),
        ("2\\frac{1}{2}", Ambiguous),
        ("2^10", Ambiguous),
        ("2^{3}^{2}", Ambiguous),
        ("1/2\\pi", Ambiguous),
        ("i", NotReal),
        ("\\sqrt{-1}", NotReal),
        ("1/0", Undefined),
        ("2^{20001}", TooLarge),
        ("2^{-20001}", TooLarge),
        ("\\pi^{10000000}", TooLarge),
        ("9" * 7_000, TooLarge),
        ("(" * 41 + "1" + ")" * 41, TooLarge),
    ],
)
def test_what_has_no_value_here_says_which_way(text: str, kind: type[NotEvaluated]) -> None:
    with pytest.raises(NotEvaluated) as raised:
        evaluate(text)
    assert type(raised.value) is kind


numbers = st.integers(0, 999).map(lambda n: (str(n), Fraction(n)))


def extend(inner: st.SearchStrategy[tuple[str, Fraction]]) -> st.SearchStrategy[tuple[str, Fraction]]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        pairs.map(lambda p: (f"({p[0][0]} - {p[1][0]})", p[0][1] - p[1][1])),
        pairs.map(lambda p: (f"({p[0][0]}\\cdot {p[1][0]})", p[0][1] * p[1][1])),
        pairs.filter(lambda p: p[1][1] != 0).map(lambda p: (f"\\dfrac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])),
        st.tuples(inner, st.integers(1, 3)).map(lambda p: (f"\\left({p[0][0]}\\right)^{{{p[1]}}}", p[0][1] ** p[1])),
        inner.map(lambda p: (f"\\sqrt{{ ({p[0]})^{{2}} }}", abs(p[1]))),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.recursive(numbers, extend, max_leaves=8))
def test_generated_expressions_have_the_value_that_fractions_give(expression: tuple[str, Fraction]) -> None:
    text, value = expression
    assert exact(clean(text)) == value


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="0123456789.+-*/^(){}[]\\ abcefinqrstpx,_", max_size=40))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with contextlib.suppress(NotEvaluated):
        evaluate(clean(text))
