"""What follows a turn where templates name calls again, end messages by other tokens, or want arguments as text."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from tokenizers import AddedToken, Tokenizer

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.chat.template import Template
from tests.chat.styles import make_model

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = ToolCall("abcdefghi", "add", '{"a": 1}')
CALLING = [Message("user", "1+1="), Message("assistant", "", None, (CALL,)), Message("tool", "2", tool_call_id=CALL.id)]

# As gpt-oss: a final answer ends with <|end|> where one follows, sampled is <|return|>; a result names its call again.
HARMONY = """
{%- set ns = namespace(name='') -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- set ns.name = m.tool_calls[0].function.name -%}
{{ '<|start|>assistant to=' + ns.name + '<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|start|>' + ns.name + ' to=assistant<|message|>' + m.content + '<|end|>' }}
{%- else -%}
{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{{ '<|start|>assistant' }}
"""

# As DeepSeek R1: arguments are text, put between other text.
TEXT_ARGUMENTS = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}
{%- elif m.tool_calls -%}
{{ '<|Assistant|>' + m.content }}
{%- for c in m.tool_calls -%}{{ '<|call|>' + c.function.name + '\n' + c.function.arguments }}{%- endfor -%}
{{ '<|im_end|>' }}
{%- elif m.role == 'tool' -%}{{ '<|output|>' + m.content }}
{%- else -%}{{ '<|Assistant|>' + m.content + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{{ '<|Assistant|>' }}
"""

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant: ' }}"


@pytest.fixture
def make_template(starter, tmp_path):
    """`make_template(text, special=..., ends=...)`: a Template of that text, with these special tokens and ends."""
    made = []

    def make(text, special=(), ends=("<|im_end|>",)):
        directory = make_model(starter, tmp_path / f"model {len(made)}", "qwen3")
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(text)
        ids = [tokenizer.token_to_id(name) for name in ends]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": ends[0]}))
        made.append(Template(directory))
        return made[-1]

    yield make
    for template in made:
        template.close()


def after(template, messages, index, last_id, tools=(TOOL,)):
    """The text of what follows; None where that is not known."""
    ids = asyncio.run(template.render_after(Conversation(tuple(messages), tuple(tools)), index, last_id))
    return None if ids is None else template.text_of(ids.tolist())


def token(template, text):
    (id,) = template._encode(text).tolist()
    return id


def harmony(make_template):
    special = ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    return make_template(HARMONY, special, ("<|return|>", "<|call|>"))


def test_a_result_that_names_its_call_again_is_whole(make_template) -> None:
    template = harmony(make_template)
    rest = "<|start|>add to=assistant<|message|>2<|end|><|start|>assistant"
    assert after(template, CALLING, 1, token(template, "<|call|>")) == rest
    assert after(template, CALLING, 1, None) == "<|call|>" + rest


def test_an_end_that_stands_in_a_later_message_does_not_end_this_one(make_template) -> None:
    """What lies between would be left out of the prompt without a word."""
    template = harmony(make_template)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), *CALLING[1:]]
    rest = "<|start|>user<|message|>c<|end|><|start|>assistant to=add"
    told = after(template, messages, 1, token(template, "<|return|>"))
    assert told.startswith(rest)
    assert after(template, messages, 1, None).startswith("<|end|>" + rest)


def test_an_end_that_a_user_wrote_does_not_end_a_message_without_one(make_template) -> None:
    template = make_template(PLAIN)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c <|im_end|> d")]
    assert after(template, messages, 1, None) == "\nuser: c <|im_end|> d\nassistant: "


def test_a_message_that_holds_what_marks_the_place_is_whole(make_template) -> None:
    template = make_template(PLAIN)
    for text in ("\ue000reef\ue001", template._mark[:-1]):
        messages = [Message("user", "a"), Message("assistant", "b"), Message("user", f"c {text} d")]
        assert after(template, messages, 1, None) == f"\nuser: c {text} d\nassistant: "


@pytest.mark.parametrize("arguments", ['{"a": 1}', "{}", '{"a": "<|im_end|>"}'])
def test_a_template_that_joins_arguments_as_text_gets_text(make_template, arguments) -> None:
    template = make_template(TEXT_ARGUMENTS)
    call = ToolCall("abcdefghi", "add", arguments)
    messages = [CALLING[0], Message("assistant", "", None, (call,)), CALLING[2]]
    whole = asyncio.run(template.render(Conversation(tuple(messages), (TOOL,))))
    assert template.text_of(whole.tolist()) == (
        f"<|User|>1+1=<|Assistant|><|call|>add\n{arguments}<|im_end|><|output|>2<|Assistant|>"
    )
    assert after(template, messages, 1, 2) == "<|output|>2<|Assistant|>"


def test_a_special_token_at_which_a_client_stopped_is_no_end_of_the_turn(make_template) -> None:
    """`stop_token_ids`: the turn is closed by the prompt, as one that length cut."""
    template = make_template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}", ("<|x|>",)
    )
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert after(template, messages, 1, token(template, "<|x|>")) == "<|im_end|>user: c<|im_end|>"
    assert after(template, messages, 1, token(template, "b")) == "<|im_end|>user: c<|im_end|>"
    assert after(template, messages, 1, 2) == "user: c<|im_end|>"


def test_an_end_that_no_file_calls_one_is_not_there_twice_where_a_client_stopped_at_it(make_template) -> None:
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|stop|>' }}{% endfor %}"
    template = make_template(text, ("<|stop|>",))
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert after(template, messages, 1, token(template, "<|stop|>")) == "user: c<|stop|>"


def test_the_ends_are_those_that_engines_stop_at(make_template) -> None:
    """config.json says one too, and a model may come without generation_config.json."""
    template = make_template("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}", ("<|other|>",))
    assert template._ends == {2: "<|im_end|>"}


def test_arguments_that_are_no_text_at_all_are_no_arguments() -> None:
    """Some clients send "" for a call without any, which no template could put into JSON."""
    assert (
        ToolCall("x", "now", "").values() == ToolCall("x", "now", " \n").values() == ToolCall("x", "now", "{}").values()
    )


def test_a_long_text_has_the_ids_of_its_parts(starter) -> None:
    template = Template(starter)
    text = "12+7= 你好 🦀 <|im_end|>\n" * 1000
    part = template._encode("12+7= 你好 🦀 <|im_end|>\n").tolist()
    assert asyncio.run(template.encode(text)).tolist() == part * 1000
    template.close()


def test_the_event_loop_goes_on_while_a_long_text_is_encoded(starter) -> None:
    template = Template(starter)
    text = " ".join(map(str, range(100_000)))
    encode, turns, meanwhile = template._encode, itertools.count(), []

    def counted(text):
        before = next(turns)
        ids = encode(text)
        meanwhile.append(next(turns) - before)
        return ids

    async def waits():
        work = asyncio.create_task(template.encode(text))
        while not work.done():
            await asyncio.sleep(0.001)
            next(turns)

    template._encode = counted
    asyncio.run(waits())
    template.close()
    assert meanwhile[0] > 10  # hundreds; were it held up, two
