"""A ledger of a thousand receipts beside one of a million: what a service asks of it must not take longer.

Both are made here, in the real schema and with real digests, so that `reef doctor --ledger` finds nothing wrong. They
differ in what lies behind them: as many reports wait in both, and the answers (a page of releases, a batch) are as
long. Each figure is the median of many repetitions that take turns on the two. Minutes, and 3 GB of disk meanwhile.
"""

import asyncio
import dataclasses
import itertools
import random
import shutil
import sqlite3
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, create_engine, event, func, insert, make_url, select, update

from benchmarks.common import RESULTS, table, write
from reef.config import load
from reef.ledger import batches, deletion, receipts, releases, reports, scenarios, schema, story
from reef.ledger.audit import audit
from reef.ledger.codec import digest, pack_ids, to_json
from reef.ledger.database import sqlite
from reef.ledger.ledger import Ledger
from reef.ledger.reading import open_reading
from reef.methods.base import build
from reef.training import packing
from reef.training.settings import settings
from reef.types import (
    FinishReason,
    Generation,
    Operation,
    Receipt,
    Release,
    Report,
    ReportState,
    Request,
    Sampling,
    Span,
)

SIZES = (1_000, 1_000_000)
SCENARIO = "arithmetic"
GROUP_SIZE, BATCH_SIZE = 4, 8
NUM_WAITING = 16  # groups that no batch has taken yet
NUM_PROMPT, NUM_OUTPUT = 64, 32  # tokens
NUM_RESTORABLE = 8  # releases whose weights are on disk
NUM_SHOWN_RELEASES = 100  # of a page
NUM_SHOWN = 100  # receipts, from all over the ledger, that the questions are about
REPEATS = 200
FEW = 20  # repetitions of what takes long by itself
LIMIT = 1.2  # times as long as with a thousand receipts
START = 1_700_000_000.0
CONFIG = load(None, ["--recipe.config.group-size", str(GROUP_SIZE), "--recipe.config.batch-size", str(BATCH_SIZE)], {})
SETTINGS = settings(CONFIG)
BODY = to_json({"model": "m", "messages": [{"role": "user", "content": "Start at 9. Subtract 4. Add 3."}]}).encode()
BULK = (schema.releases, schema.reports, schema.report_receipts, schema.batches, schema.batch_samples)


@dataclasses.dataclass(slots=True)
class Made:
    """A ledger on disk, and what to ask of it."""

    path: Path
    head: str
    old_release: str  # a quarter of the chain behind the base
    shown: Sequence[str]  # receipts that a release was trained on

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"


