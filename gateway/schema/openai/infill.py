"""llama.cpp's `POST /infill`, which editors use: the text before and behind the cursor, its names
for the fields of a completion, and its shape of the response."""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from gateway.schema.decoding import invalid
from gateway.schema.openai.completions import CompletionRequest
from gateway.schema.openai.dialect import OpenAIDialect
from gateway.schema.rendering import (
    END,
    PING,
    ChoiceEnd,
    Delta,
    FinishedChoice,
    GenerationProgress,
    ResponseRenderer,
    finished_choice,
)

STOP_TYPES = {"length": "limit", "stop": "eos"}
MAX_EXTRA = 256  # other files


class ExtraFile(msgspec.Struct, forbid_unknown_fields=True):
    """An item of `input_extra`: a file beside the one with the cursor."""

    text: str
    filename: str = "tmp"


class InfillRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that change the output. `prompt` is more text before the cursor."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = []
    prompt: str = ""
    model: str | None = None
    n_predict: int = -1  # -1: as many as the context has room for
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None

    def as_completion(self, model: str) -> CompletionRequest:
        """The same as a completion request for `model`. Raises `InvalidRequest`."""
        if len(self.input_extra) > MAX_EXTRA:
            raise invalid("input_extra", f"at most {MAX_EXTRA} files.")
        if self.n_predict < 1 and self.n_predict != -1:
            raise invalid(
                "n_predict", "expected at least 1, or -1 for what the context has room for."
            )
        request = CompletionRequest(
            model=self.model or model,
            prompt=self.input_prefix + self.prompt,
            suffix=self.input_suffix,
            max_tokens=None if self.n_predict == -1 else self.n_predict,
            stream=self.stream,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == -1 else self.seed,
            stop=self.stop,
        )
        request.check()
        return request


class InfillRenderer(ResponseRenderer):
    """llama.cpp's chunks and body: `content`, and `stop` in the last one."""

    ping = PING

    def __init__(self, model: str) -> None:
        self._model = model

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """One event with the text."""
        text = "".join([piece for piece in parts if isinstance(piece, str)])
        return _event({"index": index, "content": text, "stop": False})

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        """The last event, with the counts of tokens."""
        return _event(self._last(finished_choice([""], end), progress))

    def closing(self, progress: GenerationProgress) -> bytes:
        """Nothing: the stream ends with the event that has `stop`."""
        return b""

    def failure(self, error: BaseException) -> bytes:
        """One event with the JSON error body."""
        return OpenAIDialect().error_event(error)

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The body."""
        return orjson.dumps(self._last(choices[0], progress))

    def _last(self, choice: FinishedChoice, progress: GenerationProgress) -> dict[str, Any]:
        usage, stopped_by = progress.usage, choice.end.stopped_by
        is_word = isinstance(stopped_by, str)
        return {
            "index": 0,
            "content": choice.content or "",
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": "word" if is_word else STOP_TYPES.get(choice.end.reason, "none"),
            "stopping_word": stopped_by if is_word else "",
            "timings": {
                "prompt_n": usage.prompt_tokens - usage.cached_tokens,
                "predicted_n": usage.completion_tokens,
            },
        }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + END
