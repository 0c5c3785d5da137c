"""The json-schema grader: one JSON value, valid or not, and texts that would keep a validator busy."""

import asyncio
import json
import os
import time

import pytest
from reef_harness import Item
from reef_harness.graders.json_schema import JsonSchemaGrader

pytest.importorskip("jsonschema", reason="the extra json-schema is not installed")
pytestmark = pytest.mark.slow  # a process for each answer

SCHEMA = json.dumps(
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
)


def grade(answer: str, gold: str = SCHEMA, timeout_s: float = 120) -> tuple[str, str]:
    verdict = JsonSchemaGrader(timeout_s=timeout_s).grade(answer, gold, "stop")
    return verdict.outcome, verdict.reason_code


@pytest.mark.parametrize("answer", ['{"a": 1}', ' {"a": 1}\n', '```json\n{"a": 1}\n```', '```\n{"a": 1}\n```\n'])
def test_a_value_that_the_schema_accepts_is_correct(answer: str) -> None:
    assert grade(answer) == ("correct", "valid")


def test_a_value_that_it_does_not_accept_is_wrong_and_the_reason_is_said() -> None:
    verdict = JsonSchemaGrader(timeout_s=120).grade('{"a": "1"}', SCHEMA, "stop")
    assert (verdict.outcome, verdict.reason_code, verdict.format_valid) == ("incorrect", "invalid", True)
    assert verdict.detail == "$.a: '1' is not of type 'integer'"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "not_json"),
        ('{"a": 1} {"a": 1}', "not_json"),
        ('Here: {"a": 1}', "not_json"),
        ('{"a": 1}, as you wished', "not_json"),
        ("{'a': 1}", "not_json"),
        ('{"a": NaN}', "not_json"),
        ('{"a": １}', "not_json"),
        ('{"a": 2, "a": 1}', "doubled_key"),
        ('{"a": 1e999}', "number_out_of_range"),
        ('{"a": ' + "9" * 5_000 + "}", "number_out_of_range"),
        ("[" * 100_000, "nested_too_deep"),
        ('{"a":' * 100_000, "nested_too_deep"),
        ('```json\n{"a": 1}\n```\n```json\n{"a": 1}\n```', "several_blocks"),
    ],
)
def test_whatever_is_not_one_plain_value_is_malformed(answer: str, reason: str) -> None:
    assert grade(answer) == ("incorrect", reason)


def test_brackets_in_strings_do_not_nest() -> None:
    assert grade(json.dumps("[" * 500 + '"\\' + "{" * 500), '{"type": "string"}') == ("correct", "valid")


def test_what_keeps_the_validator_busy_is_reviewed() -> None:
    begun = time.perf_counter()
    assert grade(f'"{"a" * 60}!"', '{"pattern": "^(a+)+$"}', timeout_s=3) == ("review", "timed_out")
    assert time.perf_counter() - begun < 60
    assert grade('"' + "a" * 1_000_000 + '"') == ("review", "too_long")


@pytest.mark.parametrize(
    "gold",
    [
        "",
        "{",
        '{"type": "banana"}',
        '{"a": 1, "a": 2}',
        '{"$ref": "http://127.0.0.1:9/schema"}',
        '{"$ref": "file:///etc/passwd"}',
        '{"$schema": "http://nowhere/draft"}',
        '{"pattern": "(?<a>b"}',
        "5",
        '"x"',
        '{"$ref": "#"}',
        '{"allOf": [{"$ref": "#"}]}',
    ],
)
def test_a_gold_that_is_no_schema_of_its_own_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        grade('{"a": 1}', gold)


def test_a_pattern_that_is_only_pythons_is_an_error() -> None:
    with pytest.raises(ValueError, match="gold"):
        grade('"ABC"', '{"pattern": "(?i)^abc$"}')


def test_a_draft_may_be_named() -> None:
    older = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]})
    assert grade('["x"]', older) == ("incorrect", "invalid")
    newer = json.dumps({"$ref": "https://json-schema.org/draft/2020-12/schema"})  # comes with the package
    assert grade('{"type": "banana"}', newer) == ("incorrect", "invalid")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"multipleOf": 0.01}, ["19.99", "0.07", "-0.3", "1" + "0" * 400], ["0.005", "19.991"]),
        ({"multipleOf": 3}, ["9", "9.0", "0"], ["10", "9.5"]),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"a": {"$ref": "#"}, "b": {"multipleOf": 0.01}},
            },
            ['{"a": {"b": 19.99}}'],
            ['{"a": {"b": 19.991}}'],
        ),
        *(
            ({**root, "$ref": "money", "$defs": {"money": bundled}}, ["19.99"], ["19.991"])
            for root in ({}, {"$schema": "https://json-schema.org/draft/2020-12/schema"})
            for bundled in (
                {"$schema": draft, "$id": "money", "multipleOf": 0.01}
                for draft in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#")
            )
        ),
    ],
)
def test_multiples_are_those_of_the_decimals_as_written(
    schema: dict[str, object], valid: list[str], invalid: list[str]
) -> None:
    assert {grade(answer, json.dumps(schema)) for answer in valid} == {("correct", "valid")}
    assert {grade(answer, json.dumps(schema)) for answer in invalid} == {("incorrect", "invalid")}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"pattern": "^a$"}, ["a"], ["a\n", "ab"]),
        ({"pattern": "^\\d+$"}, ["12"], ["\u0661", "1\n"]),
        ({"pattern": "^\\w[$.]\\$$"}, ["a$$", "a.$"], ["\u00e9$$", "a$"]),
        ({"pattern": "^a.b[\\s]\\s$"}, ["axb \u00a0"], ["a\u2028b  "]),
        (
            {"patternProperties": {"^pattern$": {"type": "integer"}}, "additionalProperties": False},
            [{"pattern": 1}],
            [{"pattern\n": 1}],
        ),
        ({"properties": {"pattern": {"const": {"pattern": "a$"}}}}, [{"pattern": {"pattern": "a$"}}], [{"pattern": 1}]),
    ],
)
def test_patterns_are_those_of_ecma(schema: dict[str, object], valid: list[object], invalid: list[object]) -> None:
    assert {grade(json.dumps(answer), json.dumps(schema)) for answer in valid} == {("correct", "valid")}
    assert {grade(json.dumps(answer), json.dumps(schema)) for answer in invalid} == {("incorrect", "invalid")}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12: it is meant here
def test_a_fork_judges_with_threads_of_its_own() -> None:
    grader, item = JsonSchemaGrader(parallel=1, timeout_s=60), Item.from_text("a", "One.", SCHEMA)

    def outcome() -> str:
        return asyncio.run(asyncio.wait_for(grader.judge(item, '{"a": 1}', "stop"), 120)).outcome

    assert outcome() == "correct"
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if outcome() == "correct" else 1)
        finally:
            os._exit(2)  # it hung, or failed
    assert os.waitpid(child, 0)[1] == 0
    assert outcome() == "correct"
