"""DELETE of a receipt, a session, a scenario, over the real service; and with a trainer that must checkpoint first."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from contextlib import asynccontextmanager, closing
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from reef.config import load
from reef.errors import UnavailableError
from reef.ledger import batches, deletion, receipts, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.service.app import create_app
from reef.types import (
    FinishReason,
    Generation,
    Operation,
    Pick,
    Release,
    Report,
    Request,
    Sampling,
    Selection,
    Span,
)
from tests.service.rooms import make_house

CONTENT = {"tags", "prompt_token_ids", "token_ids", "logprobs", "matched", "prompt_text", "text", "request"}
_numbers = itertools.count()


@pytest.fixture
def ask(recorder, scenario):
    """`ask(session=..., scenario=...)`: the id of a fresh receipt."""

    def send(text="2+2=", session=None, scenario=scenario, **fields):
        headers = {"x-reef-scenario": scenario, "x-reef-tag-who": "ada"}
        headers |= {} if session is None else {"x-reef-session": session}
        response = recorder.chat(text, headers=headers, max_tokens=4, **fields)
        return [choice["reef_agent_record_id"] for choice in response.json()["choices"]]

    return send


def delete(service, route):
    return service.client.delete(service.url + route)


def is_deleted(service, receipt):
    return service.receipt(receipt)["deleted_at"] is not None


def test_a_deleted_receipt_shows_its_skeleton_and_is_deleted_once(recorder, ask, scenario) -> None:
    one, two = ask(n=2)
    before = recorder.receipt(one)
    assert before.keys() >= CONTENT
    assert (before["tags"], before["deleted_at"], before["trained_in"]) == ({"who": "ada"}, None, [])
    started = time.time()
    first = delete(recorder, f"/reef/receipts/{one}")
    assert (first.status_code, first.json()) == (200, {"deleted": [one, two]})
    after = recorder.receipt(one)
    assert after.keys() == before.keys() - CONTENT
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"deleted_at", "history"}
    assert started <= after["deleted_at"] <= time.time()
    assert [event["event"] for event in after["history"]] == ["written", "deleted"]
    again = delete(recorder, f"/reef/receipts/{two}")
    assert (again.status_code, again.json()) == (200, {"deleted": []})
    assert recorder.receipt(one) == after


def test_the_report_of_a_deleted_receipt_keeps_no_text_and_stays_idempotent(recorder, ask, scenario, stored) -> None:
    (receipt,) = ask()
    body = {
        "agent_record_id": f"rep-{scenario}",
        "references": [receipt],
        "score": 1,
        "feedback": f"secret-{scenario}",
        "metadata": {"who": f"secret-{scenario}"},
    }
    before = recorder.post("/reef/report", body).json()
    delete(recorder, f"/reef/receipts/{receipt}")
    assert recorder.post("/reef/report", body).json() == before
    (stored_body,) = stored(recorder, "SELECT body FROM reports WHERE id = ?", body["agent_record_id"])[0]
    assert "secret" not in stored_body
    shown = recorder.get(f"/reef/reports/{body['agent_record_id']}").json()
    assert [event["event"] for event in shown["history"]] == ["recorded", "deleted"]
    late = recorder.post("/reef/report", {"references": [receipt], "score": 1}).json()
    assert (late["scenario"], late["state"], late["reason"]) == (scenario, "recorded", "not_training")


@pytest.mark.parametrize("session", ["plain", "job/7/trial 3?x=%41#y", "receipts"])
def test_a_session_goes_whole_and_only_in_its_scenario(recorder, ask, scenario, session) -> None:
    mine = [ask(session=session)[0] for _ in range(2)]
    (other,), (elsewhere,) = ask(session="another"), ask(session=session, scenario=f"{scenario}-other")
    quoted = f"/reef/scenarios/{scenario}/sessions/{quote(session)}"
    answer = delete(recorder, quoted)
    assert (answer.status_code, answer.json()) == (200, {"deleted": mine})
    assert [is_deleted(recorder, item) for item in (*mine, other, elsewhere)] == [True, True, False, False]
    assert delete(recorder, quoted).json() == {"deleted": []}


def test_a_scenario_goes_in_pages_once_its_name_was_said_twice(recorder, ask, scenario, is_error, stored) -> None:
    receipts = [receipt for _ in range(5) for receipt in ask(n=128)]
    (elsewhere,) = ask(scenario=f"{scenario}-other")
    route = f"/reef/scenarios/{scenario}/receipts"
    for query in ("", "?confirm=", f"?confirm={scenario}-other"):
        is_error(delete(recorder, route + query), 400, param="confirm", says=f"say ?confirm={scenario}")
    answer = delete(recorder, f"{route}?confirm={scenario}")
    assert (answer.status_code, answer.json()) == (200, {"deleted": len(receipts)})
    assert len(receipts) > deletion.PAGE
    left = "SELECT count(*) FROM receipts JOIN requests ON requests.id = request_id WHERE scenario = ? AND {}"
    assert stored(recorder, left.format("deleted_at IS NULL"), scenario) == [(0,)]
    assert stored(recorder, left.format("length(output_ids) + length(body) > 0"), scenario) == [(0,)]
    assert not is_deleted(recorder, elsewhere)
    assert delete(recorder, f"{route}?confirm={scenario}").json() == {"deleted": 0}
    counted = recorder.get("/metrics").text
    assert 'reef_receipts_deleted_total{reason="scenario"}' in counted
    ledger = recorder.status()["ledger"]
    assert ledger["deleted_receipts"]["scenario"] >= len(receipts)
    assert ledger["used_bytes"] > 0


def test_what_is_not_there_is_named(recorder, ask, scenario, is_error) -> None:
    ask()
    is_error(delete(recorder, "/reef/receipts/rcp_x"), 404, code="receipt_not_found", says="rcp_x")
    is_error(delete(recorder, f"/reef/scenarios/{scenario}/sessions/x"), 404, code="session_not_found", says="x")
    is_error(delete(recorder, "/reef/scenarios/nobody/sessions/x"), 404, code="scenario_not_found", says="nobody")
    is_error(delete(recorder, "/reef/scenarios/nobody/receipts?confirm=nobody"), 404, code="scenario_not_found")


@pytest.fixture
def trained(recorder, ask, scenario):
    """`trained(receipt, state)`: as if a batch with a report on the receipt were reserved or committed."""

    def note(receipt, state):
        name = f"{scenario}-{next(_numbers)}"
        report = {"agent_record_id": f"rep-{name}", "references": [receipt], "score": 1}
        assert recorder.post("/reef/report", report).status_code == 200
        of_report = "reserved" if state == "reserved" else "trained"
        release = f"rel-{name}" if state == "committed" else None
        with closing(sqlite3.connect(recorder.run_dir / "ledger.db")) as connection, connection:
            connection.execute(
                "INSERT INTO batches (id, scenario, number, state, attempt, base_release, settings, microbatches,"
                " release_id, created_at, updated_at) VALUES (?, ?, 1, ?, 1, 'base', '{}', '[]', ?, 1, 1)",
                (name, scenario, state, release),
            )
            connection.execute(
                "INSERT INTO batch_samples (batch_id, position, report_id, receipt_id, group_key, reward, trains)"
                " VALUES (?, 0, ?, ?, 'g', 1, 1)",
                (name, f"rep-{name}", receipt),
            )
            connection.execute(
                "UPDATE reports SET state = ?, batch_id = ? WHERE id = ?", (of_report, name, f"rep-{name}")
            )
            if release is not None:
                connection.execute(
                    "INSERT INTO releases (id, scenario, number, content_id, operation, policy_version, step, batch_id,"
                    " path, restorable, metrics, created_at) VALUES (?, ?, 1, 'c', 'train', 1, 1, ?, '', 1, '{}', 1)",
                    (release, scenario, name),
                )
        return name

    return note


def test_what_a_step_trains_on_is_409_with_when_to_come_back(recorder, ask, scenario, trained, is_error) -> None:
    first, second = ask(session="s"), ask(session="s")
    batch = trained(first[0], "reserved")
    for route in (f"receipts/{first[0]}", f"scenarios/{scenario}/sessions/s"):
        refused = delete(recorder, f"/reef/{route}")
        is_error(refused, 409, code="in_training", says=f"batch {batch}")
        assert int(refused.headers["retry-after"]) >= 1
    is_error(delete(recorder, f"/reef/scenarios/{scenario}/receipts?confirm={scenario}"), 409, code="in_training")
    assert not is_deleted(recorder, first[0]) and not is_deleted(recorder, second[0])
    assert delete(recorder, f"/reef/receipts/{second[0]}").status_code == 200
    with closing(sqlite3.connect(recorder.run_dir / "ledger.db")) as connection, connection:
        connection.execute("DELETE FROM batch_samples WHERE batch_id = ?", (batch,))
        connection.execute(
            "UPDATE reports SET state = 'dropped', reason = 'tied', batch_id = NULL WHERE batch_id = ?", (batch,)
        )
        connection.execute("DELETE FROM batches WHERE id = ?", (batch,))
    assert delete(recorder, f"/reef/scenarios/{scenario}/sessions/s").json() == {"deleted": first}


def test_without_a_trainer_here_what_a_replay_needs_is_409_and_says_why(
    recorder, ask, scenario, trained, is_error
) -> None:
    (receipt,) = ask()
    batch = trained(receipt, "committed")
    assert recorder.receipt(receipt)["trained_in"] == [f"rel-{batch}"]
    refused = delete(recorder, f"/reef/receipts/{receipt}")
    is_error(refused, 409, code="checkpoint_needed", says="once the service that trains has written one")
    assert not is_deleted(recorder, receipt)
    with closing(sqlite3.connect(recorder.run_dir / "ledger.db")) as connection, connection:
        connection.execute("UPDATE releases SET checkpoint = '/c' WHERE id = ?", (f"rel-{batch}",))
    assert delete(recorder, f"/reef/receipts/{receipt}").json() == {"deleted": [receipt]}


# --- with a trainer ---------------------------------------------------------------------------------------------------


class FakeDispatcher:
    """A trainer whose checkpoints are rows, if it can write any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.num_checkpoints = 0
        self.can = True

    async def checkpoint(self) -> None:
        if not self.can:
            raise UnavailableError("no checkpoint now", retry_after_s=1)
        self.num_checkpoints += 1
        head = await self._ledger.read(releases.head, "s")
        await self._ledger.write(releases.set_checkpoint, head.id, "/checkpoints/x")


