"""What follows a turn in the prompt of the next one, with the templates of known families."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.chat.template import Template
from tests.chat.styles import STYLES, make_model

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = ToolCall("abcdefghi", "add", '{"a": 1}')
ASKED = (Message("system", "Be brief."), Message("user", "1+1="))


@pytest.fixture(scope="module")
def templates(starter, tmp_path_factory):
    made = {name: Template(make_model(starter, tmp_path_factory.mktemp("model") / name, name)) for name in STYLES}
    yield made
    for template in made.values():
        template.close()


@pytest.fixture(params=STYLES)
def style(request, templates):
    return request.param, templates[request.param]


def render(template, messages, tools=(), **options):
    return asyncio.run(template.render(Conversation(tuple(messages), tuple(tools), options)))


def after(template, messages, index, last_id, tools=()):
    return asyncio.run(template.render_after(Conversation(tuple(messages), tuple(tools)), index, last_id))


def sampled(template, name, text, *, ended=True):
    """What a model of that family would have sampled."""
    ids = asyncio.run(template.encode(text + STYLES[name].end if ended else text))
    return ids, int(ids[-1]) if ended else None


def user_only(name):
    """Mistral's template has no system message."""
    return ASKED[1:] if name == "mistral" else ASKED


def test_a_second_turn_is_what_the_template_would_have_rendered_whole(style) -> None:
    """Where nothing is stripped or encoded in another way, stored ids and separator are the render (verl 6501)."""
    name, template = style
    first = user_only(name)
    said = " 2" if name == "mistral" else "2"
    prompt = render(template, first)
    output, last = sampled(template, name, said)
    messages = [*first, Message("assistant", "2"), Message("user", "and 3?")]
    added = after(template, messages, len(first), last)
    whole = render(template, messages)
    assert template.text_of(np.concatenate([prompt, output, added]).tolist()) == template.text_of(whole.tolist())
    assert np.concatenate([prompt, output, added]).tolist() == whole.tolist()


def test_a_turn_that_length_cut_is_closed_by_the_prompt_and_not_by_the_model(style) -> None:
    name, template = style
    first = user_only(name)
    messages = [*first, Message("assistant", "2"), Message("user", "and 3?")]
    output, _ = sampled(template, name, "2", ended=False)
    _, last = sampled(template, name, "2")
    closed, open_ = after(template, messages, len(first), last), after(template, messages, len(first), None)
    assert open_.tolist()[1:] == closed.tolist()
    assert template.text_of(open_[:1].tolist()) == STYLES[name].end
    assert len(output) == 1


def test_a_tools_result_follows_its_call(style) -> None:
    name, template = style
    messages = [*user_only(name), Message("assistant", "", None, (CALL,)), Message("tool", "2", tool_call_id=CALL.id)]
    _, last = sampled(template, name, "x")
    text = template.text_of(after(template, messages, len(messages) - 2, last, [TOOL]).tolist())
    assert (
        text
        == {
            "qwen3": "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "mistral": '[TOOL_RESULTS]{"content": "2", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        }[name]
    )


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_the_results_of_two_calls_follow_both(templates, name) -> None:
    template = templates[name]
    calls = (CALL, ToolCall("bcdefghij", "add", '{"a": "</tool_call> [TOOL_CALLS] }"}'))
    results = [Message("tool", text, tool_call_id=call.id) for text, call in zip("23", calls, strict=True)]
    messages = [*user_only(name), Message("assistant", "", None, calls), *results]
    _, last = sampled(template, name, "x")
    text = template.text_of(after(template, messages, len(messages) - 3, last, [TOOL]).tolist())
    assert text.count("2") == text.count("3") == 1
    assert "TOOL_CALLS" not in text
    assert "</tool_call>" not in text


def test_thinking_that_the_template_strips_stays_in_the_ids(templates) -> None:
    """verl 6854: the second prompt begins with the first turn's exact ids, though a whole render would not."""
    template = templates["qwen3"]
    prompt = render(template, ASKED)
    output, last = sampled(template, "qwen3", "<think>\none and one\n</think>\n\n2")
    messages = [*ASKED, Message("assistant", "2", "one and one"), Message("user", "and 3?")]
    exact = np.concatenate([prompt, output, after(template, messages, 2, last)])
    assert "one and one" in template.text_of(exact.tolist())
    assert "one and one" not in template.text_of(render(template, messages).tolist())
    assert template.text_of(exact.tolist()).endswith(
        "2<|im_end|>\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_does_not_show_where_a_call_ends_is_not_guessed(starter, tmp_path) -> None:
    made = make_model(starter, tmp_path / "model", "qwen3")
    (made / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}assistant: "
    )
    template = Template(made)
    plain = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    calling = [Message("user", "a"), Message("assistant", "", None, (CALL,)), Message("user", "c")]
    assert template.text_of(after(template, plain, 1, None).tolist()) == "\nuser: c\nassistant: "
    assert after(template, calling, 1, None) is None
    template.close()


def test_a_template_that_leaves_the_assistants_text_out_is_not_guessed(starter, tmp_path) -> None:
    made = make_model(starter, tmp_path / "model", "qwen3")
    (made / "chat_template.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    template = Template(made)
    assert after(template, [Message("user", "a"), Message("assistant", "b"), Message("user", "c")], 1, None) is None
    template.close()
