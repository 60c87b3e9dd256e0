"""`/v1/embeddings`: the forms of an input, the shape of the response, and errors that name a field.

The rig pools a prompt into its length, its first two tokens and its last one.
"""

import asyncio
import base64
from array import array
from typing import Any

import pytest

from engine.pooling import PoolingReport
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, CONTEXT, MODEL, STEP, Rig, Setting, chat, played

PATH = "/v1/embeddings"
EMBEDS = Setting(pooling=PoolingReport("embed", "last", 4, dimensions=()))
FIXED = Setting(pooling=PoolingReport("embed", "mean", 4))
SCORES = Setting(pooling=PoolingReport("score", "last", 1))
CROWDED = Setting(pooling=EMBEDS.pooling, max_queue_requests=10)
AB = [2.0, 97.0, 98.0, 98.0]


def answer(setting: Setting = EMBEDS, **fields: Any) -> Any:
    """Status and JSON of one embedding request; `model` is the rig's."""
    found = answer_to(PATH, {"model": MODEL, **fields}, setting)
    return found.status, found.json


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [AB]),
        (["ab", "xyz"], [AB, [3.0, 120.0, 121.0, 122.0]]),
        ([97, 98], [AB]),
        ([[97, 98], [120, 121, 122]], [AB, [3.0, 120.0, 121.0, 122.0]]),
    ],
    ids=["text", "texts", "ids", "arrays of ids"],
)
def test_an_input_is_a_text_or_texts_or_token_ids(given: Any, expected: list[list[float]]) -> None:
    status, body = answer(input=given)
    assert status == 200
    assert [row["embedding"] for row in body["data"]] == expected
    assert [row["index"] for row in body["data"]] == list(range(len(expected)))
    num_tokens = sum(int(vector[0]) for vector in expected)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (body["object"], body["model"]) == ("list", MODEL)


def test_base64_is_little_endian_float32() -> None:
    _, body = answer(input="ab", encoding_format="base64")
    assert array("f", base64.b64decode(body["data"][0]["embedding"])).tolist() == AB


def test_dimensions_reach_the_worker() -> None:
    _, body = answer(input="ab", dimensions=2)
    assert body["data"][0]["embedding"] == AB[:2]


def test_a_model_that_was_not_trained_for_it_rejects_other_dimensions_than_its_own() -> None:
    assert answer(FIXED, input="ab", dimensions=4)[0] == 200
    status, body = answer(FIXED, input="ab", dimensions=2)
    assert (status, body["error"]["param"]) == (400, "dimensions")
    assert "Matryoshka" in body["error"]["message"]


def test_an_input_longer_than_the_context_is_rejected_unless_it_is_truncated() -> None:
    status, body = answer(input=["a", "a" * (CONTEXT + 1)])
    assert (status, body["error"]["param"]) == (400, "input[1]")
    assert body["error"]["code"] == "context_length_exceeded"
    _, body = answer(input="a" * (CONTEXT + 1), truncate_prompt_tokens=-1)
    assert body["data"][0]["embedding"][0] == CONTEXT
    _, body = answer(input="abcdef", truncate_prompt_tokens=2)
    assert body["data"][0]["embedding"] == AB


def test_the_special_token_at_the_end_of_an_input_survives_its_truncation() -> None:
    _, body = answer(input=[97, 98, 99, 100, 256], truncate_prompt_tokens=3)
    assert body["data"][0]["embedding"] == [3.0, 97.0, 98.0, 256.0]


@pytest.mark.parametrize(
    ("setting", "fields", "status", "param", "code"),
    [
        (Setting(), {}, 400, "model", "unsupported_model"),
        (SCORES, {}, 400, "model", "unsupported_model"),
        (EMBEDS, {"model": "text-embedding-3-small"}, 404, "model", "model_not_found"),
        (EMBEDS, {"input": ""}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": []}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": ["a", ""]}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": ["a", 7]}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": ["a"] * 2049}, 400, "input", "invalid_request_error"),
        (CROWDED, {"input": ["a"] * 11}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": 7}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"input": [1, 257]}, 400, "input[1]", "invalid_request_error"),
        (EMBEDS, {"input": [[1], [2, -1]]}, 400, "input[1][1]", "invalid_request_error"),
        (EMBEDS, {"input": [[1], []]}, 400, "input", "invalid_request_error"),
        (EMBEDS, {"encoding_format": "int8"}, 400, "encoding_format", "invalid_request_error"),
        (EMBEDS, {"dimensions": 0}, 400, "dimensions", "invalid_request_error"),
        (EMBEDS, {"dimensions": 5}, 400, "dimensions", "invalid_request_error"),
        (
            EMBEDS,
            {"truncate_prompt_tokens": 0},
            400,
            "truncate_prompt_tokens",
            "invalid_request_error",
        ),
        (EMBEDS, {"service_tier": "gold"}, 400, "service_tier", "invalid_request_error"),
        (EMBEDS, {"regex": "a"}, 400, "regex", "invalid_request_error"),
    ],
)
def test_errors_name_the_field(
    setting: Setting, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    found, body = answer(setting, **{"input": "hi", **fields})
    error = body["error"]
    assert (found, error["param"], error["code"]) == (status, param, code), error


@played(EMBEDS)
async def test_a_model_for_embeddings_rejects_chat_and_names_its_endpoints(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat())
    error = exchange.json["error"]
    assert (exchange.status, error["code"]) == (400, "unsupported_model")
    assert "/v1/embeddings" in error["message"]
    assert (await rig.client.get("/v1/models")).json["data"][0]["task"] == "embed"


@played(EMBEDS)
async def test_all_inputs_of_a_request_share_an_iteration_and_are_logged_and_counted(
    rig: Rig,
) -> None:
    began = rig.service.clock()
    exchange = await rig.client.post(PATH, {"model": MODEL, "input": ["ab"] * 8})
    assert rig.service.clock() - began == STEP
    (count,) = rig.service.request_log.requests.items()
    assert count == ((PATH, "POST", 200), 1)
    assert rig.metrics.num_prompt_tokens == 16
    assert rig.metrics.num_output_tokens == 0
    assert rig.metrics.requests.outcomes["finished"] == 8
    request_id = exchange.headers["x-request-id"]
    choices = (await rig.client.get(f"/v1/requests/{request_id}/timeline")).json["choices"]
    phases = [span["phase"] for span in choices[0]["spans"]]
    assert (len(choices), phases) == (8, ["queued", "prefill"])


@played(EMBEDS)
async def test_requests_end_when_the_client_disconnects(rig: Rig) -> None:
    async with rig.client.post(PATH, {"model": MODEL, "input": ["ab"] * 20}):
        await asyncio.sleep(STEP / 2)
    await asyncio.sleep(2 * STEP)
    assert {request.outcome for request in rig.ended} == {"cancelled"}
    assert len(rig.ended) == 20


def test_a_deadline_ends_the_request_with_a_504() -> None:
    setting = Setting(pooling=EMBEDS.pooling, max_batch_size=1)

    body = {"model": MODEL, "input": ["ab"] * 5, "deadline_ms": 2.5 * STEP * 1000}
    answer = answer_to(PATH, body, setting)
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (504, "deadline_exceeded")
