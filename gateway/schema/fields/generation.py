"""`GenerationRequest`: the request fields that chat and text completions share.

Constrained output is OpenAI's `response_format`, or vLLM's `structured_outputs` and `guided_*`.
Each becomes an `OutputConstraint`; a request may use one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from engine.errors import InvalidRequest
from engine.step import Grammar, GrammarKind
from gateway.schema.decoding import check_allowed, invalid, missing, reject_unless
from gateway.schema.field_names import renamed
from gateway.schema.fields.sampling import (
    RETENTIONS,
    PromptCacheOptions,
    SamplingRequest,
    Vocabulary,
    check_token,
)
from gateway.schema.rendering import ReportOptions, UsageOptions

MAX_CHOICES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1_000
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 100
MAX_ALLOWED_TOKENS = 10_000
_FORMATS = ("text", "json_object", "json_schema")


class OutputConstraint(NamedTuple):
    """A grammar that the output must match, and the request field it comes from."""

    grammar: Grammar
    param: str

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same with the field's name in the request that was converted."""
        return self._replace(param=renamed(self.param, names))


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A named schema. The output is constrained to it whether `strict` is set or not."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> OutputConstraint | None:
        """The grammar, or None for plain text.

        Raises `InvalidRequest` for an unsupported type or a missing `json_schema`.
        """
        param = "response_format"
        check_allowed(self.type, f"{param}.type", _FORMATS)
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputConstraint(Grammar(GrammarKind.JSON_OBJECT), param)
        if self.json_schema is None:
            raise missing(f"{param}.json_schema")
        if self.json_schema.schema is None:
            return OutputConstraint(Grammar(GrammarKind.JSON_OBJECT), param)
        return OutputConstraint(_schema(self.json_schema.schema), f"{param}.json_schema.schema")


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of the first five fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class OutputRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields that constrain the output; `guided_*` are vLLM's older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # ignored: one library serves all grammars
    guided_whitespace_pattern: str | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None

    def check_output(self) -> None:
        """Raise `InvalidRequest` for options that the grammar library does not have."""
        _check_bad_words(self.bad_words or ())
        reject_unless(self, "guided_whitespace_pattern")
        if self.structured_outputs is not None:
            for name in ("disable_any_whitespace", "disable_additional_properties"):
                reject_unless(self.structured_outputs, name, False, prefix="structured_outputs.")
            for name in ("whitespace_pattern", "structural_tag"):
                reject_unless(self.structured_outputs, name, prefix="structured_outputs.")

    def constraint(self) -> OutputConstraint | None:
        """The request's grammar, if any. Raises `InvalidRequest` if it has more than one."""
        constraints = list(self._constraints())
        if len(constraints) > 1:
            first, second = constraints[0].param, constraints[1].param
            first = "response_format" if first.startswith("response_format.") else first
            raise InvalidRequest(f"'{second}' cannot be combined with '{first}'.", second)
        return constraints[0] if constraints else None

    def _constraints(self) -> Iterator[OutputConstraint]:
        if self.response_format is not None and (formatted := self.response_format.constraint()):
            yield formatted
        options = self.structured_outputs
        if options is not None:
            yield from _constraints_in(options, "structured_outputs.", "")
            if options.json_object:
                yield OutputConstraint(
                    Grammar(GrammarKind.JSON_OBJECT), "structured_outputs.json_object"
                )
        yield from _constraints_in(self, "", "guided_")
        if self.bad_words:
            yield OutputConstraint(_without_words(self.bad_words), "bad_words")
        if self.allowed_token_ids is not None:
            yield OutputConstraint(_only_tokens(self.allowed_token_ids), "allowed_token_ids")

    def check_allowed_token_ids(self, vocabulary: Vocabulary) -> None:
        """Raise `InvalidRequest` for no ids, too many or unknown ones."""
        token_ids = self.allowed_token_ids
        if token_ids is None:
            return
        if not 0 < len(token_ids) <= MAX_ALLOWED_TOKENS:
            raise invalid(
                "allowed_token_ids",
                f"expected 1 to {MAX_ALLOWED_TOKENS} ids, but got {len(token_ids)}.",
            )
        for i, token_id in enumerate(token_ids):
            check_token(token_id, f"allowed_token_ids[{i}]", vocabulary)

    def never_ends(self, vocabulary: Vocabulary) -> bool:
        """Whether no end token may be generated, by `ignore_eos` or `allowed_token_ids`."""
        allowed = self.allowed_token_ids
        excludes_eos = allowed is not None and vocabulary.eos_token_ids.isdisjoint(allowed)
        return bool(self.ignore_eos) or excludes_eos


def _constraints_in(fields: Any, path: str, prefix: str) -> Iterator[OutputConstraint]:
    """The constraints among the four fields that `structured_outputs` and `guided_*` share."""
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, prefix + name)
        if value is not None:
            param = f"{path}{prefix}{name}"
            yield OutputConstraint(_grammar(name, value, param), param)