class Maker:
    """Writes a ledger: groups of graded receipts, batches of them, and the release that each batch made."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._run_id = run_id
        self._random = random.Random(0)
        self._numbers = np.random.default_rng(0)
        self._time = START
        self._rows: dict[str, list[dict[str, Any]]] = {each.name: [] for each in BULK}
        self.chain: list[Release] = []
        self.trained: list[str] = []  # receipts

    def make(self, num_groups: int) -> None:
        """Of every 14 groups 12 are trained, one has tied rewards and one has no reports; the last ones wait."""
        scenarios.create(self._connection, SCENARIO, "grpo", START)
        self._link(Operation.BASE)
        settled = num_groups - NUM_WAITING
        group: list[Receipt] = []  # of a batch: one more makes it whole
        for number in range(settled):
            made = self._complete()
            if number % 14 == 12:
                self._grade(made, ReportState.DROPPED, reason="tied")
            elif number % 14 < 12:
                if group:
                    self._train([*group, *made])
                group = [] if group else made
            if number in (settled // 3, settled // 2):
                self._link(Operation.ROLLBACK, source=self.chain[-2])
            if number % 1000 == 0:
                self._flush()
        for _ in range(NUM_WAITING):
            self._grade(self._complete(), ReportState.PENDING)
        self._flush()
        for release in self.chain[-NUM_RESTORABLE:]:
            releases.add_evaluation(self._connection, SCENARIO, release.id, {"accuracy": 0.9}, self._time)

    def _name(self, kind: str) -> str:
        return f"{kind}_{self._random.getrandbits(128):032x}"

    def _complete(self) -> list[Receipt]:
        """One request with its choices, sampled from the head."""
        self._time += 0.1
        request = make_request(self._name("req"), self._numbers, self._time)
        made = make_receipts(request, [self._name("rcp") for _ in range(GROUP_SIZE)], self._numbers, self.chain[-1].id)
        receipts.record(self._connection, request, made)
        return made

    def _grade(
        self, made: Sequence[Receipt], state: ReportState, reason: str | None = None, batch_id: str | None = None
    ) -> list[str]:
        """A report of each receipt, as `reports.accept` stores it and a batch leaves it."""
        names = []
        for index, receipt in enumerate(made):
            names.append(name := self._name("rep"))
            score = 1.0 if reason else float(index % 2)
            body = to_json({"references": [receipt.id], "score": score, "group": receipt.request_id})
            self._rows["reports"].append(
                {
                    "id": name,
                    "scenario": SCENARIO,
                    "body": body,
                    "digest": digest(SCENARIO, body),
                    "score": score,
                    "state": state.value,
                    "reason": reason,
                    "group_key": f"group:{receipt.request_id}",
                    "prompt_digest": digest(pack_ids(receipt.prompt_ids)),
                    "releases": to_json([receipt.generation.spans[0].release_id]),
                    "batch_id": batch_id,
                    "created_at": self._time,
                    "updated_at": self._time,
                }
            )
            self._rows["report_receipts"].append({"report_id": name, "position": 0, "receipt_id": receipt.id})
        return names

    def _train(self, made: Sequence[Receipt]) -> None:
        """A batch of these receipts, and the release that it made."""
        batch_id = self._name("bat")
        names = self._grade(made, ReportState.TRAINED, batch_id=batch_id)
        head = self.chain[-1]
        release = self._link(Operation.TRAIN, batch_id=batch_id)
        self.trained.append(made[0].id)
        self._rows["batches"].append(
            {
                "id": batch_id,
                "scenario": SCENARIO,
                "number": len(self.trained),
                "state": "committed",
                "attempt": 1,
                "base_release": head.id,
                "settings": to_json(SETTINGS),
                "microbatches": to_json([list(range(len(made)))]),
                "release_id": release.id,
                "created_at": self._time,
                "updated_at": self._time,
            }
        )
        self._rows["batch_samples"] += [
            {
                "batch_id": batch_id,
                "position": position,
                "report_id": name,
                "receipt_id": receipt.id,
                "group_key": receipt.request_id,
                "reward": float(position % 2),
                "trains": True,
            }
            for position, (name, receipt) in enumerate(zip(names, made, strict=True))
        ]

    def _link(self, operation: Operation, batch_id: str | None = None, source: Release | None = None) -> Release:
        before = self.chain[-1] if self.chain else None
        content = source or before
        number = len(self.chain)
        trained = int(operation is Operation.TRAIN)
        release = Release(
            id=f"{self._run_id}-{number:06d}",
            scenario=SCENARIO,
            number=number,
            parent=before.id if before else None,
            content_id=source.content_id if source else f"sha256:{number:064x}",
            operation=operation,
            policy_version=content.policy_version + trained if content else 0,
            step=content.step + trained if content else 0,
            batch_id=batch_id,
            path=f"/work/run/releases/{self._run_id}-{number:06d}",
            checkpoint=None,
            restorable=operation is Operation.BASE,
            created_at=self._time,
            metrics={f"metric/{index}": float(index) / 3 for index in range(16)},
            source=source.id if source else None,
        )
        values = {each.name: getattr(release, each.name) for each in dataclasses.fields(release)}
        self._rows["releases"].append({**values, "metrics": to_json(release.metrics)})
        self.chain.append(release)
        return release

    def _flush(self) -> None:
        for each in BULK:
            if rows := self._rows[each.name]:
                self._connection.execute(insert(each), rows)
                rows.clear()


def make_request(name: str, numbers: np.random.Generator, now: float) -> Request:
    return Request(
        id=name,
        scenario=SCENARIO,
        api="chat",
        prompt_ids=numbers.integers(0, 32_000, NUM_PROMPT, dtype=np.int32),
        sampling=Sampling(max_tokens=NUM_OUTPUT),
        n=GROUP_SIZE,
        body=BODY,
        created_at=now,
        tags={"episode": name[-6:]},
        template_digest="t" * 64,
        tokenizer_digest="t" * 64,
    )


def make_receipts(
    request: Request, names: Sequence[str], numbers: np.random.Generator, release_id: str
) -> list[Receipt]:
    return [
        receipts.make(
            request,
            choice,
            Generation(
                output_ids=numbers.integers(0, 32_000, NUM_OUTPUT, dtype=np.int32),
                logprobs=-numbers.random(NUM_OUTPUT, dtype=np.float32),
                finish_reason=FinishReason.STOP,
                spans=(Span(0, NUM_OUTPUT, release_id),),
                matched=2,
            ),
            "embedded 1",
            name,
            request.created_at,
        )
        for choice, name in enumerate(names)
    ]


def generate(path: Path, num_receipts: int) -> Made:
    """A ledger of so many receipts at `path`."""
    url = f"sqlite:///{path}"
    ledger = Ledger.open(url)
    run_id = ledger.run_id
    ledger.close()
    engine = create_engine(url)
    event.listen(engine, "connect", _in_a_hurry)
    with engine.begin() as connection:
        maker = Maker(connection, run_id)
        maker.make(num_receipts // GROUP_SIZE)
        claim = select(schema.report_receipts.c.report_id).where(
            schema.report_receipts.c.receipt_id == schema.receipts.c.id
        )
        connection.execute(update(schema.receipts).values(claimed_by=claim.scalar_subquery()))
    engine.dispose()
    shown = maker.trained[:: max(1, len(maker.trained) // NUM_SHOWN)][:NUM_SHOWN]
    return Made(path, maker.chain[-1].id, maker.chain[len(maker.chain) // 4 + 1].id, shown)


def _in_a_hurry(connection: sqlite3.Connection, _record: object) -> None:
    for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-500000"):
        connection.execute(f"PRAGMA {setting}")


class Asked:
    """What a service asks of one ledger; each method does it once. A read has its own transaction, as in `Ledger`."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._method = build(SETTINGS["method"])
        self._split = partial(packing.split, budget_tokens=CONFIG.training.micro_batch_tokens, data_ranks=1)
        self._reading = sqlite(make_url(made.url), read_only=True)
        self._writing = sqlite(make_url(made.url), read_only=False)
        self._shown = itertools.cycle(made.shown)
        self._runner = asyncio.Runner()
        self._ledger: Ledger | None = None
        self._numbers = np.random.default_rng(1)

    def reserve(self) -> None:
        """The dispatcher's way from pending reports to a batch, which is undone before its commit."""
        pending = self._read(reports.candidates, SCENARIO)
        head = self._read(releases.head, SCENARIO)
        produced = {release_id for candidate in pending for release_id in candidate.releases}
        behind = self._read(releases.staleness, SCENARIO, produced)
        staleness = {c.report_id: max(behind[release_id] or 0 for release_id in c.releases) for c in pending}
        selection = self._method.select(pending, staleness, START)
        with self._writing.connect() as connection:
            batches.reserve(connection, SCENARIO, "bat_new", selection, head.id, SETTINGS, self._split, START)
            batch = batches.load(connection, "bat_new")
        assert len(batch.samples) == BATCH_SIZE

    def status(self) -> None:
        """What `GET /reef/status` reads."""
        scenario = self._read(scenarios.training)
        self._read(deletion.used_bytes)
        self._read(releases.head, scenario)
        self._read(reports.count, scenario, ReportState.PENDING)
        self._read(reports.count, scenario, ReportState.RESERVED)

    def releases(self) -> None:
        """What a page of `GET /reef/scenarios/S/releases` reads."""
        chain = self._read(releases.chain, SCENARIO, NUM_SHOWN_RELEASES)
        self._read(releases.evaluations_of, [release.id for release in chain])
        self._read(releases.head, SCENARIO)
        assert len(chain) == NUM_SHOWN_RELEASES

    def lineage_of_the_head(self) -> None:
        assert self._read(releases.lineage, SCENARIO, self._made.head)["samples"]

    def lineage_of_an_old_release(self) -> None:
        assert self._read(releases.lineage, SCENARIO, self._made.old_release)["samples"]

    def why(self) -> None:
        """What `reef why RECEIPT` reads, of one receipt again and again."""
        self._why(self._made.shown[0])

    def why_of_another(self) -> None:
        """The same of another receipt each time: with a million, pages that SQLite does not hold in memory."""
        self._why(next(self._shown))

    def open(self) -> None:
        """Open the ledger and close it again."""
        Ledger.open(self._made.url).close()

    def write(self) -> None:
        """One commit with a request, its receipts and a report."""
        self._ledger = self._ledger or Ledger.open(self._made.url)
        name = uuid.uuid4().hex
        request = make_request(f"req_{name}", self._numbers, START)
        made = make_receipts(request, [f"rcp_{name}"], self._numbers, self._made.head)
        report = Report(f"rep_{name}", SCENARIO, (made[0].id,), {"references": [made[0].id], "score": 1.0}, 1.0)
        self._runner.run(_write(self._ledger, request, made, report))

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._reading.dispose()
        self._writing.dispose()
        self._runner.close()

    def _why(self, receipt_id: str) -> None:
        history, reported = self._read(_story, receipt_id)
        assert history
        for report_id in reported:
            assert self._read(_view, report_id)["release_id"]

    def _read(self, op: Callable[..., Any], *args: Any) -> Any:
        with self._reading.begin() as connection:
            return op(connection, *args)


