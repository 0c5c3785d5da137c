"""The agent's options: Harbor checks them before anything runs, and ``harbor agent schema`` lists them."""

from pathlib import Path
from typing import Any, Literal

from harbor.agents.options import AgentOptions
from pydantic import Field, field_validator

from reef_harness.graders.named import grader_of
from reef_harness.harbor.rollouts import ROLLOUTS
from reef_harness.keys import KEY_FILE


class HarborAgentOptions(AgentOptions):
    """What ``--ak NAME=VALUE`` sets. The key is none of them, since Harbor writes these into its result files."""

    url: str = Field("http://127.0.0.1:8080", description="Of the Reef service.")
    scenario: str | None = Field(None, description="Omit for the service's own.")
    key_file: Path = Field(KEY_FILE, description="Of a service on this machine, where REEF_API_KEY is not set.")
    rollouts: int = Field(ROLLOUTS, ge=1, le=1024, description="Answers to the instruction.")
    concurrency: int = Field(6, ge=1, description="How many of them are asked for at once.")
    temperature: float = Field(1.0, ge=0, description="Answers sampled at 0 are not trained on.")
    max_tokens: int | None = Field(None, ge=1, description="Of each answer. Omit for all that the context leaves.")
    system: str | None = Field(None, description="A system message before the instruction.")
    extra: dict[str, Any] | None = Field(None, description="Further fields of the request's body.")
    purpose: Literal["eval"] | None = Field(None, description="eval: recorded, never trained on.")
    grader: str | None = Field(None, description="See reef-harness graders. Omit for [metadata] grader of the task.")
    gold_file: Path | None = Field(None, description="JSON, {task name: gold}. Omit for the task's own.")
    group: bool = Field(True, description="Whether a trial's rollouts are compared with each other (GRPO).")
    retries: int = Field(2, ge=0, description="More tries for an answer where the engine failed.")
    timeout_s: float = Field(600.0, gt=0, description="Of each request.")
    answer_path: str = Field("/app/answer.txt", description="Where the task's verifier looks.")
    answer: Literal["text", "read"] = Field(
        "text", description="What is written there: the whole answer, or what the grader reads in it."
    )

    @field_validator("grader")
    @classmethod
    def _known(cls, spec: str | None) -> str | None:
        """A name that no grader has is refused before the first trial."""
        if spec is not None:
            grader_of(spec)
        return spec
