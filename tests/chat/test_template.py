"""Messages to ids as transformers does it, and ids to text that is certain."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from reef.chat.conversation import Conversation, Message
from reef.chat.detokenizer import Detokenizer, cut_at_stop
from reef.chat.template import Template
from reef.errors import BadRequestError, ConfigError


def conversation(messages, options):
    return Conversation(tuple(Message(**message) for message in messages), options=options)


EVERYTHING = settings(
    max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def template(starter):
    template = Template(starter)
    yield template
    template.close()


@pytest.fixture(scope="module")
def tokenizer(starter):
    return AutoTokenizer.from_pretrained(str(starter))


@pytest.fixture
def with_template(starter, tmp_path):
    """A Template over the starter with another chat template; None: with none at all."""
    made = []

    def make(text):
        directory = shutil.copytree(starter, tmp_path / f"model {len(made)}")
        (directory / "chat_template.jinja").unlink()
        if text is not None:
            (directory / "chat_template.jinja").write_text(text)
        made.append(Template(directory))
        return made[-1]

    yield make
    for template in made:
        template.close()


# --- messages to ids --------------------------------------------------------------------------------------------------

CHATS = [
    [{"role": "user", "content": "12+7="}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 你好 🦀"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>2</think>3"},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n"}],
]


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_is_rendered_as_transformers_renders_it(template, tokenizer, messages) -> None:
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = asyncio.run(template.render(conversation(messages, {})))
    assert ids.tolist() == expected
    assert ids.dtype.name == "int32"


@pytest.mark.parametrize("text", ["", "12+7=", "  two  spaces\n", "你好 🦀", "<|im_start|>user"])
def test_text_is_encoded_with_nothing_added(template, tokenizer, text) -> None:
    assert asyncio.run(template.encode(text)).tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_template_variables_reach_the_template(with_template) -> None:
    template = with_template("{{ messages[0].content }}{% if think %}!{% endif %}")
    plain, thinking = (
        asyncio.run(template.render(conversation([{"role": "user", "content": "a"}], options)))
        for options in ({}, {"think": True})
    )
    assert template.decode(plain.tolist()) == "a"
    assert template.decode(thinking.tolist()) == "a!"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "truncation", "tools"])
def test_the_renderers_own_arguments_are_not_a_clients_to_give(template, name) -> None:
    with pytest.raises(BadRequestError, match=f"chat_template_kwargs: {name} is not a variable") as refused:
        asyncio.run(template.render(conversation(CHATS[0], {name: "x"})))
    assert refused.value.param == "chat_template_kwargs"


def test_a_model_without_a_template_completes_text_and_says_what_is_missing(with_template) -> None:
    template = with_template(None)
    assert template.template_digest is None
    assert len(asyncio.run(template.encode("1+1="))) == 4
    with pytest.raises(BadRequestError, match=r"no chat template \(chat_template\.jinja or tokenizer_config\.json\)"):
        asyncio.run(template.render(conversation(CHATS[0], {})))


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_name.field }}",
        "{{ {}['key'].field }}",
        "{{ messages[0].content.nothing() }}",
    ],
)
def test_messages_that_a_template_refuses_are_the_clients_fault(with_template, text) -> None:
    template = with_template(text)
    with pytest.raises(BadRequestError, match="the chat template refuses these messages") as refused:
        asyncio.run(template.render(conversation(CHATS[0], {})))
    assert refused.value.param == "messages"


def test_digests_tell_templates_and_tokenizers_apart(template, starter, with_template) -> None:
    same = Template(starter)
    other = with_template("{{ messages }}")
    assert (same.template_digest, same.tokenizer_digest) == (template.template_digest, template.tokenizer_digest)
    assert other.template_digest != template.template_digest
    assert other.tokenizer_digest == template.tokenizer_digest
    same.close()


def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match=r"inference\.model-path: no tokenizer in"):
        Template(tmp_path)


def test_many_chats_are_rendered_and_decoded_at_once(template, tokenizer) -> None:
    async def work():
        renders = asyncio.gather(
            *(template.render(conversation([{"role": "user", "content": str(i)}], {})) for i in range(200))
        )
        detokenizer = Detokenizer(template)
        text = ""
        for _ in range(200):  # the event loop decodes while the thread encodes
            text += detokenizer.push([20])
            await asyncio.sleep(0)
        return await renders, text + detokenizer.finish([], None)

    renders, text = asyncio.run(work())
    assert text == tokenizer.decode([20]) * 200
    for i, ids in enumerate(renders):
        expected = [{"role": "user", "content": str(i)}]
        assert ids.tolist() == tokenizer.apply_chat_template(expected, add_generation_prompt=True, return_dict=False)


# --- ids to text ------------------------------------------------------------------------------------------------------

any_ids = st.lists(st.integers(0, 299), max_size=60)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


short = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def cut(ids, sizes):
    """`ids` in pieces of these sizes, the last one with the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(ids[at : at + size])
        at += size
    return [*pieces, ids[at:]]


