"""`POST /v1/completions`: the request; a prompt has one of four forms."""

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_range, invalid
from gateway.schema.fields.generation import GenerationRequest
from gateway.schema.fields.sampling import Vocabulary, texts_or_ids
from gateway.schema.rendering import ReportOptions

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048
MAX_LOGPROBS = 5

Prompt = str | tuple[int, ...]


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's text completion request."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first value that is invalid or not supported."""
        if self.max_tokens is not None and self.max_tokens < (0 if self.echo else 1):
            raise invalid("max_tokens", "expected at least 1, or 0 with 'echo'.")
        GenerationRequest.check(self)
        check_range(self.best_of, "best_of", 1, 20)
        check_range(self.logprobs, "logprobs", 0, MAX_LOGPROBS)
        if self.suffix and self.echo:
            raise InvalidRequest("'echo' cannot be used with 'suffix'.", "echo")
        self._check_best_of()

    def _check_best_of(self) -> None:
        best_of, num_choices = self.best_of, self.num_choices
        if best_of is None or best_of == num_choices:
            return
        if best_of < num_choices:
            raise InvalidRequest(f"'best_of' must be at least 'n' ({num_choices}).", "best_of")
        if self.stream:
            raise InvalidRequest(
                f"'best_of' must equal 'n' ({num_choices}) when 'stream' is true: the best choices "
                "are known only when all have ended.",
                "best_of",
            )

    @property
    def num_candidates(self) -> int | None:
        return None if self.best_of == self.num_choices else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def report_options(self) -> ReportOptions:
        return super().report_options._replace(echo=bool(self.echo))

    @property
    def max_output(self) -> int:
        """Maximum output tokens."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, vocabulary: Vocabulary) -> list[Prompt]:
        """The prompts in order, each a text or a tuple of token ids."""
        if not isinstance(self.prompt, str):
            if not self.prompt:
                raise invalid("prompt", "expected at least one prompt.")
            if len(self.prompt) > MAX_PROMPTS and not isinstance(self.prompt[0], int):
                raise invalid("prompt", f"at most {MAX_PROMPTS} prompts.")
        return texts_or_ids(self.prompt, "prompt", vocabulary)


class CompletionSize(msgspec.Struct):
    """What decides whether a single prompt of token ids fits, which are not decoded: a prompt that
    is far too long would delay the event loop by milliseconds."""

    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def num_ids(self) -> int:
        """Tokens of a single prompt of token ids; 0 for another one, and for one to be cut."""
        prompt = bytes(self.prompt)
        is_ids = prompt[:1] == b"[" and b'"' not in prompt and prompt.count(b"[") == 1
        return prompt.count(b",") + 1 if is_ids and self.truncate_prompt_tokens is None else 0


_SIZE_DECODER = msgspec.json.Decoder(CompletionSize)


def size_of(body: bytes) -> CompletionSize:
    """The size of a request; an empty one if the body is not valid, as `decode_completion` reports
    then."""
    try:
        return _SIZE_DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return CompletionSize()