def _story(connection: Connection, receipt_id: str) -> tuple[Any, Sequence[str]]:
    """What `GET /reef/receipts/ID` reads."""
    receipts.skeleton(connection, receipt_id)
    reported = reports.reports_of(connection, receipt_id)
    assert story.trained_in(connection, receipt_id)
    history = story.of_receipt(connection, receipt_id, GROUP_SIZE)
    receipts.body_of(connection, receipts.get(connection, receipt_id).request_id)
    return history, reported


def _view(connection: Connection, report_id: str) -> dict[str, Any]:
    """What `GET /reef/reports/ID` reads."""
    view = reports.view(connection, report_id, GROUP_SIZE)
    return {**view, "history": story.of_report(connection, report_id, GROUP_SIZE)}


async def _write(ledger: Ledger, request: Request, made: Sequence[Receipt], report: Report) -> None:
    await asyncio.gather(
        ledger.write(receipts.record, request, made), ledger.write(reports.accept, report, True, START)
    )


# In this order: what opens the ledger anew comes before what keeps it open, what writes comes last.
QUESTIONS: Mapping[str, tuple[Callable[[Asked], None], int]] = {
    "open and close": (Asked.open, FEW),
    "reserve a batch": (Asked.reserve, REPEATS),
    "status": (Asked.status, REPEATS),
    "a page of releases": (Asked.releases, REPEATS),
    "lineage of the head": (Asked.lineage_of_the_head, REPEATS),
    "lineage of an old release": (Asked.lineage_of_an_old_release, REPEATS),
    "why": (Asked.why, REPEATS),
    "why, another receipt each time": (Asked.why_of_another, NUM_SHOWN - 1),
    "write a receipt and a report": (Asked.write, REPEATS),
}


