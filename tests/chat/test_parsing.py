"""Replies as the families write them: read whole, cut at every character, truncated, broken, long."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.chat.parsing import REASONING_PARSERS, TOOL_PARSERS, make_parser
from reef.chat.reply import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "where": {"type": "object"},
            },
        },
    },
}
WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = (WEATHER, WRITE, PING)


@dataclass(frozen=True)
class Sample:
    """A model's text and what it says."""

    tool_parser: str | None
    text: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()  # name and JSON text
    reasoning_parser: str | None = None
    opened: bool = False  # the prompt has opened the thinking

    def parser(self, tools=TOOLS):
        return make_parser(
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=tools,
            seed="s",
            starts_in_reasoning=self.opened,
        )


def read(parser, pieces):
    """All deltas, and the reply."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.finish()
    return deltas, parser.reply


def seen(reply):
    return reply.content, reply.reasoning, tuple((call.name, call.arguments) for call in reply.tool_calls)


def joined(deltas):
    """What a client of the stream puts together, in the shape of `seen`."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    begun = [delta for delta in deltas if isinstance(delta, ToolCallBegin)]
    assert [delta.index for delta in begun] == list(range(len(begun)))
    arguments = [""] * len(begun)
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            assert delta.index < len(begun)
            arguments[delta.index] += delta.text
    return text, reasoning or None, tuple((call.name, text) for call, text in zip(begun, arguments, strict=True))


