"""LaTeX as it is compared: what changes only the look is taken away. Linear in the length of the text."""

import re
from fractions import Fraction

_UNICODE = str.maketrans(
    {
        "\u2212": "-",  # the minus sign
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u22c5": "\\cdot ",
        "\u00f7": "\\div ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u00b0": "^{\\circ}",
    }
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SAME = {
    "dfrac": "\\frac",
    "tfrac": "\\frac",
    "cfrac": "\\frac",
    "nicefrac": "\\frac",
    "sfrac": "\\frac",
    "leq": "\\le",
    "geq": "\\ge",
    "neq": "\\ne",
    "lbrace": "\\{",
    "rbrace": "\\}",
    "lbrack": "[",
    "rbrack": "]",
    "to": "\\rightarrow",
    "displaystyle": "",
    "textstyle": "",
    "limits": "",
    **dict.fromkeys(("quad", "qquad", "thinspace", "enspace"), " "),
    **dict.fromkeys(("left", "right", "big", "bigl", "bigr", "Big", "Bigl", "Bigr", "bigg", "Bigg"), ""),
}
_COMMAND = re.compile(r"\\(" + "|".join(sorted(_SAME, key=len, reverse=True)) + r")(?![A-Za-z])")
_SPACE = re.compile(r"\\\\|\\[,;: ]|[ \t\r\n~]")  # the end of a line, "\\\\", and a blank after it are not "\\ "
_SPACES = re.compile(r"(?<=(.)) +(?=(.))", re.DOTALL)
_WHOLE_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|boxed)\s?\{([^{}]*)\}")
_SCRIPT = re.compile(r"([\^_])([0-9A-Za-z])(?![0-9.])")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])(?![0-9.])")
_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:([, ])[0-9]{3})(?:\1[0-9]{3})*(?:\.[0-9]+)?")
THOUSANDS = re.compile(r"(?<![0-9])[1-9][0-9]{0,2}(?:[, ][0-9]{3})+(?![0-9])")  # within a text
_BRACED_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3})")
# One letter in another type; upright ones may be units, but for the constants e and i.
_LETTER = re.compile(
    r"(?P<before>[A-Za-z]?)\\math(?:rm\{(?P<upright>[ei])\}|(?:bf|it|sf|normal)\{(?P<other>[A-Za-z])\})"
)


def clean(text: str) -> str:
    """The same formula in one way of writing it; the texts of two answers that differ only in looks come out equal."""
    text = unwrapped(text.translate(_UNICODE).strip())
    text = text.replace("\\!", "")
    text = _COMMAND.sub(lambda found: _SAME[found[1]], text)
    text = _SPACE.sub(lambda found: found[0] if found[0] == "\\\\" else " ", text)
    text = _BRACED_COMMA.sub(",", text).replace("{:}", ":")
    text = _SPACES.sub(_space, text.strip())
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    if whole := _WHOLE_TEXT.fullmatch(text):
        text = whole[1].strip()
    text = _LETTER.sub(_letter, text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return _SCRIPT.sub(r"\1{\2}", text)


def unwrapped(text: str) -> str:
    """Without the dollars or brackets of mathematics around the whole."""
    for opening, closing in _WRAPPERS:
        inside = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            return inside.strip() if opening[0] != "$" or "$" not in inside else text
    return text


def grouped(text: str) -> bool:
    """Whether it is a number in well-formed groups of three digits, "1,234,567" or "1 234 567"."""
    return _GROUPED.fullmatch(text) is not None


def ungrouped(text: str) -> str:
    """The number without its separators."""
    return text.replace(",", "").replace(" ", "")


def spelled(number: Fraction) -> str:
    """A fraction as text, for comparing with others spelled here: in decimal, or in hexadecimal where it is long.

    Python refuses to write more than 4,300 decimal digits, since that takes quadratic time.
    """
    if max(number.numerator.bit_length(), number.denominator.bit_length()) < 10_000:
        return str(number)
    return f"{number.numerator:#x}/{number.denominator:#x}"


def _letter(found: "re.Match[str]") -> str:
    """The letter alone, kept apart from a command before it."""
    letter = found["upright"] or found["other"]
    return f"{found['before']} {letter}" if found["before"] else letter


def _space(found: "re.Match[str]") -> str:
    """One space between letters and digits, where it keeps them apart; none elsewhere."""
    before, after = found[1], found[2]
    return " " if before.isalnum() and after.isalnum() else ""
