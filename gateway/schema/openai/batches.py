"""`/v1/batches`: the request that creates a batch, and OpenAI's batch object; `/v1/files`: the form
fields of an upload, and OpenAI's file object."""

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_range, invalid, missing, quote
from gateway.store.batch_records import BatchRecord
from gateway.store.files import FileRecord

# OpenAI has more; no endpoint here reads files of those. Images may be of all of these.
PURPOSES = ("batch", "vision", "user_data")
KEPT_PURPOSES = (*PURPOSES, "batch_output")
EXPIRY_SECONDS = (3600, 2_592_000)  # as OpenAI's
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", _ANCHOR, _SECONDS)
MAX_NAME = 255
WINDOWS = {"24h": 86_400}  # seconds
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # OpenAI's limits
_STAMPS = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for the first form field that is unknown, missing or invalid."""
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(f"Unrecognized request argument supplied: {name[:100]}", name)
    if "purpose" not in fields:
        raise missing("purpose")
    check_allowed(fields["purpose"], "purpose", PURPOSES)
    if (_ANCHOR in fields) != (_SECONDS in fields):
        message = "'expires_after' requires both 'anchor' and 'seconds'."
        raise InvalidRequest(message, "expires_after")
    if _ANCHOR in fields:
        check_allowed(fields[_ANCHOR], "expires_after.anchor", ("created_at",))
        check_range(expiry_of(fields), "expires_after.seconds", *EXPIRY_SECONDS)


def expiry_of(fields: Mapping[str, str]) -> int | None:
    """Seconds until the file expires; None: it is kept until it is deleted."""
    seconds = fields.get(_SECONDS)
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 12):
        raise InvalidRequest(
            f"Invalid type for 'expires_after.seconds': expected an integer, not {quote(seconds)}.",
            "expires_after.seconds",
        )
    return int(seconds)


def file_json(record: FileRecord) -> dict[str, Any]:
    """OpenAI's file object."""
    file: dict[str, Any] = {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
    if record.expires_at is not None:
        file["expires_at"] = record.expires_at
    return file


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """How many seconds the output files are kept after they are created."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self, endpoints: tuple[str, ...]) -> None:
        """Raise `InvalidRequest` for the first value that is not allowed."""
        check_allowed(self.endpoint, "endpoint", endpoints)
        check_allowed(self.completion_window, "completion_window", tuple(WINDOWS))
        check_metadata(self.metadata)
        if self.output_expires_after is not None:
            expiry = self.output_expires_after
            check_allowed(expiry.anchor, "output_expires_after.anchor", ("created_at",))
            check_range(expiry.seconds, "output_expires_after.seconds", *EXPIRY_SECONDS)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raise `InvalidRequest` if there are too many pairs, or too long ones."""
    if metadata is None:
        return
    if len(metadata) > METADATA_PAIRS:
        raise invalid("metadata", f"at most {METADATA_PAIRS} pairs.")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            raise invalid(
                "metadata",
                f"keys have at most {METADATA_KEY} characters, values at most {METADATA_VALUE}.",
            )


def batch_json(record: BatchRecord) -> dict[str, Any]:
    """OpenAI's batch object. Times of events that have not happened are absent."""
    batch: dict[str, Any] = {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "created_at": record.created_at,
        "metadata": record.metadata,
        "request_counts": {
            "total": record.num_lines,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
    }
    optional = ("model", "output_file_id", "error_file_id", *_STAMPS)
    batch |= {name: value for name in optional if (value := getattr(record, name)) is not None}
    if record.errors:
        errors = [msgspec.to_builtins(error) for error in record.errors]
        batch["errors"] = {"object": "list", "data": errors}
    if record.num_completed:
        batch["usage"] = _usage(record)
    return batch


def _usage(record: BatchRecord) -> dict[str, Any]:
    tokens = record.tokens
    return {
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.input + tokens.output,
    }
