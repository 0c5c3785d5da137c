"""Which role each route needs, who a key is, and what `reef.tokens` takes: without a service."""

from __future__ import annotations

import json
import re

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from reef import keys
from reef.config import ROLES, load
from reef.errors import ConfigError, ForbiddenError, NotFoundError, UnauthorizedError
from reef.service.access import ANY, NEEDS, OPEN, WHOLE, Access
from reef.service.app import ROOMS, create_app

HASH = "0" * 64
DIFFERENT = "1" * 64


def scope(method="GET", path="/v1/models", **headers):
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": sent}


def all_routes(app: FastAPI) -> list[str]:
    own = [route for route in app.routes if isinstance(route, Route)]
    assert len(app.routes) == len(own) + len(ROOMS), "routes that are neither the app's own nor of a room"
    routes = [*own, *(route for room in ROOMS for route in room.router.routes)]
    return [f"{method} {route.path}" for route in routes for method in sorted(route.methods - {"HEAD"})]


def test_every_route_says_what_it_needs() -> None:
    house: object = None  # only asked once requests come
    found = all_routes(create_app(house))  # type: ignore[arg-type]
    assert len(found) > 20
    assert [route for route in found if route not in NEEDS] == []
    assert set(NEEDS.values()) == {*ROLES, ANY, OPEN, WHOLE}


def test_what_stands_below_a_scenario_names_it_so_that_it_is_checked() -> None:
    below = [route.partition(" ")[2] for route in NEEDS if "/reef/scenarios/" in route]
    assert len(below) > 5
    assert [path for path in below if not path.startswith("/reef/scenarios/{name}")] == []


def access(*entries, token=None, key=None) -> Access:
    flags = ["--reef.tokens", json.dumps([{"roles": list(ROLES), **entry} for entry in entries])]
    if token is not None:
        flags += ["--reef.token", token]
    return Access(load(None, flags, {}).reef, key)


def bound(name="bound", scenarios=("mine",), **more):
    return {"name": name, "hash": keys.hash_of(name), "scenarios": list(scenarios), **more}


def test_a_key_is_known_by_its_hash() -> None:
    doors = access({"name": "a", "hash": keys.hash_of("key of a")}, bound("b"), token="whole")
    for key, name, scenarios in (("key of a", "a", None), ("b", "b", {"mine"}), ("whole", "reef.token", None)):
        caller = doors.admit(scope(authorization=f"Bearer {key}"))
        assert caller is not None
        assert (caller.name, caller.scenarios) == (name, scenarios)
    for key in (keys.hash_of("key of a"), "a", "", "Whole"):
        with pytest.raises(UnauthorizedError):
            doors.admit(scope(authorization=f"Bearer {key}"))


def test_the_key_for_own_commands_is_another_one_at_each_start() -> None:
    first, second = access(token="x"), access(token="x")
    assert first.own_key and first.own_key != second.own_key
    caller = first.admit(scope("GET", "/reef/status", x_api_key=first.own_key))
    assert caller is not None and caller.name == "evaluation.command"
    with pytest.raises(UnauthorizedError):
        second.admit(scope(x_api_key=first.own_key))


def test_a_route_that_is_in_no_table_is_there_for_admins_only() -> None:
    doors = access(bound("user", roles=["infer", "report"], scenarios=["mine"]), token="admin")
    assert doors.admit(scope("GET", "/reef/secret", x_api_key="admin")) is not None
    for method, path in (("GET", "/reef/secret"), ("PUT", "/reef/scenarios/mine"), ("GET", "/v1/files"), ("GET", "/")):
        with pytest.raises(NotFoundError):
            doors.admit(scope(method, path, x_api_key="user"))


@pytest.mark.parametrize("role", ROLES)
def test_one_role_opens_the_routes_of_that_role_and_no_others(role) -> None:
    doors = access({"name": "one", "hash": keys.hash_of("one"), "roles": [role]})
    opened = set()
    for route, need in NEEDS.items():
        method, _, path = route.partition(" ")
        path = re.sub(r"{[^}]+}", "x", path)
        try:
            doors.admit(scope(method, path, x_api_key="one"))
            opened.add(need)
        except ForbiddenError as error:
            assert (error.status, error.type, error.code, error.param) == (
                403,
                "permission_error",
                "role_missing",
                "role",
            )
            assert f"the role {need}" in error.message
            assert "one" in error.message
    assert opened == {role, ANY, OPEN, WHOLE}


def test_a_bound_key_uses_the_routes_of_its_scenarios_only() -> None:
    doors = access(bound(scenarios=["mine", "also"]))
    for name in ("mine", "also"):
        assert doors.admit(scope("POST", f"/reef/scenarios/{name}/rollback", x_api_key="bound")) is not None
    for path in ("/reef/scenarios/theirs/rollback", "/reef/scenarios/mine2/rollback", "/reef/scenarios/Mine/rollback"):
        with pytest.raises(ForbiddenError, match=r"may not use scenario .* bound to also, mine") as refused:
            doors.admit(scope("POST", path, x_api_key="bound"))
        assert (refused.value.code, refused.value.param) == ("scenario_forbidden", "scenario")
    with pytest.raises(ForbiddenError):
        doors.admit(scope("DELETE", "/reef/scenarios/theirs/sessions/a/b", x_api_key="bound"))


