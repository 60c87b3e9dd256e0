"""Sends the pixels of images to the workers, a piece at a time, so that the event loop goes on."""

import asyncio
from collections.abc import Awaitable, Callable

from engine.control.images import Images
from engine.media import ImagePixels, Media


class ImageSender:
    """Sends one image after the other, as the scheduler wants them."""

    def __init__(
        self,
        images: Images,
        send: Callable[[ImagePixels], Awaitable[object]],
        on_sent: Callable[[], object],
    ) -> None:
        self._images = images
        self._send = send
        self._on_sent = on_sent
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Begin to send the image that is wanted next, unless one is being sent."""
        if self._task is None:
            wanted = self._images.next_to_send()
            if wanted is not None:
                self._task = asyncio.get_running_loop().create_task(self._run(*wanted))

    async def _run(self, number: int, media: Media) -> None:
        try:
            for piece in media.pieces(number):
                await self._send(piece)
                await asyncio.sleep(0)
            self._images.sent(number)
        finally:
            self._task = None
        self._on_sent()
