"""Unknown request fields: ignored where clients are known to add some, else rejected.

Ignored are unknown fields inside messages, content parts, tool calls and tools, and top-level
fields that other clients, routers or servers have. The response header `x-podway-ignored-fields`
lists them. Any other unknown top-level field is rejected, because it may be a misspelled one.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

HEADER = "x-podway-ignored-fields"
# Anything inside these top-level fields may have unknown fields.
_OPEN_FIELDS = frozenset({"messages", "input", "system", "tools"})
# Top-level fields of clients, routers and other servers.
_IGNORED = (
    # clients and routers
    "client_metadata", "provider", "transforms", "route", "models", "plugins", "session_id",
    "trace", "usage", "reasoning", "thinking", "caching",
    "litellm_params", "litellm_metadata", "litellm_session_id", "drop_params", "num_retries",
    "proxy_server_request", "provider_specific_fields", "timeout",
    # vLLM
    "request_id", "vllm_xargs", "kv_transfer_params", "mm_processor_kwargs", "media_io_kwargs",
    "include_reasoning", "return_tokens_as_token_ids", "detokenize", "add_special_tokens",
    # SGLang
    "no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states", "rid",
    "return_routed_experts", "return_cached_tokens_details", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "data_parallel_rank", "custom_params", "extra_key", "log_metrics",
    # llama.cpp
    "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_indent", "n_probs",
    "min_keep", "timings_per_token", "return_progress", "post_sampling_probs", "return_tokens",
    "samplers", "t_max_predict_ms", "t_max_prompt_ms", "response_fields", "reasoning_format",
    "reasoning_in_content", "parse_tool_calls", "thinking_forced_open", "chat_format",
    "generation_prompt", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau",
    "mirostat_eta", "typical_p", "tfs_z", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "repeat_last_n", "backend_sampling", "speculative.n_max",
    "speculative.n_min", "speculative.p_min",
    # Ollama
    "keep_alive", "options", "think",
)  # fmt: skip
# Fields of other servers that restrict or change the output: ignored with these values or null.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "echo": (False,),
    "best_of": (1,),
    "logits_processors": ([],),
    "documents": ([],),
    "prompt_embeds": (),
    "lora": ([],),
    "lora_path": (),
    "repeat_penalty": (1, 1.0),
    "grammar": ("",),
    "json_schema": (),
    "grammar_lazy": (False,),
    "ebnf": (),
    "regex": (),
}
_NAME = re.compile(r"[\w.\-\[\]]{1,100}", re.ASCII)
_MAX_NAMED = 16


class UnknownFields:
    """The unknown fields of one HTTP request; `ignored` has their paths, without positions."""

    __slots__ = ("_rejects_all", "ignored")

    def __init__(self, *, rejects_all: bool = False) -> None:
        self._rejects_all = rejects_all
        self.ignored: list[str] = []

    def ignore(self, path: str) -> bool:
        """Add `path` to the ignored fields; False if the server rejects them."""
        if not self._rejects_all and path not in self.ignored:
            self.ignored.append(path)
        return not self._rejects_all

    def remove(self, body: bytes, shape: type, root: str = "") -> bytes:
        """The JSON `body` without the fields that `shape` does not have and that may be ignored.

        `body` is valid JSON; other unknown fields stay and make the decoder raise. `root` is the
        path of the body in its request.
        """
        if self._rejects_all:
            return body
        data = msgspec.json.decode(body)
        found = list(_remove(data, _type_of(shape), root))
        for path in found:
            self.ignore(path)
        return msgspec.json.encode(data) if found else body

    def headers(self) -> dict[str, str]:
        """The response header that lists the ignored fields, if any."""
        if not self.ignored:
            return {}
        named = [path for path in self.ignored if _NAME.fullmatch(path)][:_MAX_NAMED]
        more = len(self.ignored) - len(named)
        return {HEADER: ", ".join([*named, *([f"{more} more"] if more else [])])}


@cache
def _type_of(shape: type) -> inspect.Type:
    return inspect.type_info(shape)


def _remove(value: Any, kind: inspect.Type, path: str) -> Iterator[str]:
    """Remove what may be ignored from `value`, in place; yield the paths."""
    if isinstance(value, dict):
        struct = _alternative(kind, inspect.StructType)
        if struct is None:
            return
        known = {field.encode_name: field.type for field in struct.fields}
        for name in list(value):
            field_path = f"{path}.{name}" if path else name
            if name in known:
                yield from _remove(value[name], known[name], field_path)
            elif _may_ignore(path, name, value[name]):
                del value[name]
                yield field_path
    elif isinstance(value, list) and (items := _alternative(kind, inspect.ListType)) is not None:
        for item in value:
            yield from _remove(item, items.item_type, f"{path}[]")


def _alternative(kind: inspect.Type, wanted: type[Any]) -> Any:
    """`kind` if it is the wanted type, or the first such type of a union."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in kinds if isinstance(each, wanted)), None)


def _may_ignore(path: str, name: str, value: object) -> bool:
    if path:
        return path.partition("[")[0].partition(".")[0] in _OPEN_FIELDS
    if name in _NEUTRAL:
        return value is None or value in _NEUTRAL[name]
    return name in _IGNORED
