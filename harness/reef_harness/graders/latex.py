"""The value of simple LaTeX arithmetic, by a parser of our own: exact fractions as far as they go, then 100 digits.

What is read: integers, decimals, ``+ - * / \\cdot \\times \\div``, implicit products, parentheses, ``\\frac{a}{b}``,
``\\sqrt[n]{a}``, powers, ``\\pi`` and ``e``. Nothing is ever handed to ``eval``, and everything is bounded before it is
computed, so that ``10^{10^{10}}`` costs no more than its eleven characters.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, DecimalException, DivisionByZero, InvalidOperation, Overflow, Underflow
from fractions import Fraction

MAX_LENGTH = 2_000  # characters of one expression
MAX_NESTING = 40
MAX_BITS = 20_000  # of a numerator or denominator
_DIGITS = 100  # of what is irrational
_ZERO = Decimal(10) ** -60  # a difference this small beside its terms is rounding of the 100 digits
_FINE = Decimal(10) ** -40  # what is smaller beside its sum would be lost where 50 digits are compared
_MAX_ROUNDED_BITS = 128  # of a fraction that enters the 100 digits, for the same reason

_context = Context(
    prec=_DIGITS, Emax=10**6, Emin=-(10**6), traps=[DivisionByZero, InvalidOperation, Overflow, Underflow]
)
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
)
_E = Decimal(1).exp(_context)
_GREEK = re.compile(
    r"alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon"
    r"|(?:var)?phi|chi|psi|omega"
)

Exact = Fraction | Decimal
Variables = Callable[[str], Fraction]


class NotEvaluated(Exception):  # noqa: N818
    """An expression without a value here. ``reason`` is a reason code; ``maybe`` says that it may still have one."""

    reason = "unreadable"
    maybe = False


class Unreadable(NotEvaluated):
    """No arithmetic as it is read here."""


class Undefined(NotEvaluated):
    """Division by zero: no number equals it."""

    reason = "undefined"


class Ambiguous(NotEvaluated):
    """People read it in two ways (``1/2x``, ``2\\frac{1}{2}``, ``2^10``, ``0^0``)."""

    reason = "ambiguous"
    maybe = True


class NotReal(NotEvaluated):
    """A root or a power of a negative number, or ``i``: complex numbers are not computed."""

    reason = "not_real"
    maybe = True


class TooLarge(NotEvaluated):
    """More characters, nesting or digits than are computed."""

    reason = "too_large"
    maybe = True


@dataclass(frozen=True, slots=True)
class Value:
    """A number: a Fraction is exact, a Decimal has 100 digits. ``decimal``: it was written with a decimal point."""

    number: Exact
    decimal: bool

    @property
    def whole(self) -> bool:
        """Whether it is an integer, exactly."""
        return isinstance(self.number, Fraction) and self.number.denominator == 1


def evaluate(text: str, variables: Variables | None = None) -> Value:
    """The value of an expression. ``variables`` gives letters a value; without it they are unreadable.

    Raises NotEvaluated, by its kinds: Unreadable, Undefined, Ambiguous, NotReal, TooLarge.
    """
    if len(text) > MAX_LENGTH:
        raise TooLarge(f"{len(text)} characters, at most {MAX_LENGTH}")
    parser = _Parser(_tokens(text), variables)
    try:
        number = parser.whole()
    except DivisionByZero as error:
        raise Undefined("division by zero") from error
    except DecimalException as error:
        raise TooLarge("a number out of range") from error
    return Value(number, parser.decimal)


def close(a: Exact, b: Exact, relative: Fraction) -> bool:
    """Whether ``a`` is within ``relative`` of ``b``. Fractions are compared exactly."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return abs(a - b) <= relative * abs(b)
    x, y = _rounded(a), _rounded(b)
    difference = _context.subtract(x, y).copy_abs()
    return difference <= _context.multiply(_rounded(relative), y.copy_abs())


def long(number: Exact) -> bool:
    """Whether it is a fraction with more digits than can be told from its neighbours once it is rounded."""
    return isinstance(number, Fraction) and _bits(number) > _MAX_ROUNDED_BITS


# ---- arithmetic


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _rounded(number: Exact) -> Decimal:
    if isinstance(number, Decimal):
        return number
    return _context.divide(Decimal(number.numerator), Decimal(number.denominator))


def _decimal(number: Exact) -> Decimal:
    """A number that more is computed with. One too long would take its last digits, and its difference, away."""
    if long(number):
        raise TooLarge("a number too long to be computed with what is irrational")
    return _rounded(number)


def _bounded(number: Fraction) -> Fraction:
    if _bits(number) > MAX_BITS:
        raise TooLarge(f"a number of more than {MAX_BITS} bits")
    return number


