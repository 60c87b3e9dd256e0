import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.request import Abort
from engine.speculation.settings import SpeculationSettings
from tests.gateway.rig import CHAT, STEP, Rig, Setting, chat, play, played

WORDS = "one two three four five one two three four five one two three four six"
NGRAM = SpeculationSettings("ngram", 5)
SUFFIX = SpeculationSettings("suffix", 5)


async def answer(rig: Rig, body: dict[str, Any]) -> dict[str, Any]:
    exchange = await rig.client.post(CHAT, body)
    reply = exchange.json
    assert exchange.status == 200, reply
    return {key: value for key, value in reply.items() if key not in ("id", "created")}


def replies(bodies: list[dict[str, Any]], setting: Setting) -> tuple[list[dict[str, Any]], Rig]:
    found: list[dict[str, Any]] = []

    async def scene(rig: Rig) -> None:
        found.extend([await answer(rig, body) for body in bodies])

    return found, play(scene, setting)


@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX], ids=lambda s: s.method)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["four"]},
        {"stop": ["two three four s", "zzz"]},
        {"stop": ["five o"], "include_stop_str_in_output": True},
        {"max_tokens": 33},
        {"n": 3, "logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": "five one t"},
    ],
    ids=str,
)
def test_a_response_is_the_same_with_and_without_drafts(
    speculation: SpeculationSettings, fields: dict[str, Any]
) -> None:
    bodies = [chat(**fields), chat(**fields)]
    setting = Setting(texts=(WORDS, WORDS + " " + WORDS, "four five one"))
    plain, _ = replies(bodies, setting)
    drafted, rig = replies(bodies, replace(setting, speculation=speculation))
    assert drafted == plain
    assert rig.engine.scheduler.drafter is not None
    if "stop" not in fields:  # before which little is repeated
        assert rig.engine.scheduler.drafter.counts.num_accepted > 0


def test_a_right_prediction_saves_iterations_and_is_counted() -> None:
    prediction = {"type": "content", "content": [{"type": "text", "text": WORDS[:40] + "!"}]}
    body = chat(prediction=prediction)
    plain, before = replies([body], Setting(texts=(WORDS,)))
    setting = Setting(texts=(WORDS,), speculation=SpeculationSettings("prediction", 8))
    (drafted,), rig = replies([body], setting)
    details = drafted["usage"].pop("completion_tokens_details")
    plain[0]["usage"].pop("completion_tokens_details")
    assert drafted == plain[0]
    assert details["accepted_prediction_tokens"] >= 30
    assert details["rejected_prediction_tokens"] >= 1
    assert rig.metrics.num_iterations < before.metrics.num_iterations - 20
    assert rig.metrics.num_output_tokens == before.metrics.num_output_tokens


def test_the_metrics_count_drafts() -> None:
    _, rig = replies([chat()], Setting(texts=(WORDS,), speculation=NGRAM))
    assert rig.engine.scheduler.drafter is not None
    counts = rig.engine.scheduler.drafter.counts
    page = asyncio.run(rig.service.exposition.render()).decode()
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="org/tiny-bytes"} ' in page
    assert counts.num_drafts >= counts.num_accepted == sum(counts.by_position) > 0
    assert counts.by_position == sorted(counts.by_position, reverse=True)


@played(Setting(texts=(WORDS,), speculation=NGRAM))
async def test_a_request_with_drafts_in_flight_is_free_after_one_iteration(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as exchange:
        events = exchange.events()
        await anext(events)
        (request,) = rig.engine.scheduler.pool
        while request.num_planned <= request.num_tokens:
            await anext(events)
        rig.engine.scheduler.cancel(request, Abort.EXPLICIT, STEP)
    assert rig.metrics.requests.cancel_to_free.sum <= 1
