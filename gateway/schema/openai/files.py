"""`/v1/files`: the form fields of an upload, and OpenAI's file object."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_range, missing, quote
from gateway.store.files import FileRecord

# OpenAI has more; no endpoint here reads files of those. Images may be of all of these.
PURPOSES = ("batch", "vision", "user_data")
KEPT_PURPOSES = (*PURPOSES, "batch_output")
EXPIRY_SECONDS = (3600, 2_592_000)  # as OpenAI's
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", _ANCHOR, _SECONDS)
MAX_NAME = 255


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
