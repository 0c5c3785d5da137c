"""DAPO's soft penalty, with the vector of METHODS 4.3 (TRL's)."""

import pytest

from reef.methods.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (50, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (110, -1), (10_000, -1)],
)
def test_the_penalty_grows_over_the_buffer_and_stays(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, longest=100, buffer=20, penalty=1.0) == pytest.approx(expected)


def test_the_penalty_is_scaled_and_a_buffer_may_be_the_whole_answer() -> None:
    assert overlong_penalty(90, longest=100, buffer=20, penalty=0.3) == pytest.approx(-0.15)
    assert overlong_penalty(25, longest=100, buffer=100, penalty=1.0) == pytest.approx(-0.25)
