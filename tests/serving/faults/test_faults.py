import pytest
from safetensors.torch import load_file, save_file

from engine.errors import NoAllowedToken, RowFailed
from engine.request import FinishReason, RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint

VOCAB, BAD = 97, 90  # the embedding of BAD is no number
GREEDY = SamplingParams(temperature=0.0)
NO_BAD = SamplingParams(temperature=0.0, logit_bias=((BAD, -100.0),))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory = make_checkpoint(tmp_path_factory.mktemp("flawed"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD, 4] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    return load_worker(directory, attention="cpu")


def good(seed: int) -> RequestSpec:
    return RequestSpec((1, 2, seed), 6, NO_BAD)


def test_a_row_of_nan_logits_fails_alone(worker: Worker) -> None:
    specs = [good(3), RequestSpec((1, BAD, 3), 6, GREEDY), good(4)]
    first, failed, last = play(worker, specs)
    assert isinstance(failed.error, RowFailed)
    assert failed.tokens == []
    for one, seed in ((first, 3), (last, 4)):
        assert one.finish is FinishReason.LENGTH
        assert one.tokens == play(worker, [good(seed)])[0].tokens


def test_a_row_may_fail_after_some_tokens(worker: Worker) -> None:
    leads_there = SamplingParams(temperature=0.0, logit_bias=((BAD, 100.0),))
    first, failed = play(worker, [good(3), RequestSpec((5, 6), 6, leads_there)])
    assert failed.tokens == [BAD]
    assert isinstance(failed.error, RowFailed)
    assert len(first.tokens) == 6


def test_a_request_that_bans_every_token_fails_with_that_reason(worker: Worker) -> None:
    everything = frozenset(range(VOCAB))
    banning = RequestSpec((1, 2), 6, GREEDY, end_ids=everything, min_tokens=2)
    first, failed = play(worker, [good(3), banning])
    assert isinstance(failed.error, NoAllowedToken)
    assert "banned" in str(failed.error)
    assert len(first.tokens) == 6


def test_a_prompt_with_nan_log_probabilities_fails_alone(worker: Worker) -> None:
    specs = [
        good(3),
        RequestSpec((1, BAD, 3, 4, 5, 6, 7, 8, 9, 10), 6, GREEDY, prompt_logprobs=1),
        good(4),
    ]
    first, failed, last = play(worker, specs, max_batch_tokens=4, max_batch_size=3)
    assert isinstance(failed.error, RowFailed)
    assert "prompt" in str(failed.error)
    assert len(first.tokens) == len(last.tokens) == 6
