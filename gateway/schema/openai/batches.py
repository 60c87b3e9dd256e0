"""`/v1/batches`: the request that creates a batch, and OpenAI's batch object."""

from typing import Any

import msgspec

from gateway.schema.decoding import check_allowed, check_range, invalid
from gateway.schema.openai.files import EXPIRY_SECONDS
from gateway.store.batch_records import BatchRecord

WINDOWS = {"24h": 86_400}  # seconds
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # OpenAI's limits
_STAMPS = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip


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
