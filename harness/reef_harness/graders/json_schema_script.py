"""The one door to jsonschema: a script that validates a JSON text. Started by :mod:`.json_schema`.

Nothing is ever fetched: a reference to another document resolves only to the JSON Schema drafts themselves.
"""

import json
import re
import resource
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

MAX_NESTING = 100


class Refused(ValueError):  # noqa: N818
    """A text that is no plain JSON; the first argument is the reason code."""


def main() -> None:
    cpu_s, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    question = json.load(sys.stdin)
    json.dump(check(question["schema"], question["answer"]), sys.stdout)


def check(schema_text: str, answer_text: str) -> dict[str, str]:
    from jsonschema import exceptions, validators  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.exceptions import Unresolvable

    try:
        schema = read(schema_text)
        if not isinstance(schema, dict | bool):
            return {"result": "bad_gold", "detail": f"a schema is an object, true or false, got {schema_text:.100}"}
        latest = exact_drafts()
        default = None if isinstance(schema, dict) and "$schema" in schema else latest
        kind = validators.validator_for(schema, default=default)
        if kind is None:
            return {"result": "bad_gold", "detail": f"a draft that is not known: {schema_text:.300}"}
        kind.check_schema(schema)
        schema = translated(schema)
    except (Refused, exceptions.SchemaError) as error:
        return {"result": "bad_gold", "detail": f"{error!s:.300}"}
    except Unresolvable as error:
        return {"result": "bad_gold", "detail": f"a draft that is not known: {error!s:.300}"}
    try:
        value = read(answer_text)
    except Refused as error:
        return {"result": str(error.args[0])}
    try:
        found = exceptions.best_match(kind(schema, registry=REGISTRY).iter_errors(value))
    except Unresolvable as error:
        return {"result": "bad_gold", "detail": f"a reference that is not in the schema: {error!s:.300}"}
    except RecursionError:  # nesting of the value is bounded, so the schema refers to itself without an end
        return {"result": "bad_gold", "detail": "a reference that leads back to itself"}
    except re.error as error:
        return {"result": "bad_gold", "detail": f"a pattern that cannot be read: {error!s:.300}"}
    if found is None:
        return {"result": "valid"}
    return {"result": "invalid", "detail": f"{found.json_path:.100}: {found.message:.300}"}


def exact_drafts() -> Any:
    """Make multipleOf exact in every draft, wherever a $schema names one, also in a bundled schema; the latest."""
    from jsonschema import validators

    drafts = (
        validators.Draft4Validator,
        validators.Draft6Validator,
        validators.Draft7Validator,
        validators.Draft201909Validator,
        validators.Draft202012Validator,
    )
    made = [validators.extend(draft, {"multipleOf": multiple_of}, version=draft.__name__) for draft in drafts]
    return made[-1]


def multiple_of(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[object]:
    """As the decimals are written: in floats 19.99 is no multiple of 0.01."""
    from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError(f"{value!r} is not a multiple of {divisor!r}")


_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "examples", "required"})


def translated(schema: Any) -> Any:
    """The schema with its patterns as Python reads them; what only looks like a pattern stays as it is."""
    if isinstance(schema, list):
        return [translated(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = pattern(value)
        elif key in _SCHEMAS and isinstance(value, dict):
            rename = pattern if key == "patternProperties" else str
            found[key] = {rename(name): translated(one) for name, one in value.items()}
        else:
            found[key] = value if key in _DATA else translated(value)
    return found


_BLANKS = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_PIECE = re.compile(r"\\.|.", re.DOTALL)
_OUTSIDE = {"$": r"\Z", ".": r"[^\n\r\u2028\u2029]", r"\s": f"[{_BLANKS}]", r"\S": f"[^{_BLANKS}]"}


def pattern(text: str) -> str:
    """An ECMA-262 pattern in Python: there $ is the very end, and \\d, \\w and \\b know ASCII only."""
    pieces, in_class = [], False
    for piece in _PIECE.findall(text):
        if not in_class:
            pieces.append(_OUTSIDE.get(piece, piece))
        else:
            pieces.append(_BLANKS if piece == r"\s" else piece)
        in_class = piece != "]" if in_class else piece == "["
    return f"(?a:{''.join(pieces)})"


def read(text: str) -> object:
    """One JSON value, without doubled keys, NaN, numbers out of range, or nesting beyond MAX_NESTING."""
    if nesting(text) > MAX_NESTING:
        raise Refused("nested_too_deep")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=finite, parse_int=whole)
    except Refused:
        raise
    except ValueError as error:
        raise Refused("not_json") from error


def nesting(text: str) -> int:
    depth = deepest = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("doubled_key")
    return found


def constant(name: str) -> object:
    raise Refused("not_json", name)


def finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise Refused("number_out_of_range")
    return number


def whole(text: str) -> int:
    if len(text) > 4000:
        raise Refused("number_out_of_range")
    return int(text)


if __name__ == "__main__":
    main()
