"""One reply, from its text: first the thinking, then text and tool calls."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from reef.chat.parsing.calls import Calls, ToolFormat, read_with_calls, schemas
from reef.chat.parsing.deepseek import DEEPSEEK
from reef.chat.parsing.hermes import HERMES
from reef.chat.parsing.llama3 import LLAMA3
from reef.chat.parsing.mistral import MISTRAL
from reef.chat.parsing.qwen3_coder import QWEN3_CODER
from reef.chat.parsing.reasoning import MISTRAL_THINK, THINK, ReasoningFormat, read_reasoning
from reef.chat.parsing.source import Reading, Source, ignore
from reef.chat.parsing.transcript import Transcript
from reef.chat.reply import Delta, PlainParser, Reply, ReplyParser

TOOL_PARSERS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3-coder": QWEN3_CODER,
    "llama3-json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
}
REASONING_PARSERS: Mapping[str, ReasoningFormat] = {"think": THINK, "mistral": MISTRAL_THINK}


def make_parser(
    *,
    tool_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[Mapping[str, Any]],
    seed: str,
    starts_in_reasoning: bool,
) -> ReplyParser:
    """A parser for one choice's text. The names are keys of TOOL_PARSERS and REASONING_PARSERS, or None.

    Args:
        tools: as in OpenAI's chat API; tool calls are looked for only if there are any.
        seed: the ids of the calls follow from it and their index in the reply.
        starts_in_reasoning: the prompt has opened the thinking, so the text begins inside it.
    """
    tool_format = TOOL_PARSERS[tool_parser] if tool_parser is not None and tools else None
    reasoning_format = REASONING_PARSERS[reasoning_parser] if reasoning_parser is not None else None
    if tool_format is None and reasoning_format is None:
        return PlainParser()
    return FormatParser(tool_format, reasoning_format, schemas(tools), seed, starts_in_reasoning)


def markers(tool_parser: str | None, reasoning_parser: str | None) -> frozenset[str]:
    """Strings that these parsers need in the text even where they are special tokens, which are left out otherwise."""
    special = TOOL_PARSERS[tool_parser].special if tool_parser is not None else frozenset()
    if reasoning_parser is None:
        return special
    form = REASONING_PARSERS[reasoning_parser]
    return special | {form.open} | form.close.strings


def starts_in_reasoning(reasoning_parser: str | None, prompt_tail: str) -> bool:
    """Whether a prompt that ends with this text has opened the thinking."""
    return reasoning_parser is not None and prompt_tail.rstrip().endswith(REASONING_PARSERS[reasoning_parser].open)


class FormatParser:
    """Finds thinking and tool calls in the text of one choice.

    A text without any marker comes back character for character. In a stream, text goes on at once but for what may be
    the beginning of a marker and, where tools are looked for, white space that a call may follow.

    A call that is cut, is not JSON, or names no tool is text in `reply`, as the model wrote it, markers included. A
    stream does not know that in time: if the name had come, it has sent ToolCallBegin and arguments up to the fault,
    and its text has only what follows the fault. Everywhere else the deltas put together are the reply. A call whose
    arguments are whole is a call, even if the marker after it is cut or missing.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        seed: str,
        starts_in_reasoning: bool,
    ) -> None:
        self._source = Source()
        self._transcript = Transcript()
        self._reader = self._read(tool_format, reasoning_format, tools, seed, starts_in_reasoning)
        next(self._reader)

    def push(self, text: str) -> list[Delta]:
        self._source.push(text)
        next(self._reader)
        return self._transcript.drain()

    def finish(self) -> list[Delta]:
        self._source.end()
        for _ in self._reader:
            raise RuntimeError("expected readers to end with the text, one waits for more")
        self._source.sink = ignore  # so that nothing refers to itself and waits for the garbage collector
        return self._transcript.drain()

    @property
    def reply(self) -> Reply:
        return self._transcript.reply()

    def _read(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        seed: str,
        opened: bool,
    ) -> Reading[None]:
        source, transcript = self._source, self._transcript
        if tool_format is None:
            if reasoning_format is not None:
                yield from read_reasoning(source, transcript, reasoning_format, opened, transcript.text)
            source.sink = transcript.text
            while (yield from source.more()):
                source.take_rest()
            return
        calls = Calls(source, transcript, tools, functools.partial(_call_id, seed, tool_format.short_ids))
        if reasoning_format is not None:
            yield from read_reasoning(source, transcript, reasoning_format, opened, calls.text)
        yield from read_with_calls(source, calls, tool_format)


def _call_id(seed: str, short: bool, index: int) -> str:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if short else f"call_{digest}"
