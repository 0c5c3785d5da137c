"""Who asks, what they may do, and what they may see.

    key -> Caller (name, roles, scenarios) -> may it use this route? -> may it see this scenario?

A key bound to scenarios learns nothing of others: a scenario that it names and may not see is a 403, whether it is
there or not; a receipt or a report of such a one is a 404, as if it were not there.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.routing import compile_path
from starlette.types import Scope

from reef import keys
from reef.config import ROLES, ReefSection
from reef.errors import ForbiddenError, NotFoundError, UnauthorizedError

ANY: Final = "any"  # a key, whatever its roles
OPEN: Final = "open"  # no key: a supervisor has none
WHOLE: Final = "whole"  # a key, whatever its roles, that is bound to no scenarios: what it reads is of all of them

# What each route needs: a role, or one of the three above. `{name}` below /reef/scenarios is the scenario, which the
# key must be allowed to see. A route that is not here is the admins'; to everybody else it does not exist.
NEEDS: Final[Mapping[str, str]] = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /metrics": WHOLE,
    "GET /openapi.json": ANY,
    "GET /v1/models": "infer",
    "POST /v1/chat/completions": "infer",
    "POST /v1/completions": "infer",
    "POST /v1/messages": "infer",
    "POST /v1/messages/count_tokens": "infer",
    "POST /v1/responses": "infer",
    "GET /v1/responses/{response_id}": "infer",
    "GET /reef/receipts/{receipt_id:path}": "infer",
    "DELETE /reef/receipts/{receipt_id:path}": "admin",
    "POST /reef/report": "report",
    "GET /reef/reports/{report_id:path}": "report",
    "POST /reef/records/batch": "report",
    "GET /reef/scenarios": ANY,
    "POST /reef/scenarios": "admin",
    "GET /reef/scenarios/{name}": ANY,
    "GET /reef/scenarios/{name}/contract": ANY,
    "GET /reef/scenarios/{name}/releases": ANY,
    "GET /reef/scenarios/{name}/releases/{release_id}": ANY,
    "GET /reef/scenarios/{name}/releases/{release_id}/lineage": ANY,
    "POST /reef/scenarios/{name}/releases/{release_id}/evaluations": "admin",
    "POST /reef/scenarios/{name}/releases/{release_id}/engine": "admin",
    "DELETE /reef/scenarios/{name}/releases/{release_id}/engine": "admin",
    "POST /reef/scenarios/{name}/update": "admin",
    "POST /reef/scenarios/{name}/rollback": "admin",
    "POST /reef/scenarios/{name}/promote": "admin",
    "DELETE /reef/scenarios/{name}/receipts": "admin",
    "DELETE /reef/scenarios/{name}/sessions/{session:path}": "admin",
    "GET /reef/status": "admin",
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. The name tells keys apart; those of `reef.tokens` never have a dot in theirs."""

    name: str
    roles: frozenset[str]
    scenarios: frozenset[str] | None = None  # all that it may see; None: everything

    def sees(self, scenario: str) -> bool:
        """Whether what belongs to a scenario may be shown to it."""
        return self.scenarios is None or scenario in self.scenarios

    @property
    def only_scenario(self) -> str | None:
        """The scenario of its requests that name none, where it is bound to a single one."""
        return next(iter(self.scenarios)) if self.scenarios is not None and len(self.scenarios) == 1 else None


ANYONE: Final = Caller("reef.access", frozenset(ROLES))  # where no key is asked