def _grammar(name: str, value: Any, param: str) -> Grammar:
    match name:
        case "json":
            return _schema(value)
        case "choice":
            return _choice(value, param)
        case "regex":
            return Grammar(GrammarKind.REGEX, value)
    return Grammar(GrammarKind.EBNF if "::=" in value else GrammarKind.LARK, value)


def _check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"at most {MAX_BAD_WORDS}, but got {len(words)}.")
    for i, word in enumerate(words):
        if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise invalid(
                f"bad_words[{i}]",
                f"expected 1 to {MAX_BAD_WORD_CHARS} characters, but got {len(word)}.",
            )


def _without_words(words: Sequence[str]) -> Grammar:
    """Any text in which none of the words occurs, not even as part of a longer word."""
    found = "|".join("".join(map(_escaped, word)) for word in words)
    text = f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({found})(?s:.*)/"
    return Grammar(GrammarKind.LARK, text)


def _escaped(char: str) -> str:
    """A character in a regular expression of a Lark grammar."""
    return char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}"


def _only_tokens(token_ids: Sequence[int]) -> Grammar:
    """Any sequence of these tokens."""
    listed = ",".join(map(str, sorted(set(token_ids))))
    return Grammar(GrammarKind.LARK, f"start: <[{listed}]>*")


def _schema(schema: str | dict[str, Any]) -> Grammar:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _choice(choice: list[str], param: str) -> Grammar:
    if not 0 < len(choice) <= MAX_CHOICES:
        raise invalid(param, f"expected 1 to {MAX_CHOICES} strings, but got {len(choice)}.")
    return Grammar(GrammarKind.CHOICE, msgspec.json.encode(choice).decode())


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. Obfuscation (events padded to equal length) is not supported."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(OutputRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None

    # Not OpenAI's; named as in vLLM.
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # ignored: text is never respaced
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None  # named as in llama.cpp

    def check(self) -> None:
        """Raise `InvalidRequest` for the first value that is out of range or unsupported."""
        self.check_sampling()
        self.check_output()
        self.check_scheduling()
        if self.prompt_cache_options is not None:
            self.prompt_cache_options.check()
        if self.prompt_cache_retention is not None:
            check_allowed(self.prompt_cache_retention, "prompt_cache_retention", RETENTIONS)
        if self.truncate_prompt_tokens == 0:
            raise invalid(
                "truncate_prompt_tokens",
                "expected at least 1, or -1 for what the context has room for.",
            )
        self._check_stop()
        self._check_stream_options()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "'prompt_logprobs' cannot be streamed; set 'stream' to false.", "prompt_logprobs"
            )

    def _check_stop(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise invalid("stop", f"at most {MAX_STOPS} sequences, but got {len(self.stops)}.")
        if "" in self.stops:
            raise invalid("stop", "an empty string is not allowed.")
        longest = max(map(len, self.stops), default=0)
        if longest > MAX_STOP_CHARS:
            raise invalid(
                "stop",
                f"a sequence has {longest} characters; at most {MAX_STOP_CHARS} are allowed.",
            )

    def _check_stream_options(self) -> None:
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest(
                "The 'stream_options' parameter is only allowed when 'stream' is true.",
                "stream_options",
            )
        reject_unless(self.stream_options, "include_obfuscation", False, prefix="stream_options.")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; none by default."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_candidates(self) -> int | None:
        """Choices to generate for each prompt (`best_of`), if more than are returned."""
        return None

    @property
    def max_output(self) -> int | None:
        """Maximum output tokens; None: as many as the context has room for."""
        return self.max_tokens

    @property
    def cache_options(self) -> PromptCacheOptions:
        """Its `prompt_cache_options`, and the `ttl` of its `prompt_cache_retention`."""
        options = self.prompt_cache_options or PromptCacheOptions()
        if self.prompt_cache_retention == "24h":
            return msgspec.structs.replace(options, ttl="24h")
        return options

    @property
    def usage_options(self) -> UsageOptions:
        """The chunks that carry token counts. Continuous counts need `include_usage`, as in
        vLLM."""
        options = self.stream_options or StreamOptions()
        at_the_end = bool(options.include_usage)
        return UsageOptions(at_the_end, at_the_end and bool(options.continuous_usage_stats))

    @property
    def num_logprobs(self) -> int | None:
        """Top alternatives for each output token; None: the response has no log-probabilities."""
        return None

    @property
    def report_options(self) -> ReportOptions:
        """What the response reports besides text."""
        return ReportOptions(
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=bool(self.return_token_ids),
            stop_string=bool(self.include_stop_str_in_output),
            special_tokens=self.skip_special_tokens is False,
            progress=bool(self.return_progress and self.stream),
        )
