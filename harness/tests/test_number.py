"""The number grader: exact rationals, three places, and texts made to mislead it."""

import time
from fractions import Fraction

import pytest
from reef_harness.graders import NumberGrader

BOUND_S = 20  # of this process's time: what grows faster than its input takes minutes or hours here


def grade(answer: str, gold: str, **options: object) -> tuple[str, str]:
    verdict = NumberGrader(**options).grade(answer, gold, "stop")  # type: ignore[arg-type]
    return verdict.outcome, verdict.reason_code


def final(answer: str, gold: str, **options: object) -> tuple[str, str]:
    return grade(f"<final>{answer}</final>", gold, **options)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("+12", "12"),
        ("012", "12"),
        ("12.00", "12"),
        ("1,234,567.50", "1234567.5"),
        ("-3", "\u22123"),
        ("-0", "0"),
        ("0.5", "1/2"),
        ("2/4", ".5"),
        ("5e-1", "0.5"),
        ("1e9", "1000000000"),
        ("0.30", "0.3"),
        ("50%", "50.0%"),
        ("1e999999999999", "10e999999999998"),
        ("9" * 1_000_000 + ".0", "9" * 1_000_000),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
    ],
)
def test_the_same_rational_is_correct_however_it_is_written(answer: str, gold: str) -> None:
    assert final(answer, gold) == ("correct", "equal")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.3333333333333333", "1/3"),
        ("0.30000000000000004", "0.3"),
        ("0.1000000000000000055511151231257827", "0.1"),
        ("10000000000000001", "10000000000000000"),
        ("1e999999999999", "1e999999999998"),
        ("-12", "12"),
    ],
)
def test_nothing_is_rounded(answer: str, gold: str) -> None:
    assert final(answer, gold) == ("incorrect", "wrong_value")


@pytest.mark.parametrize(
    "answer",
    ["", "twelve", "1,23", "12,34,567", ",123", "1,234,", "1.2.3", "1.", "1 234", "0x12", "10^10^10", "10**10", "1/0",
     "1/2/3", "--12", "NaN", "inf", "12 apples", "<b>12</b>", "１２", "١٢", "1\u06f2", "12\u200b", "1_2", "²",
     "1e99999999999999999999", "0,012", "00,012", "012,000"],
)  # fmt: skip
def test_whatever_is_not_one_well_formed_number_is_malformed(answer: str) -> None:
    assert final(answer, "12") == ("incorrect", "not_a_number")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("50%", "50"), ("50", "50%"), ("0.5", "50%"), ("50%", "1/2"), ("0.5%", "0.5"), ("0%", "0"), ("50\\%", "50.0")],
)
def test_a_percentage_that_may_be_the_number_meant_is_for_a_person(answer: str, gold: str) -> None:
    assert final(answer, gold) == ("review", "percent_differs")


@pytest.mark.parametrize(("answer", "gold"), [("50%", "5"), ("50", "5%"), ("1/2", "5%"), ("-50%", "50"), ("1%", "0")])
def test_a_percentage_of_another_number_is_wrong(answer: str, gold: str) -> None:
    assert final(answer, gold) == ("incorrect", "percent_differs")


def test_a_tolerance_is_relative_and_exact() -> None:
    assert final("0.3333", "1/3", tolerance=Fraction("0.0001")) == ("correct", "equal")  # off by exactly 1/10000
    assert final("0.33329", "1/3", tolerance=Fraction("0.0001")) == ("incorrect", "wrong_value")


def test_what_is_too_long_to_be_computed_is_reviewed() -> None:
    assert final("1" * 5_000 + "/3", "1/3") == ("review", "too_large")
    assert final("1e100000000", "1/3") == ("review", "too_large")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12", "no_final"),
        ("<final>12</final><final>12</final>", "several_finals"),
        ("```\n<final>11</final>\n```\n<final>12</final>", "several_finals"),
        ("```\n<final>12</final>\n```", "text_after_final"),
        ("<final>12</final> or 13", "text_after_final"),
    ],
)
def test_the_field_is_one_and_the_last_thing(text: str, reason: str) -> None:
    assert grade(text, "12") == ("incorrect", reason)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("First 10, then 12.", "12"),
        ("10 - 12", "12"),
        ("10-12", "12"),
        ("(3)-12", "12"),
        ("it is -12", "-12"),
        ("x=\u221212", "-12"),
        ("worth $1,234,567.", "1234567"),
        ("10 \u2013 12", "12"),
        ("it is **12** km", "12"),
        ("one half is 1/2", "0.5"),
        ("12.", "12"),
        ("2 * 6 => 12", "12"),
        ("2 * 6 -> 12", "12"),
        ("> 12", "12"),
        ("so\n> 12", "12"),
        ("<td class='x'>12</td>", "12"),
        ("there are 12 apples.", "12"),
        ("so $x = 12$.", "12"),
        ("(it is 12).", "12"),
        ("12,000", "12000"),
        ("1e5", "100000"),
        ("$12", "12"),
        ("12\u20ac", "12"),
        ("12 m", "12"),
        ("12 m\u00b2", "12"),
        ("1 *12*", "12"),
        ("12\\text{ cm}", "12"),
        ("12-year-old", "12"),
        ("\u7b54\u6848\u662f12\u4e2a", "12"),  # Chinese sets no blanks, and has no names of letters and digits
    ],
)
def test_the_last_number_of_a_text_is_read_whole(text: str, gold: str) -> None:
    assert grade(text, gold, where="last") == ("correct", "equal")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none", "no_number"),
        ("12, no: 13", "wrong_value"),
        ("1,23", "not_a_number"),
        ("on 1/12/2020", "not_a_number"),
        ("12 in fullwidth: １３", "strange_characters"),
    ],
)
def test_a_last_number_that_is_another_or_none_is_wrong(text: str, reason: str) -> None:
    assert grade(text, "12", where="last") == ("incorrect", reason)


