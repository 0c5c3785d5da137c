"""A service whose engine says what a test tells it, in the way of a family of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from tests.chat.styles import STYLES
from tests.conftest import FakeEngine, Service


@dataclass
class Says:
    """`says("text")`: the next answers are that text and the family's end; `prompts` are the ids it was asked with."""

    service: Service
    engine: FakeEngine
    name: str
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(self.service.model))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def __call__(self, text: str, *, cut: bool = False, stopped: str | None = None) -> list[int]:
        """Returns the ids that it will have sampled; without the end where length `cut` or a string `stopped` it."""
        ids = self.encode(text if cut or stopped else text + STYLES[self.name].end)
        reason = {"type": "length", "length": len(ids)} if cut else {"type": "stop", "matched": stopped or ids[-1]}

        async def answer(request: Any, body: dict[str, Any]) -> Any:
            self.prompts.append(body["input_ids"])
            whole = self.engine.generation(ids, finish_reason=reason)
            if not body.get("stream"):
                return whole
            steps = [self.engine.generation(ids[:end], finish_reason=None) for end in range(1, len(ids))]
            return await self.engine.events(*steps, whole)(request, body)

        self.engine.answers["/generate"] = answer
        return ids
