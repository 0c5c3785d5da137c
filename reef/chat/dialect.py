"""How one model writes: which parser finds its reasoning and its tool calls, and which special tokens that needs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from reef.chat.detokenizer import Detokenizer
from reef.chat.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    default_parsers,
    make_parser,
    markers,
    starts_in_reasoning,
)
from reef.chat.reply import Reply, ReplyParser
from reef.chat.template import Template
from reef.errors import ConfigError
from reef.types import Ids

TAIL = 16  # ids at the end of a prompt that show whether the template has opened the reasoning


class Dialect:
    """A model's way of writing replies."""

    def __init__(self, template: Template, model_path: Path, tool_parser: str, reasoning_parser: str) -> None:
        """`auto` follows the model's template, `none` means that all is text. Raises ConfigError for other names."""
        tools, reasoning = default_parsers(_model_type(model_path), template.text)
        self.tool_parser = _chosen("inference.tool-call-parser", tool_parser, tools, TOOL_PARSERS)
        self.reasoning_parser = _chosen("inference.reasoning-parser", reasoning_parser, reasoning, REASONING_PARSERS)
        self.keep = template.special_ids(markers(self.tool_parser, self.reasoning_parser))
        self.shows_tools = "tools" in (template.text or "")  # else the model would never hear of them
        self._template = template

    def reader(self, tools: Sequence[Mapping[str, Any]], seed: str, prompt_ids: Ids) -> ReplyParser:
        """A parser for one choice's text. `seed` makes the ids of its calls."""
        tail = self._template.text_of(prompt_ids[-TAIL:].tolist())
        return make_parser(
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            tools=tools,
            seed=seed,
            starts_in_reasoning=starts_in_reasoning(self.reasoning_parser, tail),
        )

    def detokenizer(self, stop: Sequence[str], plain: bool) -> Detokenizer:
        """Text of one choice as its tokens come; unless `plain`, with the special tokens that the parser looks for."""
        return Detokenizer(self._template, stop, frozenset() if plain else self.keep)


def read_whole(parser: ReplyParser, text: str) -> Reply:
    """The reply in a whole text."""
    parser.push(text)
    parser.finish()
    return parser.reply


def _chosen(setting: str, told: str, derived: str | None, known: Mapping[str, object]) -> str | None:
    if told == "auto":
        return derived
    if told == "none":
        return None
    if told not in known:
        raise ConfigError(f"{setting}: expected auto, none or one of {', '.join(sorted(known))}, got {told!r}")
    return told


def _model_type(model_path: Path) -> str:
    config = model_path / "config.json"
    return str(orjson.loads(config.read_bytes()).get("model_type", "")) if config.exists() else ""
