"""`/score` and `/rerank`: pairs, their order, the shapes of the responses, and errors.

The rig scores a pair by the first byte of its second text, and embeds a text as its length, its
first two bytes and its last one.
"""

from typing import Any

import pytest

from engine.pooling import PoolingReport
from tests.gateway.answers import answer_to
from tests.gateway.rig import MODEL, Rig, Setting, play

PAIRS = Setting(pooling=PoolingReport("score", "cls", 1))
TEMPLATE = Setting(pooling=PoolingReport("score", "last", 1, pair_template="<{query}|{document}>"))
EMBEDS = Setting(pooling=PoolingReport("embed", "mean", 4))
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


def answer(path: str, setting: Setting = PAIRS, **fields: Any) -> Any:
    """Status and JSON of one request; `model` is the rig's."""
    found = answer_to(path, {"model": MODEL, **fields}, setting)
    return found.status, found.json


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("q", "a", [97]),
        ("q", ["a", "c", "b"], [97, 99, 98]),
        (["q"], ["a", "b"], [97, 98]),
        (["q", "r"], ["a", "b"], [97, 98]),
    ],
)
def test_one_text_or_equally_many_are_scored(
    path: str, names: tuple[str, str], first: Any, second: Any, expected: list[int]
) -> None:
    status, body = answer(path, **dict(zip(names, (first, second), strict=True)))
    assert status == 200
    assert [row["score"] for row in body["data"]] == expected
    assert [row["index"] for row in body["data"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == 4 * len(expected)  # with two special tokens
    assert (body["object"], body["id"][:6]) == ("list", "score-")


@pytest.mark.parametrize("path", RERANK)
def test_documents_are_ordered_by_relevance(path: str) -> None:
    documents: list[Any] = ["b", {"text": "d"}, "a", "c"]
    status, body = answer(path, query="q", documents=documents, top_n=3)
    assert status == 200
    assert body["results"] == [
        {"index": 1, "document": {"text": "d"}, "relevance_score": 100},
        {"index": 3, "document": {"text": "c"}, "relevance_score": 99},
        {"index": 0, "document": {"text": "b"}, "relevance_score": 98},
    ]
    _, body = answer(path, query="q", documents=documents, return_documents=False)
    assert [set(row) for row in body["results"]] == [{"index", "relevance_score"}] * 4


def test_a_pair_is_inserted_into_the_models_template_and_truncated_within_the_document() -> None:
    status, body = answer("/score", TEMPLATE, text_1="{document}", text_2="xyz")
    assert status == 200
    assert body["usage"]["prompt_tokens"] == len("<{document}|xyz>")
    prompts = []

    async def scene(rig: Rig) -> None:
        fields = {"query": "q", "documents": ["xyz"], "truncate_prompt_tokens": 5}
        await rig.client.post("/rerank", {"model": MODEL, **fields})
        prompts.append(bytes(rig.ended[0].spec.prompt))

    play(scene, TEMPLATE)
    assert prompts == [b"<q|x>"]


def test_with_a_model_that_embeds_the_score_is_the_cosine_similarity() -> None:
    _, body = answer("/v1/score", EMBEDS, text_1="ab", text_2=["ab", "b"])
    first, second = (row["score"] for row in body["data"])
    assert first == pytest.approx(1.0)
    assert second < 1.0
    assert body["usage"]["prompt_tokens"] == 2 + 2 + 1  # the query is embedded once
    _, body = answer("/rerank", EMBEDS, query="ab", documents=["b", "ab"])
    assert [row["index"] for row in body["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", "b" * 300]}, "text_2[1]"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [7]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b" * 300]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].title"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3},
            "max_tokens_per_doc",
        ),
    ],
)
def test_errors_name_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    status, body = answer(path, **fields)
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize("path", ["/score", *RERANK])
def test_a_model_that_generates_rejects_pairs(path: str) -> None:
    texts = (
        {"query": "a", "documents": ["b"]} if "rerank" in path else {"text_1": "a", "text_2": "b"}
    )
    status, body = answer(path, Setting(), **texts)
    assert (status, body["error"]["code"]) == (400, "unsupported_model")
    assert "--task score" in body["error"]["message"]