def measure(made: Sequence[Made], share: float = 1.0) -> dict[str, list[float]]:
    """Median milliseconds of each question, of each ledger. `share` of the repetitions."""
    asked = [Asked(each) for each in made]
    found = {}
    for name, (question, repeats) in QUESTIONS.items():
        taken: list[list[float]] = [[] for _ in asked]
        for repeat in range(max(1, int(repeats * share)) + 1):
            for one, seconds in zip(asked, taken, strict=True):
                started = time.perf_counter()
                question(one)
                if repeat:  # the first warms up
                    seconds.append(time.perf_counter() - started)
        found[name] = [statistics.median(seconds) * 1000 for seconds in taken]
    for one in asked:
        one.close()
    return found


def audited(made: Made) -> float:
    """Seconds that `reef doctor --ledger` takes over a ledger."""
    started = time.perf_counter()
    with open_reading(made.url) as connection:
        findings = list(audit(connection))
    assert not findings, findings[:3]
    return time.perf_counter() - started


def disk(made: Made) -> dict[str, float]:
    """Bytes for a token: of ids and log-probabilities, and of the whole file."""
    with open_reading(made.url) as connection:
        sampled, in_receipts = connection.execute(
            select(
                func.sum(schema.receipts.c.num_tokens),
                func.sum(func.length(schema.receipts.c.output_ids) + func.length(schema.receipts.c.logprobs)),
            )
        ).one()
        added = connection.scalar(select(func.sum(func.length(schema.requests.c.prompt_ids)))) or 0
    prompt = added // 4  # an id has four bytes
    return {
        "sampled_tokens": sampled,
        "prompt_tokens": prompt,
        "file_bytes": made.path.stat().st_size,
        "bytes_per_sampled_token": in_receipts / sampled,
        "ids_and_logprobs_bytes_per_token": (in_receipts + added) / (sampled + prompt),
        "file_bytes_per_token": made.path.stat().st_size / (sampled + prompt),
        "file_bytes_per_receipt": made.path.stat().st_size / (sampled / NUM_OUTPUT),
    }


