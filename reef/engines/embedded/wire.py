"""JSON bodies of SGLang's native API <-> requests and snapshots.

Stricter than SGLang in one way: a field it does not know, or one of its fields that this engine has not, is refused by
name instead of ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from reef.engines.embedded.engine import Engine
from reef.engines.embedded.errors import BadRequestError
from reef.engines.embedded.params import SamplingParams, parse_sampling_params
from reef.engines.embedded.request import Request, Snapshot
from reef.engines.embedded.sampling import Int64s, random_key
from reef.engines.embedded.shaping import Shaping
from reef.engines.embedded.text import StopStrings, Tokenizer, visible_text

MAX_TOP_LOGPROBS = 64
SEED_BITS = 63

SUPPORTED = frozenset(
    ("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream")
)

HINTS = frozenset(
    ("session_id", "routing_key", "conversation_id", "extra_key", "cache_salt", "log_metrics", "no_logs",
     "custom_labels", "background", "received_time", "external_trace_header")
)  # fmt: skip
"""Fields that change no answer here: they steer routing, logging and a prefix cache this engine has not."""

UNSUPPORTED = frozenset(
    ("text", "input_embeds", "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes",
     "use_audio_in_video", "video_config", "watermark", "token_ids_logprob", "return_sampling_mask",
     "sampling_logprobs_mode", "return_text_in_logprobs", "return_flat_raw_top_logprobs",
     "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_hidden_states",
     "return_routed_experts", "routed_experts_start_len", "return_indexer_topk", "modalities", "session_params",
     "lora_path", "lora_id", "custom_logit_processor", "positional_embed_overrides", "bootstrap_host",
     "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank",
     "data_parallel_rank", "disagg_prefill_dp_rank", "http_worker_ipc", "require_reasoning", "max_thinking_tokens",
     "priority", "return_bytes", "return_entropy", "return_prompt_token_ids", "need_wait_for_mm_inputs",
     "num_items_assigned", "encoder_urls", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch",
     "video_max_dynamic_patch", "images_config", "mm_processor_kwargs", "multi_item_delimiter_indices",
     "token_indices_to_pool", "kv_hints")
)  # fmt: skip
"""SGLang's fields without a counterpart here: only null, false, 0 and empty values pass."""


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed `/generate` body."""

    requests: list[Request]
    """Prompts in order, each with its choices in order."""
    stream: bool
    single: bool
    """Whether the answer is one object: one prompt, one choice."""


@dataclass(frozen=True, slots=True)
class Parser:
    """Turns `/generate` bodies into requests for one engine."""

    engine: Engine
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    sink: Callable[[Request, Snapshot], None]

    def parse(self, body: Any) -> Call:
        """Checks a body.

        Raises:
            BadRequestError: naming the field.
        """
        if not isinstance(body, dict):
            raise BadRequestError(f"the body must be a JSON object, got {type(body).__name__}")
        _check_fields(body)
        prompts, batch = self._prompts(body.get("input_ids"))
        params = self._params(body.get("sampling_params"), len(prompts))
        choices = params[0].n
        return_logprob = _per_prompt(body, "return_logprob", False, len(prompts))
        starts = _per_prompt(body, "logprob_start_len", -1, len(prompts))
        tops = _per_prompt(body, "top_logprobs_num", 0, len(prompts))
        stream = bool(_per_prompt(body, "stream", False, 1)[0])
        single = not batch and choices == 1
        rid, rids = _rids(body.get("rid"), len(prompts), choices, single)
        requests: list[Request] = []
        for i, prompt in enumerate(prompts):
            start = self._logprob_start(return_logprob[i], starts[i], len(prompt))
            num_top = self._num_top(tops[i]) if return_logprob[i] else 0
            for choice in range(choices):
                requests.append(
                    self._request(
                        rid=rids[len(requests)],
                        call_rid=rid,
                        prompt=prompt,
                        params=params[i],
                        choice=choice,
                        return_logprob=return_logprob[i],
                        logprob_start=start,
                        num_top_logprobs=num_top,
                        stream=stream,
                    )
                )
        return Call(requests, stream, single)

    def _prompts(self, value: Any) -> tuple[list[Int64s], bool]:
        if not isinstance(value, list) or not value:
            raise BadRequestError("input_ids must be a list of token ids, or a list of such lists, and not empty")
        batch = isinstance(value[0], list)
        prompts = value if batch else [value]
        vocab_size = self.engine.arch.vocab_size
        arrays = []
        for prompt in prompts:
            if not isinstance(prompt, list) or not prompt:
                raise BadRequestError("input_ids must not mix ids with lists, and no prompt may be empty")
            if set(map(type, prompt)) != {int}:
                raise BadRequestError("input_ids must hold integers only")
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise BadRequestError(f"input_ids must be in [0, {vocab_size - 1}], got {min(prompt)} to {max(prompt)}")
            arrays.append(np.array(prompt, np.int64))
        return arrays, batch

    def _params(self, value: Any, num_prompts: int) -> list[SamplingParams]:
        vocab_size = self.engine.arch.vocab_size
        if not isinstance(value, list):
            return [parse_sampling_params(value, vocab_size)] * num_prompts
        if len(value) != num_prompts:
            raise BadRequestError(f"sampling_params has {len(value)} entries for {num_prompts} prompts")
        params = [parse_sampling_params(entry, vocab_size) for entry in value]
        if len({entry.n for entry in params}) > 1:
            raise BadRequestError("sampling_params: n must be the same for all prompts")
        return params

    def _logprob_start(self, wanted: bool, value: int, length: int) -> int:
        if not wanted or value == -1:
            return length
        if not 0 <= value <= length:
            raise BadRequestError(f"logprob_start_len must be in [-1, {length}] for a prompt of {length}, got {value}")
        return value

    def _num_top(self, value: int) -> int:
        if not 0 <= value <= MAX_TOP_LOGPROBS:
            raise BadRequestError(f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {value}")
        return value

    def _request(self, *, prompt: Int64s, params: SamplingParams, choice: int, **fields: Any) -> Request:
        ends = params.stop_token_ids | self.eos_ids
        if params.stop and self.tokenizer is None:
            raise BadRequestError("stop strings need a tokenizer, and this server runs without one: use stop_token_ids")
        seed = params.seed if params.seed is not None else self.engine.seeds.getrandbits(SEED_BITS)
        # min_new_tokens holds back the end tokens even where ignore_eos makes them ordinary, as in SGLang.
        shaping = Shaping(params, ends, self.engine.arch.vocab_size) if params.shaped else None
        return Request(
            prompt=prompt,
            params=params,
            max_new_tokens=self._max_new_tokens(params.max_new_tokens, len(prompt)),
            random_key=random_key(seed, choice),
            end_ids=frozenset() if params.ignore_eos else ends,
            stop_strings=StopStrings(params.stop, self.tokenizer) if params.stop and self.tokenizer else None,
            shaping=shaping,
            sink=self.sink,
            **fields,
        )

    def _max_new_tokens(self, wanted: int | None, length: int) -> int:
        limits = self.engine.limits
        if length >= limits.context_length:
            raise BadRequestError(
                f"The input ({length} tokens) is longer than the model's context length "
                f"({limits.context_length} tokens)."
            )
        if wanted is None:
            return max(0, min(limits.context_length, limits.max_total_tokens) - length)
        total = length + wanted
        for name, bound in (
            ("the model's maximum context length", limits.context_length),
            ("the engine's KV budget (--max-total-tokens)", limits.max_total_tokens),
        ):
            if total > bound:
                raise BadRequestError(
                    f"Requested token count exceeds {name} of {bound} tokens. You requested a total of {total} tokens: "
                    f"{length} tokens from the input and {wanted} tokens for the completion."
                )
        return wanted


def result(request: Request, snapshot: Snapshot, text: str, offset: int = 0) -> dict[str, Any]:
    """The answer object for one sequence. `offset`: output tokens that were already sent (incremental streams)."""
    num_tokens = len(snapshot.output_ids)
    new_ids = snapshot.output_ids[offset:].tolist()
    finish = snapshot.finish
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "num_retractions": request.num_retractions,
        "weight_version": snapshot.weight_version,
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in snapshot.spans],
    }
    if request.return_logprob:
        meta |= _logprobs(request, new_ids, snapshot.output_logprobs[offset:].tolist(), offset)
    if finish is not None:
        meta["e2e_latency"] = time.monotonic() - request.arrival_s
    return {"text": text, "output_ids": new_ids, "meta_info": meta}


def text_of(request: Request, snapshot: Snapshot, tokenizer: Tokenizer | None) -> str:
    """The visible text of all tokens so far; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    finish, params = snapshot.finish, request.params
    matched = finish.get("matched") if finish else None
    ids = snapshot.output_ids.tolist()
    return visible_text(
        tokenizer, ids, matched, finish is not None, not params.no_stop_trim, params.skip_special_tokens
    )


