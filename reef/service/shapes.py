"""How OpenAI's answers look: a chat's and a text's, whole and in chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from reef.chat.reply import Delta, ReasoningDelta, Reply, TextDelta, ToolCallBegin
from reef.chat.template import Template
from reef.types import Receipt


class Chat:
    """How a chat completion looks."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, template: Template, wants_logprobs: bool) -> None:
        self._template = template
        self._wants_logprobs = wants_logprobs
        self._known: dict[int, tuple[str, list[int] | None]] = {}  # text and bytes of the tokens so far

    def choice(self, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The message of a whole choice, its log-probabilities and why it ended."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
        generation = receipt.generation
        return {
            "message": message,
            "logprobs": self.logprobs(generation.output_ids.tolist(), generation.logprobs.tolist(), generation),
            "finish_reason": self.finish_reason(reply, generation.finish_reason.value),
        }

    def first_delta(self) -> dict[str, Any] | None:
        """What opens a choice's stream, before its first tokens; None: nothing does."""
        return {"delta": {"role": "assistant", "content": ""}}

    def deltas(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """What a piece adds to a choice: one after the other."""
        for delta in deltas:
            yield {"delta": _delta(delta)}

    def nothing(self) -> dict[str, Any]:
        """A piece that adds no text: tokens alone, or a finish reason."""
        return {"delta": {}}

    def finish_reason(self, reply: Reply, reason: str) -> str:
        """OpenAI's word for why a choice ended; `reason` is the engine's."""
        return "tool_calls" if reply.tool_calls and reason == "stop" else reason

    def logprobs(self, ids: Sequence[int], values: Sequence[float], source: Any) -> dict[str, Any] | None:
        """Log-probabilities in OpenAI's chat shape, an entry per token; None where the client asked for none.

        Args:
            ids: [N] sampled ids.
            values: [N] their log-probabilities (natural logarithm); `finite` stands in for -inf.
            source: the Generation or Chunk they come from; its `top_logprobs` are [N] or empty.
        """
        if not self._wants_logprobs:
            return None
        tops = source.top_logprobs or [()] * len(ids)
        return {
            "content": [
                {**self._token(token, value), "top_logprobs": [self._token(other, lp) for lp, other in top]}
                for token, value, top in zip(ids, values, tops, strict=True)
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        if (known := self._known.get(token)) is None:
            text = self._template.token_text(token)
            # Of half a character the bytes are not known.
            known = self._known[token] = (text, None if "\ufffd" in text else list(text.encode()))
        return {"token": known[0], "logprob": finite(logprob), "bytes": known[1]}


class Text(Chat):
    """How a text completion looks."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, template: Template, wants_logprobs: bool, echo: str) -> None:
        """`echo`: the prompt's text where the client wants it before the answer's, else nothing."""
        super().__init__(template, wants_logprobs)
        self._echo = echo

    def choice(self, reply: Reply, receipt: Receipt) -> dict[str, Any]:
        """The text of a whole choice, its log-probabilities and why it ended."""
        generation = receipt.generation
        return {
            "text": self._echo + reply.content,
            "logprobs": self.logprobs(generation.output_ids.tolist(), generation.logprobs.tolist(), generation),
            "finish_reason": generation.finish_reason.value,
        }

    def first_delta(self) -> dict[str, Any] | None:
        """The prompt, where it is wanted: a text completion has no opening event of its own."""
        return {"text": self._echo, "logprobs": None} if self._echo else None

    def deltas(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """What a piece adds to a choice."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                yield {"text": delta.text}

    def nothing(self) -> dict[str, Any]:
        """A piece that adds no text: tokens alone, or a finish reason."""
        return {"text": ""}

    def logprobs(self, ids: Sequence[int], values: Sequence[float], source: Any) -> dict[str, Any] | None:
        """Log-probabilities in OpenAI's completions shape (no text_offset); None where the client asked for none.

        Three lists of length N: tokens, token_logprobs, top_logprobs (empty mappings where there are none).
        Arguments as in `Chat.logprobs`.
        """
        if not self._wants_logprobs:
            return None
        tops = source.top_logprobs or [()] * len(ids)
        return {
            "tokens": [self._template.token_text(token) for token in ids],
            "token_logprobs": [finite(value) for value in values],
            "top_logprobs": [{self._template.token_text(other): finite(lp) for lp, other in top} for top in tops],
        }


def finite(logprob: float) -> float:
    """JSON has no -inf: the smallest float32 stands for it (the receipt says `logprob_not_finite`)."""
    return max(logprob, -3.4028235e38)


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolCallBegin):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
