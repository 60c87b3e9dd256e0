"""`GenerationRequest`: the request fields that chat and text completions share."""

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, invalid, reject_unless
from gateway.schema.fields.output import OutputRequest
from gateway.schema.fields.scheduling import RETENTIONS, PromptCacheOptions
from gateway.schema.openai.event_envelope import UsageOptions
from gateway.schema.rendering import ReportOptions

MAX_STOPS = 16
MAX_STOP_CHARS = 1_000


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
