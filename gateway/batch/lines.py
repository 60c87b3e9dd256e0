"""The lines of batch files: requests in JSON Lines to `BatchLine`s, answers to JSON Lines.

OpenAI's formats. What is wrong with the file as a whole, or with the envelope of a line, fails
the batch before it starts; what is wrong with a request is that line's answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decoding import decode
from gateway.store.batches import MAX_TOLD, BatchLine, BatchRecord, LineError, Tokens


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """In the words of chat completions and in those of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


class _Modelled(msgspec.Struct):
    model: object = None


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Lines of a file, and bytes of a line."""

    num_lines: int = 50_000
    line_bytes: int = 16 << 20


class LineReader:
    """Reads an input file in pieces. `errors` and `num_lines` grow as its iterators are used."""

    def __init__(self, endpoint: str, limits: LineLimits) -> None:
        self.errors: list[LineError] = []
        self.num_lines = 0
        self.model: str | None = None  # of the first line that names one
        self._endpoint = endpoint
        self._limits = limits
        self._number = 0  # of lines that were looked at, empty ones included
        self._rest = b""
        self._is_too_long = False

    @property
    def has_given_up(self) -> bool:
        """So much is wrong that nobody needs to hear of more."""
        return self._is_too_long or len(self.errors) >= MAX_TOLD

    def feed(self, piece: bytes) -> Iterator[BatchLine]:
        """The lines that are whole by now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > self._limits.line_bytes:
            lines.append(self._rest)
            self._rest = b""
        return self._read(lines)

    def finish(self) -> Iterator[BatchLine]:
        """The last line, which need not end in a line feed."""
        lines, self._rest = [self._rest], b""
        return self._read(lines)

    def conclude(self) -> None:
        """All lines were read: is it a file that can be run?"""
        if not self.num_lines and not self.errors:
            self.errors.append(LineError("empty_file", "The input file has no lines."))

    def refuse_double(self, line: BatchLine) -> None:
        """Another line had this custom_id."""
        self._complain(
            line.number,
            "duplicate_custom_id",
            f"The custom_id {line.custom_id[:100]!r} is that of an earlier line.",
            "custom_id",
        )

    def _read(self, lines: list[bytes]) -> Iterator[BatchLine]:
        for text in lines:
            self._number += 1
            if text.strip() and not self.has_given_up and (line := self._line(text)):
                self.num_lines += 1
                yield line

    def _line(self, text: bytes) -> BatchLine | None:
        number = self._number
        if self.num_lines == self._limits.num_lines:
            most = f"The input file has more than {self._limits.num_lines} lines."
            self._complain(number, "too_many_lines", most)
            self._is_too_long = True
            return None
        if len(text) > self._limits.line_bytes:
            limit = f"The line is longer than {self._limits.line_bytes} bytes."
            self._complain(number, "line_too_long", limit)
            return None
        try:
            envelope = decode(_ENVELOPE, text)
            self._check(envelope)
            self.model = self.model or _model(envelope.body)
        except InvalidRequest as error:
            self._complain(number, "invalid_json_line", str(error), error.param)
            return None
        return BatchLine(number, envelope.custom_id, bytes(envelope.body))

    def _check(self, envelope: _Envelope) -> None:
        if envelope.method != "POST":
            raise InvalidRequest("Invalid 'method': expected 'POST'.", "method")
        if envelope.url != self._endpoint:
            message = f"Invalid 'url': expected the batch's endpoint, '{self._endpoint}'."
            raise InvalidRequest(message, "url")
        if not bytes(envelope.body).startswith(b"{"):
            raise InvalidRequest("Invalid type for 'body': expected an object.", "body")

    def _complain(self, number: int, code: str, message: str, param: str | None = None) -> None:
        if not self.has_given_up:
            self.errors.append(LineError(code, message, param, number))


def answer_line(record: BatchRecord, line: BatchLine, status: int, body: bytes) -> bytes:
    """A line of the output or error file, without its line feed."""
    response = {
        "status_code": status,
        "request_id": request_id(record, line),
        "body": orjson.Fragment(body),
    }
    return _told(record, line, response, None)


def expired_line(record: BatchRecord, line: BatchLine) -> bytes:
    """The same for a line that there was no time for."""
    message = "This request could not be executed before the completion window expired."
    return _told(record, line, None, {"code": "batch_expired", "message": message})


def request_id(record: BatchRecord, line: BatchLine) -> str:
    """The name of a line's request, in logs and to cancel it by."""
    return f"{record.id}_{line.number}"


def tokens_of(body: bytes) -> Tokens:
    """What an answer says that it has used."""
    usage = _ANSWERED.decode(body).usage or _Usage()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    written = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return Tokens(
        input=usage.prompt_tokens + usage.input_tokens,
        cached=read.cached_tokens,
        output=usage.completion_tokens + usage.output_tokens,
        reasoning=written.reasoning_tokens,
    )


def _model(body: msgspec.Raw) -> str | None:
    model = decode(_MODELLED, bytes(body)).model
    return model if isinstance(model, str) else None


def _told(record: BatchRecord, line: BatchLine, response: object, error: object) -> bytes:
    told = {
        "id": f"batch_req_{record.id.removeprefix('batch_')}_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(told)


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_MODELLED = msgspec.json.Decoder(_Modelled)
_ANSWERED = msgspec.json.Decoder(_Answered)
