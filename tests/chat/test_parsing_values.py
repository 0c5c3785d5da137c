"""Bare text of Qwen3-Coder's parameters as the JSON that a tool's schema asks for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.chat.parsing import make_parser
from reef.chat.parsing.schema import as_json, types_of

pytestmark = pytest.mark.slow

CASES = [
    ({"type": "integer"}, "3", "3"),
    ({"type": "integer"}, " -12\n", "-12"),
    ({"type": "integer"}, "3.0", "3.0"),
    ({"type": "number"}, "1e-3", "1e-3"),
    ({"type": "number"}, "0.10", "0.10"),
    ({"type": "integer"}, "007", '"007"'),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "integer"}, "three", '"three"'),
    ({"type": "integer"}, "12345678901234567890123", "12345678901234567890123"),
    ({"type": "boolean"}, "true", "true"),
    ({"type": "boolean"}, "False", "false"),
    ({"type": "boolean"}, "yes", '"yes"'),
    ({"type": "object"}, '{"a": [1, {"b": null}]}', '{"a": [1, {"b": null}]}'),
    ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
    ({"type": "object"}, "[1]", '"[1]"'),
    ({"type": "array"}, ' ["x",\n "y"] ', '["x",\n "y"]'),
    ({"type": "array"}, "[" * 5000 + "]" * 5000, json.dumps("[" * 5000 + "]" * 5000)),
    ({"type": "string"}, "3", '"3"'),
    ({"type": "string"}, "null", '"null"'),
    ({"type": "string"}, ' "quoted" \\ ', '" \\"quoted\\" \\\\ "'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["string", "null"]}, "None", "null"),
    ({"type": ["string", "null"]}, "3", '"3"'),
    ({"type": ["integer", "string"]}, "3", "3"),
    ({"type": ["integer", "string"]}, "3 a", '"3 a"'),
    ({"type": "integer"}, "null", "null"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", "4"),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", "[1]"),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1", '"[1"'),
    ({"enum": [1, 2]}, "2", "2"),
    ({"enum": ["1", "2"]}, "2", '"2"'),
    ({"enum": ["a", None]}, "null", "null"),
    ({"const": True}, "true", "true"),
    ({"$ref": "#/$defs/Count"}, "5", "5"),
    ({"$ref": "#/$defs/Loop"}, "5", '"5"'),
    ({"$ref": "#/$defs/Nowhere"}, "5", '"5"'),
    ({"description": "of no type"}, "5", '"5"'),
    (True, "5", '"5"'),
]
DEFINITIONS = {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
def test_a_value_becomes_what_the_schema_says(schema, text, expected) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS}
    assert as_json(text, types_of(parameters, "x")) == expected


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": {}}, {"properties": {"y": {}}}])
def test_a_parameter_that_the_schema_does_not_have_is_a_string(parameters) -> None:
    assert as_json("5", types_of(parameters, "x")) == '"5"'


@given(
    text=st.text().filter(lambda text: "</parameter>" not in text),
    types=st.sampled_from(["string", ["string", "boolean"], "integer", "object", "array"]),
    cut=st.integers(0, 60),
)
def test_any_text_makes_valid_json_and_a_string_comes_back_as_it_was(text, types, cut) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {'k"é': {"type": types}}}}}
    parser = make_parser(
        tool_parser="qwen3-coder", reasoning_parser=None, tools=[tool], seed="s", starts_in_reasoning=False
    )
    whole = f'<tool_call>\n<function=f>\n<parameter=k"é>\n{text}\n</parameter>\n</function>\n</tool_call>'
    parser.push(whole[:cut])
    parser.push(whole[cut:])
    parser.finish()
    (call,) = parser.reply.tool_calls
    values = json.loads(call.arguments)
    assert list(values) == ['k"é']
    if types == "string":
        assert values['k"é'] == text
