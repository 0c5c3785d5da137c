"""Tokenizers with the space in the token, the first of which is dropped, as those of Llama 2, Mistral and Gemma."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from reef.chat.conversation import Conversation, Message
from reef.chat.detokenizer import Detokenizer
from reef.chat.template import Template

pytestmark = pytest.mark.slow

PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "▁▁", "é", ".", "\n"]
DECODERS = {
    "llama": [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ],
    "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
}
TEMPLATE = "{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}"


@pytest.fixture(scope="module", params=DECODERS)
def template(request, tmp_path_factory):
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    model = models.BPE(
        {piece: id for id, piece in enumerate(vocabulary)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(DECODERS[request.param])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    whole.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp(request.param)
    whole.save_pretrained(directory)
    made = Template(directory)
    yield made
    made.close()


def test_deltas_of_any_ids_cut_anywhere_are_the_whole_text(template) -> None:
    bytes_and_pieces = st.one_of(st.integers(0, 258), st.integers(259, template.vocab_size - 1))

    @settings(max_examples=1000, deadline=None)
    @given(st.lists(bytes_and_pieces, max_size=60), st.lists(st.integers(0, 5), max_size=60))
    def check(ids, sizes) -> None:
        detokenizer, at, text = Detokenizer(template), 0, ""
        for size in sizes:
            text += detokenizer.push(ids[at : at + size])
            at += size
        assert text + detokenizer.finish(ids[at:], None) == template.decode(ids)

    check()


def test_a_long_reply_of_words_is_not_decoded_again_and_again(template) -> None:
    """Each word begins with a space, so that there are few places where a text may be taken apart."""
    ids = template._encode("ab ab a b ab. " * 400).tolist()
    detokenizer = Detokenizer(template)
    most = 0
    text = ""
    for token in ids:
        text += detokenizer.push([token])
        most = max(most, len(detokenizer._ids) - detokenizer._prefix)
    assert text + detokenizer.finish([], None) == template.decode(ids)
    assert most < 40


def test_a_turn_continues_with_its_ids_and_one_beginning(template) -> None:
    """The template writes the beginning: nothing adds a second one, and none comes before what follows a turn."""
    asked = [Message("user", "a b")]
    prompt = asyncio.run(template.render(Conversation(tuple(asked)))).tolist()
    assert (prompt[0], prompt.count(1), prompt[-1]) == (1, 1, 2)
    messages = (*asked, Message("assistant", "ab"), Message("user", "b"))
    after = asyncio.run(template.render_after(Conversation(messages), 1, 2)).tolist()
    whole = asyncio.run(template.render(Conversation(messages))).tolist()
    assert after == whole[-len(after) :]
    assert (after[0], after.count(1)) == (1, 1)
