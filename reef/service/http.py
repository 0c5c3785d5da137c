"""What every route needs of HTTP: its house, the body within its limit, JSON out."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import TooLargeError
from reef.service.house import House


def house_of(http: HttpRequest) -> House:
    """The house of the app that a request came to."""
    house: House = http.app.state.house
    return house


async def read_body(http: HttpRequest) -> bytes:
    """The whole body. Raises TooLargeError as soon as it is over `reef.max-body-bytes`."""
    limit = house_of(http).config.reef.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes (reef.max-body-bytes)")
        chunks.append(chunk)
    return b"".join(chunks)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with `content` as JSON. It must be what orjson can write, with text as keys."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI for a body that we parse ourselves (to keep its bytes and to name unknown fields)."""
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": model.model_json_schema(ref_template="#/components/schemas/{model}")}
            },
        }
    }
