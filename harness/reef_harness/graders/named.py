"""Graders by name, for the command line and configuration files."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from types import ModuleType

from reef_harness.graders.base import Grader
from reef_harness.graders.boxed import BoxedGrader
from reef_harness.graders.choice import ChoiceGrader
from reef_harness.graders.final import FinalGrader
from reef_harness.graders.number import NumberGrader

Options = dict[str, str]

_MAX_NUMBER = 1_000_000  # seconds or MiB of an option


def grader_of(spec: str) -> Grader:
    """The grader that ``spec`` names: NAME, NAME:option=value,option=value, judge:URL,model=M or module:Class.

    Raises ValueError for a name or an option that is not known, naming those that are, and for what the grader itself
    refuses (a package that is missing, a sandbox that this machine cannot make).
    """
    name, _, rest = spec.partition(":")
    if name in _MAKERS:
        return _made(name, rest)
    if rest and all(part.isidentifier() for part in [*name.split("."), *rest.split(".")]):
        return _imported(name, rest)
    raise ValueError(f"no grader is named {name!r}: known are {', '.join(_MAKERS)}, or your own as module:Class")


def _made(name: str, rest: str) -> Grader:
    options: Options = {}
    for position, part in enumerate(filter(None, rest.split(","))):
        key, equals, value = part.partition("=")
        if name == "judge" and position == 0 and "://" in key:
            key, equals, value = "url", "=", part
        if not equals or key in options:
            raise ValueError(f"grader {name}: expected option=value once each, got {part!r}")
        options[key] = value
    grader = _MAKERS[name](options)
    if options:
        raise ValueError(f"grader {name} has no option {', '.join(map(repr, options))}")
    return grader


def module_of(name: str) -> ModuleType:
    """Import a module; those in the current directory are found too, as by ``python -m``. Raises ImportError."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _imported(module: str, attribute: str) -> Grader:
    try:
        found = module_of(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no grader {module}:{attribute}: {error}") from error
    grader = found() if isinstance(found, type) and issubclass(found, Grader) else found
    if not isinstance(grader, Grader):
        raise ValueError(f"{module}:{attribute} is no Grader, but {type(grader).__name__}")
    return grader


# ---- one maker each: takes the options that it knows out of ``options``


def _number_of(options: Options, key: str, default: float) -> float:
    """A finite number above 0. Raises ValueError, naming the option."""
    given = options.pop(key, None)
    try:
        number = float(default if given is None else given)
    except ValueError:
        number = math.nan
    if not 0 < number <= _MAX_NUMBER:  # not for nan either
        raise ValueError(f"option {key} must be a number above 0 and at most {_MAX_NUMBER}, got {given!r}")
    return number


def _whole_of(options: Options, key: str, default: int) -> int:
    number = _number_of(options, key, default)
    if number != int(number):
        raise ValueError(f"option {key} must be a whole number, got {number:g}")
    return int(number)


def _fraction_of(options: Options, key: str) -> Fraction:
    given = options.pop(key, "0")
    try:
        return Fraction(given)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"option {key} must be a number such as 0.001 or 1/1000, got {given!r}") from error


def _switch_of(options: Options, key: str, default: str) -> bool:
    given = options.pop(key, default)
    if given not in ("yes", "no"):
        raise ValueError(f"option {key} must be yes or no, got {given!r}")
    return given == "yes"


def _text_of(options: Options, key: str) -> str:
    path = options.pop(key)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"option {key} must name a text file, got {path!r}: {error}") from error


def _final(options: Options) -> Grader:
    return FinalGrader(options.pop("comparing", "integer"))  # type: ignore[arg-type]  # it checks


def _number(options: Options) -> Grader:
    where = options.pop("where", "final")
    return NumberGrader(where, _fraction_of(options, "tolerance"))  # type: ignore[arg-type]  # it checks


def _choice(options: Options) -> Grader:
    return ChoiceGrader(options.pop("options", "ABCDE"))


def _math_verify(options: Options) -> Grader:
    from reef_harness.graders.math_verify import MathVerifyGrader  # the extra's package, in a process of its own

    return MathVerifyGrader(timeout_s=_number_of(options, "timeout_s", 10))


def _json_schema(options: Options) -> Grader:
    from reef_harness.graders.json_schema import JsonSchemaGrader

    return JsonSchemaGrader(timeout_s=_number_of(options, "timeout_s", 10))


def _code(options: Options) -> Grader:
    from reef_harness.graders.code import CodeGrader, Limits

    limits = Limits(
        wall_s=_number_of(options, "wall_s", Limits().wall_s),
        cpu_s=_number_of(options, "cpu_s", Limits().cpu_s),
        memory_mib=_whole_of(options, "memory_mib", Limits().memory_mib),
    )
    python = Path(options.pop("python")) if "python" in options else None
    isolation = options.pop("isolation", "namespaces")
    return CodeGrader(limits, isolation=isolation, python=python)  # type: ignore[arg-type]


def _judge(options: Options) -> Grader:
    from reef_harness.graders.judge import JudgeGrader

    if missing := [key for key in ("url", "model", "rubric") if key not in options]:
        raise ValueError(f"grader judge needs {', '.join(missing)}: judge:URL,model=NAME,rubric=FILE")
    return JudgeGrader(
        options.pop("url"),
        model=options.pop("model"),
        rubric=_text_of(options, "rubric"),
        threshold=_number_of(options, "threshold", 0.5),
        key=os.environ.get(options.pop("key_env", "REEF_JUDGE_KEY")),
        needs_gold=_switch_of(options, "needs_gold", "yes"),
    )


_MAKERS: Mapping[str, Callable[[Options], Grader]] = {
    "final": _final,
    "boxed": lambda options: BoxedGrader(),
    "number": _number,
    "choice": _choice,
    "math-verify": _math_verify,
    "json-schema": _json_schema,
    "code": _code,
    "judge": _judge,
}

SPELLINGS: Mapping[str, str] = {
    "final": "the one <final> field that ends the text; gold: an integer (comparing=text|latex: what it says)",
    "boxed": "the last \\boxed{}, equal as mathematics; gold: LaTeX",
    "number[:where=boxed|last,tolerance=T]": "one number, exactly; gold: a number",
    "choice[:options=ABCD]": "one letter; gold: a letter",
    "math-verify": "the last \\boxed{} by the package of that name (extra math-verify)",
    "json-schema": "one JSON value; gold: a JSON Schema (extra json-schema)",
    "code[:wall_s=10,isolation=process]": "one block of Python, run apart from this machine; gold: tests as JSON",
    "judge:URL,model=NAME,rubric=FILE": "everything, by an OpenAI-compatible model; gold: text",
    "module:Class": "your own",
}
"""How each is written on the command line, and what it reads. docs/graders.md has the rest."""