@pytest.mark.parametrize(
    "text",
    ["x = - 12", "\u201312", "\uff0d12", "-$12", "-\\$12", "-\\boxed{12}", "minus 12", "-(12)", "--12", "x-12",
     "- **12**", "-" + " " * 500 + "12"],
)  # fmt: skip
def test_a_dash_before_the_last_number_leaves_its_sign_to_a_person(text: str) -> None:
    assert grade(text, "12", where="last") == ("review", "sign_unclear")
    assert grade(text, "13", where="last")[0] != "correct"
    assert NumberGrader("last").read(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "12m",  # metres, minutes, millions
        "12kg",
        "12k",
        "12i",
        "12x",  # twelve times, or a product
        "x12",  # a name, or a product
        "12a",
        "12 of x2",
        "12 of x_2",
        "12 of x_{2}",
        "_12_",
        "Rs12",
        "3rd",
        "0x12",
        "1/2m",
        "1 1/2",
        "1:12",
        "1 / 12",
        "1 + 12",
        "1 * 12",
        "1*12",
        "1 \u00d7 12",
        "12 cm^2",
        "12 cm^{2}",
        "12\\text{ cm}^2",
        "12e",
        "12 000",
        "12\\text{m}",
        "$12$m",
        "12\u00b0",
        "12^\\circ",
        "12^{\\circ}",
        "12!",
        "12 %",
        "12\\,\\%",
        "12 million",
        "12\\text{ million}",
        "$12 M",
        "12 dozen",
        "12\u00a2",
        "12\u4e07",  # times ten thousand
        "12 squared",
        "12 pi",
        "sqrt(12)",
        "f(12)",
        "the square root of 12",
        "x < 12",
        "x \u2264 12",
        "x>12",
        "n > 12",
        "\u00b112",
        "\u224812",
        "x \\approx 12",
        "\\pm 12",
        "\\Rightarrow 12",
    ],
)
def test_what_is_beside_the_last_number_may_change_it_so_a_person_looks_whatever_gold_is(text: str) -> None:
    for gold in ("12", "12000000", "7"):
        assert grade(text, gold, where="last") == ("review", "not_alone")
    assert NumberGrader("last").read(text) is None


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("10^10", "10"),
        ("2^{10}", "10"),
        ("2**10", "10"),
        ("10\u00bd", "10"),
        ("\\sqrt{10}", "10"),
        ("\\sqrt[3]{10}", "10"),
        ("\\frac{1}{10}", "10"),
        ("10\\pi", "10"),
        ("10 \\cdot 10^3", "10"),
    ],
)
def test_a_part_of_a_formula_is_no_number(text: str, gold: str) -> None:
    assert grade(text, gold, where="last") == ("incorrect", "not_a_number")


def test_the_last_box_is_a_place_too() -> None:
    assert grade("\\boxed{7} \\boxed{12}", "12", where="boxed") == ("correct", "equal")
    assert grade("12", "12", where="boxed") == ("incorrect", "no_box")


@pytest.mark.parametrize("unit", ["9", "-", ",1", " 9", "1/", "9e", ".", "9.", "x", "\u0665"])
@pytest.mark.parametrize("where", ["final", "boxed", "last"])
def test_a_megabyte_takes_no_longer_than_its_length(unit: str, where: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begun = time.process_time()
    for wrapped in (text, f"<final>{text}</final>", f"\\boxed{{{text}}}"):
        assert grade(wrapped, "12", where=where)[0] != "correct"
    assert time.process_time() - begun < BOUND_S


@pytest.mark.parametrize("gold", ["", "twelve", "1,23", "1/0", "NaN", "1" * 5_000 + "/3"])
def test_a_gold_that_is_no_number_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        final("12", gold)


def test_how_it_reads_is_part_of_its_version() -> None:
    versions = {NumberGrader().version, NumberGrader("last").version, NumberGrader(tolerance=Fraction(1, 10)).version}
    assert versions == {"2-final", "3-last", "2-final-1/10"}


def test_numbers_vote_by_their_value() -> None:
    read = NumberGrader("last").read
    assert read("0.50") == read("1/2") == "1/2"
    assert read("50%") == "50%"
    assert read("none") is None
    assert read("1e999999999") is None
