"""Every error on every route in one shape: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from reef.errors import ReefError
from reef.observe import log


def error_body(error: ReefError) -> dict[str, Any]:
    """The JSON value of an error: its message, type, param (the field at fault, or None) and code."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code},
    }


def to_response(error: ReefError) -> Response:
    """Answer with an error's status and body, and with `retry-after` (seconds) where it says when to try again."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return Response(orjson.dumps(error_body(error)), error.status, headers, media_type="application/json")


async def on_reef_error(_http: HttpRequest, error: Exception) -> Response:
    """Answer for a ReefError that a route raised."""
    assert isinstance(error, ReefError)
    return to_response(error)


async def on_http_error(http: HttpRequest, error: Exception) -> Response:
    """Routes that do not exist, and methods that a route does not have."""
    assert isinstance(error, HTTPException)
    made = ReefError(f"{http.method} {http.url.path}: {error.detail}", code=str(error.detail).lower().replace(" ", "_"))
    made.status = error.status_code
    made.type = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    response = to_response(made)
    response.headers.update(error.headers or {})  # Allow, where the method is the wrong one
    return response


def fault(scope: Scope, error: Exception) -> Response:
    """A fault of ours. What happened goes to the log, not to the client."""
    log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return to_response(ReefError("the service failed; its log says why"))
