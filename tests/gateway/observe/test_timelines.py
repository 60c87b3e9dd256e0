import asyncio
import itertools
from typing import Any

import pytest

from engine.control.admission import Admission
from gateway.observe.timelines import Wait
from tests.gateway.rig import STEP, TEXT, Rig, Setting, play, played, text


async def timeline(rig: Rig, request_id: str, **headers: str) -> Any:
    """The status and body of a request's timeline."""
    exchange = await rig.client.get(f"/v1/requests/{request_id}/timeline", headers)
    return exchange.status, exchange.json


async def complete(rig: Rig, request_id: str, prompt: str, max_tokens: int, **fields: Any) -> None:
    """A whole text completion under this request id."""
    body = text(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **fields)
    exchange = await rig.client.post(TEXT, body, {"x-request-id": request_id})
    assert exchange.status == 200


def explanation_of_the_second(setting: Setting, *, output: int, **fields: Any) -> str:
    """The explanation of a request that arrives while an earlier one runs."""

    async def scene(rig: Rig) -> str:
        first = asyncio.create_task(complete(rig, "first", "a" * 20, 40))
        await asyncio.sleep(3 * STEP)
        await complete(rig, "second", "b" * 20, output, **fields)
        await first
        status, body = await timeline(rig, "second")
        assert status == 200
        return str(body["explanation"])

    found: list[str] = []

    async def keep(rig: Rig) -> None:
        found.append(await scene(rig))

    play(keep, setting)
    return found[0]


def test_a_request_that_waits_for_kv_is_explained_by_kv() -> None:
    found = explanation_of_the_second(Setting(num_blocks=61, admission=Admission.RESERVE), output=4)
    assert found.startswith("It waited ")
    assert "for KV: 1 request held" in found
    assert "--kv-memory" in found


def test_a_request_that_waits_for_a_seat_is_explained_by_the_batch_size() -> None:
    found = explanation_of_the_second(Setting(max_batch_size=1), output=4)
    assert "for a seat: every step already had" in found
    assert "--max-batch-size" in found


def test_a_request_that_never_waited_is_explained_by_its_own_tokens() -> None:
    found = explanation_of_the_second(Setting(), output=4)
    assert found.startswith("It did not wait: its 4 output tokens took 0.75 s, 250.0 ms each.")


@pytest.mark.parametrize(
    ("num_host_blocks", "words", "flag"),
    [
        (0, "It was preempted ", "--host-kv-memory"),
        (200, "Its KV was swapped out", "a larger --kv-memory"),
    ],
)
def test_a_request_that_lost_its_kv_is_explained_by_preemption_or_swapping(
    num_host_blocks: int, words: str, flag: str
) -> None:
    setting = Setting(num_blocks=70, num_host_blocks=num_host_blocks)
    found = explanation_of_the_second(setting, output=30)
    assert found.startswith(words)
    assert flag in found


@played()
async def test_a_client_that_does_not_read_is_named_as_the_cause(rig: Rig) -> None:
    await complete(rig, "slow", "a", 4)
    rig.service.timelines.reader_waits.add("slow", Wait(0.5, 5.0))
    rig.service.timelines.reader_waits.add("slow", Wait(6.0, 2.0))
    _, body = await timeline(rig, "slow")
    assert body["explanation"].startswith("Its client did not read for 7.00 s")
    assert body["reader_waits"] == [
        {"start": 0.5, "seconds": 5.0},
        {"start": 6.0, "seconds": 2.0},
    ]


@played()
async def test_spans_cover_the_whole_life_without_gaps(rig: Rig) -> None:
    await complete(rig, "one", "a" * 20, 5, n=2)
    _, body = await timeline(rig, "one")
    assert len(body["choices"]) == 2
    for number, choice in enumerate(body["choices"]):
        spans = choice["spans"]
        assert [span["phase"] for span in spans] == ["queued", "prefill", "decode"]
        ends = [span["start"] + span["seconds"] for span in spans]
        assert [span["start"] for span in spans] == [0.0, *ends[:-1]]
        assert ends[-1] == pytest.approx((5 + number) * STEP)  # the other reuses the prompt
        assert choice["completion_tokens"] == 5


@played()
async def test_timelines_belong_to_their_key_and_are_bounded(rig: Rig) -> None:
    rig.service.timelines._keep = 2
    for name in ("one", "two", "three"):
        await complete(rig, name, "a", 1)
    assert (await timeline(rig, "one"))[0] == 404
    assert (await timeline(rig, "three"))[0] == 200
    assert rig.service.timelines.find("three", "another key") == []


@played(Setting(num_blocks=110, admission=Admission.RESERVE))
async def test_kv_that_runs_short_after_a_request_arrived_is_the_cause_of_its_wait(
    rig: Rig,
) -> None:
    """When the last one arrives, there is KV for all; those before it take it."""
    tasks = [
        asyncio.create_task(complete(rig, f"{number}", f"{number}" * 20, 30)) for number in range(4)
    ]
    await asyncio.gather(*tasks)
    _, body = await timeline(rig, "3")
    assert "for KV: 2 requests held" in body["explanation"]


@played(Setting(max_batch_size=1))
async def test_a_request_that_waits_still_is_explained_by_what_it_lacks_now(rig: Rig) -> None:
    first = asyncio.create_task(complete(rig, "first", "a" * 20, 40))
    second = asyncio.create_task(complete(rig, "second", "b" * 20, 4))
    await asyncio.sleep(8 * STEP)
    _, body = await timeline(rig, "second")
    assert body["explanation"].startswith(f"It waited {8 * STEP:.2f} s for a seat")
    await asyncio.gather(first, second)


@played()
async def test_a_timeline_shows_when_the_worker_was_lost(rig: Rig) -> None:
    task = asyncio.create_task(complete(rig, "lost", "a" * 20, 8))
    await asyncio.sleep(3.5 * STEP)
    timelines = rig.service.timelines
    timelines.worker_lost(rig.service.clock())
    await task
    _, body = await timeline(rig, "lost")
    phases = [span["phase"] for span in body["choices"][0]["spans"]]
    assert phases == ["queued", "prefill", "decode", "restart", "decode"]


@played(Setting(policy="mlfq", max_batch_size=1))
async def test_a_request_that_the_policy_does_not_run_is_explained_by_its_pause(rig: Rig) -> None:
    """The long request is demoted after its first tokens; short ones run before it."""
    first = asyncio.create_task(complete(rig, "long", "a" * 20, 12))
    await asyncio.sleep(6 * STEP)
    for number in range(12):
        await complete(rig, f"short-{number}", "b", 1)
    await first
    _, body = await timeline(rig, "long")
    phases = [span["phase"] for span in body["choices"][0]["spans"]]
    assert "paused" in phases
    assert all(before != after for before, after in itertools.pairwise(phases))
    assert body["explanation"].startswith("It was paused ")


@played()
async def test_a_request_that_has_ended_is_kept_without_its_tokens(rig: Rig) -> None:
    await complete(rig, "long", "a" * 50, 3)
    (found,) = rig.service.timelines.find("long", "")
    assert (found.request.prompt_len, found.request.produced) == (50, 3)
    assert isinstance(found.request.spec.prompt, range)
    assert isinstance(found.request.output, range)
    assert not found.request.block_hashes
    assert (await timeline(rig, "long"))[0] == 200
