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
class Choice:
    """One of the answers to a request. ``finish_reason`` is "stop" when the model ended its turn itself."""

    index: int
    text: str
    finish_reason: str
    receipt: str
    token_ids: tuple[int, ...] | None = None  # only where asked for, as are
    logprobs: tuple[float, ...] | None = None  # of the sampled tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request, from :meth:`Client.chat` or :meth:`Client.completions`.

    ``release`` is the release that answered; token counts are of the whole request; ``raw`` is the body as it came.
    """

    choices: tuple[Choice, ...]
    release: str
    prompt_tokens: int
    completion_tokens: int
    raw: Json = field(repr=False)

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
