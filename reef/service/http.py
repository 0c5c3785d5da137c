"""What every route needs of HTTP: its house, the body within its limit, JSON out."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import ClientGoneError, TooLargeError
from reef.service.house import House


def house_of(http: HttpRequest) -> House:
    """The house of the app that a request came to."""
    house: House = http.app.state.house
    return house


async def read_body(http: HttpRequest, limit: int | None = None) -> bytes:
    """The whole body.

    Raises:
        TooLargeError: as soon as it is over `limit` bytes, which is `reef.max-body-bytes`.
        ClientGoneError: the client went away before it was whole.
    """
    known = "" if limit is not None else " (reef.max-body-bytes)"
    if limit is None:
        limit = house_of(http).config.reef.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in http.stream():
            size += len(chunk)
            if size > limit:
                raise TooLargeError(f"the body is larger than {limit} bytes{known}")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client closed its connection before its request was whole") from None
    return b"".join(chunks)


def check_num_messages(house: House, num_messages: int, param: str = "messages") -> None:
    """Raises TooLargeError over `reef.max-messages`; `param` is the field that holds them."""
    limit = house.config.reef.max_messages
    if num_messages > limit:
        raise TooLargeError(
            f"{param}: {num_messages} messages, at most {limit} are taken (reef.max-messages)",
            param=param,
            code="too_many_messages",
        )


def text_of(header: str) -> str:
    """A header's text: where it is not ASCII, clients and paths say it in UTF-8, and the framework read latin-1."""
    if header.isascii():
        return header
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with `content` as JSON. It must be what orjson can write, with text as keys."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def body_schema(model: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """OpenAPI for a body that we parse ourselves (to keep its bytes and to name unknown fields).

    Not `required`: no body means an empty object. `document.complete` puts the parts of it where its `$ref`s point.
    """
    name = model.__name__
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{name}.{{model}}")
    schema["$defs"] = {f"{name}.{part}": value for part, value in schema.get("$defs", {}).items()}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
