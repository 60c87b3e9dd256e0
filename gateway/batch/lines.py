"""The lines of batch files: input JSON Lines to `BatchLine`s, answers to output JSON Lines.

OpenAI's formats. An invalid file, or an invalid envelope of a line, fails the batch before it
starts; an invalid request body is answered in the error file.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import decode, invalid
from gateway.store.batch_records import MAX_LISTED, BatchLine, BatchRecord, LineError, Tokens


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Usage as in chat completions and as in responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Body(msgspec.Struct):
    model: object = None


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Maximum lines of a file, and bytes of a line."""

    num_lines: int = 50_000
    line_bytes: int = 16 << 20


class LineReader:
    """Reads an input file in pieces. Consuming its iterators fills `errors` and `num_lines`."""

    def __init__(self, endpoint: str, limits: LineLimits) -> None:
        self.errors: list[LineError] = []
        self.num_lines = 0
        self.model: str | None = None  # the model that the first line with one names
        self._endpoint = endpoint
        self._limits = limits
        self._number = 0  # lines read, including empty ones
        self._rest = b""
        self._is_too_long = False

    @property
    def has_stopped(self) -> bool:
        """Whether reading further is useless: too many lines, or too many errors."""
        return self._is_too_long or len(self.errors) >= MAX_LISTED

    def feed(self, piece: bytes) -> Iterator[BatchLine]:
        """The lines that are complete after this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > self._limits.line_bytes:
            lines.append(self._rest)
            self._rest = b""
        return self._read(lines)

    def finish(self) -> Iterator[BatchLine]:
        """The last line; its line feed is optional."""
        lines, self._rest = [self._rest], b""
        return self._read(lines)

    def check(self) -> None:
        """After all lines: add an error if there were none."""
        if not self.num_lines and not self.errors:
            self.errors.append(LineError("empty_file", "The input file has no lines."))

    def reject_duplicate(self, line: BatchLine) -> None:
        """Add the error of a line whose custom_id occurred before."""
        self._add_error(
            line.number,
            "duplicate_custom_id",
            f"The custom_id {line.custom_id[:100]!r} is used by an earlier line.",
            "custom_id",
        )

    def _read(self, lines: list[bytes]) -> Iterator[BatchLine]:
        for text in lines:
            self._number += 1
            if self._number == 1:
                text = text.removeprefix(BOM_UTF8)  # some editors write it
            if text.strip() and not self.has_stopped and (line := self._line(text)):
                self.num_lines += 1
                yield line

    def _line(self, text: bytes) -> BatchLine | None:
        number = self._number
        if self.num_lines == self._limits.num_lines:
            most = f"The input file has more than {self._limits.num_lines} lines."
            self._add_error(number, "too_many_lines", most)
            self._is_too_long = True
            return None
        if len(text) > self._limits.line_bytes:
            limit = f"The line is longer than {self._limits.line_bytes} bytes."
            self._add_error(number, "line_too_long", limit)
            return None
        try:
            envelope = decode(_Envelope, text)
            self._check(envelope)
            self.model = self.model or _model(envelope.body)
        except InvalidRequest as error:
            self._add_error(number, "invalid_json_line", str(error), error.param)
            return None
        return BatchLine(number, envelope.custom_id, bytes(envelope.body))

    def _check(self, envelope: _Envelope) -> None:
        if envelope.method != "POST":
            raise invalid("method", "expected 'POST'.")
        if envelope.url != self._endpoint:
            raise invalid("url", f"expected the batch's endpoint, '{self._endpoint}'.")
        if not bytes(envelope.body).startswith(b"{"):
            raise InvalidRequest("Invalid type for 'body': expected an object.", "body")

    def _add_error(self, number: int, code: str, message: str, param: str | None = None) -> None:
        if not self.has_stopped:
            self.errors.append(LineError(code, message, param, number))


def answer_line(record: BatchRecord, line: BatchLine, status: int, body: bytes) -> bytes:
    """A line of the output or error file, without line feed."""
    response = {
        "status_code": status,
        "request_id": request_id(record, line),
        "body": orjson.Fragment(body),
    }
    return _output_line(record, line, response, None)


def expired_line(record: BatchRecord, line: BatchLine) -> bytes:
    """The same for a line that was not run before the completion window expired."""
    message = "This request could not be executed before the completion window expired."
    return _output_line(record, line, None, {"code": "batch_expired", "message": message})


def request_id(record: BatchRecord, line: BatchLine) -> str:
    """The request id of a line, in logs and for cancelling."""
    return f"{record.id}_{line.number}"


def tokens_of(body: bytes) -> Tokens:
    """The usage that a response body reports."""
    usage = _RESPONSE.decode(body).usage or _Usage()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return Tokens(
        input=usage.prompt_tokens + usage.input_tokens,
        cached=read.cached_tokens,
        output=usage.completion_tokens + usage.output_tokens,
        reasoning=written.reasoning_tokens,
    )


def _model(body: msgspec.Raw) -> str | None:
    model = decode(_Body, bytes(body)).model
    return model if isinstance(model, str) else None


def _output_line(record: BatchRecord, line: BatchLine, response: object, error: object) -> bytes:
    fields = {
        "id": f"batch_req_{record.id.removeprefix('batch_')}_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(fields)


_RESPONSE = msgspec.json.Decoder(_Response)
