"""Numbered schema changes, applied in order when a ledger is opened.

The version is kept in `meta`. A ledger from a newer Reef is refused and left as it is.
"""

from collections.abc import Callable

from sqlalchemy import Connection, Engine, insert, inspect, select, update

from reef.errors import LedgerError
from reef.ledger.schema import meta, metadata


def _first_tables(connection: Connection) -> None:
    metadata.create_all(connection)


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_first_tables,)


def migrate(engine: Engine) -> None:
    """Bring the ledger to this version of the schema, one transaction a migration.

    Raises:
        LedgerError: the ledger was written by a newer version.
    """
    with engine.begin() as connection:
        version = _version(connection)
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"the ledger has schema version {version}, this Reef knows versions up to {len(MIGRATIONS)}: "
            "use the Reef that wrote it, or a newer one"
        )
    for number, apply in enumerate(MIGRATIONS[version:], start=version + 1):
        with engine.begin() as connection:
            apply(connection)
            row = {"key": "schema_version", "value": str(number)}
            if number == 1:
                connection.execute(insert(meta).values(row))
            else:
                connection.execute(update(meta).where(meta.c.key == row["key"]).values(row))


def _version(connection: Connection) -> int:
    if not inspect(connection).has_table("meta"):
        return 0
    value = connection.scalar(select(meta.c.value).where(meta.c.key == "schema_version"))
    if value is None or not value.isdecimal():
        raise LedgerError(f"the ledger's schema version is {value!r}, expected a number: is this a ledger?")
    return int(value)
