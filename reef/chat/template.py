"""Messages to ids and ids to text, with the model's own template and tokenizer.

Knows nothing of requests or engines. Rendering and decoding of whole answers run in one thread of their own, so the
event loop is never blocked; a stream's few new tokens are decoded where they arrive, in microseconds.
"""

import asyncio
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jinja2
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from reef.errors import BadRequestError, ConfigError
from reef.types import Ids

P = ParamSpec("P")
T = TypeVar("T")
# Arguments of the renderer itself (another template, truncation, ...): not a client's to give.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}


class Template:
    """One model directory's tokenizer and chat template."""

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"inference.model-path: no tokenizer in {model_path}: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self.vocab_size: int = len(self._tokenizer)
        if len(self._encode("0")) == 0:  # transformers makes an empty tokenizer where there is none
            raise ConfigError(f"inference.model-path: no tokenizer in {model_path}: it encodes nothing")
        template = self._tokenizer.chat_template
        self.template_digest = _sha256(str(template)) if template else None
        self.tokenizer_digest = _sha256(self._tokenizer.backend_tokenizer.to_str())

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Ids:
        """Prompt ids [P] of a chat, ready for the assistant's answer.

        Raises:
            BadRequestError: the model has no template, an option is not the template's, or the template refuses these
                messages.
        """
        if self.template_digest is None:
            raise BadRequestError(
                "this model has no chat template (chat_template.jinja or tokenizer_config.json): "
                "/v1/completions works, /v1/chat/completions cannot",
                code="no_chat_template",
            )
        if taken := sorted(RESERVED & options.keys()):
            raise BadRequestError(
                f"chat_template_kwargs: {taken[0]} is not a variable of the template", param="chat_template_kwargs"
            )
        return await self._in_thread(self._render, messages, options)

    async def encode(self, text: str) -> Ids:
        """Ids [P] of plain text, nothing added."""
        return await self._in_thread(self._encode, text)

    async def decode_all(self, sequences: Sequence[Ids]) -> list[str]:
        """Text of whole answers, special tokens left out."""
        return await self._in_thread(lambda: [self.decode(ids.tolist()) for ids in sequences])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out. Blocks: for a few tokens, or in the thread."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        """One token by itself, for `logprobs`; special tokens by name."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def close(self) -> None:
        self._thread.shutdown()

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Ids:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadRequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        return self._encode(text)

    def _encode(self, text: str) -> Ids:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


class Detokenizer:
    """Text deltas of one choice as its tokens come; holds back what the next token may still change.

    Bytes of a character that is not complete yet decode to U+FFFD, so text that ends in one waits. Text that may be the
    beginning of a stop string waits too.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self._template = template
        self._longest_stop = max((len(text) for text in stop), default=1)
        self._ids: list[int] = []
        self._prefix = 0  # ids before it are settled
        self._text = ""  # of settled ids
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids, which are not the last, and was not returned before."""
        self._ids.extend(ids)
        tail = self._template.decode(self._ids[self._prefix :])
        if not tail.endswith("�") and len(self._ids) - self._prefix > _CONTEXT:
            keep = len(self._ids) - _CONTEXT
            settled = self._template.decode(self._ids[self._prefix : keep])
            rest = self._template.decode(self._ids[keep:])
            if settled + rest == tail:
                self._text += settled
                self._prefix, tail = keep, rest
        whole = self._text + tail.rstrip("�")
        return self._take(whole, len(whole) - (self._longest_stop - 1))

    def finish(self, ids: Sequence[int], matched: int | str | None) -> str:
        """The rest of the text with the last ids, cut at the stop string that ended it."""
        self._ids.extend(ids)
        whole = cut_at_stop(self._text + self._template.decode(self._ids[self._prefix :]), matched)
        return self._take(whole, len(whole))

    def _take(self, whole: str, end: int) -> str:
        """What of `whole` before `end` was not returned yet; nothing where `end` lies before that."""
        start, self._sent = self._sent, max(self._sent, end)
        return whole[start : self._sent]


_CONTEXT = 8  # ids that are decoded again with the next ones: a character spans at most 4 bytes, so at most 4 ids


def cut_at_stop(text: str, matched: int | str | None) -> str:
    """Text before the stop string that ended it; all of it where an id or nothing did."""
    if isinstance(matched, str):
        at = text.find(matched)
        return text if at < 0 else text[:at]
    return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
