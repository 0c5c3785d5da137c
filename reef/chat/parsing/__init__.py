"""Replies of the common model families, read whole or as they stream: thinking, text, tool calls.

source       text as it comes, for readers that pause         transcript   the deltas and the reply
reasoning    the thinking before the answer                   calls        what holds for tool calls of every format
hermes, llama3, mistral, deepseek (on json_call), qwen3_coder (on schema)  one format each
parser       all of it for one reply                          defaults     which formats a model writes
"""

from reef.chat.parsing.defaults import default_parsers
from reef.chat.parsing.parser import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    make_parser,
    markers,
    starts_in_reasoning,
)

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "default_parsers",
    "make_parser",
    "markers",
    "starts_in_reasoning",
]
