"""The OpenAPI document: whole, and true to the routes that there are. (What they answer: `test_openapi.py`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from reef.service.access import NEEDS

ROUTES = NEEDS.keys() - {"GET /openapi.json"}


@pytest.fixture(scope="module")
def document(recorder) -> dict[str, Any]:
    response = recorder.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def test_the_document_has_every_route_that_there_is_and_no_other(document) -> None:
    told = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert told == {route.replace(":path", "") for route in ROUTES}


def test_every_reference_in_the_document_leads_somewhere(document) -> None:
    references = set(_references(document))
    assert len(references) > 20
    for reference in references:
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found


def test_every_schema_in_the_document_is_one(document) -> None:
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name.count(".") <= 1


def test_every_status_but_success_has_the_one_error_shape(document) -> None:
    for path, methods in document["paths"].items():
        shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        for operation in methods.values():
            assert "422" not in operation["responses"]
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/readyz":
                    told = response["content"]["application/json"]["schema"]
                    assert told == {"$ref": f"#/components/schemas/{shape}"} or status == "403", (path, status)


def test_every_route_that_needs_a_key_says_so(document) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            is_open = path in ("/healthz", "/readyz")
            assert ("security" not in operation) == is_open
            assert ("401" not in operation["responses"]) == is_open


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def test_a_wrong_method_is_told_all_the_right_ones_of_its_path(recorder) -> None:
    for path, allowed in (
        ("/reef/scenarios", "GET, POST"),
        ("/reef/receipts/rcp_1", "DELETE, GET"),
        ("/v1/messages", "POST"),
    ):
        response = recorder.client.put(recorder.url + path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
