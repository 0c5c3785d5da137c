"""A ledger opened for reading only, beside the services that are on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, make_url, select
from sqlalchemy.exc import DBAPIError

from reef.errors import LedgerError
from reef.ledger.database import POSTGRES, postgres, sqlite
from reef.ledger.ledger import check_url
from reef.ledger.migrations import require_newest
from reef.ledger.schema import meta


@contextmanager
def open_reading(url: str) -> Iterator[Connection]:
    """One snapshot of the ledger at `url`. Nothing is made, migrated or owned.

    Raises:
        ConfigError: `url` is not one of a ledger.
        LedgerError: it is not there, cannot be read, or has another version of the schema.
    """
    parsed = check_url(url)
    engine = _engine(parsed)
    try:
        with engine.connect() as connection:
            require_newest(connection)
            yield connection
    except DBAPIError as error:
        where = parsed.set(query={}).render_as_string(hide_password=True)
        raise LedgerError(f"cannot read the ledger at {where}: {error.orig}") from None
    finally:
        engine.dispose()


def run_id_of(connection: Connection) -> str:
    """The run directory's part of its releases' names."""
    return str(connection.scalar(select(meta.c.value).where(meta.c.key == "run_id")))


def _engine(url: URL) -> Engine:
    if url.drivername == POSTGRES:
        return postgres(url, num_connections=1, read_only=True, patient=True)
    file = Path(str(url.database))
    if not file.is_file():
        raise LedgerError(f"there is no ledger {file}")
    return sqlite(make_url(f"sqlite:///file:{quote(str(file))}?mode=ro&uri=true"), read_only=True)