def _add(a: Exact, b: Exact) -> Exact:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a + b)
    x, y = _decimal(a), _decimal(b)
    smaller, larger = sorted((x.copy_abs(), y.copy_abs()))
    if 0 < smaller < _context.multiply(_FINE, larger):
        raise TooLarge("a sum of terms too far apart")
    total = _context.add(x, y)
    return Fraction(0) if total.copy_abs() <= _context.multiply(_ZERO, larger) else total


def _negate(a: Exact) -> Exact:
    return -a if isinstance(a, Fraction) else a.copy_negate()


def _multiply(a: Exact, b: Exact) -> Exact:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a * b)
    if a == 0 or b == 0:
        return Fraction(0)
    return _context.multiply(_decimal(a), _decimal(b))


def _divide(a: Exact, b: Exact) -> Exact:
    if b == 0:
        raise Undefined("division by zero")
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a / b)
    return _context.divide(_decimal(a), _decimal(b))


def _power(base: Exact, exponent: Exact) -> Exact:
    if base == 0:
        return _power_of_zero(exponent)
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _whole_power(base, exponent.numerator)
        if base < 0:
            raise NotReal("a broken power of a negative number")
        if exponent.denominator <= MAX_BITS:
            return _whole_power(_root(base, exponent.denominator), exponent.numerator)
    if base < 0:
        raise NotReal("a broken power of a negative number")
    return _apart(_context.power(_decimal(base), _decimal(exponent)))


def _apart(power: Decimal) -> Decimal:
    """A power that can still be told from 1. Roots of roots come as near to it as one likes."""
    if power != 1 and _context.subtract(power, Decimal(1)).copy_abs() < _FINE:
        raise TooLarge("a power too near to 1")
    return power


def _power_of_zero(exponent: Exact) -> Exact:
    if exponent == 0:
        raise Ambiguous("0^0")
    if exponent < 0:
        raise Undefined("division by zero")
    return Fraction(0)


def _whole_power(base: Exact, exponent: int) -> Exact:
    if isinstance(base, Decimal):
        return _context.power(base, Decimal(exponent))
    bits = _bits(base)
    if abs(base) == 1 or exponent == 0:
        return base if exponent % 2 else Fraction(1)
    if (bits - 1) * abs(exponent) > MAX_BITS:
        raise TooLarge("a power too large to be computed")
    return _bounded(base**exponent)


def _root(base: Exact, degree: int) -> Exact:
    """The real root; exact where it is rational."""
    if base < 0:
        if degree % 2 == 0:
            raise NotReal("an even root of a negative number")
        return _negate(_root(_negate(base), degree))
    if isinstance(base, Fraction):
        top, bottom = _whole_root(base.numerator, degree), _whole_root(base.denominator, degree)
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    return _apart(_context.power(_decimal(base), _context.divide(Decimal(1), Decimal(degree))))


def _whole_root(number: int, degree: int) -> int | None:
    """The integer whose ``degree``-th power is ``number``, or None.

    Newton's iteration in integers, from above. It starts within 2**-29 of the root, by a floating-point logarithm, and
    so takes about five steps for a root of 10,000 bits.
    """
    if number < 2 or degree == 1:
        return number
    if number.bit_length() <= degree:
        return None  # below 2**degree
    root = math.isqrt(number) if degree == 2 else _floor_root(number, degree)
    return root if root**degree == number else None


