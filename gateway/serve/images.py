"""The reader of images for a model that reads them, if what it needs is installed.

Adapters are imported here, by name.
"""

import logging
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, cast

from engine.errors import StartupError
from gateway.groups.group import TEXT_ONLY
from gateway.images.reader import ImageLimits, ImageReader
from gateway.ports import ImageDecoder
from gateway.serve.load import LoadedModel
from gateway.settings.model import ImageSettings

logger = logging.getLogger(__name__)


class Images(NamedTuple):
    """The reader of images, or why there is none."""

    reader: ImageReader | None = None
    refusal: str = TEXT_ONLY


def open_images(settings: ImageSettings, loaded: LoadedModel, stack: AsyncExitStack) -> Images:
    """The reader of the images of requests to the loaded model; `stack` closes what it uses."""
    if loaded.report.encoder is None:
        return Images()
    if find_spec("PIL") is None:
        return _without("this server cannot read images: pip install 'podway[vision]'")
    try:
        decoder = _decoder(loaded)
    except StartupError as error:
        logger.warning("images are not read: %s", error)
        return Images(None, "this server cannot read images for this model")
    stack.push_async_callback(decoder.close)
    limits = ImageLimits(settings.max_images, settings.image_max_tokens)
    fetcher = None
    if settings.media_hosts:
        module = import_module("gateway.images.fetch")  # its libraries take 0.2 s to import
        fetcher = module.MediaFetcher(settings.media_hosts, limits.max_bytes)
        stack.push_async_callback(fetcher.close)
    return Images(ImageReader(decoder, limits, fetcher))


def _decoder(loaded: LoadedModel) -> ImageDecoder:
    """The decoder for the model's images. Raises `StartupError`."""
    module = import_module("adapters.images.isolated")
    decoder = cast("ImageDecoder", module.IsolatedDecoder(loaded.mmproj or loaded.directory))
    if decoder.soft_token not in loaded.texts.tokenizer.special_tokens:
        raise StartupError(f"the tokenizer has no special token {decoder.soft_token}")
    return decoder


def _without(reason: str) -> Images:
    logger.warning("%s", reason)
    return Images(None, reason)
