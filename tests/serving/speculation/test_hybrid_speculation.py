"""Speculation over recurrent layers changes no output: any drafts, any parameters, any shortage.

`PODWAY_EXAMPLES=1000` runs as many cases.
"""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter, a_model_drafter
from tests.models.mtp import make_mtp_checkpoint
from tests.serving.speculation.disturbances import cases, disturbances, results
from tests.worker_settings import worker_settings

BLOCK_SIZE = 4


def load(directory: Path, *, has_mtp: bool = False) -> Worker:
    kept = worker_settings(
        str(directory),
        block_size=BLOCK_SIZE,
        kv_slots=512,
        host_kv_memory=1 << 18,
        threads=1,
        lookahead=1,
        has_mtp=has_mtp,
    )
    return Worker.load(kept, lambda *_: None)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return load(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5"))


@pytest.fixture(scope="module")
def worker_with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """The same model; the layer for multi-token prediction has random weights."""
    return load(make_mtp_checkpoint(tmp_path_factory.mktemp("mtp")), has_mtp=True)


@st.composite
def spec_lists(draw: st.DrawFn) -> list[RequestSpec]:
    shared = Random(0).choices(range(97), k=9)
    found = []
    for at in range(draw(st.integers(1, 4))):
        prompt = (*shared[: draw(st.sampled_from((0, 4, 9)))], at, *range(draw(st.integers(0, 9))))
        sampling = SamplingParams(
            temperature=draw(st.sampled_from((0.0, 0.8))),
            top_k=draw(st.sampled_from((0, 20))),
            repetition_penalty=draw(st.sampled_from((1.0, 1.3))),
            seed=at,
        )
        count = draw(st.integers(1, 24))
        found.append(
            RequestSpec(prompt, count, sampling, logprobs=draw(st.sampled_from((None, 2))))
        )
    return found


@cases(40)
@given(data=st.data())
def test_any_drafts_leave_every_output_as_it_is(worker: Worker, data: st.DataObject) -> None:
    specs = data.draw(spec_lists())
    plain = play(worker, specs)
    drafter = a_drafter(
        [one.tokens for one in plain],
        data.draw(st.sampled_from((0.0, 0.2, 0.5))),
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(1, 7)),
    )
    few = {"num_blocks": (0, 12), "num_states": (0, 2, 5), "reuses_prefixes": (True, False)}
    drafted = play(worker, specs, drafter=drafter, **disturbances(data, **few))
    assert results(drafted) == results(plain)


@cases(25)
@given(data=st.data())
def test_multi_token_prediction_leaves_every_output_as_it_is(
    worker: Worker, worker_with_mtp: Worker, data: st.DataObject
) -> None:
    specs = data.draw(spec_lists())
    drafter = a_model_drafter(data.draw(st.integers(1, 4)))
    few = disturbances(data, num_blocks=(0, 12), num_states=(0, 5))
    drafted = play(worker_with_mtp, specs, drafter=drafter, **few)
    assert results(drafted) == results(play(worker, specs))


def test_drafts_are_accepted_and_the_next_turn_starts_behind_the_output(worker: Worker) -> None:
    prompt = tuple(Random(1).choices(range(97), k=10))
    spec = RequestSpec(prompt, 30, SamplingParams(temperature=0.0))
    (plain,) = play(worker, [spec])
    drafter = a_drafter([plain.tokens] * 2, error_rate=0.2)
    turn = RequestSpec((*prompt, *plain.tokens, 5, 6), 4, SamplingParams(temperature=0.0))
    first, second = play(worker, [spec, turn], max_batch_size=1, drafter=drafter)
    assert first.tokens == plain.tokens
    assert drafter.counts.num_drafts > drafter.counts.num_accepted >= 15
    assert second.request.num_cached >= (len(prompt) + 29 - 7) // BLOCK_SIZE * BLOCK_SIZE


def test_without_slots_for_the_states_of_drafts_there_are_none(worker: Worker) -> None:
    spec = RequestSpec((1, 2, 3), 20, SamplingParams(temperature=0.0))
    (plain,) = play(worker, [spec])
    drafter = a_drafter([plain.tokens], error_rate=0.0)
    (found,) = play(worker, [spec], num_states=2, drafter=drafter)
    assert found.tokens == plain.tokens
    assert drafter.counts.num_drafts == 0
