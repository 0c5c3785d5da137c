"""Numbered schema changes, applied in order when a ledger is opened.

The version is kept in `meta`. A new ledger begins with the newest schema. An older one is backed up first (SQLite: a
copy beside it, `ledger.db.schema-1`), then changed, one transaction a migration. A newer one is left as it is, refused.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, insert, inspect, select, text, update

from reef.errors import LedgerError
from reef.ledger.schema import leases, meta, metadata
from reef.observe import log


def _rollback_gate_deletion(connection: Connection) -> None:
    """Version 2: states and sources of releases, deletion, every release of a report, leases."""
    statements = (
        "ALTER TABLE requests ADD COLUMN deleted_at FLOAT",
        "ALTER TABLE releases ADD COLUMN source VARCHAR",
        "ALTER TABLE releases ADD COLUMN state VARCHAR NOT NULL DEFAULT 'released'",
        "ALTER TABLE releases ADD COLUMN reason TEXT",
        "ALTER TABLE releases ADD COLUMN state_at FLOAT",
        "ALTER TABLE releases ADD COLUMN replay_diverged BOOLEAN NOT NULL DEFAULT false",
        "ALTER TABLE releases ADD COLUMN num_deleted INTEGER NOT NULL DEFAULT '0'",
        "ALTER TABLE batches ADD COLUMN begun BOOLEAN NOT NULL DEFAULT true",
        "ALTER TABLE reports ADD COLUMN releases TEXT",
        # Version 1 kept the oldest only: a later one of the same report is not known any more without its receipts.
        """UPDATE reports SET releases = '["' || oldest_release || '"]' WHERE oldest_release IS NOT NULL""",
        "ALTER TABLE reports DROP COLUMN oldest_release",
        "CREATE INDEX requests_session ON requests (scenario, session) WHERE session IS NOT NULL",
        "CREATE INDEX requests_parent ON requests (parent) WHERE parent IS NOT NULL",
        "CREATE INDEX releases_batch ON releases (batch_id)",
        "CREATE INDEX releases_jumps ON releases (scenario, number) WHERE source IS NOT NULL",
        "CREATE INDEX batch_samples_report ON batch_samples (report_id)",
    )
    for statement in statements:
        connection.execute(text(statement))
    leases.create(connection)


def _turns(connection: Connection) -> None:
    """Version 3: how a turn was found to continue another, keys to find it by, sequences of several turns."""
    statements = (
        "ALTER TABLE requests ADD COLUMN continued_by TEXT",
        "ALTER TABLE receipts ADD COLUMN turn_key VARCHAR",
        "ALTER TABLE batch_samples ADD COLUMN sample INTEGER",
        "CREATE INDEX receipts_turn_key ON receipts (turn_key, seq) WHERE turn_key IS NOT NULL",
    )
    for statement in statements:
        connection.execute(text(statement))


def _prompts(connection: Connection) -> None:
    """Version 4: what a prompt's answers earned before is found by the prompt."""
    index = "CREATE INDEX reports_prompt ON reports (scenario, prompt_digest, seq) WHERE state = 'trained'"
    connection.execute(text(index))


# From version 1, 2, ...
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_rollback_gate_deletion, _turns, _prompts)
NEWEST = len(MIGRATIONS) + 1


def migrate(engine: Engine) -> None:
    """Bring the ledger to this version of the schema.

    Raises:
        LedgerError: the ledger was written by a newer version, or cannot be backed up.
    """
    with engine.begin() as connection:
        version = _version(connection)
        if version == 0:
            metadata.create_all(connection)
            connection.execute(insert(meta).values(key="schema_version", value=str(NEWEST)))
            return
    _refuse_newer(version)
    if version < NEWEST:
        _back_up(engine, version)
    for number, apply in enumerate(MIGRATIONS[version - 1 :], start=version + 1):
        with engine.begin() as connection:
            apply(connection)
            connection.execute(update(meta).where(meta.c.key == "schema_version").values(value=str(number)))
        log.info("the ledger has schema version %d now", number)


def require_newest(connection: Connection) -> None:
    """For who only reads. Raises LedgerError where the ledger has another version of the schema than this one."""
    version = _version(connection)
    _refuse_newer(version)
    if version == 0:
        raise LedgerError("the database holds no ledger yet")
    if version < NEWEST:
        raise LedgerError(
            f"the ledger has schema version {version}, and {NEWEST} is needed to read it: "
            "`reef serve` backs it up and brings it forward"
        )


def _refuse_newer(version: int) -> None:
    if version > NEWEST:
        raise LedgerError(
            f"the ledger has schema version {version}, this Reef knows versions up to {NEWEST}: "
            "use the Reef that wrote it, or a newer one"
        )


def _back_up(engine: Engine, version: int) -> None:
    """SQLite: a whole copy beside the ledger. PostgreSQL has its own ways; there a change that fails is undone."""
    if engine.dialect.name != "sqlite":
        return
    path = Path(str(engine.url.database))
    target, partial = (path.with_name(f"{path.name}.schema-{version}{end}") for end in ("", ".partial"))
    try:
        partial.unlink(missing_ok=True)
        with contextlib.closing(engine.raw_connection()) as connection:
            connection.cursor().execute("VACUUM INTO ?", (str(partial),))
        partial.rename(target)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"the ledger is not migrated, since it cannot be backed up to {target}: {error}") from error
    log.info("the ledger of schema version %d is kept as %s", version, target)


def _version(connection: Connection) -> int:
    if not inspect(connection).has_table("meta"):
        return 0
    value = connection.scalar(select(meta.c.value).where(meta.c.key == "schema_version"))
    if value is None or not value.isdecimal():
        raise LedgerError(f"the ledger's schema version is {value!r}, expected a number: is this a ledger?")
    return int(value)
