"""The OpenAPI document against the service that it describes: thousands of requests, right ones and wrong ones.

Schemathesis makes them from the document. The engine is a stub that answers at once: what is tested is every route's
way in and out, not the model. Half of the right requests are aimed at what is there: ids made up are only ever 404.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from reef.service.access import NEEDS
from tests.load.conftest import StubEngine

KEY = "reef-a-key-of-this-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
ROUTES = sorted(NEEDS.keys() - {"GET /openapi.json"})
MAX_LIMITS = 80  # requests a route that try its limits one by one
MAX_RANDOM = 50  # and at random, as many right as wrong
DEFAULTS = {
    "generation": {"deterministic": True, "no-shrink": True, "with-security-parameters": False},
    "checks": {
        # What a schema does not say is said by words: fields that contradict one another, ids that are not there.
        "positive_data_acceptance": {"enabled": False},
        "ignored_auth": {"enabled": False},  # tests/service/test_keys.py
        "negative_data_rejection": {"enabled": False},  # takes null for wrong where one of several types is null
    },
}
RIGHT: Mapping[str, Mapping[str, Any]] = {  # what makes a right body one that can be answered
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3},
    "POST /v1/completions": {"prompt": "1+1=", "max_tokens": 3},
    "POST /v1/messages": {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3, "stop_sequences": []},
    "POST /v1/messages/count_tokens": {"messages": [{"role": "user", "content": "1+1="}]},
    "POST /v1/responses": {"input": "1+1=", "max_output_tokens": 3, "previous_response_id": None},
}

answered: Counter[tuple[str, int]] = Counter()  # by route and status


class Aim:
    """Turns requests to what is there. Some of it is deleted on the way."""

    def __init__(self, service) -> None:
        self._dice = random.Random(0)
        self._ids: dict[str, list[str]] = {"receipt_id": [], "report_id": [], "response_id": [], "session": ["s"]}
        for number in range(48):
            headers = {"x-reef-scenario": ("kept", "doomed")[number % 2], "x-reef-session": "s"}
            made = service.chat("1+1=", headers=headers).json()["choices"][0]["reef_agent_record_id"]
            self._ids["receipt_id"].append(made)
            if number % 4 == 0:
                report = service.post("/reef/report", {"references": [made], "score": 1.0}, headers=headers).json()
                self._ids["report_id"].append(report["agent_record_id"])
                response = service.post("/v1/responses", {"input": "1+1="}, headers=headers)
                self._ids["response_id"].append(response.json()["id"])
        self._releases = service.get("/reef/scenarios/kept/releases").json()["releases"]
        self._ids["release_id"] = [release["release_id"] for release in self._releases]

    def change(self, route: str, case: Any) -> None:
        """Of a right request: parameters, headers and fields, half of the time."""
        if self._dice.random() < 0.5:
            return
        known = {**self._ids, "name": ["doomed" if route.startswith("DELETE") else "kept"]}
        for name in case.path_parameters or {}:
            case.path_parameters[name] = self._dice.choice(known[name])
        if "confirm" in (case.query or {}):
            case.query["confirm"] = "doomed"
        for name in ("x-reef-parent", "x-reef-release", "x-reef-recipe", "x-reef-scenario"):
            if self._dice.random() < 0.8:
                case.headers.pop(name, None)
        if isinstance(case.body, dict):
            case.body = {**case.body, **RIGHT.get(route, {})}
            if "references" in case.body:
                case.body["references"] = [self._dice.choice(known["receipt_id"])]
            if "release_id" in case.body:
                case.body["release_id"] = self._dice.choice(known["release_id"])


@pytest.fixture(scope="module")
def described(make_service) -> Iterator[Any]:
    engine = StubEngine("--context", "512", "--at-once")
    settings = ("--training.backend", "none", "--inference.url", engine.url)
    service = make_service(*settings, "--reef.access", "key", "--reef.token", KEY)
    service.client.headers.update(HEADERS)
    yield service.start()
    service.end()
    engine.end()


@pytest.fixture(scope="module")
def schema(described) -> Any:
    config = schemathesis.Config.from_dict(DEFAULTS)
    return schemathesis.openapi.from_url(f"{described.url}/openapi.json", config=config, headers=HEADERS)


@pytest.fixture(scope="module")
def check(described) -> Iterator[Callable[[str, Any], None]]:
    """`check(route, case)`: ask, and hold the answer against the document. No success where the body is wrong."""
    aim = Aim(described)
    document = described.get("/openapi.json").json()
    validators = {route: _validator(document, route) for route in ROUTES}
    with requests.Session() as session:

        def check(route: str, case: Any) -> None:
            if case.meta.generation.mode is GenerationMode.POSITIVE:
                aim.change(route, case)
            response = case.call(session=session, headers=HEADERS)
            answered[route, response.status_code] += 1
            case.validate_response(response)
            if response.status_code < 300 and (validator := validators[route]) is not None:
                validator.validate(case.body)

        yield check


def _validator(document: Mapping[str, Any], route: str) -> jsonschema.Draft202012Validator | None:
    """Of a route's body; None where it need not have one."""
    method, _, path = route.partition(" ")
    told = document["paths"][path.replace(":path", "")][method.lower()].get("requestBody", {"required": False})
    if not told["required"]:
        return None
    schema = told["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_whatever_a_route_is_asked_it_answers_as_the_document_says(route, schema, check) -> None:
    method, _, path = route.partition(" ")
    operation = schema[path.replace(":path", "")][method]
    modes = list(GenerationMode) if operation.body or operation.query else [GenerationMode.POSITIVE]
    limits = schema.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=schema.config.generation
    )
    for case in itertools.islice(limits, MAX_LIMITS):
        check(route, case)
    asked = settings(
        max_examples=MAX_RANDOM if operation.body or operation.query or operation.path_parameters else 1,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    for mode in modes:
        asked(given(case=operation.as_strategy(generation_mode=mode))(lambda case: check(route, case)))()
    assert all(status < 500 for known, status in answered if known == route)


@pytest.mark.slow
def test_they_were_at_least_2000_requests_and_every_route_succeeded_as_well_as_refused() -> None:
    if {route for route, _ in answered} != set(ROUTES):
        pytest.skip("only some of the routes were asked")
    print(sum(answered.values()), "requests")
    assert sum(answered.values()) >= 2000
    succeeded = {route for route, status in answered if status < 300}
    assert set(ROUTES) - succeeded == {  # no trainer here
        "POST /reef/scenarios/{name}/update",
        "POST /reef/scenarios/{name}/rollback",
        "POST /reef/scenarios/{name}/promote",
    }


# --- the document itself ----------------------------------------------------------------------------------------------


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
