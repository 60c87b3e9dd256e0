"""Images in messages: where they come from, in the form that all APIs are converted to."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed

DETAILS = ("auto", "low", "high", "original")
NO_FILES = "Files such as PDFs are not read: send their text, or their pages as images."
Part = Mapping[str, Any]


class RequestedImage(NamedTuple):
    """An image of a request: a URL or the id of a file. `field` is its path in the body."""

    field: str
    url: str | None = None
    file_id: str | None = None
    detail: str = "auto"


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """An image by a URL, which may contain it, or by the id of an uploaded file."""

    url: str | None = None
    file_id: str | None = None
    detail: str | None = None

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` unless it has one source; `path` is its path."""
        if (self.url is None) == (self.file_id is None):
            raise InvalidRequest(
                f"Invalid '{path}': expected either a 'url' or a 'file_id'.", f"{path}.url"
            )
        if self.detail is not None:
            check_allowed(self.detail, f"{path}.detail", DETAILS)

    def requested(self, field: str) -> RequestedImage:
        """The image, found at this path."""
        return RequestedImage(field, self.url, self.file_id, self.detail or "auto")


def image_part(url: str | None, file_id: str | None = None, detail: str | None = None) -> Part:
    """A part of a chat message with an image."""
    source = {"url": url, "file_id": file_id, "detail": detail}
    given = {name: value for name, value in source.items() if value is not None}
    return {"type": "image_url", "image_url": given}


def template_content(parts: Iterable[str | None]) -> list[Part]:
    """The content of a message as chat templates read it; None stands for an image. Texts beside
    each other are one."""
    content: list[Part] = []
    for text in parts:
        last = content[-1] if content else {"type": "image"}
        if text is None:
            content.append({"type": "image"})
        elif last["type"] == "text":
            content[-1] = {"type": "text", "text": last["text"] + text}
        elif text:
            content.append({"type": "text", "text": text})
    return content
