"""The one door to jsonschema: a script that validates a JSON text. Started by :mod:`.json_schema`.

Nothing is ever fetched: a reference to another document resolves only to the JSON Schema drafts themselves.
"""

import json
import resource
import sys

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
        kind = validators.validator_for(schema, default=validators.Draft202012Validator)
        kind.check_schema(schema)
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
    except OverflowError:  # multipleOf and the like divide by floats
        return {"result": "too_large"}
    if found is None:
        return {"result": "valid"}
    return {"result": "invalid", "detail": f"{found.json_path:.100}: {found.message:.300}"}


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