class Access:
    """The keys of a service. Of each it knows the hash only, but for `own_key`, which never leaves this machine."""

    def __init__(self, settings: ReefSection, key: str | None = None) -> None:
        """`key`: the one in the file of the run directory, where none is configured."""
        self.open = settings.access == "open"
        self.own_key = None if self.open else keys.new_key()
        """For the commands that the service itself runs; made anew at each start. None: no key is asked."""
        configured = settings.token.get_secret_value() if settings.token is not None else key
        self._hint = " (it is in the file api-key of the run directory)" if key is not None else ""
        self._known = [
            (entry.hash, Caller(entry.name, frozenset(entry.roles), _set(entry.scenarios))) for entry in settings.tokens
        ]
        for name, whole in (("reef.token", configured), ("evaluation.command", self.own_key)):
            if whole is not None:
                self._known.append((keys.hash_of(whole), Caller(name, frozenset(ROLES))))

    def admit(self, scope: Scope) -> Caller | None:
        """Whose request it is; None where the route asks for no key.

        Raises:
            UnauthorizedError: no key, or an unknown one.
            ForbiddenError: the key lacks the role, or the scenario, that the route needs.
            NotFoundError: there is no such route for this key.
        """
        needed, scenario = _route(scope["method"], scope["path"])
        if needed == OPEN:
            return None
        caller = ANYONE if self.open else self._identify(named_headers(scope))
        if needed is None and "admin" not in caller.roles:
            raise NotFoundError(f"{scope['method']} {scope['path']}: Not Found")
        if needed in ROLES and needed not in caller.roles:
            raise ForbiddenError(
                f"this needs the role {needed}; the key {caller.name} has {', '.join(sorted(caller.roles))}",
                param="role",
                code="role_missing",
            )
        if needed == WHOLE and caller.scenarios is not None:
            raise ForbiddenError(
                f"this is about all scenarios; the key {caller.name} is bound to {', '.join(sorted(caller.scenarios))}",
                param="scenario",
                code="scenario_forbidden",
            )
        if scenario is not None:
            _require(caller, scenario)
        if caller.scenarios is not None and (header := named_headers(scope).get("x-reef-scenario")):
            _require(caller, header)  # whatever the route makes of it
        return caller

    def _identify(self, headers: Mapping[str, str]) -> Caller:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise UnauthorizedError(f"a key is needed: Authorization: Bearer KEY{self._hint}", code="missing_api_key")
        digest = keys.hash_of(given)
        found = None
        for known, caller in self._known:  # all of them, whichever it is: the time says nothing
            if secrets.compare_digest(digest, known):
                found = caller
        if found is None:
            raise UnauthorizedError("the key is none that this service knows")
        return found


def named_headers(scope: Scope) -> Mapping[str, str]:
    """The headers of a request by name; the first of those that come twice. Made once: Starlette looks through all."""
    found: Mapping[str, str] | None = scope.get("reef.headers")
    if found is None:
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope["reef.headers"] = found
    return found


def headers_of(http: HttpRequest) -> Mapping[str, str]:
    """The headers of a request that came through the door, by name in lower case."""
    found: Mapping[str, str] = http.scope["reef.headers"]
    return found


def caller(http: HttpRequest) -> Caller:
    """Whose request it is."""
    found: Caller = http.scope["reef.caller"]
    return found


def require_scenario(http: HttpRequest, name: str) -> None:
    """Raises ForbiddenError where the caller may not see the scenario, whether it is there or not."""
    _require(caller(http), name)


def require_visible(http: HttpRequest, scenario: str, missing: NotFoundError) -> None:
    """Raises `missing`, what the caller would get if it were not there, for what belongs to a scenario it sees not."""
    if not caller(http).sees(scenario):
        raise missing


def _require(who: Caller, scenario: str) -> None:
    if not who.sees(scenario):
        raise ForbiddenError(
            f"the key {who.name} may not use scenario {scenario[:80]}; it is bound to "
            f"{', '.join(sorted(who.scenarios or ()))}",
            param="scenario",
            code="scenario_forbidden",
        )


def _set(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _split(needs: Mapping[str, str]) -> tuple[dict[str, str], list[tuple[str, re.Pattern[str], str]]]:
    """Routes that are looked up, and those that have a name in their path: method, pattern, need."""
    exact = {route: need for route, need in needs.items() if "{" not in route}
    patterns = []
    for route, need in needs.items():
        method, _, template = route.partition(" ")
        if "{" in template:
            patterns.append((method, compile_path(template)[0], need))
    return exact, patterns


_EXACT, _PATTERNS = _split(NEEDS)


def methods_of(path: str) -> list[str]:
    """The methods that routes with this path have."""
    exact = [route.partition(" ")[0] for route in _EXACT if route.partition(" ")[2] == path]
    return sorted({*exact, *(method for method, pattern, _ in _PATTERNS if pattern.match(path) is not None)})


def _route(method: str, path: str) -> tuple[str | None, str | None]:
    """What a request needs (None: it is in no table), and the scenario that its path names."""
    method = "GET" if method == "HEAD" else method
    if (need := _EXACT.get(f"{method} {path}")) is not None:
        return need, None
    for known, pattern, need in _PATTERNS:
        if known == method and (match := pattern.match(path)) is not None:
            return need, match.groupdict().get("name")
    return None, None