def test_a_scenario_in_a_header_is_checked_whatever_the_route_makes_of_it() -> None:
    doors = access(bound(scenarios=["mine"]), token="whole")
    for route in ("GET /v1/models", "GET /reef/reports/x", "GET /reef/scenarios", "POST /v1/chat/completions"):
        method, _, path = route.partition(" ")
        assert doors.admit(scope(method, path, x_api_key="bound", x_reef_scenario="mine")) is not None
        assert doors.admit(scope(method, path, x_api_key="whole", x_reef_scenario="theirs")) is not None
        with pytest.raises(ForbiddenError) as refused:
            doors.admit(scope(method, path, x_api_key="bound", x_reef_scenario="theirs"))
        assert refused.value.code == "scenario_forbidden"


def test_the_metrics_of_all_scenarios_are_for_keys_that_are_bound_to_none() -> None:
    doors = access(bound(scenarios=["mine"]), {"name": "free", "hash": keys.hash_of("free"), "roles": ["report"]})
    assert doors.admit(scope("GET", "/metrics", x_api_key="free")) is not None
    with pytest.raises(ForbiddenError, match="about all scenarios; the key bound is bound to mine") as refused:
        doors.admit(scope("GET", "/metrics", x_api_key="bound"))
    assert refused.value.code == "scenario_forbidden"


def test_space_around_a_bearer_key_is_none_of_it() -> None:
    assert access(token="whole").admit(scope(authorization="Bearer  whole ")) is not None


def test_the_default_scenario_of_a_key_is_the_only_one_it_has() -> None:
    doors = access(bound("one"), bound("two", scenarios=["a", "b"]), token="all")
    found = {key: doors.admit(scope(x_api_key=key)) for key in ("one", "two", "all")}
    assert {key: caller and caller.only_scenario for key, caller in found.items()} == {
        "one": "mine",
        "two": None,
        "all": None,
    }


def test_open_access_asks_nobody() -> None:
    doors = Access(load(None, ["--reef.access", "open"], {}).reef)
    caller = doors.admit(scope("DELETE", "/reef/scenarios/any/receipts"))
    assert caller is not None and caller.roles == set(ROLES)
    assert doors.own_key is None


# --- what is configured -----------------------------------------------------------------------------------------------


def refused(*flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(None, flags, {})
    return raised.value.message


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"name": "a.b", "hash": HASH, "roles": ["infer"]}], "a name has 1-64 letters"),
        ([{"name": "a", "hash": "reef_abc", "roles": ["infer"]}], "make one with `reef token a`"),
        ([{"name": "a", "hash": HASH.replace("0", "A"), "roles": ["infer"]}], "lower case"),
        ([{"name": "a", "hash": HASH, "roles": []}], "reef.tokens.0.roles"),
        ([{"name": "a", "hash": HASH}], "reef.tokens.0.roles"),
        ([{"name": "a", "hash": HASH, "roles": ["root"]}], "'infer', 'report' or 'admin'"),
        ([{"name": "a", "hash": HASH, "roles": ["infer"], "scenarios": []}], "reef.tokens.0.scenarios"),
        ([{"name": "a", "hash": HASH, "roles": ["infer"], "scenarios": ["a b"]}], "'a b' is no scenario's name"),
        ([{"name": "a", "hash": HASH, "roles": ["infer"], "scenario": "a"}], "did you mean reef.tokens.scenarios?"),
        (
            [{"name": "a", "hash": HASH[:i] + "1" + HASH[i + 1 :], "roles": ["infer"]} for i in (0, 1)],
            "a is the name of",
        ),
        ([{"name": name, "hash": HASH, "roles": ["infer"]} for name in "ab"], "one key stands twice"),
    ],
)
def test_an_entry_that_is_no_key_is_refused(entries, says) -> None:
    assert says in refused("--reef.tokens", json.dumps(entries))


def test_a_key_where_its_hash_belongs_is_in_no_message() -> None:
    secret = keys.new_key()
    for entry in ({"name": "a", "hash": secret, "roles": ["infer"]}, {"hash": [secret]}, {"hash": {"x": secret}}):
        assert secret not in refused("--reef.tokens", json.dumps([entry]))
    assert secret not in refused("--reef.tokens", secret)
    assert secret not in refused("--reef.tokens", f"[{secret}]")
    hashed = {"name": "a", "hash": keys.hash_of(secret), "roles": ["infer"]}
    assert "one key stands twice" in refused("--reef.token", secret, "--reef.tokens", json.dumps([hashed]))
    assert secret not in refused("--reef.token", secret, "--reef.tokens", json.dumps([hashed]))


def test_open_access_is_for_loopback_and_without_keys() -> None:
    entry = json.dumps([{"name": "a", "hash": HASH, "roles": ["infer"]}])
    assert "reef.access is open" in refused("--reef.access", "open", "--reef.token", "x")
    assert "reef.access is open" in refused("--reef.access", "open", "--reef.tokens", entry)
    assert "0.0.0.0 is not loopback" in refused("--reef.access", "open", "--reef.host", "0.0.0.0")
    assert "is not loopback: set reef.token or reef.tokens" in refused("--reef.host", "0.0.0.0")
    assert load(None, ["--reef.host", "0.0.0.0", "--reef.tokens", entry], {}).reef.tokens[0].name == "a"
