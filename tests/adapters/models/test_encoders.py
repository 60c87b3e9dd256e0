from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import StartupError
from engine.pooling import PoolSpec
from engine.request import RequestSpec
from engine.step import RequestId, SamplingParams, Step, StepEntry, StepId
from engine.worker.process.worker import Worker
from tests.adapters.models.test_pooled_decoders import a_worker, vectors
from tests.inline import play
from tests.models.encoders import VARIANTS, describe_pooling, make_encoder

PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 2, 9, 23, 40, 62)]
WHOLE: dict[str, Any] = {"chunks_prompts": False, "max_batch_tokens": 70, "max_batch_size": 4}
TOLERANCE = 2e-5
MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


def states_of(model: Any, prompt: tuple[int, ...], **inputs: Any) -> torch.Tensor:
    """transformers' final hidden states `[tokens, hidden]`."""
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt]), **inputs).last_hidden_state[0]
    return states


def pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    of_mode = {"cls_token": states[0], "mean_tokens": states.mean(0), "lasttoken": states[-1]}
    return of_mode[mode]


def served(tmp_path: Path, variant: str, mode: str = "mean_tokens", **fields: Any) -> Any:
    """A model in transformers, and a worker that serves its checkpoint."""
    model = make_encoder(variant)
    model.save_pretrained(tmp_path)
    describe_pooling(tmp_path, mode, normalizes=fields.pop("normalizes", True))
    return model, a_worker(tmp_path, "auto", **fields)


@pytest.mark.parametrize(
    ("variant", "attention"),
    [*((variant, "cpu") for variant in VARIANTS), ("modernbert", "reference")],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, variant: str, attention: str) -> None:
    model, worker = served(tmp_path, variant, attention=attention, normalizes=False)
    assert worker.report.windows == ()
    for prompt, vector in zip(PROMPTS, vectors(worker, PROMPTS, **WHOLE), strict=True):
        expected = states_of(model, prompt).mean(0).numpy()
        assert np.abs(vector - expected).max() < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_every_pooling_method_reads_its_hidden_states(tmp_path: Path, mode: str) -> None:
    model, worker = served(tmp_path, "bert", mode)
    assert worker.report.pooling is not None
    assert (worker.report.pooling.method, worker.report.pooling.is_whole) == (MODES[mode], True)
    for prompt, vector in zip(PROMPTS, vectors(worker, PROMPTS, **WHOLE), strict=True):
        expected = torch.nn.functional.normalize(pooled(states_of(model, prompt), mode), dim=0)
        assert np.abs(vector - expected.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_a_vector_has_the_same_bits_alone_and_in_company(tmp_path: Path, variant: str) -> None:
    _, worker = served(tmp_path, variant)
    alone = [vectors(worker, [prompt], **WHOLE)[0] for prompt in PROMPTS]
    for prompts in (PROMPTS, PROMPTS[::-1]):
        together = vectors(worker, prompts, **WHOLE)
        ordered = together if prompts is PROMPTS else together[::-1]
        assert [each.tobytes() for each in ordered] == [each.tobytes() for each in alone]


def test_the_second_text_of_a_pair_has_token_type_1(tmp_path: Path) -> None:
    model, worker = served(tmp_path, "bert", normalizes=False)
    prompt, first_len = PROMPTS[3], 9
    types = torch.tensor([[int(at >= first_len) for at in range(len(prompt))]])
    specs = [
        RequestSpec(prompt, 0, SamplingParams(), pooling=PoolSpec(None, split))
        for split in (None, first_len)
    ]
    outcomes = play(worker, specs, **WHOLE)
    found = [np.frombuffer(each.request.vector, "<f4") for each in outcomes]
    for vector, inputs in zip(found, ({}, {"token_type_ids": types}), strict=True):
        expected = states_of(model, prompt, **inputs).mean(0).numpy()
        assert np.abs(vector - expected).max() < TOLERANCE


def test_a_worker_that_dies_computes_whole_prompts_again(tmp_path: Path) -> None:
    _, worker = served(tmp_path, "bert")
    undisturbed = vectors(worker, PROMPTS, **WHOLE)
    again = vectors(worker, PROMPTS, dies_in=[1, 3], **WHOLE)
    assert [each.tobytes() for each in again] == [each.tobytes() for each in undisturbed]


def step_of(worker: Worker, start: int) -> Step:
    entry = StepEntry(RequestId(0), start, (5, 6), b"", None, pooling=PoolSpec())
    return Step(StepId(0), (entry,))


def test_a_part_of_a_prompt_is_rejected(tmp_path: Path) -> None:
    _, worker = served(tmp_path, "bert")
    assert len(worker.run(step_of(worker, 0)).vectors) == 1
    with pytest.raises(ValueError, match="computes a prompt from its first token on"):
        worker.run(step_of(worker, 2))


def test_max_seq_length_bounds_the_context(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    _, worker = served(tmp_path, "bert")
    assert worker.report.max_model_len == 20


@pytest.mark.parametrize(
    ("task", "mode", "message"),
    [
        ("generate", "mean_tokens", "BertModel does not generate text"),
        ("score", "mean_tokens", "BertModel has no head that scores"),
        ("auto", "max_tokens", "max_tokens"),
    ],
)
def test_a_task_or_pooling_that_is_not_supported_is_named(
    tmp_path: Path, task: str, mode: str, message: str
) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    describe_pooling(tmp_path, mode)
    with pytest.raises(StartupError, match=message):
        a_worker(tmp_path, task)
