import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from examples.benchmarks.cluster.routers import free_port
from examples.ray_serve.ingress import MAX_BODY_BYTES, Request, responses_through

pytest.importorskip("ray")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own code
    import ray
    from ray import serve

    from examples.ray_serve import app as application
    from examples.ray_serve.router import PREFIX_BYTES, affinity_key, score

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT = "/v1/chat/completions"
SECONDS = 120.0


def request(body: bytes, method: str = "POST") -> Request:
    return Request(method, CHAT, b"", (), None, body)


def test_prompts_that_begin_alike_have_the_same_key_whatever_the_other_fields() -> None:
    one = request(b'{"user":"a","messages":[' + b"x" * PREFIX_BYTES + b"1")
    other = request(b'{"model":"m","user":"bb","messages":[' + b"x" * PREFIX_BYTES + b"2")
    assert affinity_key(one) == affinity_key(other) != b""
    assert affinity_key(request(b'{"messages":["y"]}')) != affinity_key(one)
    assert affinity_key(request(b"", "GET")) == b""
    assert affinity_key(request(b'{"file":"f"}')) == b""


def test_a_replica_that_joins_changes_the_preference_of_its_share_of_keys_only() -> None:
    keys = [str(number).encode() for number in range(300)]

    def preferred(replicas: str) -> list[str]:
        return [max(replicas, key=lambda one: score(key, one)) for key in keys]

    before, after = preferred("abc"), preferred("abcd")
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"}
    assert 40 < len(moved) < 110


@pytest.mark.parametrize(
    ("waiting", "now", "open_requests", "wanted"),
    [
        ([0.0], 1, 3, 1),
        ([20_000.0], 1, 3, 2),
        ([20_000.0, 50_000.0], 2, 9, 4),  # as many as there may be
        ([0.0, 0.0], 2, 5, 2),
        ([0.0, 0.0], 2, 0, 1),
        ([0.0], 1, 0, 1),
    ],
)
def test_replicas_follow_the_waiting_tokens(
    waiting: list[float], now: int, open_requests: int, wanted: int
) -> None:
    context = SimpleNamespace(
        aggregated_metrics={application.WAITING_TOKENS: dict(enumerate(waiting))},
        current_num_replicas=now,
        total_num_requests=open_requests,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert application.wanted_replicas(context) == (wanted, {})


async def test_a_body_that_is_too_large_is_answered_without_a_replica() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * (MAX_BODY_BYTES + 1), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    await responses_through(None)(scope, receive, send)
    assert sent[0]["status"] == 413


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of two replicas of the built-in model."""
    with pytest.MonkeyPatch.context() as environment:
        # Ray kills a proxy that is not ready after 5 s, which beside other tests it may not be.
        environment.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        yield from serving()


def serving() -> Iterator[str]:
    port = free_port()
    ray.init(
        address="local",  # not a cluster that other tests may have left
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {"model": "builtin", "served_model_name": "m", "threads": "1"}
        serve.run(application.build({"min_replicas": "2", **settings}), name="podway")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + CHAT, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""


def ongoing() -> int:
    """Requests in all replicas."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [ray.get_actor(one, "serve") for one in names if "#Replica#" in one]
    assert len(replicas) == 2
    return sum(ray.get([one.get_num_ongoing_requests.remote() for one in replicas]))


async def test_answers_whole_and_streaming_are_equal(url: str) -> None:
    whole = await post(url, chat("What is 2 + 3?", temperature=0))
    async with aiohttp.ClientSession() as session:
        body = chat("What is 2 + 3?", temperature=0, stream=True)
        async with session.post(url + CHAT, json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join([piece async for piece in lines(response)])
    assert whole["choices"][0]["message"]["content"] == text != ""


async def test_errors_pass_through(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + CHAT, json=chat("x", temperature=9)) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "temperature"


async def test_the_next_message_of_a_chat_finds_the_kv_of_the_last_one(url: str) -> None:
    async def shares(number: int) -> int:
        words = " ".join(f"w{number}n{i}" for i in range(PREFIX_BYTES // 6))
        first = await post(url, chat(f"{words} What is 1 + 1?", max_tokens=4))
        again = await post(url, chat(f"{words} What is 1 + 2?", max_tokens=4))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        found: int = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert min([await shares(number) for number in range(6)]) > 100


async def test_a_client_that_leaves_ends_its_request(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        body = chat("Tell me a story.", stream=True, max_tokens=4000, ignore_eos=True)
        response = await session.post(url + CHAT, json=body)
        await anext(lines(response))
        assert ongoing() == 1
        response.close()
        for _ in range(600):
            if not ongoing():
                return
            await asyncio.sleep(0.05)
    raise AssertionError("the request still runs")


async def test_a_stream_survives_the_death_of_its_worker(url: str) -> None:
    body = chat("Tell me a story.", temperature=0, max_tokens=600, ignore_eos=True)
    expected = (await post(url, body))["choices"][0]["message"]["content"]
    pieces = []
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url + CHAT, json=body | {"stream": True}) as response,
    ):
        async for piece in lines(response):
            pieces.append(piece)
            if len(pieces) == 5:
                for process in workers():
                    process.kill()
    assert "".join(pieces) == expected


def workers() -> list[psutil.Process]:
    """The worker processes of all replicas, which are descendants of Ray's processes."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "engine.worker.process.entry" in " ".join(process.cmdline())
    ]