def _logprobs(request: Request, ids: list[int], logprobs: list[float], offset: int) -> dict[str, Any]:
    """`ids` and `logprobs`: those from `offset` on."""
    start = request.logprob_start
    # The first token of the range has no log-probability of its own: nothing before it was scored.
    inputs: list[float | None] = [None]
    if request.input_logprobs is not None:
        inputs += request.input_logprobs.tolist()
    scored = request.prompt[start:].tolist() if request.input_logprobs is not None else []
    meta: dict[str, Any] = {
        "input_token_logprobs": list(zip(inputs, scored, repeat(None))),
        "output_token_logprobs": list(zip(logprobs, ids, repeat(None))),
        "output_token_logprobs_length": offset + len(ids),
    }
    if request.num_top_logprobs:
        meta["input_top_logprobs"] = [None, *request.input_top_logprobs] if scored else []
        meta["output_top_logprobs"] = request.output_top_logprobs[offset : offset + len(ids)]
    return meta


def _check_fields(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in SUPPORTED or name in HINTS:
            continue
        if name not in UNSUPPORTED:
            raise BadRequestError(f"unknown field {name!r}")
        if value not in (None, False, 0, "", []) and value != {}:
            raise BadRequestError(f"{name} is not supported by the embedded engine")


def _per_prompt(body: dict[str, Any], name: str, default: bool | int, num_prompts: int) -> list[Any]:
    """A field that may be one value or a list with one value a prompt; null means the default."""
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * num_prompts
    if len(values) != num_prompts:
        raise BadRequestError(f"{name} has {len(values)} entries for {num_prompts} prompts")
    values = [default if entry is None else entry for entry in values]
    if any(type(entry) is not type(default) for entry in values):
        raise BadRequestError(f"{name} must be of type {type(default).__name__}, got {value!r}")
    return values


def _rids(value: Any, num_prompts: int, choices: int, single: bool) -> tuple[str, list[str]]:
    """The id of the call and one a sequence."""
    if value is not None and not isinstance(value, str | list):
        raise BadRequestError(f"rid must be a string or a list of strings, got {value!r}")
    if isinstance(value, list):
        if len(value) != num_prompts or not all(isinstance(rid, str) and rid for rid in value):
            raise BadRequestError(f"rid must hold one non-empty string for each of {num_prompts} prompts")
        if len(set(value)) != len(value):
            raise BadRequestError(f"rid holds duplicates: {value}")
        if choices == 1:
            return value[0] if single else uuid.uuid4().hex, value
        return uuid.uuid4().hex, [f"{rid}_{choice}" for rid in value for choice in range(choices)]
    call = value or uuid.uuid4().hex
    if single:
        return call, [call]
    return call, [f"{call}_{i}" for i in range(num_prompts * choices)]
