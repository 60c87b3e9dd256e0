"""A thin HTTP front end to OpenVINO GenAI's continuous batching, so that it can be measured beside
servers. It is not OpenVINO Model Server, which is on no package registry.

    VENV/bin/python examples/benchmarks/peers/openvino_server.py MODEL --port 8106 [--image TEXT]

VENV has openvino-genai, aiohttp and pillow, and nothing of Podway. MODEL is a directory that
optimum-intel exported. It answers completions and chats with images, whole or as streams. One
thread steps the pipeline; requests are added between two steps, as the pipeline's Python binding
keeps Python's lock while it encodes an image.
"""

import argparse
import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from aiohttp import web
from PIL import Image

Json = dict[str, Any]
Put = Callable[[str | None], None]


class Pipeline:
    """The pipeline and its requests; all is done by one thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gib
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": options.precision,
        }
        self._pipe = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._tokenizer = self._pipe.get_tokenizer()
        self._live: dict[int, tuple[Any, Put]] = {}
        self._left: set[int] = set()
        self._count = 0

    def add(self, prompt: str, images: list[Any], body: Json, put: Put) -> int:
        """Add a request; `put` gets the text of each token, and None behind the last one."""
        config = genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens") or 16
        config.ignore_eos, config.do_sample = bool(body.get("ignore_eos")), False
        config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        self._count += 1
        added = [prompt, images] if images else [prompt]
        handle = self._pipe.add_request(self._count, *added, config)
        self._live[self._count] = handle, put
        return self._count

    def leave(self, number: int) -> None:
        """The client has left, or has its answer."""
        self._left.add(number)

    def step(self) -> bool:
        """Compute one iteration and hand out its tokens; whether a request is left."""
        if self._pipe.has_non_finished_requests():
            self._pipe.step()
        for number, (handle, put) in list(self._live.items()):
            is_over = handle.get_status() != genai.GenerationStatus.RUNNING
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        put(self._tokenizer.decode([token]))
            if is_over:
                put(None)
            elif number in self._left:
                handle.cancel()
            if is_over or number in self._left:
                del self._live[number]
        return bool(self._live)


class Service:
    """The endpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._image = options.image
        self._thread = ThreadPoolExecutor(1)
        self._pipeline = Pipeline(options)
        self._stepping: asyncio.Task[None] | None = None

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(self._thread, self._pipeline.step):
            pass

    async def _texts(self, prompt: str, images: list[Any], body: Json) -> AsyncIterator[str]:
        loop, found = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def put(text: str | None) -> None:
            loop.call_soon_threadsafe(found.put_nowait, text)

        number = await loop.run_in_executor(
            self._thread, self._pipeline.add, prompt, images, body, put
        )
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())
        try:
            while (text := await found.get()) is not None:
                yield text
        finally:
            self._pipeline.leave(number)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """A text's continuation, whole or as a stream."""
        body = await request.json()
        texts = self._texts(body["prompt"], [], body)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "".join([t async for t in texts])}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for text in texts:
            chunk = {"choices": [{"index": 0, "text": text}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def chats(self, request: web.Request) -> web.StreamResponse:
        """The answer to lines of messages, with `--image` where an image stands."""
        body, lines, images = await request.json(), [], []
        for message in body["messages"]:
            content = message["content"]
            parts: list[Json] = [{"text": content}] if isinstance(content, str) else content
            images += [
                picture_of(each["image_url"]["url"]) for each in parts if "image_url" in each
            ]
            lines.append("".join(each.get("text", self._image) for each in parts) + "\n")
        texts = [text async for text in self._texts("".join(lines), images, body)]
        return web.json_response({"choices": [{"message": {"content": "".join(texts)}}]})


def picture_of(url: str) -> Any:
    """The pixels of a data URL, `[height, width, 3]`."""
    file = BytesIO(base64.b64decode(url.partition(",")[2]))
    return ov.Tensor(np.asarray(Image.open(file).convert("RGB")).copy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="f32", help="of the computation")
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--image", default="<|vision_start|><|image_pad|><|vision_end|>")
    service = Service(options := parser.parse_args())
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", service.completions)
    app.router.add_post("/v1/chat/completions", service.chats)
    web.run_app(
        app, host="127.0.0.1", port=options.port, access_log=None, print=None,
        handler_cancellation=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