DEEPSEEK_V3 = (
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Tōkyō"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
CODER = (
    "I'll write it.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\na/b.py\n</parameter>\n<parameter=text>\n"
    'print("<b>{x}</b>")\n\tif a < b:\n\n</parameter>\n</function>\n</tool_call>'
)
NASTY = (
    '{"city": "a } ] \\" \\\\ <tool_call> </tool_call> [TOOL_CALLS] \\u00e9 \\ud83d\\ude00 🦀", '
    '"where": {"x": [{}, []]}}'
)

SAMPLES = {
    "hermes: one call": Sample(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        calls=(("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    "hermes: text, two calls, no white space": Sample(
        "hermes",
        'Both.<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>'
        '<tool_call>{"name":"ping","arguments":{}}</tool_call>',
        content="Both.",
        calls=(("get_weather", '{"city":"Paris"}'), ("ping", "{}")),
    ),
    "hermes: text before, between and after": Sample(
        "hermes",
        'First\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\nthen\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\nlast.\n',
        content="First\nthen\nlast.\n",
        calls=(("ping", "{}"), ("ping", "{}")),
    ),
    "hermes: text only after": Sample(
        "hermes",
        '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n\nDone.',
        content="Done.",
        calls=(("ping", "{}"),),
    ),
    "hermes: braces, escapes, markers and unicode in strings": Sample(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {NASTY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        calls=(("get_weather", NASTY), ("ping", "{}")),
    ),
    "hermes: other keys, other order, no arguments": Sample(
        "hermes",
        '<tool_call>{"id": 7, "arguments": {"city": "X"}, "why": {"a": [1]}, "name": "get_weather"}</tool_call>\n'
        '<tool_call>{"name": "ping"}</tool_call>',
        calls=(("get_weather", '{"city": "X"}'), ("ping", "{}")),
    ),
    "hermes: the last marker is missing": Sample(
        "hermes", '<tool_call>\n{"name": "ping", "arguments": {}}', calls=(("ping", "{}"),)
    ),
    "hermes: thinking, text and a call": Sample(
        "hermes",
        "<think>\nI could <tool_call>{}</tool_call> now.\n\nYes.\n</think>\n\nHere:\n"
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        content="Here:",
        reasoning="I could <tool_call>{}</tool_call> now.\n\nYes.",
        calls=(("ping", "{}"),),
        reasoning_parser="think",
    ),
    "hermes: no thinking where thinking is possible": Sample(
        "hermes", "  \nPlain <b>text</b>, a < b.\n", content="  \nPlain <b>text</b>, a < b.\n", reasoning_parser="think"
    ),
    "qwen3-coder: strings of several lines": Sample(
        "qwen3-coder",
        CODER,
        content="I'll write it.",
        calls=(
            (
                "write_file",
                json.dumps({"path": "a/b.py", "text": 'print("<b>{x}</b>")\n\tif a < b:\n'}, ensure_ascii=False),
            ),
        ),
    ),
    "qwen3-coder: types, two calls, one without parameters": Sample(
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nŌsaka 🦀\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\n{"lat": [1.5, -2]}\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        calls=(
            ("get_weather", '{"city": "Ōsaka 🦀", "days": 3, "metric": true, "where": {"lat": [1.5, -2]}}'),
            ("ping", "{}"),
        ),
    ),
    "qwen3-coder: the first marker left out": Sample(
        "qwen3-coder",
        "Sure.\n\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        content="Sure.",
        calls=(("get_weather", '{"city": "Rome"}'),),
    ),
    "qwen3-coder: markers in a value": Sample(
        "qwen3-coder",
        "<tool_call><function=write_file><parameter=text>\n<parameter=x>\n1\n</parameter>\n</parameter>\n</function>"
        "</tool_call>",
        calls=(("write_file", '{"text": "<parameter=x>\\n1\\n</parameter>"}'),),
    ),
    "qwen3-coder: ends of parameters left out": Sample(
        "qwen3-coder",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n<parameter=text>\n<parameter=other>\nb </function>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        calls=(("write_file", '{"path": "a", "text": "<parameter=other>\\nb </function>"}'), ("ping", "{}")),
    ),
    "llama: bare JSON": Sample(
        "llama3-json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=(("get_weather", '{"city": "Paris"}'),),
    ),
    "llama: python tag, several, type first": Sample(
        "llama3-json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "ping", "parameters": {}}\n{"name": "ping", "parameters": {}}',
        calls=(("get_weather", '{"city": "Paris"}'), ("ping", "{}"), ("ping", "{}")),
    ),
    "llama: text before the python tag": Sample(
        "llama3-json",
        'Looking. <|python_tag|>{"name": "ping", "parameters": {}}',
        content="Looking.",
        calls=(("ping", "{}"),),
    ),
    "llama: JSON that is no call": Sample(
        "llama3-json",
        '{"answer": {"name": "ping"}, "sure": true}\n',
        content='{"answer": {"name": "ping"}, "sure": true}\n',
    ),
    "llama: JSON with the name of somebody else": Sample(
        "llama3-json", ' {"name": "Ada", "parameters": {}}', content=' {"name": "Ada", "parameters": {}}'
    ),
    "llama: the python tag before code": Sample(
        "llama3-json", "<|python_tag|>print(6 * 7)", content="<|python_tag|>print(6 * 7)"
    ),
    "mistral: array": Sample(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "ping", "arguments": {}}]',
        calls=(("get_weather", '{"city": "Paris"}'), ("ping", "{}")),
    ),
    "mistral: text, array without space": Sample(
        "mistral",
        'Un moment. [TOOL_CALLS][{"name": "ping", "arguments": {}}]',
        content="Un moment.",
        calls=(("ping", "{}"),),
    ),
    "mistral: names before arguments": Sample(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[ARGS]"}[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]ping{}',
        calls=(("get_weather", '{"city": "[ARGS]"}'), ("ping", "{}"), ("ping", "{}")),
    ),
    "mistral: thinking": Sample(
        "mistral",
        '[THINK]Hm [a] [/THIN no.[/THINK]Voilà[TOOL_CALLS]ping[ARGS]{"a": []}',
        content="Voilà",
        reasoning="Hm [a] [/THIN no.",
        calls=(("ping", '{"a": []}'),),
        reasoning_parser="mistral",
    ),
    "deepseek: V3, two calls": Sample(
        "deepseek", DEEPSEEK_V3, content="Let me look.", calls=(("get_weather", '{"city": "Tōkyō"}'), ("ping", "{}"))
    ),
    "deepseek: V3.1, two calls after thinking": Sample(
        "deepseek",
        "Think.</think>Now<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "```"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        content="Now",
        reasoning="Think.",
        calls=(("get_weather", '{"city": "```"}'), ("ping", "{}")),
        reasoning_parser="think",
        opened=True,
    ),
    "thinking alone, opened by the prompt": Sample(
        None,
        "Well,\n\n\nyes.\n</think>\n\n42",
        content="42",
        reasoning="Well,\n\n\nyes.",
        reasoning_parser="think",
        opened=True,
    ),
    "thinking opened by the prompt and by the model": Sample(
        None,
        "<think>\nWell.\n</think>\n\n42\n",
        content="42\n",
        reasoning="Well.",
        reasoning_parser="think",
        opened=True,
    ),
    "empty thinking": Sample(None, "<think>\n\n</think>\n\n42", content="42", reasoning_parser="think"),
    "thinking cut": Sample(None, "<think>\nWell,\n", reasoning="Well,\n", reasoning_parser="think"),
    "thinking never ended, a call in it": Sample(
        "hermes",
        '<tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        reasoning='<tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        reasoning_parser="think",
        opened=True,
    ),
}
samples = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)


@samples
def test_a_reply_is_read_whole(sample) -> None:
    deltas, reply = read(sample.parser(), [sample.text])
    assert seen(reply) == (sample.content, sample.reasoning, sample.calls)
    assert joined(deltas) == seen(reply)


@samples
def test_a_reply_is_the_same_one_character_at_a_time(sample) -> None:
    whole = read(sample.parser(), [sample.text])[1]
    deltas, reply = read(sample.parser(), sample.text)
    assert reply == whole
    assert joined(deltas) == seen(whole)


@samples
def test_a_reply_is_the_same_wherever_it_is_cut_in_two(sample) -> None:
    whole = read(sample.parser(), [sample.text])[1]
    for at in range(len(sample.text) + 1):
        deltas, reply = read(sample.parser(), [sample.text[:at], sample.text[at:]])
        assert reply == whole, at
        assert joined(deltas) == seen(whole), at


@samples
def test_a_truncated_reply_is_read_too_and_alike_however_it_came(sample) -> None:
    for at in range(len(sample.text)):
        deltas, reply = read(sample.parser(), [sample.text[:at]])
        streamed, same = read(sample.parser(), sample.text[:at])
        assert same == reply, at
        assert joined(deltas) == joined(streamed), at
        assert all(isinstance(call.values(), dict) for call in reply.tool_calls), at
        assert seen(reply)[2] == sample.calls[: len(reply.tool_calls)], at


@samples
def test_what_follows_never_changes_what_a_stream_has_sent(sample) -> None:
    parser, sent = sample.parser(), []
    for character in sample.text:
        sent += parser.push(character)
    whole = read(sample.parser(), [sample.text])[0]
    text, reasoning, calls = joined(sent)
    assert joined(whole)[0].startswith(text)
    assert (joined(whole)[1] or "").startswith(reasoning or "")
    assert len(calls) <= len(joined(whole)[2])


# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_of_calls_follow_from_seed_and_index() -> None:
    text = '<tool_call>{"name": "ping"}</tool_call><tool_call>{"name": "ping"}</tool_call>'
    sample = Sample("hermes", text)
    deltas, reply = read(sample.parser(), text)
    # hashlib.blake2b(b"s/0", digest_size=12).hexdigest(), and of b"s/1"
    assert [call.id for call in reply.tool_calls] == ["call_e78033f67a23d9ca1fb729c4", "call_6a40281d11e2ef6e589ef3ec"]
    assert [delta.id for delta in deltas if isinstance(delta, ToolCallBegin)] == [call.id for call in reply.tool_calls]


def test_ids_of_mistral_have_nine_letters_and_digits() -> None:
    text = '[TOOL_CALLS] [{"name": "ping", "arguments": {}, "id": "x"}, {"name": "ping", "arguments": {}}]'
    calls = read(Sample("mistral", text).parser(), [text])[1].tool_calls
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


# --- no calls ---------------------------------------------------------------------------------------------------------

NO_CALLS = {
    "cut in the arguments": ("hermes", 'Now.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'),
    "cut after a backslash": ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "\\'),
    "cut before the object ends": ("hermes", '<tool_call>{"name": "ping", "arguments": {}'),
    "no JSON value": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": nope}}</tool_call> so'),
    "a number that is none": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": 01}}</tool_call>'),
    "a newline in a string": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": "\n"}}</tool_call>'),
    "half a surrogate": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": "\\ud83d"}}</tool_call>'),
    "brackets that do not match": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": [}]}</tool_call>'),
    "arguments that are no object": ("hermes", '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>'),
    "two names": ("hermes", '<tool_call>{"name": "ping", "name": "ping"}</tool_call>'),
    "arguments twice": ("hermes", '<tool_call>{"name": "ping", "arguments": {}, "parameters": {}}</tool_call>'),
    "nested too deep": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a":' + "[" * 9999 + "]" * 9999 + "}}"),
    "no name": ("hermes", '<tool_call>\n{"arguments": {"name": "ping"}}\n</tool_call>'),
    "a name that is no string": ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    "an unknown name": ("hermes", 'A <tool_call>\n{"name": "rm", "arguments": {"a": 1}}\n</tool_call>\nB\n'),
    "an unknown name, a marker in its arguments": (
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>{\\"name\\": \\"ping\\"}</tool_call>"}}</tool_call>',
    ),
    "nothing in the block": ("hermes", "<tool_call></tool_call>"),
    "no object": ("hermes", "<tool_call>get_weather()</tool_call>"),
    "the name is cut": ("mistral", "[TOOL_CALLS]ping"),
    "no call in the array": ("mistral", "[TOOL_CALLS] []"),
    "an unknown name in the array": ("mistral", '[TOOL_CALLS] [{"name": "rm", "arguments": {}}]'),
    "an unknown name before arguments": ("mistral", '[TOOL_CALLS]rm[ARGS]{"a": 1}'),
    "a parameter is cut": ("qwen3-coder", "Hm\n<tool_call>\n<function=write_file>\n<parameter=text>\nabc\n</para"),
    "a parameter twice": (
        "qwen3-coder",
        "<function=ping><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
    ),
    "an unknown function": (
        "qwen3-coder",
        "<tool_call>\n<function=rm>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
    ),
    "no function": ("qwen3-coder", '<tool_call>\n{"name": "ping"}\n</tool_call>'),
    "no fence": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n{}<｜tool▁call▁end｜>",
    ),
    "an unknown function of V3": (
        "deepseek",
        DEEPSEEK_V3.split("\n<｜tool▁call▁begin｜>")[0].replace("get_weather", "rm"),
    ),
    "cut in the name": ("llama3-json", '<|python_tag|>{"name": "get_wea'),
    "a second object that is none": ("llama3-json", '{"name": "rm", "parameters": {}}; {"name": "rm"'),
}


