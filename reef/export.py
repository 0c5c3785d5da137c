"""`reef export`: conversations out of the ledger, a line of JSON each, beside a running service or without one."""

from collections.abc import Callable
from typing import Any, BinaryIO

import orjson

from reef.chat.dialect import Dialect
from reef.chat.template import Template
from reef.config import Config
from reef.errors import NotFoundError
from reef.ledger import recorded, scenarios
from reef.ledger.reading import open_reading
from reef.service.trajectories import to_atif


def atif(config: Config, scenario: str, out: BinaryIO, progress: Callable[[str], None]) -> int:
    """Write each conversation of a scenario to `out` as ATIF, up to its last turn; one at a time in memory.

    What was deleted is not there any more, and replies that were aborted are left out.

    Returns:
        How many there were.

    Raises:
        NotFoundError: there is no such scenario.
        ConfigError, LedgerError: there is no ledger, or no tokenizer.
        ConflictError, DamagedError: a receipt is of another tokenizer, or not as it was recorded.
    """
    inference = config.inference
    with open_reading(config.ledger_url) as connection:
        if scenarios.find(connection, scenario) is None:
            raise NotFoundError(f"no scenario {scenario}")
        template = Template(inference.model_path)
        try:
            dialect = Dialect(template, inference.model_path, inference.tool_call_parser, inference.reasoning_parser)
            count = 0
            for receipt_id in recorded.last_turns(connection, scenario):
                whole = to_atif(recorded.chain(connection, receipt_id), template, dialect, inference.model_path.name)
                out.write(_line(whole))
                count += 1
                if count % 100 == 0:
                    progress(f"{count} conversations")
            return count
        finally:
            template.close()


def _line(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