def deltas(template, pieces, stop=(), matched=None):
    """What is sent: a delta for each piece of ids, the last one with the end."""
    detokenizer = Detokenizer(template, stop)
    *pushed, last = pieces or [[]]
    return [*(detokenizer.push(piece) for piece in pushed), detokenizer.finish(last, matched)]


@EVERYTHING
@given(ids=any_ids, sizes=st.lists(st.integers(0, 5), max_size=60))
def test_deltas_of_any_ids_cut_anywhere_are_the_whole_text(template, ids, sizes) -> None:
    assert "".join(deltas(template, cut(ids, sizes))) == template.decode(ids)


@EVERYTHING
@given(text=texts, ends=st.lists(st.integers(0, 299), max_size=3))
def test_deltas_of_any_text_token_by_token_are_that_text_and_never_half_a_character(template, text, ends) -> None:
    ids = [*template._encode(text).tolist(), *ends]
    parts = deltas(template, [*([token] for token in ids), []])
    whole = template.decode(ids)
    assert "".join(parts) == whole
    if "�" not in whole:
        assert not any("�" in part for part in parts)


@EVERYTHING
@given(
    before=short,
    after=short,
    stop=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
    others=st.lists(st.text(min_size=1, max_size=8), max_size=2),
)
def test_a_stop_string_and_what_follows_it_are_never_sent(template, before, after, stop, others) -> None:
    ids = template._encode(before + stop + after).tolist()
    text = template.decode(ids)
    if stop not in text:  # the text held a special token, or half of a pair: nothing to stop at
        return
    end = next(k for k in range(1, len(ids) + 1) if stop in template.decode(ids[:k]))  # where an engine stops
    parts = deltas(template, [[token] for token in ids[:end]], (stop, *others), stop)
    stopped = template.decode(ids[:end])  # half a character is U+FFFD, at which an engine stops too where it was asked
    assert "".join(parts) == stopped[: stopped.find(stop)]
    assert not any(stop in part for part in parts)


@pytest.mark.parametrize("text", ["🦀", "你好", "é", "👩‍👩‍👧‍👦 and 汉字🙂", "a🦀b"])
def test_a_character_of_several_tokens_is_held_back_until_it_is_whole(template, text) -> None:
    ids = template._encode(text).tolist()
    assert len(ids) > len(text)
    parts = deltas(template, [[token] for token in ids])
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)
    assert parts.count("") > 0  # something was held back
    for position in range(len(ids) + 1):
        assert "".join(deltas(template, [ids[:position], ids[position:]])) == text


def test_bytes_that_never_become_a_character_are_sent_at_the_end(template) -> None:
    half = template._encode("🦀").tolist()[:2]
    assert deltas(template, [half, []]) == ["", "�"]
    assert "".join(deltas(template, [half, template._encode("a").tolist()])) == template.decode([*half, 74])[:1] + "a"


def test_special_tokens_are_no_text(template) -> None:
    ids = [1, *template._encode("hi").tolist(), 2]
    assert "".join(deltas(template, [[token] for token in ids])) == "hi"
    assert asyncio.run(template.decode_all([np.array(ids), np.array([], int)])) == ["hi", ""]
    assert template.token_text(2) == "<|im_end|>"


def test_text_that_may_begin_a_stop_string_waits_and_comes_when_it_does_not(template) -> None:
    detokenizer = Detokenizer(template, ["STOP", "END"])
    sent = [detokenizer.push(template._encode(letter).tolist()) for letter in "xSTOxyz"]
    assert "".join(sent) == "xSTO"  # three characters may begin STOP
    assert detokenizer.finish([], None) == "xyz"


@pytest.mark.parametrize(
    ("text", "matched", "left"),
    [("a b c", "b", "a "), ("a b c", None, "a b c"), ("a b c", 2, "a b c"), ("a b c", "z", "a b c"), ("", "b", "")],
)
def test_text_is_cut_at_a_stop_string_and_at_nothing_else(text, matched, left) -> None:
    assert cut_at_stop(text, matched) == left
