"""Thinking, which a model writes before its answer and between two markers.

Newlines just inside and after the markers are the template's, not text. Without the closing marker (the reply was cut)
all is thinking, as it came.
"""

from dataclasses import dataclass

from reef.chat.parsing.source import NEWLINES, SPACE, HeldSpace, Markers, Reading, Sink, Source, ignore
from reef.chat.parsing.transcript import Transcript


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its thinking."""

    open: str
    close: Markers


THINK = ReasoningFormat("<think>", Markers("</think>"))  # Qwen3, DeepSeek
MISTRAL_THINK = ReasoningFormat("[THINK]", Markers("[/THINK]"))  # Magistral and later


def read_reasoning(
    source: Source, transcript: Transcript, form: ReasoningFormat, opened: bool, content: Sink
) -> Reading[None]:
    """Reads the thinking, if there is any, and stops where the answer begins.

    `opened`: the prompt has opened it. `content` gets white space that belongs to an answer without thinking.
    """
    source.sink = ignore
    leading = yield from source.skip(SPACE)
    marked = yield from source.literal(form.open)
    if not (marked or opened):
        content(leading)
        return
    thinking = HeldSpace("\n")
    source.sink = lambda piece: transcript.reasoning(thinking.push(piece))
    if marked:
        yield from _skip_newlines(source)
    else:
        source.sink(leading)
    close = yield from source.before(form.close)
    if close is None:
        transcript.reasoning(thinking.release())
        return
    source.sink = ignore
    source.take(len(close))
    yield from source.skip(NEWLINES)


def _skip_newlines(source: Source) -> Reading[None]:
    sink, source.sink = source.sink, ignore
    yield from source.skip(NEWLINES)
    source.sink = sink
