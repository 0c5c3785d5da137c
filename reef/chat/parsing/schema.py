"""Values that a model wrote as bare text, as the JSON that a tool's schema asks for."""

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

TEXT = frozenset({"string"})
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
DEEPEST = 16  # schemas within schemas; a $ref may lead back to itself


def types_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a tool's parameter may have; `TEXT` where the schema does not say."""
    properties = parameters.get("properties")
    found = _types(properties.get(key), parameters, DEEPEST) if isinstance(properties, Mapping) else None
    return frozenset(found) if found else TEXT


def as_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value, in the model's own digits and brackets; a string where the text is none of the types.

    null, true and false may be written as Python writes them, which is how Qwen3-Coder's template shows them.
    """
    bare = text.strip()
    if bare in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"number", "integer"} and NUMBER.fullmatch(bare):
        return bare
    if types & {"object", "array"} and _type_of_json(bare) in types & {"object", "array"}:
        return bare
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any], deepest: int) -> set[str]:
    if not isinstance(schema, Mapping) or deepest == 0:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(root, reference), root, deepest - 1)
    if named := schema.get("type"):
        return {named} if isinstance(named, str) else set(named)
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    found = {JSON_TYPES.get(type(value), "null") for value in values}
    for combination in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(combination, ()):
            found |= _types(part, root, deepest - 1)
    return found


def _resolved(root: Mapping[str, Any], reference: str) -> Any:
    """What "#/$defs/Name" points to; None for what is not there."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_of_json(text: str) -> str | None:
    try:
        return JSON_TYPES.get(type(orjson.loads(text)))
    except orjson.JSONDecodeError:
        return None
