"""Sampling fields of a request, their allowed ranges, and the engine's `SamplingParams`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from engine.errors import InvalidRequest
from engine.step import SamplingParams
from gateway.schema.decoding import check_minimum, check_range, invalid, quote
from gateway.schema.fields.scheduling import INT64, PromptCacheOptions, SchedulingRequest

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
    "max_tokens": 0,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "top_k": -1,
    "truncate_prompt_tokens": -1,
}


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
