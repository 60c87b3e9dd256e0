"""The images of a chat request, whichever API it came from, with their names in its body."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import UnsupportedByModel
from gateway.groups.group import ServedModel
from gateway.images.reader import Sender
from gateway.ports import PreparedImage
from gateway.schema.images import RequestedImage
from gateway.schema.openai.chat import ChatRequest

EARLIER = "previous_response_id"  # the field that has images of earlier responses


class ImageOrigin(NamedTuple):
    """Who sends the images of a chat request, and their paths in the body of another API: if there
    are fewer paths than images, the last images have them."""

    sender: Sender
    fields: Sequence[str] = ()


def check_images(
    model: ServedModel, request: ChatRequest, origin: ImageOrigin | None = None
) -> None:
    """Raise `UnsupportedByModel` if the request has images and the model reads text only."""
    if model.images is None and (images := _images(request, origin)):
        field = images[0].field
        raise UnsupportedByModel(f"'{field}' is an image, and {model.no_images}.", field)


async def read_images(
    model: ServedModel, request: ChatRequest, origin: ImageOrigin | None, most: int | None
) -> list[PreparedImage]:
    """The images in order. Raises as `ImageReader.read` does, and as `check_images`."""
    check_images(model, request, origin)
    images = _images(request, origin)
    if not images or model.images is None:
        return []
    assert origin is not None, "every route that takes images has one"
    return await model.images.read(images, origin.sender, most)


def _images(request: ChatRequest, origin: ImageOrigin | None) -> list[RequestedImage]:
    """The images of a request, with their paths in its body."""
    images = request.images
    fields = () if origin is None else origin.fields[-len(images) :]
    if not images or not fields:
        return images
    first = len(images) - len(fields)
    earlier = [image._replace(field=EARLIER) for image in images[:first]]
    named = zip(images[first:], fields, strict=True)
    return earlier + [image._replace(field=field) for image, field in named]
