"""Scheduling and sampling fields of a request, their allowed ranges, and what the engine gets.

Every policy accepts the scheduling fields and uses those it knows. `deadline_ms` applies under
every policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from engine.errors import InvalidRequest
from engine.step import SamplingParams
from gateway.schema.decoding import check_allowed, check_minimum, check_range, invalid, quote

DEFAULT_TIER = "default"
PRIORITY_OF_TIER = {  # lower runs first
    "auto": 0, "default": 0, "scale": 0, "flex": 10, "priority": -10, "fast": -10, "ultrafast": -20,
}  # fmt: skip
MAX_DEADLINE_MS = 86_400_000  # a day
INT64 = (-(2**63), 2**63 - 1)

MODES = ("implicit", "explicit")
# Seconds. 5m and 1h are Anthropic's, 24h is `prompt_cache_retention`'s.
TTLS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
RETENTIONS = ("in_memory", "in-memory", "24h")
ANTHROPIC_TTLS = ("5m", "1h")  # values of `cache_control`, the default first
BREAKPOINT = {"mode": "explicit"}
MAX_BREAKPOINTS = 4  # the latest ones of a prompt
MAX_CHOICES = 128
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
IDS_AT_ONCE = 65_536  # ids compared in one piece of 2 ms

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "repeat_penalty": (0.01, 10),
    "n": (1, MAX_CHOICES),
    "seed": INT64,
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
MINIMUMS: dict[str, int] = {
    "max_tokens": 0,  # with `echo`, else 1
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "top_k": -1,
    "truncate_prompt_tokens": -1,
}


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's options.

    With `mode` "explicit" the cache keeps nothing behind the last breakpoint of the prompt. With
    `prewarm` the prompt is computed, in the background, and no output. For `ttl` what the request
    leaves in the cache is evicted after all that has no such time, in every tier.
    """

    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    @property
    def seconds(self) -> float:
        """The seconds of `ttl`; 0 without one."""
        return 0.0 if self.ttl is None else TTLS[self.ttl]

    def check(self, *, compares: bool = False) -> None:
        """Raise `InvalidRequest` for the first invalid field; only the Responses API `compares`."""
        path = "prompt_cache_options"
        if self.mode is not None:
            check_allowed(self.mode, f"{path}.mode", MODES)
        if self.ttl is not None:
            check_allowed(self.ttl, f"{path}.ttl", tuple(TTLS))
        if self.comparison_response_id is not None and not compares:
            param = f"{path}.comparison_response_id"
            raise InvalidRequest(f"'{param}' is only supported in /v1/responses.", param)


def check_breakpoint(given: Any, path: str) -> None:
    """Raise `InvalidRequest` unless it is None or OpenAI's `prompt_cache_breakpoint`."""
    if given is not None and given != BREAKPOINT:
        raise InvalidRequest(f'Invalid \'{path}\': expected {{"mode": "explicit"}}.', path)


class SchedulingParams(NamedTuple):
    """The fields of an engine `RequestSpec` that these become; deadlines are seconds."""

    priority: int = 0
    salt: str = ""
    ttft_deadline: float | None = None
    deadline: float | None = None
    is_background: bool = False


class SchedulingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`service_tier` is OpenAI's, `priority` and `cache_salt` are vLLM's, deadlines are Podway's.

    Deadlines are milliseconds after the request is accepted. `priority` overrides the tier.
    """

    service_tier: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    ttft_deadline_ms: float | None = None
    deadline_ms: float | None = None

    def check_scheduling(self) -> None:
        """Raise `InvalidRequest` for the first value that is not allowed."""
        if self.service_tier is not None:
            check_allowed(self.service_tier, "service_tier", tuple(PRIORITY_OF_TIER))
        check_range(self.priority, "priority", *INT64)
        check_range(self.ttft_deadline_ms, "ttft_deadline_ms", 1, MAX_DEADLINE_MS)
        check_range(self.deadline_ms, "deadline_ms", 1, MAX_DEADLINE_MS)
        if self.cache_salt == "":
            raise invalid(
                "cache_salt",
                "expected at least one character; omit the field to share cached prefixes "
                "with all requests that have no salt.",
            )

    @property
    def tier(self) -> str:
        """The tier that the response reports; `auto` is reported as `default`."""
        tier = self.service_tier or DEFAULT_TIER
        return DEFAULT_TIER if tier == "auto" else tier

    @property
    def scheduling_params(self) -> SchedulingParams:
        """The engine's scheduling parameters."""
        by_tier = PRIORITY_OF_TIER[self.tier]
        return SchedulingParams(
            priority=by_tier if self.priority is None else self.priority,
            salt=self.cache_salt or "",
            ttft_deadline=_seconds(self.ttft_deadline_ms),
            deadline=_seconds(self.deadline_ms),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's token ids, `[0, size)`, and those that end an answer."""

    size: int
    eos_token_ids: frozenset[int]


class SamplingDefaults(NamedTuple):
    """The values of sampling fields that a request does not have; these are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self._asdict().items())


class SharedRequest(SchedulingRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of chat and text completions that responses have too. None is JSON's null and
    means the same as an absent field."""

    model: str
    stream: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None

    # Not OpenAI's; named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None

    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Ignored by completions; responses repeat them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None


class SamplingRequest(SharedRequest, kw_only=True, forbid_unknown_fields=True):
    """The other sampling fields. `repeat_penalty` is what llama.cpp, Ollama and their chat pages
    call `repetition_penalty`."""

    logit_bias: dict[str, float] | None = None
    repeat_penalty: float | None = None
    stop_token_ids: list[int] | None = None

    def check_sampling(self) -> None:
        """Raise `InvalidRequest` for the first value that is out of range."""
        for name, (low, high) in RANGES.items():
            check_range(getattr(self, name, None), name, low, high)
        for name, least in MINIMUMS.items():
            check_minimum(getattr(self, name, None), name, least)
        penalties = {self.repetition_penalty, self.repeat_penalty} - {None}
        if len(penalties) > 1:
            raise InvalidRequest(
                "'repetition_penalty' and 'repeat_penalty' have different values; set one of them.",
                "repeat_penalty",
            )

    def sampling(
        self, vocabulary: Vocabulary, seed: int, defaults: SamplingDefaults
    ) -> SamplingParams:
        """The engine's sampling parameters; `seed` is used if the request has none.

        With `top_p` 0 only the most likely token remains: that is greedy sampling.
        """
        top_p = _or(self.top_p, defaults.top_p)
        top_k = defaults.top_k if self.top_k is None else self.top_k
        penalty = _or(self.repeat_penalty, defaults.repetition_penalty)
        return SamplingParams(
            temperature=0.0 if top_p == 0 else _or(self.temperature, defaults.temperature),
            top_p=top_p or 1.0,
            top_k=min(max(top_k, 0), vocabulary.size),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, penalty),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_biases(self.logit_bias or {}, vocabulary),
            seed=seed if self.seed is None else self.seed,
        )

    def caller_end_ids(self, vocabulary: Vocabulary) -> frozenset[int]:
        """The request's `stop_token_ids`. Raises `InvalidRequest` for too many or unknown ids."""
        token_ids = self.stop_token_ids or []
        if len(token_ids) > MAX_STOP_TOKENS:
            raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS} ids.")
        for i, token_id in enumerate(token_ids):
            check_token(token_id, f"stop_token_ids[{i}]", vocabulary)
        return frozenset(token_ids)


def check_token(token_id: int, param: str, vocabulary: Vocabulary) -> None:
    """Raise `InvalidRequest` unless the id is in the vocabulary."""
    if not 0 <= token_id < vocabulary.size:
        raise InvalidRequest(
            f"Invalid token id for '{param}': {quote(token_id)} is not from 0 to "
            f"{vocabulary.size - 1}.",
            param,
        )


def _biases(biases: Mapping[str, float], vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"at most {MAX_BIASES} ids.")
    return tuple(_bias(key, value, vocabulary) for key, value in biases.items())


def _bias(key: str, value: float, vocabulary: Vocabulary) -> tuple[int, float]:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidRequest(
            f"Invalid key in 'logit_bias': {quote(key)} is not a token id.", "logit_bias"
        )
    check_token(int(key), "logit_bias", vocabulary)
    check_range(value, "logit_bias", -100, 100)
    return int(key), value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def texts_or_ids(
    given: str | Sequence[str | int | Sequence[int]], param: str, vocabulary: Vocabulary
) -> list[str | tuple[int, ...]]:
    """The prompts of a field in order, each a text or its token ids. It has one of four forms;
    raises `InvalidRequest` for a mixture of them and for invalid ids."""
    if isinstance(given, str):
        return [given]
    if len(set(map(type, given))) > 1:
        raise invalid(
            param,
            "expected a string, or an array of only strings, only token ids, or only "
            "arrays of token ids.",
        )
    if isinstance(given[0], int):
        return [check_ids(cast("list[int]", given), param, vocabulary)]
    return [
        item if isinstance(item, str) else check_ids(item, f"{param}[{i}]", vocabulary)
        for i, item in enumerate(given)
        if not isinstance(item, int)
    ]


def check_ids(ids: Sequence[int], param: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The ids of a prompt; raises `InvalidRequest` for none, and for the first invalid one."""
    if not ids:
        raise invalid(param, "expected at least one token id.")
    for start in range(0, len(ids), IDS_AT_ONCE):  # no other thread runs within `min` and `max`
        part = ids[start : start + IDS_AT_ONCE]
        if min(part) < 0 or max(part) >= vocabulary.size:
            for i, token_id in enumerate(part, start):
                check_token(token_id, f"{param}[{i}]", vocabulary)
    return tuple(ids)
