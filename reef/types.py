"""The nouns: every value that crosses from one room to another, on one page.

    Request -> engine -> Generation -> Receipt -> Report -> Sample -> Batch -> StepResult -> Release

All are frozen; arrays are never written after construction. Shape letters: T tokens of one sequence, P tokens of a
prompt, N sampled tokens of one choice. Times are seconds since the epoch (UTC), durations seconds.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

# The API a request came through, and what it is for: "train" may be trained on, "eval" never is.
PURPOSES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled. With neutral values, log-probabilities are those of the distribution drawn from."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    json_schema: str | None = None  # JSON text: the engine's grammar lets nothing else through

    def inexact_reason(self) -> str | None:
        """Why recorded log-probabilities are not those of the distribution sampled from, or None where they are."""
        if self.temperature <= 0:
            return "greedy"
        neutral = {
            "top_p": self.top_p >= 1.0,
            "top_k": self.top_k <= 0,
            "min_p": self.min_p <= 0.0,
            "presence_penalty": self.presence_penalty == 0.0,
            "frequency_penalty": self.frequency_penalty == 0.0,
            "repetition_penalty": self.repetition_penalty == 1.0,
            "min_tokens": self.min_tokens <= 0,
            "json_schema": self.json_schema is None,
        }
        changed = [name for name, is_neutral in neutral.items() if not is_neutral]
        return ",".join(changed) or None

    def neutralised(self) -> "Sampling":
        """The same request drawn from the model's own distribution at its temperature; a grammar stays."""
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            json_schema=self.json_schema,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One inference request, rendered to ids. Made by `service/`, consumed by `engines/` and the ledger."""

    id: str
    scenario: str
    api: str  # chat | completions
    prompt_ids: Ids  # [P]
    sampling: Sampling
    n: int
    body: bytes  # the client's JSON as it came
    created_at: float
    purpose: str = "train"
    session: str | None = None
    parent: str | None = None  # the receipt whose ids this prompt continues
    tags: Mapping[str, str] = field(default_factory=dict)
    top_logprobs: int = 0
    template_digest: str | None = None
    tokenizer_digest: str | None = None
    continued_by: str | None = None  # how the parent was found: explicit | response | session | messages


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens [start, end) of one choice came from one release's weights."""

    start: int
    end: int
    release_id: str


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What an engine sampled for one choice. Made by `engines/client.py`."""

    output_ids: Ids  # [N]
    logprobs: Floats  # [N], log-probability of each id at the sampling temperature
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # cover 0..N without gaps
    matched: int | str | None = None  # the stop id or stop string that ended it
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()  # per token: (log-probability, id), best first
    reproducible: bool = True  # False where a load in place kept the KV cache of older weights


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """The immutable record of one choice of one completion. `prompt_ids` is whole; the ledger stores what was added."""

    id: str
    request_id: str
    scenario: str
    choice: int
    prompt_ids: Ids  # [P]
    generation: Generation
    sampling: Sampling
    purpose: str
    session: str | None
    parent: str | None
    tags: Mapping[str, str]
    template_digest: str | None
    tokenizer_digest: str | None
    engine_build: str
    created_at: float
    inexact_reason: str | None
    digest: str  # sha256 over all else here
    continued_by: str | None = None  # how the parent was found; see `Request`
    turn_key: str | None = None  # hash of the conversation up to and including this reply


class ReportState(enum.StrEnum):
    """Where a report is. `waiting` is `pending` in an incomplete group, worked out when asked."""

    PENDING = "pending"
    WAITING = "waiting"
    RESERVED = "reserved"
    TRAINED = "trained"
    RECORDED = "recorded"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Report:
    """A grade against receipts. Made by `service/reports.py` from a checked body."""

    id: str
    scenario: str
    references: tuple[str, ...]  # receipt ids
    body: Mapping[str, Any]  # the checked body, kept whole
    score: float | None = None
    outcome: str | None = None
    group: str | None = None
    truncated: bool = False
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pending report as a method sees it when it chooses a batch: no tokens, only what the choice needs."""

    report_id: str
    seq: int  # order of arrival
    group: str
    score: float
    releases: tuple[str, ...]  # all that produced a sampled token
    accepted_at: float


@dataclass(frozen=True, slots=True)
class Drop:
    """A report that will not train, and why (`stale`, `abandoned`, `group_incomplete`, `tied`, ...)."""

    report_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """A report chosen for a batch. `trains` False: counts in its group's mean, contributes no tokens (it is stale)."""

    report_id: str
    group: str
    trains: bool = True


