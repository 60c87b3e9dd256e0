import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from adapters.images.isolated import ATTEMPTS, IsolatedDecoder
from engine.errors import Unavailable
from gateway.ports import EncodedImage, PreparedImage, UnreadableImage
from tests.adapters.images.pictures import bad_images, checkpoint, encoded, noise

IMAGE = EncodedImage(encoded(noise(64, 64)))
MANY = 4096  # tokens


@pytest.fixture(name="decoder")
async def _decoder(tmp_path: Path) -> AsyncIterator[IsolatedDecoder]:
    decoder = IsolatedDecoder(checkpoint(tmp_path), seconds=60.0)
    yield decoder
    await decoder.close()
    await decoder.close()
    assert not psutil.Process().children(recursive=True)


def digests(image: PreparedImage) -> list[bytes]:
    return [tile.digest for tile in image.tiles]


async def test_the_same_pixels_have_the_same_digest_and_others_another_one(
    decoder: IsolatedDecoder, tmp_path: Path
) -> None:
    image = await decoder.prepare(IMAGE, MANY)
    (tile,) = image.tiles
    assert tile.pixels.levels.shape == (16, 3, 16 * 16)
    assert tile.pixels.values.shape == (3, 256)
    assert (tile.grid, tile.num_tokens) == ((1, 4, 4), 4)
    text = base64.b64encode(encoded(noise(64, 64), "WEBP", lossless=True)).decode()
    same = await decoder.prepare(EncodedImage(text, is_base64=True), MANY)
    assert digests(same) == digests(image)
    assert (same.tiles[0].pixels.levels == tile.pixels.levels).all()
    other = await decoder.prepare(EncodedImage(encoded(noise(64, 64, seed=1))), MANY)
    smaller = await decoder.prepare(IMAGE, 1)
    assert len({*digests(image), *digests(other), *digests(smaller)}) == 3


async def test_bad_images_are_refused_and_the_process_goes_on(decoder: IsolatedDecoder) -> None:
    await decoder.prepare(IMAGE, MANY)
    (process,) = psutil.Process().children()
    for data, reason in bad_images().values():
        with pytest.raises(UnreadableImage) as caught:
            await decoder.prepare(EncodedImage(data), MANY)
        assert str(caught.value).endswith(reason)
    for text in ("?", "é"):
        with pytest.raises(UnreadableImage, match="is not valid base64"):
            await decoder.prepare(EncodedImage(text, is_base64=True), MANY)
    assert (await decoder.prepare(IMAGE, MANY)).num_tokens == 4
    assert psutil.Process().children() == [process]


async def test_an_image_that_needs_too_much_memory_or_time_is_refused(tmp_path: Path) -> None:
    large = EncodedImage(encoded(noise(16, 16).resize((4096, 4096)), "JPEG"))
    decoder = IsolatedDecoder(checkpoint(tmp_path), num_bytes=24 << 20)
    with pytest.raises(UnreadableImage, match="needs too much memory"):
        await decoder.prepare(large, MANY)
    assert (await decoder.prepare(IMAGE, MANY)).num_tokens == 4
    await decoder.close()
    decoder = IsolatedDecoder(checkpoint(tmp_path), seconds=0.001)
    with pytest.raises(UnreadableImage, match=r"takes longer than 0\.001 seconds to read"):
        await decoder.prepare(large, MANY)
    await decoder.close()


async def test_an_image_whose_process_was_killed_is_decoded_by_another_one(
    decoder: IsolatedDecoder,
) -> None:
    await decoder.prepare(IMAGE, MANY)
    (process,) = psutil.Process().children()
    os.kill(process.pid, signal.SIGSTOP)
    pending = asyncio.create_task(decoder.prepare(IMAGE, MANY))
    while not decoder._pending:  # noqa: ASYNC110 # nothing says when
        await asyncio.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert (await pending).num_tokens == 4
    (other,) = psutil.Process().children()
    assert other.pid != process.pid


async def test_an_image_whose_processes_are_all_killed_can_be_sent_again(
    decoder: IsolatedDecoder,
) -> None:
    await decoder.prepare(IMAGE, MANY)
    pending = asyncio.create_task(decoder.prepare(IMAGE, MANY))
    killed = None
    for _ in range(ATTEMPTS):
        while not decoder._pending or decoder._process in (None, killed):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        killed = decoder._process
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="was lost; please try again"):
        await pending
    assert (await decoder.prepare(IMAGE, MANY)).num_tokens == 4