def release(number: int, batch_id: str | None = None) -> Release:
    return Release(
        id=f"r{number}",
        scenario="s",
        number=number,
        parent=f"r{number - 1}" if number else None,
        content_id=f"sha256:{number}",
        operation=Operation.TRAIN if number else Operation.BASE,
        policy_version=number,
        step=number,
        batch_id=batch_id,
        path="",
        checkpoint=None,
        restorable=True,
        created_at=1.0,
    )


def trained_receipts(connection, count: int) -> list[str]:
    """`count` receipts, all trained in r1."""
    scenarios.create(connection, "s", "grpo", 1.0)
    releases.append(connection, release(0))
    for index in range(count):
        ids = np.array([index], dtype=np.int32)
        request = Request(f"req{index}", "s", "chat", ids, Sampling(max_tokens=1), 1, b"{}", 1.0)
        sampled = Generation(ids, np.zeros(1, dtype=np.float32), FinishReason.STOP, (Span(0, 1, "r0"),))
        receipts.record(connection, request, [receipts.make(request, 0, sampled, "e", f"rcp{index}", 1.0)])
        body = {"references": [f"rcp{index}"], "score": 1.0}
        reports.accept(connection, Report(f"rep{index}", "s", (f"rcp{index}",), body, score=1.0), True, 1.0)
    picks = Selection(tuple(Pick(f"rep{index}", "g") for index in range(count)))
    batches.reserve(connection, "s", "b1", picks, "r0", {}, lambda lengths: (tuple(range(len(lengths))),), 1.0)
    batches.commit(connection, "b1", release(1, "b1"), 1.0)
    return [f"rcp{index}" for index in range(count)]


