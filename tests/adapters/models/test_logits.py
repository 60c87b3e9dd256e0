from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.models.checks.checkpoint import check_checkpoint
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import VARIANTS, make_model

TOLERANCE = 1e-4
# Unit vectors of few dimensions amplify rounding: transformers' own logits differ by 1.2e-4 between
# a whole prompt and the same tokens one by one.
RECURRENT_TOLERANCE = 5e-4
# Each kind of attention: windows, limited scores, sinks, shared KV, latents, gates.
KINDS = (
    *("llama", "mistral_window", "gemma2", "gemma4", "gpt_oss", "deepseek_v2", "qwen3_5"),
    *("phi3_long", "gpt2"),
)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and in a worker."""

    model: Any
    worker: Worker

    @property
    def tolerance(self) -> float:
        return RECURRENT_TOLERANCE if self.worker.report.num_states else TOLERANCE

    def expected(self, *texts: list[int]) -> Tensor:
        """transformers' logits, `[texts, tokens, vocab]`, of texts of one length."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor(texts)).logits
        return logits


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    model, directory = make_model(str(request.param)), tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def pair(checkpoint: tuple[Any, Path]) -> Pair:
    model, directory = checkpoint
    return Pair(model, load_worker(directory, attention="cpu"))


def test_the_checks_before_a_start_accept_it(checkpoint: tuple[Any, Path]) -> None:
    assert check_checkpoint(checkpoint[1], 128).keys()


@pytest.mark.parametrize("variant", KINDS)
def test_the_reference_attention_computes_prompts_and_decodes_of_every_kind(
    variant: str, tmp_path: Path
) -> None:
    model = make_model(variant)
    model.save_pretrained(tmp_path)
    pair = Pair(model, load_worker(tmp_path, attention="reference"))
    test_chunked_prefill_and_decode_match_at_every_split(pair)
    test_a_ragged_mix_gives_each_request_its_own_logits(pair)


def text(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < tolerance


def test_chunked_prefill_and_decode_match_at_every_split(pair: Pair) -> None:
    tokens, driver = text(53), Driver(pair.worker)
    (expected,), done = pair.expected(tokens), 0
    for size in (3, 1, 8, 13, 20, *[1] * 8):
        found = driver.logits((0, tokens[done : done + size]))
        done += size
        assert_close(found[0], expected[done - 1], pair.tolerance)


def test_a_ragged_mix_gives_each_request_its_own_logits(pair: Pair) -> None:
    texts = [text(40, seed=request) for request in range(5)]
    expected = pair.expected(*texts)
    driver = Driver(pair.worker)
    driver.logits((0, texts[0][:17]), (1, texts[1][:4]), (2, texts[2][:9]))
    found = driver.logits(
        (0, texts[0][17:18]),
        (1, texts[1][4:5]),
        (2, texts[2][9:20]),
        (3, texts[3][:1]),
        (4, texts[4][:33]),
    )
    for row, (request, last) in enumerate(((0, 17), (1, 4), (2, 19), (3, 0), (4, 32))):
        assert_close(found[row], expected[request][last], pair.tolerance)


@pytest.mark.parametrize("checkpoint", KINDS, indirect=True)
def test_greedy_output_has_transformers_most_likely_token_at_every_position(pair: Pair) -> None:
    for seed, length in ((1, 5), (2, 19)):
        prompt = text(length, seed)
        output = Driver(pair.worker).generate(0, prompt, 20)
        expected = pair.expected(prompt + output[:-1])[0, length - 1 :]
        assert output == expected.argmax(-1).tolist()
