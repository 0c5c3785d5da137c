"""The tables. One row per noun; ids and log-probabilities are little-endian int32 and float32 blobs (8 bytes a token).

A prompt is stored once per request (its n choices share it), as what it adds to the receipt it continues.
"""

from sqlalchemy import (
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
)

receipts = Table(
    "receipts",
    metadata,
    Column("seq", Integer, primary_key=True),
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
)

reports = Table(
    "reports",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("scenario", ForeignKey("scenarios.name"), nullable=False),
    Column("body", Text, nullable=False),
    Column("digest", String, nullable=False),
    Column("score", Float),
    Column("state", String, nullable=False),
    Column("reason", String),
    Column("group_key", String),
    Column("prompt_digest", String),
    Column("oldest_release", String),
    Column("batch_id", String),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index("reports_queue", "scenario", "state", "seq"),
    Index("reports_group", "scenario", "state", "group_key"),
    Index("reports_batch", "batch_id"),
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
    Column("state", String, nullable=False),  # reserved | committed | failed
    Column("attempt", Integer, nullable=False),
    Column("base_release", String, nullable=False),
    Column("settings", Text, nullable=False),
    Column("microbatches", Text, nullable=False),
    Column("release_id", String),
    Column("error", Text),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
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
)

releases = Table(
    "releases",
    metadata,
    Column("seq", Integer, primary_key=True),
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
    UniqueConstraint("scenario", "number"),
    Index("releases_kept", "scenario", "restorable", "number"),
    Index("releases_checkpoint", "scenario", "checkpoint"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("release_id", ForeignKey("releases.id"), nullable=False, index=True),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
