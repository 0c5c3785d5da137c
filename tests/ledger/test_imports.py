"""Exchanges that were recorded elsewhere, as they lie in the ledger."""

from __future__ import annotations

import dataclasses

import pytest

from reef.errors import ConflictError, NotFoundError
from reef.ledger import deletion, imports, receipts, reports
from reef.ledger.audit import audit
from reef.ledger.imports import Exchange
from tests.ledger.conftest import NOW, SCENARIO

BODY = b'{"messages":[],"response":{}}'


def store(book, *records, now=NOW):
    return book.write(imports.store, SCENARIO, records, True, now)


def findings(book):
    return [str(finding) for finding in book.read(lambda connection: list(audit(connection)))]


def test_it_is_a_receipt_that_the_audit_finds_whole(book) -> None:
    assert store(book, Exchange("a", BODY)) == (1, [])
    receipt = book.read(receipts.get, "a")
    assert (len(receipt.prompt_ids), len(receipt.generation.output_ids), receipt.generation.spans) == (0, 0, ())
    assert (receipt.inexact_reason, receipt.turn_key) == ("imported", None)
    assert book.read(receipts.body_of, receipt.request_id) == BODY
    assert findings(book) == []


def test_a_report_on_it_never_trains_in_the_scenario_that_trains(book) -> None:
    assert store(book, Exchange("a", BODY), book.report("a", id="r"))[1] == ["dropped"]
    assert book.state("r") == ("dropped", "inexact")
    assert book.read(reports.candidates, SCENARIO) == []
    assert findings(book) == []


def test_a_report_on_it_and_on_a_receipt_of_our_own_takes_neither_into_training(book) -> None:
    ours = book.complete([1, 2], [3])
    store(book, Exchange("a", BODY), book.report("a", ours.id, id="both"), book.report(ours.id, id="own", group="g"))
    assert book.state("both") == ("dropped", "inexact")
    assert book.state("own") == ("pending", None)


def test_what_comes_again_is_counted_once(book) -> None:
    records = [Exchange("a", BODY), book.report("a", id="r")]
    store(book, *records)
    before = book.dump()
    assert store(book, *records, now=NOW + 1) == (0, [])
    assert book.dump() == before


@pytest.mark.parametrize("wrong", [Exchange("a", b"{}"), "report"])
def test_a_batch_is_stored_whole_or_not_at_all(book, wrong) -> None:
    store(book, Exchange("a", BODY))
    before = book.dump()
    record = book.report("nobody", id="r") if wrong == "report" else wrong
    with pytest.raises((ConflictError, NotFoundError), match=r"records\.1"):
        store(book, Exchange("b", BODY), record)
    assert book.dump() == before


def test_an_id_of_a_receipt_of_our_own_is_taken(book) -> None:
    ours = book.complete([1, 2], [3])
    with pytest.raises(ConflictError):
        store(book, Exchange(ours.id, BODY))


def test_the_same_words_under_two_ids_are_two_receipts(book) -> None:
    assert store(book, Exchange("a", BODY), Exchange("b", BODY)) == (2, [])


def test_after_its_deletion_it_is_known_still_and_its_content_gone(book) -> None:
    store(book, Exchange("a", BODY))
    book.write(lambda connection: deletion.delete(connection, deletion.of_receipt(connection, "a"), NOW + 1))
    assert store(book, Exchange("a", BODY)) == (0, [])
    with pytest.raises(ConflictError):
        store(book, Exchange("a", b"{}"))
    assert findings(book) == []


def test_one_that_was_changed_is_found_by_its_digest(book) -> None:
    store(book, Exchange("a", BODY))
    receipt = book.read(receipts.get, "a")
    assert receipts.compute_digest(dataclasses.replace(receipt, inexact_reason=None)) != receipt.digest
