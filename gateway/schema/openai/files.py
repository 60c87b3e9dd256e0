"""`/v1/files`: the fields of an upload's form, and files as the wire shows them."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_range, check_word, shown
from gateway.store.files import FileRecord

PURPOSES = ("batch",)  # OpenAI has more; nothing here would read such files
KEPT_PURPOSES = (*PURPOSES, "batch_output")
EXPIRY_SECONDS = (3600, 2_592_000)  # as OpenAI's
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", _ANCHOR, _SECONDS)
MAX_NAME = 255


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for the first field of the form that is wrong."""
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(f"Unrecognized request argument supplied: {name[:100]}", name)
    if "purpose" not in fields:
        raise InvalidRequest("Missing required parameter: 'purpose'.", "purpose")
    check_word(fields["purpose"], "purpose", PURPOSES)
    if (_ANCHOR in fields) != (_SECONDS in fields):
        message = "'expires_after' needs both 'anchor' and 'seconds'."
        raise InvalidRequest(message, "expires_after")
    if _ANCHOR in fields:
        check_word(fields[_ANCHOR], "expires_after.anchor", ("created_at",))
        check_range(expiry_of(fields), "expires_after.seconds", *EXPIRY_SECONDS)


def expiry_of(fields: Mapping[str, str]) -> int | None:
    """Seconds that the file is to be kept; None: until it is deleted."""
    seconds = fields.get(_SECONDS)
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 12):
        raise InvalidRequest(
            f"Invalid type for 'expires_after.seconds': expected an integer, not {shown(seconds)}.",
            "expires_after.seconds",
        )
    return int(seconds)


def file_json(record: FileRecord) -> dict[str, Any]:
    """OpenAI's file object."""
    shown: dict[str, Any] = {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
    if record.expires_at is not None:
        shown["expires_at"] = record.expires_at
    return shown
