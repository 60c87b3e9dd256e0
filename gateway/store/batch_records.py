"""A batch and its lines, as they are stored."""

from typing import Literal, NamedTuple

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
MAX_LISTED = 100  # errors of an input file that a batch lists


class LineError(msgspec.Struct, frozen=True):
    """An error in an input file; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Token usage of the answered lines."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class BatchRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch without its lines. `_at` fields are Unix seconds, None until that event."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    model: str | None = None
    output_seconds: int | None = None  # how long the output files are kept
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    tokens: Tokens = Tokens()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchLine(NamedTuple):
    """One request of a batch; `number` counts from 1."""

    number: int
    custom_id: str
    body: bytes


class LineAnswer(NamedTuple):
    """The line of the output file, or of the error file if `is_error`."""

    number: int
    text: bytes
    is_error: bool
    tokens: Tokens = Tokens()
