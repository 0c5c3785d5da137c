"""The text that a client gets is the text of the ids that are stored, whole or in pieces, for any ids at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.chat.dialect import Dialect
from reef.chat.reply import TextDelta
from reef.chat.template import Template
from tests.chat.styles import STYLES, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_SEQUENCES = 10_000


@pytest.fixture(scope="module", params=["starter", *STYLES])
def speaking(request, starter, tmp_path_factory):
    """A model's template and dialect."""
    model = starter
    if request.param != "starter":
        model = make_model(starter, tmp_path_factory.mktemp("model") / request.param, request.param)
    template = Template(model)
    yield template, Dialect(template, model, "auto", "auto")
    template.close()


def pieces(data, length):
    """Where a sequence is cut: an engine sends one token, or several at once."""
    cuts = data.draw(st.lists(st.integers(0, length), max_size=6).map(sorted))
    return zip([0, *cuts], [*cuts, length], strict=True)


def streamed(dialect, ids, cuts, plain):
    detokenizer = dialect.detokenizer((), plain)
    *before, last = cuts
    texts = [detokenizer.push(ids[start:end]) for start, end in before]
    return [*texts, detokenizer.finish(ids[slice(*last)], None)]


def test_streamed_text_is_the_text_of_the_ids(speaking) -> None:
    template, dialect = speaking

    @settings(max_examples=NUM_SEQUENCES // (len(STYLES) + 1), deadline=None)
    @given(st.lists(st.integers(0, template.vocab_size - 1), max_size=40), st.booleans(), st.data())
    def check(ids, plain, data) -> None:
        keep = frozenset() if plain else dialect.keep
        text = "".join(streamed(dialect, ids, list(pieces(data, len(ids))), plain))
        assert text == template.decode(ids, keep)

    check()


def test_a_reply_without_markers_is_its_text_to_the_character(speaking) -> None:
    template, dialect = speaking
    plain = sorted(set(range(3, 256)) - {token for token in range(256) if "<" in template.text_of([token])})

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(plain), max_size=40), st.data())
    def check(ids, data) -> None:
        prompt = template._encode("1+1=")
        parser = dialect.reader([], "seed", prompt)
        deltas = [
            delta for text in streamed(dialect, ids, list(pieces(data, len(ids))), False) for delta in parser.push(text)
        ]
        deltas += parser.finish()
        text = template.decode(ids)
        assert all(isinstance(delta, TextDelta) for delta in deltas)
        assert "".join(delta.text for delta in deltas) == parser.reply.content == text
        assert parser.reply.reasoning is None

    check()
