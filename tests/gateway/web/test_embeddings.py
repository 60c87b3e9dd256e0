"""Embeddings are rejected with the reason; invalid fields are named before that."""

from typing import Any

import pytest

from tests.gateway.rig import MODEL, Rig, play


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({}, 400, "model", "unsupported_model"),
        ({"input": ["a", "b"], "dimensions": 64}, 400, "model", "unsupported_model"),
        ({"input": [1, 2], "encoding_format": "base64"}, 400, "model", "unsupported_model"),
        ({"input": [[1], [2]], "user": "me"}, 400, "model", "unsupported_model"),
        ({"model": "text-embedding-3-small"}, 404, "model", "model_not_found"),
        ({"input": ""}, 400, "input", "invalid_request_error"),
        ({"input": []}, 400, "input", "invalid_request_error"),
        ({"input": ["a", ""]}, 400, "input", "invalid_request_error"),
        ({"input": ["a"] * 2049}, 400, "input", "invalid_request_error"),
        ({"input": 7}, 400, "input", "invalid_request_error"),
        ({"encoding_format": "int8"}, 400, "encoding_format", "invalid_request_error"),
        ({"dimensions": 0}, 400, "dimensions", "invalid_request_error"),
        ({"extra": 0}, 400, "extra", "invalid_request_error"),
    ],
)
def test_embeddings_are_rejected(
    fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    async def scene(rig: Rig) -> None:
        body = {"model": MODEL, "input": "hi", **fields}
        async with rig.client.post("/v1/embeddings", body) as exchange:
            error = (await exchange.json())["error"]
        assert (exchange.status, error["param"], error["code"]) == (status, param, code)

    play(scene)
