"""Prompts with images: the placeholders that the chat template wrote become the images' tokens.

A text of a message that looks like such a placeholder stays text. Before the template renders the
messages, a mark is put into every such text; the text is then divided at the marks and its parts
are tokenized one by one, so that none of them becomes a token around images.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.media import Media
from gateway.errors import PromptTooLong, UnsupportedByModel
from gateway.generation.prompt import Prompt, token_ids
from gateway.groups.group import ServedModel
from gateway.images.reader import Sender
from gateway.ports import ImageDecoder, ImageTile, PreparedImage, Tokenizer
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


MARK = "\ufdd0"  # no character: left out of a text that has it
WINDOW = 1 << 18  # characters that are searched at once, since this holds the interpreter


class ImagePrompt(NamedTuple):
    """Token ids, of which those of `media` stand for images, and the text of the others."""

    ids: Prompt
    media: tuple[Media, ...] = ()
    text: str = ""


class Placeholders:
    """Keeps the texts of messages from becoming placeholders, and finds those of the template."""

    def __init__(self, decoder: ImageDecoder) -> None:
        self._decoder = decoder
        words = sorted(decoder.reserved, key=len, reverse=True)
        self._reserved = re.compile("|".join(map(re.escape, words)))
        self._longest = max(map(len, words))

    def marked(self, value: Any) -> Any:
        """A message, or another variable of the template, with marks in what looks like a
        placeholder."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {key: self.marked(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each) for each in value]
        return value

    def _marked_text(self, text: str) -> str:
        text = unmarked(text)
        pieces: list[str] = []
        start = 0
        while start < len(text):
            word = self._reserved.search(text, start, start + WINDOW + self._longest)
            end = start + WINDOW if word is None else word.start() + 1
            pieces.append(text[start:end])
            if word is not None:
                pieces.append(MARK)
            start = end
        return "".join(pieces)

    @staticmethod
    def has_marks(text: str) -> bool:
        """Whether the prompt has a text that looks like a placeholder."""
        return MARK in text

    def ids(
        self, tokenizer: Tokenizer, text: str, images: Sequence[PreparedImage], most: int | None
    ) -> ImagePrompt:
        """The ids of a rendered prompt with these images. Raises `InvalidRequest` if the template
        did not write a placeholder for each, and as `token_ids` does."""
        parts = text.split(self._decoder.placeholder)
        if len(parts) - 1 != len(images):
            raise InvalidRequest(
                f"The model's chat template writes {len(parts) - 1} of the {len(images)} images "
                "that these messages have; it may not support images in such messages.",
                "messages",
            )
        soft_id = tokenizer.special_tokens[self._decoder.soft_token]
        ids: list[int] = []
        media: list[Media] = []
        pieces = _joined(parts, images)
        for piece in pieces:
            if isinstance(piece, str):
                for part in filter(None, piece.split(MARK)):
                    ids += _ids_behind(len(ids), tokenizer, part, most)
            else:
                media.append(
                    Media(len(ids), piece.num_tokens, piece.digest, piece.pixels, piece.grid)
                )
                ids += [soft_id] * piece.num_tokens
        others = "".join([piece for piece in pieces if isinstance(piece, str)])
        return ImagePrompt(tuple(ids), tuple(media), unmarked(others))


def unmarked(text: str) -> str:
    """A text without marks."""
    return text.replace(MARK, "")


def _ids_behind(num_ids: int, tokenizer: Tokenizer, text: str, most: int | None) -> Prompt:
    """The ids of a part of a prompt behind so many others; raises as `token_ids` of the whole."""
    left = None if most is None else max(0, most - num_ids)
    try:
        return token_ids(tokenizer, text, "messages", add_special_tokens=False, most=left)
    except PromptTooLong as error:
        assert most is not None, "no prompt is too long without a bound"
        raise PromptTooLong(num_ids + error.min_tokens, most, "messages") from error


def _joined(parts: Sequence[str], images: Sequence[PreparedImage]) -> list[str | ImageTile]:
    """The parts of a text with the pieces of the images between them; texts beside each other are
    one, as they are tokenized together."""
    pieces: list[str | ImageTile] = [parts[0]]
    for image, part in zip(images, parts[1:], strict=True):
        for piece in (*image.pieces, part):
            last = pieces[-1]
            if isinstance(piece, str) and isinstance(last, str):
                pieces[-1] = last + piece
            else:
                pieces.append(piece)
    return pieces


def cut_before(prompt: ImagePrompt, keep: int) -> ImagePrompt:
    """The last `keep` tokens of a prompt, without an image of which tokens would be missing."""
    first = max(0, len(prompt.ids) - keep)
    for each in prompt.media:
        if each.start < first < each.end:
            first = each.end
    media = [
        Media(each.start - first, each.num_tokens, each.digest, each.pixels, each.grid)
        for each in prompt.media
        if each.start >= first
    ]
    return ImagePrompt(prompt.ids[first:], tuple(media))
