"""The nouns of the client's side, each a frozen dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One task to answer. ``gold`` is the right answer as text, in the form the grader expects; None: there is none.

    ``source``, ``revision`` and ``split`` say where it comes from; ``slices`` are named values by which results are
    taken apart, e.g. ``{"level": "hard"}``.
    """

    id: str
    messages: tuple[Message, ...]
    gold: str | None
    source: str | None = None
    revision: str | None = None
    split: str | None = None
    slices: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_text(cls, id: str, text: str, gold: str | None) -> "Item":
        """An item whose prompt is a single user message."""
        return cls(id, ({"role": "user", "content": text},), gold)

    @property
    def question(self) -> str:
        """The last user message's text, for people and judges."""
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        return str(asked[-1]) if asked else ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a request. ``finish_reason`` is "stop" when the model ended its turn itself.

    ``token_ids`` [N] and ``logprobs`` [N] (natural logarithm) are those of the sampled tokens, only where asked for.
    """

    index: int
    text: str
    finish_reason: str
    receipt: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Json:
        """The answer as a message of the conversation, for the request that goes on from it."""
        said: Json = {"role": "assistant", "content": None if self.tool_calls and not self.text else self.text}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return said


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request: of :meth:`Client.chat`, :meth:`Client.completions`, or the end of a stream.

    ``release`` is the release that answered, "" where the service names none (it gave no token, or it is a
    ``reef-infra`` without releases); token counts are of the whole request, 0 where it counts none. ``raw`` is the body
    as it came; of a stream, the body that it adds up to. ``prompt_token_ids`` are there where token ids were asked for.
    """

    choices: tuple[Choice, ...]
    release: str
    prompt_tokens: int
    completion_tokens: int
    raw: Json = field(repr=False)
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def receipt(self) -> str:
        """The first choice's receipt."""
        return self.choices[0].receipt

    @property
    def receipts(self) -> tuple[str, ...]:
        """The receipts of all choices, in order."""
        return tuple(choice.receipt for choice in self.choices)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that a choice gained."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Thinking that a choice gained."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What call number ``index`` of a choice gained: id and name where it begins, then its arguments piece by piece."""

    choice: int
    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = TextDelta | ReasoningDelta | ToolCallDelta

FINAL_STATES = frozenset({"trained", "recorded", "dropped"})


@dataclass(frozen=True, slots=True)
class ReportState:
    """Where a report stands: pending, waiting, reserved, trained, recorded or dropped, and why."""

    id: str
    state: str
    reason: str | None
    step: int | None
    release: str | None
    raw: Json = field(repr=False)

    @property
    def final(self) -> bool:
        """Whether the state will not change any more."""
        return self.state in FINAL_STATES


@dataclass(frozen=True, slots=True)
class Release:
    """One link of a scenario's chain. ``current`` marks the head; ``metrics`` are those of its step."""

    id: str
    parent: str | None
    content: str
    operation: str
    step: int
    checkpoint: str | None
    restorable: bool
    current: bool
    created_at: str | float
    metrics: Json = field(repr=False)
    number: int | None = None  # its place in the chain, from 0; None, as the next, where the service does not say
    policy_version: int | None = None  # updates behind its content
    state: str | None = None  # released | pending | rejected | quarantined
    raw: Json = field(default_factory=dict, repr=False)  # as it came, with `evaluations` and `alarms`

    @property
    def version(self) -> int:
        """By how many updates it is newer than the base: what staleness is counted in."""
        return self.step if self.policy_version is None else self.policy_version


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :meth:`Client.why` found out about a report or a receipt.

    Of a report that trained: ``release``, which it trained, and that release's ``lineage`` (batch, reports, receipts).
    """

    report: ReportState | None = None
    receipt: Json | None = field(default=None, repr=False)
    release: Release | None = None
    lineage: Json | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Short: of a receipt its id, which is all that is known of one without a report."""
        if self.receipt is not None:
            return f"Explanation(receipt={self.receipt.get('agent_record_id')!r})"
        return f"Explanation(report={self.report!r}, release={self.release!r})"

    @property
    def history(self) -> list[Json]:
        """All that happened to it, in order of time, where the service tells it."""
        told = self.report.raw if self.report else self.receipt or {}
        return list(told.get("history", ()))
