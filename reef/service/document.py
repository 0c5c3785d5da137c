"""The OpenAPI document, GET /openapi.json: what each route takes, and every status that it answers with.

A route says what it itself can answer (`answers`); what the door before all routes can is added here. 500 is in no
line: it is a fault of ours.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from reef.service.access import NEEDS, OPEN
from reef.types import PURPOSES

ERROR: Final = "Error"
ANTHROPIC_ERROR: Final = "AnthropicError"
INFERENCE: Final = (400, 404, 409, 410, 413, 429, 502, 503, 504)  # of a route that samples
_DESCRIPTIONS: Final[Mapping[int, str]] = {
    400: "A field is wrong; `param` names it",
    401: "No key, or an unknown one",
    403: "The key may not do this, or a page of another site asks",
    404: "It is not there, or not for this key",
    409: "It contradicts what is stored",
    410: "It was deleted",
    413: "The body, or what it holds, is too large",
    429: "Too many requests are in work, or wait",
    502: "The engine failed",
    503: "Not now: starting, paused, or the ledger cannot be written",
    504: "The engine took too long",
}
_RETRY: Final = {
    "retry-after": {"description": "Seconds after which to try again", "schema": {"type": "integer", "minimum": 0}}
}
_TEXT: Final = {"type": "string"}
_TEXT_OR_NULL: Final = {"type": ["string", "null"]}
_SCHEMAS: Final[Mapping[str, Any]] = {
    ERROR: {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
                "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT},
            }
        },
    },
    ANTHROPIC_ERROR: {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
        "properties": {
            "type": {"const": "error"},
            "request_id": _TEXT,
            "error": {
                "type": "object",
                "required": ["type", "message", "details"],
                "additionalProperties": False,
                "properties": {
                    "type": _TEXT,
                    "message": _TEXT,
                    "details": {
                        "type": "object",
                        "required": ["error_code", "param"],
                        "additionalProperties": False,
                        "properties": {"error_code": _TEXT, "param": _TEXT_OR_NULL},
                    },
                },
            },
        },
    },
}
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SCENARIO: Final = ("x-reef-scenario", "The scenario; else the one of the key, or the one that trains", _TEXT)
_RECIPE: Final = ("x-reef-recipe", "The recipe that the scenario must have", _TEXT)
_PLACE: Final = (  # where a request stands
    _SCENARIO,
    ("x-reef-session", "Whose turns these are: an agent's run", _TEXT),
    ("x-reef-parent", "The receipt that this request continues", _TEXT),
)
_HEADERS: Final = (  # of a request that samples
    *_PLACE,
    _RECIPE,
    ("x-reef-purpose", "What the answer is for", {"enum": list(PURPOSES)}),
    ("x-reef-release", "The release that must answer", _TEXT),
)
_HEADERS_OF: Final[Mapping[str, Any]] = {
    "/v1/chat/completions": _HEADERS,
    "/v1/completions": _HEADERS,
    "/v1/messages": _HEADERS,
    "/v1/messages/count_tokens": _PLACE,
    "/v1/responses": _HEADERS,
    "/reef/report": (_SCENARIO, _RECIPE),
    "/reef/records/batch": (_SCENARIO, _RECIPE),
}
# FastAPI's own, for bodies and parameters that it checks itself: here none.
_NOT_OURS: Final = ("HTTPValidationError", "ValidationError")


def answers(*refusals: int, ok: int = 200, streams: bool = False, error: str = ERROR) -> dict[int | str, Any]:
    """FastAPI's `responses` of a route.

    Args:
        refusals: the statuses with which it refuses, each with a body of the schema `error`.
        ok: the status of success, with a JSON object.
        streams: whether success may also be a stream of events.
    """
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {}
    success = {"description": "Done", "content": content}
    return {ok: success, **{status: _refusal(status, error) for status in refusals}}


def _refusal(status: int, error: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{error}"}
    described = {"description": _DESCRIPTIONS[status], "content": {"application/json": {"schema": schema}}}
    return {**described, "headers": _RETRY} if status in (429, 503, 504) else described


def query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter of a route behind the question mark, which it reads itself."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def any_object() -> dict[str, Any]:
    """OpenAPI for a body that may be any JSON object."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with the schemas that its `$ref`s name, keys, and what the door refuses; changed in place."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _NOT_OURS:
        schemas.pop(name, None)
    schemas.update(_SCHEMAS)
    components["securitySchemes"] = _KEYS
    for method, path, operation in _operations(document):
        operation["responses"].pop("422", None)
        for media in operation.get("requestBody", {}).get("content", {}).values():
            schemas.update(media["schema"].pop("$defs", {}))
        for name, description, schema in _HEADERS_OF.get(path, ()):
            header = {"name": name, "in": "header", "required": False, "description": description, "schema": schema}
            operation.setdefault("parameters", []).append(header)
        _add_door(operation, method, path)
    return document


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def _add_door(operation: dict[str, Any], method: str, path: str) -> None:
    """What `app.Door` and the bound of requests in work add to a route."""
    error = ANTHROPIC_ERROR if path.startswith("/v1/messages") else ERROR
    statuses = [403]
    if NEEDS.get(f"{method} {path}") != OPEN:
        statuses.append(401)
        operation["security"] = [{name: []} for name in _KEYS]
    if path.startswith("/v1/"):
        statuses.append(429)
    for status in statuses:
        operation["responses"].setdefault(str(status), _refusal(status, error))
