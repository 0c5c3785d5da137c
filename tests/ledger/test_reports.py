"""Reports: every state they can be in, what they claim, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from reef.errors import BadRequestError, ConflictError, NotFoundError
from reef.ledger import batches, receipts, reports, scenarios
from reef.types import Candidate, Drop, FinishReason, Pick, ReportState, Sampling, Span


def num_reports(book: Any) -> int:
    return int(book.rows("SELECT count(*) FROM reports")[0][0])


def test_a_scored_report_is_pending_and_claims_its_receipt(book: Any) -> None:
    receipt = book.complete([1, 2, 3], [10, 2])
    view = book.accept(receipt.id, id="rep_a", score=0.5, group="g1")
    assert view == {
        "agent_record_id": "rep_a",
        "scenario": "arithmetic",
        "state": "pending",
        "reason": None,
        "score": 0.5,
        "group": "g1",
        "references": [receipt.id],
        "batch_id": None,
        "step": None,
        "release_id": None,
        "created_at": 1_700_000_000.25,
        "updated_at": 1_700_000_000.25,
    }
    assert book.rows("SELECT claimed_by FROM receipts") == [("rep_a",)]
    assert book.read(reports.candidates, "arithmetic") == [
        Candidate("rep_a", 1, "group:g1", 0.5, ("r0",), accepted_at=1_700_000_000.25)
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"score": None}, "no_score"),
        ({"score": None, "outcome": "correct"}, "no_score"),
        ({"outcome": "review"}, "outcome_review"),
        ({"outcome": "error"}, "outcome_error"),
        ({"trains": False}, "not_training"),
    ],
)
def test_a_report_that_cannot_train_is_recorded_with_its_reason_and_claims_nothing(
    book: Any, fields: dict[str, Any], reason: str
) -> None:
    receipt = book.complete([1], [10, 2])
    view = book.accept(receipt.id, **fields)
    assert (view["state"], view["reason"]) == ("recorded", reason)
    assert book.rows("SELECT claimed_by FROM receipts") == [(None,)]
    assert book.accept(receipt.id)["state"] == "pending"  # so a scored one still can


@pytest.mark.parametrize("outcome", ["correct", "incorrect"])
def test_other_outcomes_do_not_keep_a_scored_report_from_training(book: Any, outcome: str) -> None:
    assert book.accept(book.complete([1], [2]).id, outcome=outcome)["state"] == "pending"


def test_a_report_without_references_is_recorded(book: Any) -> None:
    view = book.accept(score=1.0)
    assert (view["state"], view["reason"], view["references"]) == ("recorded", "no_references", [])


def test_evaluation_traffic_is_recorded_and_never_trained(book: Any) -> None:
    held_out, training = book.complete([1], [2], purpose="eval"), book.complete([1], [2])
    for references in ([held_out.id], [training.id, held_out.id]):
        view = book.accept(*references)
        assert (view["state"], view["reason"]) == ("recorded", "evaluation")


def test_an_aborted_answer_is_dropped_even_with_a_score(book: Any) -> None:
    request = book.request([1])
    made = book.made(request, book.generation([5], finish_reason=FinishReason.ABORT))
    book.write(receipts.record, request, made)
    view = book.accept(made[0].id, score=0.0)
    assert (view["state"], view["reason"]) == ("dropped", "aborted")


def test_an_answer_whose_log_probabilities_are_not_the_policys_is_dropped(book: Any) -> None:
    nucleus = book.complete([1], [2], sampling=Sampling(max_tokens=4, top_p=0.95))
    assert book.accept(nucleus.id)["reason"] == "inexact"
    request = book.request([1])
    impossible = book.made(request, book.generation([5], logprobs=np.array([-np.inf], dtype=np.float32)))
    book.write(receipts.record, request, impossible)
    view = book.accept(impossible[0].id)
    assert (view["state"], view["reason"]) == ("dropped", "inexact")


def test_an_answer_without_a_token_is_dropped(book: Any) -> None:
    view = book.accept(book.complete([1], []).id)
    assert (view["state"], view["reason"]) == ("dropped", "empty")


def test_the_first_scored_report_claims_and_later_ones_are_kept(book: Any) -> None:
    one, two = book.complete([1], [2]), book.complete([1], [3])
    first = book.accept(one.id)["agent_record_id"]
    later = book.accept(one.id, two.id)  # Harbor's verdict over a trial whose steps were graded one by one
    assert (later["state"], later["reason"]) == ("recorded", "already_claimed")
    assert book.accept(two.id)["state"] == "pending"  # what it did not claim is still free
    book.train(1, [first])
    after = book.accept(one.id, score=0.0)
    assert (after["state"], after["reason"]) == ("recorded", "already_trained")
    assert book.state(first) == ("trained", None)
    assert book.state(later["agent_record_id"]) == ("recorded", "already_claimed")
    assert list(book.read(reports.reports_of, one.id)) == [
        first,
        later["agent_record_id"],
        after["agent_record_id"],
    ]


def test_the_same_report_again_gets_the_stored_answer_as_it_is_by_then(book: Any) -> None:
    report = book.report(book.complete([1], [2]).id, id="rep_a", score=1.0, metadata={"b": 1, "a": [1.5, None]})
    first = book.write(reports.accept, report, True, 5.0)
    again = dataclasses.replace(report, body=dict(reversed(report.body.items())), created_at=6.0)
    assert book.write(reports.accept, again, True, 6.0) == first
    book.train(1, ["rep_a"])
    after = book.write(reports.accept, again, True, 7.0)
    assert (after["state"], after["step"], after["release_id"], after["batch_id"]) == ("trained", 1, "r1", "b1")
    assert num_reports(book) == 1


@pytest.mark.parametrize("changed", [{"score": 0.0}, {"group": "g"}, {"metadata": {"x": 2}}])
def test_the_same_id_with_another_body_is_refused_and_the_first_stays(book: Any, changed: dict[str, Any]) -> None:
    receipt = book.complete([1], [2])
    book.accept(receipt.id, id="rep_a", metadata={"x": 1})
    before = book.dump()
    with pytest.raises(ConflictError, match="report rep_a is stored already with another body") as refused:
        book.accept(receipt.id, id="rep_a", **{"metadata": {"x": 1}, **changed})
    assert (refused.value.status, refused.value.code, refused.value.param) == (409, "id_reused", "agent_record_id")
    assert book.dump() == before


def test_the_same_id_for_another_scenario_is_refused(book: Any) -> None:
    book.write(scenarios.create, "other", "grpo", 7.5)
    report = book.report(id="rep_a", score=None)
    book.write(reports.accept, report, True, 5.0)
    with pytest.raises(ConflictError):
        book.write(reports.accept, dataclasses.replace(report, scenario="other"), True, 5.0)


def test_an_unknown_receipt_is_named_and_nothing_stored(book: Any) -> None:
    receipt = book.complete([1], [2])
    before = book.dump()
    with pytest.raises(NotFoundError, match=r"references\[1\]: no receipt rcp_x") as missing:
        book.accept(receipt.id, "rcp_x")
    assert (missing.value.status, missing.value.code) == (404, "receipt_not_found")
    assert book.dump() == before


def test_a_receipt_of_another_scenario_is_refused_and_nothing_stored(book: Any) -> None:
    book.write(scenarios.create, "other", "grpo", 7.5)
    receipt = book.complete([1], [2], scenario="other")
    before = book.dump()
    with pytest.raises(BadRequestError, match=rf"references\[0\]: receipt {receipt.id} belongs to scenario other"):
        book.accept(receipt.id)
    assert book.dump() == before


def test_a_group_holds_one_prompt_and_a_member_with_another_is_refused(book: Any) -> None:
    first = book.accept(book.complete([1, 2], [3]).id, group="g")
    other = book.complete([1, 9], [3])
    before = book.dump()
    with pytest.raises(BadRequestError, match=f"report {first['agent_record_id']} of it answers another") as refused:
        book.accept(other.id, group="g")
    assert (refused.value.code, refused.value.param) == ("mixed_group", "group")
    assert book.dump() == before
    assert book.accept(other.id, group="h")["state"] == "pending"
    assert book.accept(book.complete([1, 2], [4]).id, group="g")["state"] == "pending"


def test_a_group_name_may_be_used_for_another_prompt_once_its_first_members_have_left(book: Any) -> None:
    first = book.accept(book.complete([1, 2], [3]).id, group="g")["agent_record_id"]
    book.train(1, [first])
    assert book.accept(book.complete([1, 9], [3]).id, group="g")["state"] == "pending"


def test_reports_without_a_group_are_grouped_by_prompt_and_sampling_but_not_by_seed(book: Any) -> None:
    def key(prompt: list[int], **sampling: Any) -> str:
        receipt = book.complete(prompt, [5, 2], sampling=Sampling(**{"max_tokens": 4, **sampling}))
        report_id = book.accept(receipt.id)["agent_record_id"]
        found = {item.report_id: item.group for item in book.read(reports.candidates, "arithmetic")}
        return str(found[report_id])

    same = key([1, 2])
    assert same.startswith("prompt:")
    assert key([1, 2], seed=1) == key([1, 2], seed=2) == same
    others = [key([1, 3]), key([1, 2], temperature=0.7), key([1, 2], max_tokens=5), key([1, 2], stop=("x",))]
    assert len({same, *others}) == 5


def test_a_pending_member_of_an_incomplete_group_is_shown_waiting(book: Any) -> None:
    first = book.accept(book.complete([1], [2]).id, group="g")["agent_record_id"]
    second = book.accept(book.complete([1], [3]).id, group="g")["agent_record_id"]
    book.accept(book.complete([7], [3]).id, group="another")
    view = book.read(reports.view, first, 3)
    assert (view["state"], view["reason"]) == ("waiting", "group 2 of 3")
    assert book.state(first) == ("pending", None)
    assert book.read(reports.count, "arithmetic", ReportState.PENDING) == 3
    book.accept(book.complete([1], [4]).id, group="g")
    assert [book.read(reports.view, name, 3)["state"] for name in (first, second)] == ["pending", "pending"]


def test_every_release_of_all_spans_of_all_receipts_is_kept(book: Any) -> None:
    for number in (1, 2, 3):
        book.train(number, book.graded(1, release=f"r{number - 1}"))

    def record(*releases: str) -> str:
        request = book.request([1, 2])
        spans = tuple(Span(index, index + 1, release) for index, release in enumerate(releases))
        made = book.made(request, book.generation(range(10, 10 + len(releases)), spans=spans))
        book.write(receipts.record, request, made)
        return str(made[0].id)

    book.accept(record("r3", "r1", "r2"), id="one receipt")
    book.accept(record("r3", "r3"), record("r2", "r3"), id="two receipts")
    book.accept(record("r3"), id="newest")
    produced = {item.report_id: item.releases for item in book.read(reports.candidates, "arithmetic")}
    assert produced == {"one receipt": ("r1", "r2", "r3"), "two receipts": ("r2", "r3"), "newest": ("r3",)}


def test_candidates_come_in_order_of_arrival_with_the_length_of_their_longest_receipt(book: Any) -> None:
    short, long = book.complete([1, 2], [3]), book.complete([1, 2], [3, 4, 5])
    book.accept(short.id, long.id, id="zeta", score=0.25)
    book.accept(book.complete([1], [3]).id, id="alpha", score=-1.0)
    found = book.read(reports.candidates, "arithmetic")
    assert [(item.report_id, item.score) for item in found] == [("zeta", 0.25), ("alpha", -1.0)]
    assert found[0].seq < found[1].seq


def test_drops_end_pending_reports_with_their_reasons_and_touch_no_others(book: Any) -> None:
    stale, abandoned, tied, reserved = book.graded(4)
    batch = book.reserve([reserved])
    reasons = {stale: "stale", abandoned: "abandoned", tied: "tied", reserved: "stale"}
    book.write(reports.drop, [Drop(*item) for item in reasons.items()], 9.0)
    assert [book.state(name) for name in (stale, abandoned, tied)] == [
        ("dropped", "stale"),
        ("dropped", "abandoned"),
        ("dropped", "tied"),
    ]
    assert book.state(reserved) == ("reserved", None)
    assert book.read(batches.reserved, "arithmetic") == batch.id


def test_a_report_says_at_each_station_where_it_is(book: Any) -> None:
    trained, silent, failing = book.graded(3)
    batch = book.reserve([trained, Pick(silent, "g", trains=False)])
    view = book.read(reports.view, trained)
    assert (view["state"], view["batch_id"], view["step"], view["release_id"]) == ("reserved", batch.id, None, None)
    book.write(batches.commit, batch.id, book.release(1, batch_id=batch.id, step=17), 9.0)
    view = book.read(reports.view, trained)
    assert (view["state"], view["reason"], view["step"], view["release_id"]) == ("trained", None, 17, "r1")
    assert view["updated_at"] == 9.0
    assert book.state(silent) == ("dropped", "stale")
    book.reserve([failing], id="b2", base_release="r1")
    book.write(batches.again, "b2", 1, "gradients not finite", 10.0)
    book.write(batches.again, "b2", 2, "gradients not finite", 11.0)
    view = book.read(reports.view, failing)
    assert (view["state"], view["reason"], view["release_id"]) == ("dropped", "step_failed", None)


def test_an_unknown_report_is_named(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no report rep_x") as missing:
        book.read(reports.view, "rep_x")
    assert missing.value.code == "report_not_found"
