"""Every error on every route in one shape: {"error": {"message", "type", "param", "code"}}.

Anthropic's routes have its own: {"type": "error", "error": {"type", "message", "details"}, "request_id"}.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from reef.errors import ReefError
from reef.observe import log
from reef.service.access import methods_of

_ANTHROPIC = re.compile(r"/v1/messages(/|\Z)")  # in a path, also behind a prefix that could not be taken off it
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ReefError) -> dict[str, Any]:
    """The JSON value of an error: its message, type, param (the field at fault, or None) and code."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


def anthropic_error_body(error: ReefError, request_id: str) -> dict[str, Any]:
    """The same for Anthropic's clients; `details` holds our code, and the field at fault or None."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"error_code": error.code, "param": error.param}
    said = {"type": kind, "message": error.message, "details": details}
    return {"type": "error", "error": said, "request_id": request_id}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is for one of Anthropic's routes, or for one below them that there is not."""
    return _ANTHROPIC.search(scope["path"]) is not None


def request_id(scope: Scope) -> str:
    """A request's id, the client's or ours."""
    its_id: str = scope["reef.request_id"]
    return its_id


def to_response(error: ReefError, scope: Scope) -> Response:
    """Answer with an error's status and body, and with `retry-after` (seconds) where it says when to try again.

    409 says that trying again is of no use: the SDKs would, as after a lock that was held.
    """
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 409:
        headers["x-should-retry"] = "false"
    body = anthropic_error_body(error, request_id(scope)) if is_anthropic(scope) else error_body(error)
    return Response(orjson.dumps(body), error.status, headers, media_type="application/json")


async def on_reef_error(http: HttpRequest, error: Exception) -> Response:
    """Answer for a ReefError that a route raised."""
    assert isinstance(error, ReefError)
    return to_response(error, http.scope)


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Routes that do not exist, and methods that a route does not have."""
    assert isinstance(error, HTTPException)
    made = ReefError(f"{http.method} {http.url.path}: {error.detail}", code=str(error.detail).lower().replace(" ", "_"))
    made.status = error.status_code
    made.type = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    response = to_response(made, http.scope)
    if error.status_code == 405:  # the framework names the methods of one route, there may be several
        response.headers["allow"] = ", ".join(methods_of(http.scope["path"]))
    return response


def fault(scope: Scope, error: Exception) -> Response:
    """A fault of ours. What happened goes to the log, not to the client."""
    log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return to_response(ReefError("the service failed; its log says why"), scope)
