"""SpeculationSettings, and how they are read from vLLM's `--speculative-config`."""

from collections.abc import Mapping
from dataclasses import dataclass

MTP = "mtp"
METHODS = ("ngram", "suffix", "prediction", "draft_model", MTP)
ALIASES = {"qwen3_5_mtp": MTP, "qwen3_next_mtp": MTP}  # vLLM's names for models of one family
MAX_DRAFTS = 64  # fixed: a limit of the setting
MAX_CACHED_REQUESTS = 10_000  # fixed: vLLM's default
LOOKUP_MIN, LOOKUP_MAX = 2, 16  # swept in results/constants
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 16, "prediction": 16, "draft_model": 4, MTP: 1}
_FIELDS = {
    "prompt_lookup_min": "lookup_min",
    "prompt_lookup_max": "lookup_max",
    "suffix_decoding_max_tree_depth": "lookup_max",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "prediction": (),
    "draft_model": ("model",),
    MTP: (),
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """How drafts are proposed: at most `num_drafts` per request and iteration.

    The `prediction` of a request is used with every method. `ngram` and `suffix` look up the last
    `lookup_min` to `lookup_max` tokens. `suffix` also looks in the outputs
    of the last `max_cached_requests` requests, proposes at most `max_spec_factor` times as many
    drafts as tokens matched, and only drafts with at least a share of `min_token_prob` among the
    continuations found. `draft_model` lets the checkpoint `model` propose tokens in the worker,
    `mtp` the model's own layer for multi-token prediction.
    """

    method: str
    num_drafts: int
    lookup_min: int = LOOKUP_MIN
    lookup_max: int = LOOKUP_MAX
    max_cached_requests: int = MAX_CACHED_REQUESTS
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    model: str = ""  # a directory, file or hub id as for `--model`

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "SpeculationSettings":
        """Settings from vLLM's `--speculative-config`; ValueError names a wrong key or value."""
        given = config.get("method")
        method = ALIASES.get(given, given) if isinstance(given, str) else given
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; supported: {', '.join(METHODS)}")
        known = ("method", "num_speculative_tokens", *_KEYS[str(method)])
        for key in config:
            if key not in known:
                raise ValueError(f"{key!r} is no key of {method}; known: {', '.join(known)}")
        drafts = config.get("num_speculative_tokens", DEFAULT_DRAFTS[str(method)])
        keys = _KEYS[str(method)]
        values = {_FIELDS[key]: config[key] for key in keys if key in config and key in _FIELDS}
        longest = _whole("the longest match", values.get("lookup_max", LOOKUP_MAX), 1, 1024)
        shortest = values.get("lookup_min", min(LOOKUP_MIN, longest))
        shortest = _whole("prompt_lookup_min", shortest, 1, 1024)
        if "lookup_max" not in values:
            longest = max(longest, shortest)
        if shortest > longest:
            raise ValueError("prompt_lookup_min is larger than prompt_lookup_max")
        cached = values.get("max_cached_requests", MAX_CACHED_REQUESTS)
        return cls(
            str(method),
            _whole("num_speculative_tokens", drafts, 1, MAX_DRAFTS),
            shortest,
            longest,
            _whole("suffix_decoding_max_cached_requests", cached, 0, 1 << 20),
            _number("suffix_decoding_max_spec_factor", values.get("max_spec_factor", 1.0), 1024.0),
            _number("suffix_decoding_min_token_prob", values.get("min_token_prob", 0.1), 1.0),
            _name("model", config.get("model")) if "model" in keys else "",
        )


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed: whole numbers from {least} to {most}")
    return value


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; the draft model must be named, as for --model")
    return value


def _number(name: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed: numbers from 0 to {most:g}")
    return float(value)
