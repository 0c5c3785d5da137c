"""Conversations to ids and ids to text, with the model's own template and tokenizer.

Knows nothing of requests or engines. What is short is rendered, encoded and decoded where it is asked for, in
microseconds; what is long in one thread of its own, so that the event loop is never blocked.
"""

import asyncio
import functools
import hashlib
import inspect
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jinja2
import numpy as np
import orjson
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.errors import BadRequestError, ConfigError
from reef.types import Ids

P = ParamSpec("P")
T = TypeVar("T")
# Arguments of the renderer itself (another template, truncation, ...): not a client's to give.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
SHORT_CHARS = 8192  # of a text, or tokens of an answer: fewer are not worth a thread
MAX_CACHED = 512  # prompts rendered last: the rollouts of a group, an agent's retries
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


class Template:
    """One model directory's tokenizer and chat template."""

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"inference.model-path: no tokenizer in {model_path}: {error}") from None
        self._backend = self._tokenizer.backend_tokenizer  # without transformers' checks, which take as long as it
        self._backend.no_truncation()
        self._backend.no_padding()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._rendered: OrderedDict[bytes, Ids] = OrderedDict()
        self._token_texts: dict[int, str] = {}  # at most one for each id that there is
        self.vocab_size: int = len(self._tokenizer)
        if len(self._encode("0")) == 0:  # transformers makes an empty tokenizer where there is none
            raise ConfigError(f"inference.model-path: no tokenizer in {model_path}: it encodes nothing")
        self.text: str | None = _template_text(self._tokenizer.chat_template)
        self.template_digest = _sha256(self.text) if self.text else None
        described = self._backend.to_str()
        self.tokenizer_digest = _sha256(described)
        self._bytes = self._byte_ids(described)
        added = self._tokenizer.added_tokens_decoder
        self._special = {int(id): str(token.content) for id, token in added.items() if token.special}
        self._ends = self._end_texts(model_path)
        self._knows_developer = "developer" in (self.text or "")
        self._mark = f"mark-{secrets.token_hex(16)}"  # nobody can have written it
        self._arguments_as_text = False
        self._closed = {calls: self._is_closed(calls) for calls in (False, True)} if self.text else {}

    async def render(self, conversation: Conversation) -> Ids:
        """Prompt ids [P] of a conversation, ready for the assistant's answer.

        Raises:
            BadRequestError: the model has no template, an option is not the template's, or the template refuses these
                messages.
        """
        self._check(conversation)
        key = _digest(conversation)
        if (found := self._rendered.get(key)) is not None:
            self._rendered.move_to_end(key)
            return found
        ids = await self._run(_size(conversation), self._render, conversation)
        if len(ids) <= SHORT_CHARS:
            self._rendered[key] = ids
            if len(self._rendered) > MAX_CACHED:
                self._rendered.popitem(last=False)
        return ids

    async def render_after(self, conversation: Conversation, index: int, last_id: int | None) -> Ids | None:
        """What follows the assistant's message `index` in the prompt: its end, the messages after it, the opening.

        The ids of everything before are those of the turn that said it. Only the text after it is encoded.

        Args:
            last_id: the stop id that was sampled at the end of the turn, if one was: the template's own is left out.

        Returns:
            Ids [A]; None where the template's text does not show where that message ends.

        Raises what `render` raises.
        """
        self._check(conversation)
        return await self._run(_size(conversation), self._render_after, conversation, index, last_id)

    async def encode(self, text: str) -> Ids:
        """Ids [P] of plain text, nothing added."""
        return await self._run(len(text), self._encode, text)

    async def decode_all(self, sequences: Sequence[Ids], keep: frozenset[int] = frozenset()) -> list[str]:
        """Text of whole answers, special tokens left out but for those in `keep`."""
        work = lambda: [self.decode(ids.tolist(), keep) for ids in sequences]  # noqa: E731
        return await self._run(sum(len(ids) for ids in sequences), work)

    def decode(self, ids: Sequence[int], keep: frozenset[int] = frozenset()) -> str:
        """Text of ids, special tokens left out but for those in `keep`. Blocks: for a few tokens, or in the thread."""
        if keep:
            ids = [token for token in ids if token in keep or token not in self._special]
        return str(self._backend.decode(ids, skip_special_tokens=not keep))

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        wanted = frozenset(texts)
        return frozenset(id for id, text in self._special.items() if text in wanted)

    def unsettled(self, keep: frozenset[int] = frozenset()) -> frozenset[int]:
        """Ids whose text the next one may still change, however long they are there; none in most tokenizers.

        Where a token may stand for one byte (`<0xE4>`), the bytes in a row are read together, across special tokens
        that are left out: one that is wrong makes all of them U+FFFD, the characters before it too.
        """
        return (self._bytes | self._special.keys()) - keep if self._bytes else frozenset()

    def is_special(self, token: int) -> bool:
        """Whether an id is a special token, which is in no text."""
        return token in self._special

    def text_of(self, ids: Sequence[int]) -> str:
        """Text of a few ids, special tokens by name."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        """One token by itself, for `logprobs`; special tokens by name."""
        if (text := self._token_texts.get(token)) is None:
            text = self._token_texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return text

    def forget(self) -> None:
        """Content was deleted: prompts that are remembered may be of it."""
        self._rendered.clear()

    def close(self) -> None:
        self._thread.shutdown()

    async def _run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if size <= SHORT_CHARS:
            return function(*args, **kwargs)
        work = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check(self, conversation: Conversation) -> None:
        if self.template_digest is None:
            raise BadRequestError(
                "this model has no chat template (chat_template.jinja or tokenizer_config.json): "
                "/v1/completions works, chats cannot",
                code="no_chat_template",
            )
        if taken := sorted(RESERVED & conversation.options.keys()):
            raise BadRequestError(
                f"chat_template_kwargs: {taken[0]} is not a variable of the template", param="chat_template_kwargs"
            )

    def _render(self, conversation: Conversation) -> Ids:
        return self._encode(self._text(conversation, self._shown(conversation)))

    def _render_after(self, conversation: Conversation, index: int, last_id: int | None) -> Ids | None:
        messages = self._shown(conversation)
        calls = "tool_calls" in messages[index]
        messages[index] = self._marked(messages[index])
        _, found, after = self._text(conversation, messages).rpartition(self._mark)
        closed = self._closed[calls]
        if not found or closed is None or (calls and not closed):  # where a text ends is known, where a call ends not
            return None
        if closed:
            if (end := self._first_end(after)) is None:
                return None
            after = after[end:]
        ids = self._encode(after)
        return ids[1:] if last_id is not None and self._is_end(int(ids[0]), last_id) else ids

    def _is_end(self, told: int, last_id: int) -> bool:
        """Whether what the template puts after a message is the end that was sampled, or stands for it."""
        return told == last_id or (last_id in self._ends and told in self._special)

    def _first_end(self, text: str) -> int | None:
        """Where the first token that ends an answer begins."""
        return min((at for end in self._ends.values() if (at := text.find(end)) >= 0), default=None)

    def _is_closed(self, calls: bool) -> bool | None:
        """Whether the template ends an assistant's message with a token that ends answers; None: that is not shown.

        Tried once, with another message after it: a later one's end must not be taken for this one's. Learns on the way
        whether the template puts arguments together as text, as some do.
        """
        call = ToolCall("a" * 9, "f", "{}")
        said = Message("assistant", "", None, (call,) if calls else ())
        follows = "b" + self._mark  # what a template does to an edge of a text it does to this too
        last = Message("tool", follows, tool_call_id=call.id, name="f") if calls else Message("user", follows)
        tried = Conversation((Message("user", "a"), said, last), (_TOOL,) if calls else ())
        for self._arguments_as_text in (False, True) if calls else (False,):
            shown = self._shown(tried)
            shown[1] = self._marked(shown[1])
            try:
                text = self._text(tried, shown)
            except BadRequestError:
                continue
            before, found, _ = text.partition(follows)
            _, marked, between = before.rpartition(self._mark)
            return self._first_end(between) is not None if found and marked else None
        self._arguments_as_text = False
        return None

    def _shown(self, conversation: Conversation) -> list[dict[str, Any]]:
        return [message.rendered(self._arguments_as_text) for message in conversation.messages]

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        """The assistant's message with the mark where the template shows its text and its arguments.

        The names of its calls stay: some templates name them again where they show the results.
        """
        marked = {"role": message["role"], "content": self._mark}
        if "tool_calls" in message:
            arguments = self._mark if self._arguments_as_text else {self._mark: self._mark}
            marked["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments}} for call in message["tool_calls"]
            ]
        return marked

    def _text(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        for message in messages:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in conversation.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **conversation.options,
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadRequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        return str(text)

    def _end_texts(self, model_path: Path) -> dict[int, str]:
        """The special tokens that end an answer: what the tokenizer and the model's files call so, as for engines."""
        ids = {self._tokenizer.eos_token_id}
        for file in (model_path / "generation_config.json", model_path / "config.json"):
            told = orjson.loads(file.read_bytes()).get("eos_token_id") if file.exists() else None
            ids.update(told if isinstance(told, list) else [told])
        return {id: self._special[id] for id in sorted(ids - {None}) if id in self._special}

    def _byte_ids(self, described: str) -> frozenset[int]:
        """The tokens that stand for one byte. `described`: the tokenizer as JSON."""
        if b'"ByteFallback"' not in orjson.dumps(orjson.loads(described)["decoder"]):
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id for id in ids if id is not None)

    def _encode(self, text: str) -> Ids:
        if len(text) <= SHORT_CHARS:
            return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        # Of the tokenizer's functions only those for many texts let the event loop go on meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _template_text(template: Any) -> str | None:
    """A model may have several by name; `default` is the one that `apply_chat_template` takes without tools."""
    if isinstance(template, dict):
        return "".join(f"{name}\n{text}\n" for name, text in sorted(template.items())) or None
    return str(template) if template else None


def _digest(conversation: Conversation) -> bytes:
    shown = [[message.rendered() for message in conversation.messages], conversation.tools, conversation.options]
    return hashlib.blake2b(orjson.dumps(shown), digest_size=16).digest()


def _size(conversation: Conversation) -> int:
    tools = sum(len(str(tool)) for tool in conversation.tools)
    return tools + sum(
        len(message.content) + len(message.reasoning or "") + sum(len(call.arguments) for call in message.tool_calls)
        for message in conversation.messages
    )
