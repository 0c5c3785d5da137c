"""The OpenAPI document against the service that it describes: thousands of requests, right ones and wrong ones.

Schemathesis makes them from the document. The engine is a stub that answers at once: what is tested is every route's
way in and out, not the model. Half of the right requests are aimed at what is there: ids made up are only ever 404.
"""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from reef.service.access import NEEDS
from tests.load.conftest import StubEngine

pytestmark = pytest.mark.slow
KEY = "reef-a-key-of-this-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
ROUTES = sorted(NEEDS.keys() - {"GET /openapi.json"})
CHAIN = [f"POST /reef/scenarios/{{name}}/{verb}" for verb in ("update", "rollback", "promote")]
MAX_LIMITS = 80  # requests a route that try its limits one by one
MAX_RANDOM = 50  # right ones at random, and as many wrong ones
DEFAULTS = {
    "request-timeout": 60,  # it is 10
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
        doomed = route.startswith("DELETE") and not route.endswith("/engine")
        known = {**self._ids, "name": ["doomed" if doomed else "kept"]}
        for name in case.path_parameters or {}:
            case.path_parameters[name] = self._dice.choice(known[name])
        if "confirm" in (case.query or {}):
            case.query["confirm"] = "doomed"
        for name in ("x-reef-parent", "x-reef-release", "x-reef-recipe", "x-reef-scenario"):
            if self._dice.random() < 0.8:
                case.headers.pop(name, None)
        if isinstance(case.body, dict):
            case.body = {**case.body, **RIGHT.get(route, {})}
            if "records" in case.body:
                payload = {"request": {"messages": []}, "response": {}}
                record = {"agent_record_id": uuid.uuid4().hex, "request_type": "inference", "payload": payload}
                case.body["records"] = [record]
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


class Check:
    """Asks a route thousands of things, and holds each answer against the document."""

    def __init__(self, service, aim: Aim, session: requests.Session) -> None:
        config = schemathesis.Config.from_dict(DEFAULTS)
        self._schema = schemathesis.openapi.from_url(
            f"{service.url}/openapi.json", config=config, headers=HEADERS, timeout=60
        )
        self._document = service.get("/openapi.json").json()
        self._aim = aim
        self._session = session
        self.answered: Counter[tuple[str, int]] = Counter()  # by route and status

    def ask(self, route: str, max_limits: int, max_random: int) -> None:
        method, _, path = route.partition(" ")
        operation = self._schema[path.replace(":path", "")][method]
        check = partial(self._check, route, self._validator(operation))
        limits = self._schema.iter_coverage_cases(
            operation, generation_modes=list(GenerationMode), generation_config=self._schema.config.generation
        )
        for case in itertools.islice(limits, max_limits):
            check(case)
        varies = operation.body or operation.query
        asked = settings(
            max_examples=max_random if varies or operation.path_parameters else 1,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        for mode in GenerationMode if varies else [GenerationMode.POSITIVE]:
            asked(given(case=operation.as_strategy(generation_mode=mode))(lambda case: check(case)))()

    def _check(self, route: str, validator: jsonschema.Draft202012Validator | None, case: Any) -> None:
        if case.meta.generation.mode is GenerationMode.POSITIVE:
            self._aim.change(route, case)
        response = case.call(session=self._session, headers=HEADERS)
        self.answered[route, response.status_code] += 1
        case.validate_response(response)
        assert response.status_code < 500
        if response.status_code < 300 and validator is not None:
            validator.validate(case.body)  # what is wrong by the document is never answered with success

    def _validator(self, operation: Any) -> jsonschema.Draft202012Validator | None:
        """Of a route's body; None where it need not have one."""
        told = self._document["paths"][operation.path][operation.method].get("requestBody", {"required": False})
        if not told["required"]:
            return None
        schema = told["content"]["application/json"]["schema"]
        return jsonschema.Draft202012Validator({**schema, "components": self._document["components"]})


@pytest.fixture(scope="module")
def http() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture(scope="module")
def check(described, http) -> Check:
    return Check(described, Aim(described), http)


@pytest.mark.parametrize("route", ROUTES)
def test_whatever_a_route_is_asked_it_answers_as_the_document_says(route, check) -> None:
    check.ask(route, MAX_LIMITS, MAX_RANDOM)


def test_they_were_at_least_2000_requests_and_every_route_succeeded_as_well_as_refused(check) -> None:
    if {route for route, _ in check.answered} != set(ROUTES):
        pytest.skip("only some of the routes were asked")
    assert check.answered.total() >= 2000
    succeeded = {route for route, status in check.answered if status < 300}
    assert set(ROUTES) - succeeded == set(CHAIN)  # nobody trains here


@pytest.fixture(scope="module")
def chain_check(make_service, http) -> Iterator[Check]:
    """The same of a service that trains, and has made one release."""
    settings = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2", "--recipe.scenario", "kept")
    service = make_service(*settings, "--reef.access", "key", "--reef.token", KEY)
    service.client.headers.update(HEADERS)
    service.start()
    for score in (0.0, 1.0):
        made = service.chat("2+2=").headers["x-reef-agent-record-id"]
        graded = service.post("/reef/report", {"references": [made], "score": score, "group": "g"})
        assert graded.status_code == 200, graded.text
    deadline = time.monotonic() + 120
    while len(service.get("/reef/scenarios/kept/releases").json()["releases"]) < 2:
        assert time.monotonic() < deadline, "no release was made"
        time.sleep(0.1)
    yield Check(service, Aim(service), http)
    service.end()


@pytest.mark.parametrize("route", CHAIN)
def test_whatever_is_asked_of_a_chain_that_trains_it_answers_as_the_document_says(route, chain_check) -> None:
    chain_check.ask(route, MAX_LIMITS, MAX_RANDOM // 3)
    assert any(status < 300 for known, status in chain_check.answered if known == route)
