"""Which turn a request continues, and the ids it continues with: over the real service and the embedded engine."""

from __future__ import annotations

import itertools
import json

import pytest

CHAT = "/v1/chat/completions"


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """A conversation with a service: each turn is asked with all that was said."""

    def __init__(self, service, scenario, **headers):
        self.service = service
        self.headers = {"x-reef-scenario": scenario, **headers}
        self.messages = []

    def ask(self, text=None, *, messages=None, headers=None, **fields):
        """The receipt of one more turn; `messages` are sent instead of what was said so far."""
        if text is not None:
            self.messages.append(user(text))
        body = {"messages": self.messages if messages is None else messages, "max_tokens": 8, **fields}
        response = self.service.post(CHAT, body, headers={**self.headers, **(headers or {})})
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        return self.service.receipt(response.headers["x-reef-agent-record-id"])


@pytest.fixture
def talk(recorder, scenario):
    return lambda **headers: Talk(recorder, scenario, **headers)


def all_ids(receipt):
    return receipt["prompt_token_ids"] + receipt["token_ids"]


def continues(later, earlier):
    """Whether a turn begins with another one's exact ids, and says so."""
    begins = later["prompt_token_ids"][: len(all_ids(earlier))] == all_ids(earlier)
    assert begins or later["parent"] != earlier["agent_record_id"]
    return later["parent"] == earlier["agent_record_id"]


def alone(receipt):
    return (receipt["parent"], receipt["continued_by"]) == (None, None)


def test_each_turn_begins_with_the_exact_ids_of_the_one_before(talk) -> None:
    """Gym 1787: random ids, which no tokenizer would give for their text."""
    chat = talk()
    turns = [chat.ask(f"{i}+1=", temperature=3, seed=i) for i in range(6)]
    assert alone(turns[0])
    for earlier, later in itertools.pairwise(turns):
        assert continues(later, earlier)
        assert later["continued_by"] == "messages"


def test_a_streamed_turn_is_continued_like_a_whole_one(talk, recorder) -> None:
    chat = talk()
    chunks = recorder_stream(chat, "1+1=")
    first = recorder.receipt(next(chunk["reef"]["agent_record_id"] for chunk in chunks if "reef" in chunk))
    chat.messages.append({"role": "assistant", "content": text_of(chunks)})
    assert continues(chat.ask("2+2="), first)


def recorder_stream(chat, text):
    chat.messages.append(user(text))
    asked = {"messages": chat.messages, "max_tokens": 8, "stream": True, "temperature": 3, "seed": 5}
    with chat.service.client.stream("POST", chat.service.url + CHAT, json=asked, headers=chat.headers) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks):
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_turn_that_length_ended_is_continued_and_its_end_is_the_prompts(talk) -> None:
    chat = talk()
    first = chat.ask("1+1=", max_tokens=3, ignore_eos=True)
    second = chat.ask("2+2=")
    assert first["finish_reason"] == "length"
    assert continues(second, first)
    assert second["prompt_token_ids"][len(all_ids(first))] == 2  # <|im_end|>, which was not sampled


def test_white_space_at_the_edges_of_text_is_no_edit(talk) -> None:
    chat = talk()
    first = chat.ask("1+1=")
    chat.messages[1]["content"] = f"\n {chat.messages[1]['content']} "
    assert continues(chat.ask("2+2="), first)


@pytest.mark.parametrize("edit", ["user", "assistant", "system"])
def test_an_edit_is_a_new_branch(talk, edit) -> None:
    """prime-rl 1334: a rewritten system prompt is a sample of its own."""
    chat = talk()
    chat.messages = [{"role": "system", "content": "s"}]
    chat.ask("1+1=")
    chat.messages[{"system": 0, "user": 1, "assistant": 2}[edit]]["content"] += "!"
    assert alone(chat.ask("2+2="))


def test_an_edit_of_a_later_turn_branches_at_the_last_shared_one(talk) -> None:
    chat = talk()
    first = chat.ask("1+1=")
    chat.ask("2+2=")
    third = chat.ask("3+3=")
    messages = [*chat.messages[:2], user("5+5=")]
    branch = chat.ask(messages=messages)
    assert continues(branch, first)
    edited = [*messages[:2], user("2+2="), {"role": "assistant", "content": "something else"}, user("3+3=")]
    assert continues(chat.ask(messages=edited), first)
    assert third["parent"] != first["agent_record_id"]


def test_an_agent_that_keeps_only_the_last_messages_branches(talk) -> None:
    """rLLM 352."""
    chat = talk()
    turns = []
    for i in range(4):
        chat.messages.append(user(f"{i}+1="))
        turns.append(chat.ask(messages=chat.messages[-2:]))
    assert all(alone(turn) for turn in turns)


def test_compaction_begins_a_new_branch_which_then_goes_on(talk) -> None:
    chat = talk()
    chat.ask("1+1=")
    chat.ask("2+2=")
    chat.messages = [user("In short: sums were asked. 3+3=")]
    compacted = chat.ask()
    assert alone(compacted)
    assert continues(chat.ask("4+4="), compacted)


def test_rollouts_of_one_prompt_that_said_the_same_are_told_apart_by_session_only(talk) -> None:
    same = {"temperature": 0, "max_tokens": 8}
    sessions = [talk(**{"x-reef-session": f"s{i}"}) for i in range(3)]
    firsts = [chat.ask("1+1=", **same) for chat in sessions]
    assert len({tuple(first["token_ids"]) for first in firsts}) == 1
    for chat, first in zip(sessions, firsts, strict=True):
        second = chat.ask("2+2=", **same)
        assert continues(second, first)
        assert second["continued_by"] == "session"
    nobody = talk()
    nobody.messages = sessions[0].messages[:2]
    assert alone(nobody.ask("2+2=", **same))