@dataclass(frozen=True, slots=True)
class Selection:
    """What a method decided about the pending reports. An empty `picks` means: no batch yet."""

    picks: tuple[Pick, ...] = ()
    drops: tuple[Drop, ...] = ()
    next_deadline_at: float | None = None  # when to look again though no report arrives


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, end) of a sequence were sampled in one receipt's completion."""

    receipt_id: str
    start: int
    end: int
    reward: float = 0.0  # the report's own score of this turn (`reference_scores`), besides that of the whole


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training sequence: what was sampled, under which policy, and what it was worth.

    A report over a chain or a tree of turns gives one for each branch and temperature; a turn that branches share
    trains in the first of them. Everything else in `tokens` is context. See `ledger/trajectories.py`.
    """

    report_id: str
    receipt_id: str  # the last turn of the sequence
    group: str
    reward: float
    tokens: Ids  # [T] prompt and sampled tokens
    mask: Bools  # [T] True on the sampled tokens of `turns` (those the loss sees)
    logprobs: Floats  # [T] the engine's log-probabilities at `temperature`; 0 where mask is False
    temperature: float
    trains: bool = True
    truncated: bool = False  # length cut the last turn, or the report says so
    turns: tuple[Turn, ...] = ()  # those that train in this sequence, in the order of their tokens
    lag: int = 0  # policy updates between the oldest release that sampled it and the one that is trained
    accepted_at: float = 0.0  # when its report came
    components: Mapping[str, float] = field(default_factory=dict)  # of the reward, by name, as the report has them


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """An ordered, durable list of samples with everything that decides its step.

    `microbatches` holds positions in `samples`; data rank r of d takes microbatches r, r+d, ...
    """

    id: str
    scenario: str
    number: int  # how often a batch was reserved in this scenario, this one included
    attempt: int  # 1 for the first try
    base_release: str  # the head when it was reserved
    samples: tuple[Sample, ...]
    microbatches: tuple[tuple[int, ...], ...]
    settings: Mapping[str, Any]  # resolved method, optimizer, layout, threads, seed: JSON values only
    reserved_at: float = 0.0
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by report: its prompt's rewards before


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Made by `training/`."""

    step: int  # steps of the trainer after this one, those of a critic alone included
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]  # by phase
    trained_policy: bool = True  # False: the critic alone learned, the policy is bit-equal


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed sequence and the trainer's log-probabilities of it: an engine that loaded the same weights agrees."""

    ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T-1], of ids[1:], at temperature 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that the trainer sends to an engine at once, under Hugging Face names and in the base model's dtypes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # torch's names without "torch.", e.g. "bfloat16"
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A release's weights: on disk (complete, fsynced and renamed into place), or for now in the trainer alone."""

    release_id: str
    path: str  # absolute; where they are, or would be
    content_id: str  # "sha256:..." over the weights' bytes; equal weights have equal ids
    size_bytes: int
    probe: Probe | None  # None where nothing trains (record-only) and so nobody can contradict the engine
    on_disk: bool = True


class Operation(enum.StrEnum):
    """How a link of the chain came to be. All but `base` and `train` repeat the content of another release."""

    BASE = "base"
    TRAIN = "train"
    CRITIC_ONLY = "critic-only"  # a step of the critic alone: a state of the trainer of its own, the parent's weights
    ROLLBACK = "rollback"
    PROMOTE = "promote"


class ReleaseState(enum.StrEnum):
    """Whether a release may be served. Only the head can be `pending`."""

    RELEASED = "released"
    PENDING = "pending"  # held by the gate until its held-out result is in
    REJECTED = "rejected"  # failed the gate, or was rolled back while it was held
    QUARANTINED = "quarantined"  # no engine loads it or agrees with the trainer about it


@dataclass(frozen=True, slots=True)
class Release:
    """One link of a scenario's chain."""

    id: str
    scenario: str
    number: int  # 0 for the base, then one more per link
    parent: str | None
    content_id: str
    operation: Operation
    policy_version: int  # policy updates along the content's ancestry
    step: int  # optimizer steps along the content's ancestry
    batch_id: str | None
    path: str  # where the weights are (or were: see `restorable`)
    checkpoint: str | None  # trainer checkpoint directory, where one was kept
    restorable: bool  # weights are still on disk
    created_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    verified_at: float | None = None  # when an engine last loaded it and agreed with the probe
    source: str | None = None  # rollback and promote: the release whose content and trainer state it repeats
    state: ReleaseState = ReleaseState.RELEASED
    reason: str | None = None  # of the state
    state_at: float | None = None  # when the state last changed; None: it is as it was made
    replay_diverged: bool = False  # made again from the ledger, it came out different
    num_deleted: int = 0  # receipts it was trained on that were deleted since