@pytest.mark.parametrize(("family", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_is_text_as_the_model_wrote_it(family, text) -> None:
    for pieces in ([text], text):
        assert seen(read(Sample(family, text).parser(), pieces)[1]) == (text, None, ())


@pytest.mark.parametrize(("family", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_a_stream_of_what_is_no_call_is_text_too_or_a_call_up_to_the_fault(family, text) -> None:
    deltas, _ = read(Sample(family, text).parser(), text)
    content, _, begun = joined(deltas)
    if not begun:
        assert content == text
        return
    head = text[: min(text.index(marker) for marker in STARTS if marker in text)].rstrip()
    assert content.startswith(head)
    assert text.endswith(content[len(head) :])
    ((_, arguments),) = begun
    assert family == "qwen3-coder" or arguments in text  # its arguments are built here


def test_a_good_call_after_a_bad_one_is_a_call_and_keeps_the_id_of_its_place_in_the_stream() -> None:
    bad = '<tool_call>{"name": "ping", "arguments": {"a": nope}}</tool_call>'
    good = '<tool_call>{"name": "ping", "arguments": {"b": 1}}</tool_call>'
    deltas, reply = read(Sample("hermes", bad + good).parser(), bad + good)
    assert seen(reply) == (bad, None, (("ping", '{"b": 1}'),))
    begun = [delta for delta in deltas if isinstance(delta, ToolCallBegin)]
    assert [delta.index for delta in begun] == [0, 1]
    assert reply.tool_calls[0].id == begun[1].id


def test_a_call_cut_behind_a_whole_one_is_text_alone() -> None:
    text = '[TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "get_weather", "argu'
    content, _, calls = seen(read(Sample("mistral", text).parser(), text)[1])
    assert calls == (("ping", "{}"),)
    assert content == ', {"name": "get_weather", "argu'


def test_a_brace_too_many_is_text_and_the_call_a_call() -> None:
    text = '<tool_call>\n{"name": "ping", "arguments": {}}}\n</tool_call>'
    deltas, reply = read(Sample("hermes", text).parser(), text)
    assert seen(reply) == ("}\n</tool_call>", None, (("ping", "{}"),)) == joined(deltas)


def test_without_tools_nothing_is_a_call() -> None:
    for sample in SAMPLES.values():
        if sample.reasoning_parser is None:
            assert seen(read(sample.parser(tools=()), sample.text)[1]) == (sample.text, None, ())


# --- plain text -------------------------------------------------------------------------------------------------------

PIECES = st.lists(
    st.text()
    | st.sampled_from(["<", "<t", "<tool_", "</tool_call>", "[TOOL", "\n", " ", "<|", "<｜tool", "</think", "]"]),
    max_size=12,
)
STARTS = (
    "<tool_call>",
    "<function=",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
)
MARKED = (*STARTS, "<think>", "</think>", "[THINK]", "[/THINK]")


@pytest.mark.parametrize("tool_parser", [None, *TOOL_PARSERS])
@pytest.mark.parametrize("reasoning_parser", [None, *REASONING_PARSERS])
@settings(max_examples=30, deadline=None)
@given(pieces=PIECES, opened=st.booleans())
def test_text_without_a_marker_comes_back_character_for_character(
    tool_parser, reasoning_parser, pieces, opened
) -> None:
    text = "".join(pieces)
    for marker in MARKED:
        if marker in text:
            return
    sample = Sample(tool_parser, text, reasoning_parser=reasoning_parser, opened=opened)
    expected = ("", text or None, ()) if opened and reasoning_parser else (text, None, ())
    deltas, reply = read(sample.parser(), pieces)
    assert seen(reply) == expected
    assert joined(deltas) == expected


@settings(max_examples=150, deadline=None)
@given(
    sample=st.sampled_from(list(SAMPLES.values())),
    other=st.sampled_from(list(SAMPLES.values())),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    junk=st.text(max_size=4) | st.sampled_from(STARTS),
)
def test_any_mixture_is_read_alike_however_it_is_cut(sample, other, cuts, junk) -> None:
    at = cuts[0] if cuts else 0
    text = sample.text[:at] + junk + other.text
    whole_deltas, whole = read(sample.parser(), [text])
    ends = sorted(cut for cut in cuts if cut < len(text))
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    deltas, reply = read(sample.parser(), pieces)
    assert reply == whole
    assert joined(deltas) == joined(whole_deltas)


WRITERS = {
    "hermes": lambda arguments: f'<tool_call>\n{{"name": "ping", "arguments": {arguments}}}\n</tool_call>',
    "mistral": lambda arguments: f"[TOOL_CALLS]ping[ARGS]{arguments}",
    "llama3-json": lambda arguments: f'<|python_tag|>{{"name": "ping", "parameters": {arguments}}}',
    "deepseek": lambda arguments: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 2]),
)
BESIDE = (st.text(max_size=6) | st.sampled_from([" ", "\n\n", "\n a\n", "<", "so <tool"])).filter(
    lambda text: text.lstrip(" \t\r\n")[:1] not in ("{", ";")  # with Llama it would be another call
)


def between_calls(texts):
    """The content of text, call, text, call, ..., text by the rules of `reef.chat.parsing.calls`."""
    content = ""
    for place, text in enumerate(texts):
        last = place == len(texts) - 1
        if (place > 0 or not last) and not text.strip(" \t\r\n"):
            continue
        if place > 0 and not content:
            text = text.lstrip(" \t\r\n")
        content += text if last else text.rstrip(" \t\r\n")
    return content


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(ARGUMENTS, max_size=3), data=st.data(), size=st.integers(1, 9))
def test_any_arguments_between_any_texts_come_back_as_they_were(family, calls, data, size) -> None:
    texts = data.draw(st.lists(BESIDE, min_size=len(calls) + 1, max_size=len(calls) + 1))
    text = texts[0] + "".join(WRITERS[family](call) + after for call, after in zip(calls, texts[1:], strict=True))
    deltas, reply = read(Sample(family, text).parser(), [text[at : at + size] for at in range(0, len(text), size)])
    assert seen(reply) == (between_calls(texts), None, tuple(("ping", call) for call in calls)) == joined(deltas)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_text_goes_on_at_once_and_the_beginning_of_a_marker_waits() -> None:
    parser = Sample("hermes", "").parser()
    assert parser.push("Hello") == [TextDelta("Hello")]
    assert parser.push(" wor") == [TextDelta(" wor")]
    assert parser.push("ld <to") == [TextDelta("ld")]
    assert parser.push("ol_box>") == [TextDelta(" <tool_box>")]
    assert parser.push("<tool_call") == []
    assert parser.finish() == [TextDelta("<tool_call")]


def test_thinking_goes_on_at_once() -> None:
    parser = Sample("hermes", "", reasoning_parser="think").parser()
    assert parser.push("<think>\n") == []
    assert parser.push("Hm") == [ReasoningDelta("Hm")]
    assert parser.push(".\n</th") == [ReasoningDelta(".")]
    assert parser.push("ink>\n\nSo") == [TextDelta("So")]


def test_arguments_go_on_as_the_model_writes_them() -> None:
    parser = Sample("hermes", "").parser()
    begin = ToolCallBegin(
        0, read(Sample("hermes", "").parser(), SAMPLES["hermes: one call"].text)[1].tool_calls[0].id, "ping"
    )
    assert parser.push('<tool_call>\n{"name": "pi') == []
    assert parser.push('ng", "argu') == [begin]
    assert parser.push('ments": {"a') == [ToolCallArguments(0, '{"a')]
    assert parser.push('": "x\\') == [ToolCallArguments(0, '": "x')]  # an escape is not cut
    assert parser.push('n"}}\n</tool_call>') == [ToolCallArguments(0, '\\n"}')]
    assert parser.finish() == []


def test_a_string_of_qwen3_coder_goes_on_as_it_comes_and_other_values_once_they_are_whole() -> None:
    parser = Sample("qwen3-coder", "").parser()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push('New "Y') == [ToolCallArguments(0, 'New \\"Y')]
    assert parser.push("ork\n") == [ToolCallArguments(0, "ork")]  # the newline may be the template's
    assert parser.push("</parameter>\n<parameter=days>\n1") == [ToolCallArguments(0, '", "days": ')]
    assert parser.push("2\n</parameter>\n</function>") == [ToolCallArguments(0, "12}")]


def test_a_reply_of_llama_that_begins_with_json_streams_from_the_first_key_that_calls_do_not_have() -> None:
    parser = Sample("llama3-json", "").parser()
    assert parser.push('{"ans') == []
    assert parser.push('wer": ') == [TextDelta('{"answer":')]
    assert parser.push("4}") == [TextDelta(" 4}")]


# --- time -------------------------------------------------------------------------------------------------------------

LONG = 200_000
LONG_TEXTS = {
    "text": ("hermes", "word <b " * (LONG // 8)),
    "white space": ("hermes", "\n" * LONG),
    "beginnings of markers": ("qwen3-coder", "<tool_call" * (LONG // 10)),
    "a string of arguments": (
        "hermes",
        '<tool_call>{"name": "ping", "arguments": {"a": "' + "x\\n{é" * (LONG // 5) + '"}}</tool_call>',
    ),
    "numbers in arguments": ("mistral", '[TOOL_CALLS]ping[ARGS]{"a": [' + "1, " * (LONG // 3) + "1]}"),
    "objects in arguments": ("mistral", '[TOOL_CALLS]ping[ARGS]{"a": [' + '{"b":""},' * (LONG // 9) + "1]}"),
    "brackets without end": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": ' + "[" * LONG),
    "calls": ("hermes", '<tool_call>{"name": "ping"}</tool_call>\n' * (LONG // 40)),
    "a value of qwen3-coder": (
        "qwen3-coder",
        "<function=write_file><parameter=text>" + "a <b>\n</parameter\n" * (LONG // 18) + "</parameter></function>",
    ),
    "an object of qwen3-coder": (
        "qwen3-coder",
        '<function=get_weather><parameter=where>{"a": "' + "x < y " * (LONG // 6) + '"}</parameter></function>',
    ),
    "ends of parameters that are none": (
        "qwen3-coder",
        "<function=write_file><parameter=text>" + "</parameter>\n" * (LONG // 13) + "</function>",
    ),
}


@pytest.mark.parametrize(("family", "text"), LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_time_is_in_proportion_to_length(family, text) -> None:
    """A few characters a push; at each, no more than a marker's length is looked at again."""
    parser = Sample(family, text).parser()
    begun = time.process_time()
    deltas = []
    for at in range(0, len(text), 8):
        deltas += parser.push(text[at : at + 8])
        assert parser._source.unread < 24
    deltas += parser.finish()
    assert time.process_time() - begun < 5
    assert read(Sample(family, text).parser(), [text])[1] == parser.reply
    assert joined(deltas)[2] == seen(parser.reply)[2] or not parser.reply.tool_calls