def test_a_retry_in_a_session_continues_the_newest(talk) -> None:
    chat = talk(**{"x-reef-session": "s"})
    chat.ask("1+1=", temperature=0)
    again = chat.ask(messages=chat.messages[:1], temperature=0)
    chat.messages = chat.messages[:2]
    assert continues(chat.ask("2+2="), again)


def test_a_parent_that_is_named_is_continued_or_refused(talk, recorder, is_error) -> None:
    chat = talk()
    first, twin = (chat.ask(messages=[user("1+1=")], temperature=0) for _ in range(2))
    messages = [user("1+1="), chat.messages[0], user("2+2=")]
    for receipt in (first, twin):
        named = chat.ask(messages=messages, headers={"x-reef-parent": receipt["agent_record_id"]})
        assert continues(named, receipt)
        assert named["continued_by"] == "explicit"

    def refused(messages, parent, scenario):
        headers = {"x-reef-parent": parent, "x-reef-scenario": scenario}
        return recorder.post(CHAT, {"messages": messages}, headers=headers)

    mine = chat.headers["x-reef-scenario"]
    is_error(refused([user("2+2=")], first["agent_record_id"], mine), 409, code="not_continued")
    is_error(refused(messages, "rcp_nobody", mine), 404, code="receipt_not_found")
    is_error(refused(messages, first["agent_record_id"], mine + "-other"), 404, code="receipt_not_found")


def test_a_parent_that_was_deleted_is_gone(talk, recorder, is_error) -> None:
    """Through both APIs that can name one: what does not continue it and what is not there any more are told apart."""
    chat = talk()
    first = chat.ask("1+1=")
    assert recorder.client.delete(f"{recorder.url}/reef/receipts/{first['agent_record_id']}").status_code == 200
    headers = {**chat.headers, "x-reef-parent": first["agent_record_id"]}
    body = {"messages": [*chat.messages, user("2+2=")]}
    is_error(recorder.post(CHAT, body, headers=headers), 410, says=first["agent_record_id"])
    is_error(recorder.complete(all_ids(first), headers=headers), 410, says=first["agent_record_id"])


def test_a_completion_continues_the_ids_of_the_turn_it_names(recorder, scenario, is_error) -> None:
    headers = {"x-reef-scenario": scenario}
    first = recorder.complete([53, 46, 53, 64], headers=headers, max_tokens=4)
    receipt = recorder.receipt(first.headers["x-reef-agent-record-id"])
    headers["x-reef-parent"] = receipt["agent_record_id"]
    second = recorder.complete([*all_ids(receipt), 53], headers=headers, max_tokens=4)
    assert continues(recorder.receipt(second.headers["x-reef-agent-record-id"]), receipt)
    is_error(recorder.complete([53, 46, 54], headers=headers), 409, code="not_continued", says="begin with its ids")


def test_turns_of_another_scenario_or_with_other_variables_are_not_continued(talk, recorder, scenario) -> None:
    chat = talk()
    chat.ask("1+1=")
    messages = [*chat.messages, user("2+2=")]
    assert alone(Talk(recorder, scenario + "-other").ask(messages=messages))
    assert alone(chat.ask(messages=messages, chat_template_kwargs={"enable_thinking": False}))


def test_each_choice_is_a_turn_of_its_own(talk, recorder) -> None:
    chat = talk()
    body = {"messages": [user("1+1=")], "n": 4, "temperature": 3, "seed": 9, "max_tokens": 8}
    choices = recorder.post(CHAT, body, headers=chat.headers).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 4
    for choice in choices:
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        second = chat.ask(messages=[user("1+1="), answer, user("2+2=")])
        assert continues(second, recorder.receipt(choice["reef_agent_record_id"]))


def test_a_deleted_turn_is_not_continued(talk, recorder) -> None:
    chat = talk()
    first = chat.ask("1+1=")
    assert recorder.client.delete(f"{recorder.url}/reef/receipts/{first['agent_record_id']}").status_code == 200
    assert alone(chat.ask("2+2="))


def test_a_long_conversation_stores_what_each_turn_adds(talk, stored, recorder) -> None:
    chat = talk()
    turns = [chat.ask(f"{i % 10}+1=", max_tokens=2) for i in range(30)]
    assert all(continues(later, earlier) for earlier, later in itertools.pairwise(turns))
    (size,) = stored(
        recorder, "SELECT sum(length(prompt_ids)) FROM requests WHERE scenario = ?", chat.headers["x-reef-scenario"]
    )[0]
    sampled = sum(len(turn["token_ids"]) for turn in turns)
    assert size / 4 + sampled == len(all_ids(turns[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("cache_tokens", [0, 4_000_000])
def test_turns_are_found_after_a_restart_and_without_memory(make_service, scenario, is_error, cache_tokens) -> None:
    service = make_service("--training.backend", "none", "--inference.history-cache-tokens", str(cache_tokens)).start()
    chat = Talk(service, scenario)
    first = chat.ask("1+1=", temperature=3)
    second = chat.ask("2+2=", temperature=3)
    assert continues(second, first)
    service.stop()
    service.start()
    third = chat.ask("3+3=", temperature=3)
    assert continues(third, second)
    service.stop()
    if cache_tokens:
        return
    service.start("--inference.history", "template")
    fourth = chat.ask("4+4=")
    assert alone(fourth)
    assert fourth["prompt_token_ids"].count(1) == 8  # <|im_start|>: four of the user, four of the assistant
    headers = {**chat.headers, "x-reef-parent": third["agent_record_id"]}
    response = service.post(CHAT, {"messages": [*chat.messages[:6], user("4+4=")]}, headers=headers)
    is_error(response, 409, code="not_continued", says="inference.history: template")
