"""The tables. One row per noun; ids and log-probabilities are little-endian int32 and float32 blobs (8 bytes a token).

A prompt is stored once per request (its n choices share it), as what it adds to the receipt it continues.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts by itself in a column of this very type only

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", Text, nullable=False),
)

scenarios = Table(
    "scenarios",
    metadata,
    Column("name", String, primary_key=True),
    Column("recipe", String, nullable=False),
    Column("mode", String, nullable=False),  # auto: batches train as they fill; manual: only on POST .../update
    Column("created_at", Float, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("id", String, primary_key=True),
    Column("scenario", ForeignKey("scenarios.name"), nullable=False),
    Column("session", String),
    Column("purpose", String, nullable=False),
    Column("api", String, nullable=False),
    Column("parent", String),  # the receipt whose ids come first
    Column("continued_by", Text),  # how it was found: explicit | response | session | messages
    Column("prompt_ids", LargeBinary, nullable=False),  # what was added to the parent's ids
    Column("prompt_length", Integer, nullable=False),  # tokens of the whole prompt
    Column("prompt_digest", String, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # zlib of the client's JSON
    Column("tags", Text, nullable=False),
    Column("template_digest", String),
    Column("tokenizer_digest", String),
    Column("engine_build", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("deleted_at", Float),  # ids, body and tags are gone since then
    Index(
        "requests_session",
        "scenario",
        "session",
        sqlite_where=text("session IS NOT NULL"),
        postgresql_where=text("session IS NOT NULL"),
    ),
    Index(
        "requests_parent",
        "parent",
        sqlite_where=text("parent IS NOT NULL"),
        postgresql_where=text("parent IS NOT NULL"),
    ),
)

receipts = Table(
    "receipts",
    metadata,
    Column("seq", SEQUENCE, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("request_id", ForeignKey("requests.id"), nullable=False, index=True),
    Column("choice", Integer, nullable=False),
    Column("output_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("num_tokens", Integer, nullable=False),
    Column("spans", Text, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("matched", Text),
    Column("reproducible", Boolean, nullable=False),
    Column("inexact_reason", String),
    Column("digest", String, nullable=False),
    Column("claimed_by", String),  # the report that trains it
    Column("created_at", Float, nullable=False),
    Column("turn_key", String),  # hash of the conversation up to and including this reply
    Index(
        "receipts_turn_key",
        "turn_key",
        "seq",
        sqlite_where=text("turn_key IS NOT NULL"),
        postgresql_where=text("turn_key IS NOT NULL"),
    ),
)

reports = Table(
    "reports",
    metadata,
    Column("seq", SEQUENCE, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("scenario", ForeignKey("scenarios.name"), nullable=False),
    Column("body", Text, nullable=False),
    Column("digest", String, nullable=False),
    Column("score", Float),
    Column("state", String, nullable=False),
    Column("reason", String),
    Column("group_key", String),
    Column("prompt_digest", String),
    Column("releases", Text),  # JSON: every release that produced a token of its receipts
    Column("batch_id", String),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index("reports_queue", "scenario", "state", "seq"),
    Index("reports_group", "scenario", "state", "group_key"),
    Index("reports_batch", "batch_id"),
    Index(  # see `history.py`
        "reports_prompt",
        "scenario",
        "prompt_digest",
        "seq",
        sqlite_where=text("state = 'trained'"),
        postgresql_where=text("state = 'trained'"),
    ),
)

report_receipts = Table(
    "report_receipts",
    metadata,
    Column("report_id", ForeignKey("reports.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("receipt_id", ForeignKey("receipts.id"), nullable=False, index=True),
    UniqueConstraint("report_id", "receipt_id"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String, primary_key=True),
    Column("scenario", ForeignKey("scenarios.name"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String, nullable=False),  # reserved | committed | failed | aborted
    Column("attempt", Integer, nullable=False),
    Column("base_release", String, nullable=False),
    Column("settings", Text, nullable=False),
    Column("microbatches", Text, nullable=False),
    Column("release_id", String),
    Column("error", Text),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("begun", Boolean, nullable=False, server_default=text("true")),  # reserved: an attempt may be in work
    UniqueConstraint("scenario", "number"),
    Index(
        "batches_reserved",  # at most one a scenario
        "scenario",
        unique=True,
        sqlite_where=text("state = 'reserved'"),
        postgresql_where=text("state = 'reserved'"),
    ),
)

batch_samples = Table(
    "batch_samples",
    metadata,
    Column("batch_id", ForeignKey("batches.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("report_id", ForeignKey("reports.id"), nullable=False),
    Column("receipt_id", ForeignKey("receipts.id"), nullable=False),
    Column("group_key", String, nullable=False),
    Column("reward", Float, nullable=False),
    Column("trains", Boolean, nullable=False),
    Column("sample", Integer),  # rows of one number form one sequence; NULL (before version 3): each row its own
    Index("batch_samples_report", "report_id"),
)

releases = Table(
    "releases",
    metadata,
    Column("seq", SEQUENCE, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("scenario", ForeignKey("scenarios.name"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("parent", String),
    Column("content_id", String, nullable=False),
    Column("operation", String, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("batch_id", String),
    Column("path", Text, nullable=False),
    Column("checkpoint", Text),
    Column("restorable", Boolean, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("verified_at", Float),
    Column("created_at", Float, nullable=False),
    Column("source", String),
    Column("state", String, nullable=False, server_default="released"),
    Column("reason", Text),
    Column("state_at", Float),
    Column("replay_diverged", Boolean, nullable=False, server_default=text("false")),
    Column("num_deleted", Integer, nullable=False, server_default="0"),
    UniqueConstraint("scenario", "number"),
    Index("releases_batch", "batch_id"),
    Index(
        "releases_jumps",
        "scenario",
        "number",
        sqlite_where=text("source IS NOT NULL"),
        postgresql_where=text("source IS NOT NULL"),
    ),
    Index("releases_kept", "scenario", "restorable", "number"),
    Index("releases_checkpoint", "scenario", "checkpoint"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("seq", SEQUENCE, primary_key=True),
    Column("release_id", ForeignKey("releases.id"), nullable=False, index=True),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

# Who may reserve and commit, where several services share one ledger (PostgreSQL). With SQLite the run lock says it.
leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("expires_at", Float, nullable=False),  # by the database's clock
)