@asynccontextmanager
async def house_with_trainer(tmp_path):
    """A house that is ready, its client, and its trainer."""
    ledger = Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    dispatcher = FakeDispatcher(ledger)
    house = make_house(load(None), ledger, storage=object(), dispatcher=dispatcher)
    house.waiting_for = None
    transport = httpx.ASGITransport(app=create_app(house))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield house, client, dispatcher
    finally:
        ledger.close()


def test_a_checkpoint_is_written_before_what_a_replay_needs_is_deleted(tmp_path) -> None:
    async def run() -> None:
        async with house_with_trainer(tmp_path) as (house, client, dispatcher):
            made = await house.ledger.write(trained_receipts, 3)
            dispatcher.can = False
            refused = await client.delete(f"/reef/receipts/{made[0]}")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await house.ledger.read(receipts.skeleton, made[0])).deleted_at is None
            dispatcher.can = True
            assert (await client.delete(f"/reef/receipts/{made[0]}")).json() == {"deleted": [made[0]]}
            assert (await client.delete("/reef/scenarios/s/receipts?confirm=s")).json() == {"deleted": 2}
            assert dispatcher.num_checkpoints == 1
            assert (await house.ledger.read(releases.get, "s", "r1")).num_deleted == 3

    asyncio.run(run())


def test_nothing_is_deleted_while_the_service_starts(tmp_path) -> None:
    async def run() -> None:
        async with house_with_trainer(tmp_path) as (house, client, _):
            await house.ledger.write(trained_receipts, 1)
            house.waiting_for = "the engine and the trainer"
            for route in ("receipts/rcp0", "scenarios/s/sessions/x", "scenarios/s/receipts?confirm=s"):
                assert (await client.delete(f"/reef/{route}")).status_code == 503

    asyncio.run(run())
