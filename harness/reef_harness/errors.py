"""What can go wrong when talking to a service: one class per status a caller may want to tell apart."""

import httpx

# ruff: noqa: N818  (an error is named after the status it stands for)


class HarnessError(Exception):
    """The root of every error this package raises on purpose."""


class Unreachable(HarnessError):
    """The service could not be reached, or the connection broke before it answered."""


class UnexpectedAnswer(HarnessError):
    """Something answered, but not as Reef does (no receipt, no JSON): probably not a Reef service."""


class BrokenStream(HarnessError):
    """A stream ended before its answer was whole: there is no receipt to grade. ``code`` is the service's, if it said.

    What came of the answer until then was told in deltas; the service keeps it as an aborted receipt: it never trains.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Closed(HarnessError):
    """The client was closed: before the request, or while it was in work."""


class WrongRecords(HarnessError):
    """A driver's records cannot be gone on with: another driver's, damaged, or in use."""


class Stalled(HarnessError):
    """The service is up but has not moved for too long; the message says what was awaited."""


class ServiceError(HarnessError):
    """The service refused or failed. ``str()`` gives its own message; ``param`` names the field at fault, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(ServiceError):
    """400: a field is wrong; ``param`` names it."""


class Unauthorized(ServiceError):
    """401: the token is missing or wrong."""


class Forbidden(ServiceError):
    """403: the token may not do this."""


class NotFound(ServiceError):
    """404: no such receipt, report, scenario or release."""


class Conflict(ServiceError):
    """409: the same id came with another body, the recipe differs, the release named does not answer, …"""


class Gone(ServiceError):
    """410: it was there and was deleted, e.g. the receipt that a request continues."""


class TooLarge(ServiceError):
    """413: the request is larger than the service takes."""


class TooManyRequests(ServiceError):
    """429: the service is full; try again after ``retry_after_s``."""


class EngineFailed(ServiceError):
    """502 or 504: the engine behind the service failed or did not answer."""


class Unavailable(ServiceError):
    """503: not ready, paused or stopping; try again after ``retry_after_s``."""


_BY_STATUS: dict[int, type[ServiceError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    422: BadRequest,
    429: TooManyRequests,
    502: EngineFailed,
    503: Unavailable,
    504: EngineFailed,
}


def from_response(response: httpx.Response) -> ServiceError:
    """Turn an answer of 400 or above into the error of its status, with the service's own message."""
    message, code, param = response.text[:500] or response.reason_phrase, None, None
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # not one of Reef's own answers (a proxy's page, say): keep its text
    kind = _BY_STATUS.get(response.status_code, ServiceError)
    return kind(response.status_code, message, code, param, _retry_after_s(response))


def _retry_after_s(response: httpx.Response) -> float | None:
    """The Retry-After header in seconds, or None where it is absent or a date."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