def _floor_root(number: int, degree: int) -> int:
    power, part = divmod(math.log2(number) / degree, 1)
    start = int(2**part * (1 << 52)) + (1 << 23)
    shift = int(power) - 52
    root = (start << shift if shift >= 0 else start >> -shift) + 1
    while (following := ((degree - 1) * root + number // root ** (degree - 1)) // degree) < root:
        root = following
    return root


# ---- reading

_TOKEN = re.compile(r"\s*(?:([0-9]+\.[0-9]+|\.[0-9]+|[0-9]+)|(\\[A-Za-z]+)|([-+*/^(){}\[\]A-Za-z]))", re.ASCII)
_SCIENTIFIC = re.compile(r"[0-9][eE][-+]?[0-9]")
_REPEATING = re.compile(r"\.[0-9]*\([0-9]+\)")
_TIMES = ("*", "\\cdot", "\\times")


def _tokens(text: str) -> list[str]:
    if _SCIENTIFIC.search(text):
        raise Ambiguous("e may be Euler's number or a power of ten: write \\times 10^{n}")
    if _REPEATING.search(text):
        raise Ambiguous("0.3(3) may be a product, or a decimal that repeats")
    tokens, position = [], 0
    end = len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if not found:
            raise Unreadable(f"not arithmetic: {text[position : position + 20]!r}")
        tokens.append(found[found.lastindex or 0])
        position = found.end()
    return tokens


class _Parser:
    """Recursive descent that computes as it reads; only brackets and arguments nest."""

    def __init__(self, tokens: list[str], variables: Variables | None) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0
        self._depth = 0
        self._variables = variables
        self.decimal = False

    def whole(self) -> Exact:
        value = self._sum()
        if self._next:
            raise Unreadable(f"unexpected {self._next!r}")
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self, expected: str | None = None) -> str:
        token = self._next
        if not token or (expected is not None and token != expected):
            raise Unreadable(f"expected {expected or 'more'}, got {token or 'the end'!r}")
        self._at += 1
        return token

    def _sum(self) -> Exact:
        total = self._signed_product()
        while self._next in ("+", "-"):
            total = _add(total, self._signed_product())
        return total

    def _signed_product(self) -> Exact:
        sign = self._take() if self._next in ("+", "-") else "+"
        product = self._product()
        return _negate(product) if sign == "-" else product

    def _product(self) -> Exact:
        value = self._factor()
        slashed = False
        while True:
            if self._next in _TIMES:
                self._take()
                value = _multiply(value, self._signed_factor())
            elif self._next in ("/", "\\div"):
                if slashed:
                    raise Ambiguous("a/b/c")
                self._take()
                slashed = True
                value = _divide(value, self._signed_factor())
            elif self._starts_factor(self._next):
                if slashed:
                    raise Ambiguous("1/2x may be (1/2)x or 1/(2x)")
                self._refuse_digits_side_by_side()
                value = _multiply(value, self._factor())
            else:
                return value

    def _refuse_digits_side_by_side(self) -> None:
        before, after = self._tokens[self._at - 1], self._next
        if _is_number(after):
            raise Ambiguous(f"{before!r} beside {after!r}: a product, or one number?")
        if _is_number(before) and after == "\\frac":
            raise Ambiguous("a mixed number, or a product?")

    def _starts_factor(self, token: str) -> bool:
        return _is_number(token) or token in ("(", "{") or token.isalpha() or (token[:1] == "\\" and token != "\\div")

    def _signed_factor(self) -> Exact:
        if self._next == "-":
            self._take()
            return _negate(self._factor())
        return self._factor()

    def _factor(self) -> Exact:
        base = self._atom()
        if self._next != "^":
            return base
        self._take()
        if _is_number(self._next) and len(self._next) > 1:
            raise Ambiguous("without braces only one digit is in the exponent")
        exponent = self._argument()
        if self._next == "^":
            raise Ambiguous("a^b^c without braces")
        return _power(base, exponent)

    def _atom(self) -> Exact:
        token = self._take()
        if _is_number(token):
            return self._literal(token)
        if token in ("(", "{"):
            return self._nested({"(": ")", "{": "}"}[token])
        match token:
            case "\\frac":
                top = self._argument()
                return _divide(top, self._argument())
            case "\\sqrt":
                return self._sqrt()
            case "\\pi":
                return _PI
            case "e":
                return _E
            case "i":
                raise NotReal("i")
        return self._variable(token)

    def _literal(self, token: str) -> Fraction:
        if len(token) * 3 > MAX_BITS:
            raise TooLarge(f"a number of {len(token)} digits")
        self.decimal = self.decimal or "." in token
        return Fraction(token)

    def _nested(self, closing: str) -> Exact:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise TooLarge(f"nested more than {MAX_NESTING} deep")
        value = self._sum()
        self._take(closing)
        self._depth -= 1
        return value

    def _argument(self) -> Exact:
        """What a command or ``^`` takes: a braced group, one digit, one letter, ``\\pi``."""
        token = self._take()
        if token == "{":
            return self._nested("}")
        if _is_number(token):
            if len(token) == 1:
                return self._literal(token)
            if len(token) == 2 and token.isdigit() and self._tokens[self._at - 2] == "\\frac":  # \frac12
                self._tokens[self._at - 1 : self._at] = [token[0], token[1]]
                return self._literal(token[0])
            raise Ambiguous(f"which digits of {token!r} belong to it?")
        if token == "\\pi":
            return _PI
        if len(token) == 1 and token.isalpha():
            self._at -= 1
            return self._atom()
        if token in ("-", "+"):
            raise Ambiguous("without braces only the sign is in the exponent")
        raise Unreadable(f"expected braces, got {token!r}")

    def _sqrt(self) -> Exact:
        degree: Exact = Fraction(2)
        if self._next == "[":
            self._take()
            degree = self._nested("]")
        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= MAX_BITS:
            raise Unreadable("a root's degree must be a positive integer")
        return _root(self._argument(), int(degree))

    def _variable(self, token: str) -> Exact:
        name = token.removeprefix("\\")
        known = _GREEK.fullmatch(name) is not None if token[0] == "\\" else len(name) == 1 and name.isalpha()
        if self._variables is None or not known:
            raise Unreadable(f"no number: {token!r}")
        return self._variables(name)


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."
