"""Items out of JSONL: what is wrong is said with its line, and the others go on."""

import json
from pathlib import Path

import pytest
from reef_harness.errors import HarnessError
from reef_harness.evaluation.items import read_items, row_of
from reef_harness.types import Item


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def test_a_row_becomes_an_item_with_all_that_it_says(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "prompt": "2+2?",
        "gold": "4",
        "source": "sums",
        "revision": "v1",
        "split": "test",
        "slices": {"level": "hard", "steps": 4},
    }
    items, complaints = read_items(write(tmp_path, json.dumps(row)))
    asked = ({"role": "user", "content": "2+2?"},)
    assert items == [Item("a", asked, "4", "sums", "v1", "test", {"level": "hard", "steps": "4"})]
    assert complaints == []


def test_a_conversation_and_numbers_are_kept_as_they_are_written(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
    ]
    items, complaints = read_items(
        write(
            tmp_path, json.dumps({"id": 7, "messages": messages, "gold": 4}), '{"id":"b","prompt":"x","gold":{"a":[1]}}'
        )
    )
    assert complaints == []
    assert [(item.id, item.gold) for item in items] == [("7", "4"), ("b", '{"a": [1]}')]
    assert items[0].messages == tuple(messages)
    assert [read_items(write(tmp_path, json.dumps(row_of(item))))[0] for item in items] == [[item] for item in items]


def test_a_row_without_gold_is_an_item_that_nobody_can_grade(tmp_path: Path) -> None:
    items, complaints = read_items(write(tmp_path, '{"id": "a", "prompt": "x"}', '{"id":"b","prompt":"x","gold":null}'))
    assert [item.gold for item in items] == [None, None]
    assert complaints == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x", "gold": "1"}', "a row without an id"),
        ('{"id": "", "prompt": "x"}', "a row without an id"),
        ('{"id": true, "prompt": "x"}', "id must be text, got bool"),
        ('{"id": "good", "prompt": "x"}', "the id 'good' is already that of line 1"),
        ('{"id": "a", "gold": "1"}', "no prompt"),
        ('{"id": "a", "prompt": " "}', "prompt must be text that is not blank"),
        ('{"id": "a", "prompt": 3}', "prompt must be text"),
        ('{"id": "a", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "both prompt and messages"),
        ('{"id": "a", "messages": []}', "at least one message"),
        ('{"id": "a", "messages": [{"role": "user"}]}', "messages[0] must be an object with role and content"),
        ('{"id": "a", "prompt": "x", "golden": "1"}', "unknown field 'golden'"),
        ('{"id": "a", "prompt": "x", "slices": ["hard"]}', "slices must be an object"),
        ('{"id": "a", "prompt": "x", "split": 3}', "split must be text, got int"),
        ('{"id": "a", "prompt": "x", "gold": NaN}', "bad JSON: NaN is not a JSON value"),
        ('{"id": "a", "prompt": ', "bad JSON"),
        ('["a"]', "expected a JSON object, got list"),
        ('{"id": "a", "prompt": "\\ud800"}', "not UTF-8 text"),
        (b'{"id": "a", "prompt": "\xff"}', "not UTF-8 text"),
        ('{"id": "a", "prompt": "x", "gold": "1", "gold": "2"}', "bad JSON: 'gold' is there twice"),
        ('{"id": "a", "prompt": "x", "slices": {"level": "1", "level": "2"}}', "bad JSON: 'level' is there twice"),
        ('{"id": "a", "prompt": ' + "[" * 100_000, "bad JSON"),
        ('{"id": "a", "prompt": "x", "gold": ' + "9" * 5000 + "}", "bad JSON"),
    ],
)
def test_a_bad_row_is_a_complaint_with_its_line_and_the_others_go_on(
    tmp_path: Path, line: str | bytes, complaint: str
) -> None:
    path = write(tmp_path, '{"id": "good", "prompt": "x"}', "", line, '{"id": "last", "prompt": "y"}')
    items, complaints = read_items(path)
    assert [item.id for item in items] == ["good", "last"]
    [said] = complaints
    assert said.startswith(f"{path}:3: ") and complaint in said


def test_a_byte_order_mark_and_a_missing_last_newline_are_no_faults(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\r\n{"id": "b", "prompt": "y"}')
    items, complaints = read_items(path)
    assert ([item.id for item in items], complaints) == (["a", "b"], [])


def test_a_file_without_a_usable_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"no usable item \(1 rows were refused\); .*:1: no prompt"):
        read_items(write(tmp_path, '{"id": "a"}'))
    with pytest.raises(HarnessError, match="it is empty"):
        read_items(write(tmp_path, ""))
    with pytest.raises(OSError, match="nowhere"):
        read_items(tmp_path / "nowhere.jsonl")
