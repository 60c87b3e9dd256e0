"""Data URLs: images as base64 text in a request."""

from gateway.ports import EncodedImage, UnreadableImage
from gateway.schema.decoding import quote
from gateway.schema.images import NO_FILES

TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
# Sent by clients that know no better
_ALSO = ("image/jpg", "image/apng", "application/octet-stream")
MAX_HEADER = 256  # characters before the comma


def image_of_data_url(url: str) -> EncodedImage:
    """The base64 text of a data URL, which is not decoded here. Raises `UnreadableImage`."""
    comma = url.find(",", 0, MAX_HEADER)
    if comma < 0:
        raise UnreadableImage("is not a data URL such as data:image/png;base64,…")
    media_type, *parameters = [part.strip().lower() for part in url[5:comma].split(";")]
    if media_type == "application/pdf":
        raise UnreadableImage(f"is a PDF. {NO_FILES.removesuffix('.')}")
    if media_type not in TYPES + _ALSO:
        raise UnreadableImage(f"is of the type {quote(media_type)}; allowed are {', '.join(TYPES)}")
    if "base64" not in parameters:
        raise UnreadableImage("is a data URL that is not base64")
    return EncodedImage(url[comma + 1 :], is_base64=True)