def run(directory: Path, sizes: Sequence[int] = SIZES, share: float = 1.0) -> dict[str, Any]:
    """Make the ledgers in `directory`, check them, ask them."""
    made, generated_s = [], []
    for size in sizes:
        started = time.perf_counter()
        made.append(generate(directory / f"{size}.db", size))
        generated_s.append(time.perf_counter() - started)
    audit_s = [audited(each) for each in made]
    on_disk = disk(made[-1])
    medians = measure(made, share)
    return {
        "receipts": list(sizes),
        "choices": GROUP_SIZE,
        "output_tokens": NUM_OUTPUT,
        "generated_s": [round(seconds, 1) for seconds in generated_s],
        "audit_s": [round(seconds, 2) for seconds in audit_s],
        "disk": {name: round(value, 2) for name, value in on_disk.items()},
        "median_ms": {name: [round(value, 3) for value in values] for name, values in medians.items()},
        "ratio": {name: round(values[-1] / values[0], 2) for name, values in medians.items()},
    }


def main() -> None:
    directory = RESULTS.parent / "bench-ledger"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        found = run(directory)
    finally:
        shutil.rmtree(directory)
    print("Ledger: median milliseconds with a thousand receipts and with a million")
    head = ["question", *(f"{size:,}" for size in SIZES), "ratio"]
    rows = [
        [name, *(f"{value:.3f}" for value in values), f"{found['ratio'][name]:.2f}"]
        for name, values in found["median_ms"].items()
    ]
    print(table(head, rows))
    print("Bytes for a token:", {name: value for name, value in found["disk"].items() if "bytes_per" in name})
    print("reef doctor --ledger:", f"{found['audit_s'][-1]} s")
    print("Above", LIMIT, [name for name, ratio in found["ratio"].items() if ratio > LIMIT])
    write("ledger", found)


if __name__ == "__main__":
    main()
