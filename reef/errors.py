"""One class per boundary crossed.

Each error carries what HTTP needs (status, type, code, param) so that `service/app.py` turns any of them into the one
error shape in one place. Messages say what was expected and what came.
"""


class ReefError(Exception):
    """Base of every error that Reef raises on purpose."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s


class BadRequestError(ReefError):
    """A field of the request is wrong; `param` names it."""

    status = 400
    type = "invalid_request_error"
    code = "bad_field"


class UnauthorizedError(ReefError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(ReefError):
    """The key is known and may not do this: `param` names what it lacks, a role or a scenario."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(ReefError):
    """The scenario, receipt, report, release or route is not there."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ConflictError(ReefError):
    """The request contradicts what is stored already."""

    status = 409
    type = "conflict_error"
    code = "conflict"


class CheckpointNeededError(ConflictError):
    """Receipts cannot be deleted yet: after a crash, releases trained on them would have to be trained again."""

    code = "checkpoint_needed"


class GoneError(ReefError):
    """It was here, and was deleted."""

    status = 410
    type = "gone_error"
    code = "receipt_deleted"


class TooLargeError(ReefError):
    """The request is over `reef.max-body-bytes` or `reef.max-messages`."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class BusyError(ReefError):
    """A bounded queue is full; try again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class ClientGoneError(ReefError):
    """The client closed its connection; nobody reads the answer. (The status is nginx's, for our figures only.)"""

    status = 499
    code = "client_gone"


class EngineError(ReefError):
    """An engine failed, or answered with something that cannot be a record."""

    status = 502
    type = "engine_error"
    code = "engine_failed"


class EngineTimeoutError(EngineError):
    """An engine did not answer in the time it has."""

    status = 504
    code = "engine_timeout"


class UnavailableError(ReefError):
    """Not now (starting, paused for a load, ledger locked or full); try again after `retry_after_s`."""

    status = 503
    type = "unavailable_error"
    code = "unavailable"


class ConfigError(ReefError):
    """serve.yaml, a flag or the machine is not fit to start; raised before anything has started."""

    code = "config"


class LedgerError(ReefError):
    """The ledger cannot be used as it is (newer schema, another owner, a broken row)."""

    code = "ledger"


class DamagedError(LedgerError):
    """What a receipt holds is not what was recorded; `receipt_id` names it."""

    code = "receipt_damaged"

    def __init__(self, receipt_id: str, what: str) -> None:
        super().__init__(f"receipt {receipt_id} is damaged ({what}): run `reef doctor --ledger`")
        self.receipt_id = receipt_id


class OwnershipLostError(LedgerError):
    """Another process took over this run directory; this one must stop writing at once."""

    code = "ownership_lost"


class StepFailedError(ReefError):
    """A step was refused (gradients not finite). Nothing was moved, unless `moved` says so."""

    code = "step_failed"
    moved = False


class WorkersLostError(ReefError):
    """A training worker died or does not answer; its state is gone."""

    code = "workers_lost"


class LoadFailedError(ReefError):
    """A replica did not load a release, or does not agree with the trainer about it."""

    code = "load_failed"
