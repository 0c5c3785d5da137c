"""Sampling parameters of one request: parsed from SGLang's `sampling_params` object and checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reef.engines.embedded.errors import BadRequestError

GREEDY_BELOW = 1e-6
"""A temperature below this is greedy, as in SGLang."""

MAX_STOP_STRINGS = 32
MAX_STOP_TOKENS = 256
MAX_BIASED_TOKENS = 4096
DEFAULT_MAX_NEW_TOKENS = 128

UNSUPPORTED: Mapping[str, Any] = {
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "beam_width": None,
    "custom_params": None,
    "watermark": None,
    "choice": None,
    "spaces_between_special_tokens": True,
}
"""SGLang's fields that this engine has not, with their neutral value; anything but that, null or empty is refused."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Defaults are SGLang's."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    """None: up to the context length."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    ignore_eos: bool = False
    """Also ignores `stop_token_ids`, as SGLang does."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream_interval: int = 1

    @property
    def filtered(self) -> bool:
        """Whether sampling keeps only part of the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def shaped(self) -> bool:
        """Whether logits are changed before temperature is applied."""
        return bool(
            self.logit_bias
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1
            or self.min_new_tokens
        )


def parse_sampling_params(body: Any, vocab_size: int) -> SamplingParams:
    """Checks a JSON `sampling_params` object.

    Raises:
        BadRequestError: not an object, an unknown or unsupported field, or a value outside its range.
    """
    if body is None:
        return SamplingParams()
    if not isinstance(body, dict):
        raise BadRequestError(f"sampling_params must be an object, got {type(body).__name__}")
    fields = _Fields(body)
    # An explicit null means "no bound of its own"; leaving the field out means the default.
    unbounded = "max_new_tokens" in body and body["max_new_tokens"] is None
    maximum = None if unbounded else fields.integer("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, 0)
    seedless = body.get("sampling_seed") is None
    temperature = fields.number("temperature", 1.0, 0.0)
    top_k = fields.integer("top_k", 0, -1)
    params = SamplingParams(
        max_new_tokens=maximum,
        min_new_tokens=fields.integer("min_new_tokens", 0, 0),
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=0 if top_k < 0 or top_k >= vocab_size else top_k,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 2.0),
        logit_bias=_logit_bias(fields.take("logit_bias"), vocab_size),
        n=fields.integer("n", 1, 1),
        seed=None if seedless else fields.integer("sampling_seed", 0, -(2**63), 2**63 - 1),
        ignore_eos=fields.boolean("ignore_eos", False),
        stop=_stop(fields.take("stop")),
        stop_token_ids=_token_ids(fields.take("stop_token_ids"), vocab_size),
        no_stop_trim=fields.boolean("no_stop_trim", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        stream_interval=fields.integer("stream_interval", 1, 1),
    )
    fields.finish()
    if params.top_p == 0 or params.repetition_penalty == 0:
        raise BadRequestError("top_p and repetition_penalty must be above 0")
    if maximum is not None and params.min_new_tokens > maximum:
        raise BadRequestError(f"min_new_tokens must be in [0, max_new_tokens({maximum})], got {params.min_new_tokens}")
    return params


class _Fields:
    """Reads typed values out of a JSON object and remembers which were read; null means the default."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        # Two fields that are null or absent without being read.
        self._read = {"max_new_tokens", "sampling_seed"}

    def take(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequestError(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value) or not low <= value <= high:
            raise BadRequestError(f"{name} must be in [{low}, {high}], got {value}")
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int = 2**31) -> int:
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int:
            raise BadRequestError(f"{name} must be an integer, got {value!r}")
        if not low <= value <= high:
            raise BadRequestError(f"{name} must be in [{low}, {high}], got {value}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadRequestError(f"{name} must be true or false, got {value!r}")
        return value

    def finish(self) -> None:
        """Refuses what was not read."""
        for name, value in self._body.items():
            if name in UNSUPPORTED:
                if value not in (None, UNSUPPORTED[name], "", []):
                    raise BadRequestError(f"sampling_params.{name} is not supported by the embedded engine")
            elif name not in self._read:
                raise BadRequestError(f"sampling_params has an unknown field {name!r}")


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise BadRequestError(f"logit_bias must be an object of at most {MAX_BIASED_TOKENS} token ids")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        if not token.isdecimal() or int(token) >= vocab_size:
            raise BadRequestError(f"logit_bias must have keys in [0, {vocab_size - 1}], got {token!r}")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount):
            raise BadRequestError(f"logit_bias[{token}] must be a finite number, got {amount!r}")
        bias[int(token)] = float(amount)
    return bias


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise BadRequestError(f"stop must be a string or a list of strings, got {value!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    return tuple(string for string in strings if string)


def _token_ids(value: Any, vocab_size: int) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise BadRequestError(f"stop_token_ids must be a list of at most {MAX_STOP_TOKENS} token ids")
    if not all(type(token) is int and 0 <= token < vocab_size for token in value):
        raise BadRequestError(f"stop_token_ids must hold integers in [0, {vocab_size - 1}], got {value!r}")
    return frozenset(value)
