from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.pooling import PoolSpec
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint, make_model
from tests.worker_settings import worker_settings

VARIANTS = ("llama", "mistral_window", "qwen2_tied", "qwen3", "gpt2")
PROMPTS = [
    tuple(range(3, 3 + length)) for length in (1, 2, 5, 17, 40, 40)
]  # the last two are equal
SMALL: dict[str, Any] = {"max_batch_tokens": 16, "max_batch_size": 4}
TOLERANCE = 1e-5


def a_worker(directory: Path, task: str = "embed", **fields: Any) -> Worker:
    settings = worker_settings(
        str(directory),
        task=task,
        block_size=4,
        kv_slots=512,
        kv_cache_dtype="float32",  # as exact as transformers
        threads=1,
        **fields,
    )
    return Worker.load(settings, lambda *_: None)


def vectors(worker: Worker, prompts: Any = PROMPTS, **fields: Any) -> list[NDArray[np.float32]]:
    """The vectors of these prompts, served at once by a whole engine."""
    dimensions = fields.pop("dimensions", None)
    specs = [
        RequestSpec(prompt, 0, SamplingParams(), pooling=PoolSpec(dimensions)) for prompt in prompts
    ]
    found = []
    for outcome in play(worker, specs, **fields):
        assert outcome.error is None
        found.append(np.frombuffer(outcome.request.vector, dtype="<f4"))
    return found


def expected(model: Any, prompt: tuple[int, ...], dimensions: int | None = None) -> Any:
    base = getattr(model, model.base_model_prefix)
    with torch.inference_mode():
        last = base(torch.tensor([prompt])).last_hidden_state[0, -1][:dimensions]
    return torch.nn.functional.normalize(last, dim=0).numpy()


@pytest.mark.parametrize(
    ("variant", "attention"),
    [*((variant, "cpu") for variant in VARIANTS), ("mistral_window", "reference")],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, variant: str, attention: str) -> None:
    model = make_model(variant)
    worker = a_worker(make_checkpoint(tmp_path, variant), attention=attention)
    assert worker.report.pooling is not None
    assert (worker.report.pooling.task, worker.report.pooling.method) == ("embed", "last")
    for prompt, vector in zip(PROMPTS, vectors(worker, **SMALL), strict=True):
        assert np.abs(vector - expected(model, prompt)).max() < TOLERANCE


def test_a_vector_has_the_same_bits_alone_in_company_in_chunks_and_behind_a_cached_prefix(
    tmp_path: Path,
) -> None:
    worker = a_worker(make_checkpoint(tmp_path, "qwen3"))
    alone = [vectors(worker, [prompt], reuses_prefixes=False)[0] for prompt in PROMPTS]
    for fields in ({}, SMALL, {"reuses_prefixes": False}, {"dies_in": [2], **SMALL}):
        together = vectors(worker, **fields)
        assert [each.tobytes() for each in together] == [each.tobytes() for each in alone]


def test_fewer_dimensions_are_the_first_ones_normalized_again(tmp_path: Path) -> None:
    model = make_model("qwen3")
    worker = a_worker(make_checkpoint(tmp_path, "qwen3"))
    for prompt, vector in zip(PROMPTS, vectors(worker, dimensions=8), strict=True):
        assert len(vector) == 8
        assert np.abs(vector - expected(model, prompt, 8)).max() < TOLERANCE


def test_the_head_of_an_embedding_model_is_not_loaded(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    generates, embeds = a_worker(directory, "generate").report, a_worker(directory).report
    assert generates.num_parameters - embeds.num_parameters == 97 * 32
