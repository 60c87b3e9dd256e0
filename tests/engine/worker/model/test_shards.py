"""Models cut over stages and ranks: together the workers compute what one computes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest
import torch

from engine.errors import StartupError, StepFailed, WorkerLost
from engine.step import (
    LAST_TOKEN,
    PromptTargets,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.model.stage import Stage
from engine.worker.ports import ModelShape, Shard
from engine.worker.ports.shard import layer_spans
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.engine.worker.process.fleet import Fleet, fleet
from tests.models.checkpoints import make_checkpoint

SHAPE = ModelShape(
    num_layers=12, num_heads=8, num_kv_heads=2, head_dim=16, hidden_size=128, inner_size=256,
    layer_parameters=128_000, vocab_size=1000, max_positions=100,
)  # fmt: skip
ON_CPU = (
    *("llama_biases", "llama_multi_query", "mistral_window", "qwen2_tied", "qwen2_moe"),
    *("qwen3_moe", "opt", "smollm3", "granite", "phi3_long", "olmo2", "gemma2", "gemma3"),
    *("gemma4", "gemma4_moe", "olmoe", "gpt_oss", "qwen3_5", "qwen3_5_moe", "glm4", "glm4_moe"),
    *("deepseek_v3", "qwen3_next", "lfm2", "granite_hybrid_moe", "granite_hybrid_groups"),
    *("bamba", "falcon_h1_norm", "nemotron_h", "cohere2", "hunyuan", "starcoder2"),
    *("ernie4_5_moe", "nemotron", "gpt2", "lfm2_moe", "minicpm"),
)
ON_REFERENCE = (
    *("llama_tied", "llama_wide_heads", "qwen3_biases", "mixtral", "stablelm", "olmo3", "glm"),
    *("deepseek_v2", "glm4_moe_lite", "granite_hybrid", "falcon_h1", "cohere", "seed_oss"),
    *("exaone4_window", "ernie4_5", "hunyuan_moe", "arcee", "minicpm3", "gpt2_untied"),
)
VARIANTS = dict.fromkeys(ON_CPU, "cpu") | dict.fromkeys(ON_REFERENCE, "reference")

# Whose first, last or other layers differ, or have states: the stages of all others are Llama's.
IN_STAGES = (
    *("llama_biases", "mistral_window", "qwen2_tied", "opt", "smollm3", "gpt2", "granite"),
    *("olmo3", "gemma3", "gemma4", "gpt_oss", "qwen3_moe", "qwen3_5", "deepseek_v3", "lfm2"),
    *("glm4_moe_lite", "granite_hybrid_groups", "bamba", "falcon_h1", "nemotron_h", "cohere2"),
    *("ernie4_5_moe", "minicpm3"),
)
IN_FOUR = ("llama_biases", "gemma4", "qwen3_moe", "qwen3_5")  # also cut by stages and by ranks


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(variant: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return make_checkpoint(tmp_path_factory.mktemp(variant), variant), VARIANTS[variant]


@pytest.fixture(scope="module")
def alone(checkpoint: tuple[Path, str]) -> Worker:
    return load_worker(checkpoint[0], attention=checkpoint[1])


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids=["2x1", "1x2", "2x2"])
def together(
    request: pytest.FixtureRequest, variant: str, checkpoint: tuple[Path, str]
) -> Iterator[Fleet]:
    stages, ranks = request.param
    if stages > 1 and variant not in (IN_STAGES if ranks == 1 else IN_FOUR):
        pytest.skip("what differs between families is cut by ranks")
    with fleet(checkpoint[0], stages, ranks, attention=checkpoint[1]) as workers:
        yield workers


def text(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def test_logits_of_a_ragged_mix_are_those_of_one_worker(alone: Worker, together: Fleet) -> None:
    texts = {request: text(40, seed=request) for request in range(4)}
    steps = [
        [(0, texts[0][:17]), (1, texts[1][:4]), (2, texts[2][:9])],
        [(0, texts[0][17:18]), (1, texts[1][4:5]), (2, texts[2][9:20]), (3, texts[3][:33])],
    ]
    one, many = Driver(alone, seed=1), Driver(together, seed=2)
    for pieces in steps:
        expected, found = one.logits(*pieces), many.logits(*pieces)
        if together.num_ranks == 1:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", IN_FOUR, indirect=True)
def test_generations_are_those_of_one_worker(alone: Worker, together: Fleet) -> None:
    one, many = Driver(alone, seed=1), Driver(together, seed=2)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    prompt = text(11, seed=8)
    assert many.generate(0, prompt, 8) == one.generate(0, prompt, 8)
    assert many.tokens((1, prompt, sampled)) == one.tokens((1, prompt, sampled))


def test_layers_that_read_the_kv_of_others_are_in_the_last_stage_with_them(tmp_path: Path) -> None:
    shape = Checkpoint.open(str(make_checkpoint(tmp_path, "gemma4"))).family.shape
    assert layer_spans(shape, 2) == [range(2), range(2, 6)]
    assert layer_spans(shape, 3) == [range(1), range(1, 2), range(2, 6)]
    with pytest.raises(StartupError, match=r"among 4 stages .*, and layers from 2 on share KV"):
        layer_spans(shape, 4)


@pytest.mark.parametrize("variant", ["llama_biases"], indirect=True)
def test_every_rank_rejects_a_wrong_step_and_runs_the_next(together: Fleet) -> None:
    expected = Driver(together).generate(0, [1, 2, 3], 4)
    outside = StepEntry(RequestId(0), 0, (97,), bytes(4), SampleSpec(GREEDY))
    wrong = Step(StepId(0), (outside,))
    for worker in together.workers:
        with pytest.raises(ValueError, match="token ids out of range"):
            worker.run(wrong)
    assert Driver(together).generate(0, [1, 2, 3], 4) == expected


def test_a_failing_stage_sends_the_reason_to_later_stages(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with fleet(tmp_path, 3, 1) as workers:
        first, *later = workers.workers
        expected = Driver(workers).generate(0, [1, 2, 3], 4)
        step = Step(StepId(7), (Driver(workers).entry(0, [5, 6], SampleSpec(GREEDY)),))
        with failing_layers(), pytest.raises(ZeroDivisionError):
            first.run(step)
        first.abandon(step, "no luck")
        for worker in later:
            with pytest.raises(StepFailed, match="no luck"):
                worker.run(step)
            worker.abandon(step, "no luck")
        assert Driver(workers).generate(0, [1, 2, 3], 4) == expected


def test_a_rank_that_fails_inside_a_collective_is_lost(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with fleet(tmp_path, 1, 2) as workers:
        first = workers.workers[0]
        step = Step(StepId(7), (Driver(workers).entry(0, [5, 6], SampleSpec(GREEDY)),))
        lost = pytest.raises(WorkerLost, match="step 7 failed while other ranks wait for this one")
        with failing_layers(), lost:
            first.run(step)


def test_hidden_states_come_in_while_the_stage_computes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with fleet(tmp_path, 2, 1) as workers:
        first, last = workers.workers
        driver = Driver(workers)
        steps = [
            Step(StepId(at), (driver.entry(0, [5, at], SampleSpec(GREEDY)),)) for at in range(1, 4)
        ]
        for step in steps:
            last.learn(step)
        for step in steps:
            first.run(step)
        answers = [last.run(step) for step in steps]
    assert [answer.step_id for answer in answers] == [1, 2, 3]
    assert all(len(answer.tokens) == 1 for answer in answers)


@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_steps_continue_from_tokens_that_only_the_workers_know(
    tmp_path: Path, stages: int, ranks: int
) -> None:
    alone = Driver(load_worker(make_checkpoint(tmp_path)))
    prompts = {request: text(5 + request, seed=request) for request in range(stages)}
    expected = {request: alone.generate(request, prompts[request], 8) for request in prompts}
    with fleet(tmp_path, stages, ranks, lookahead=1) as workers:
        driver = Driver(workers)
        steps: list[Step] = []
        for turn in range(8):
            for request, prompt in prompts.items():
                entry = driver.entry(
                    request, prompt if turn == 0 else [LAST_TOKEN], SampleSpec(GREEDY)
                )
                steps.append(Step(StepId(len(steps)), (entry,)))
        answers = workers.on_all(lambda worker: [worker.run(step).tokens for step in steps])
    scores = [token for (token,) in next(each for each in answers if each[0])]
    assert {request: scores[request::stages] for request in prompts} == expected


def test_the_first_stage_continues_after_a_failed_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with fleet(tmp_path, 2, 1, lookahead=1) as workers:
        first, last = workers.workers
        driver = Driver(workers)
        steps = [
            Step(StepId(at), (driver.entry(0, tokens, SampleSpec(GREEDY)),))
            for at, tokens in enumerate(([5, 6], [LAST_TOKEN]))
        ]
        with failing_layers(), pytest.raises(ZeroDivisionError):
            first.run(steps[0])
        first.abandon(steps[0], "no luck")
        with pytest.raises(StepFailed):
            last.run(steps[0])
        last.abandon(steps[0], "no luck")
        assert first.run(steps[1]).tokens == ()
        assert len(last.run(steps[1]).tokens) == 1


@contextmanager
def failing_layers() -> Iterator[None]:
    """The layers of every worker raise."""

    def run(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "run", run)
        patch.setattr(Stage, "read", run)
        yield


def test_workers_use_the_smallest_number_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = iter([1 << 20, 1 << 19])
    monkeypatch.setattr("engine.worker.cpu.device.available_bytes", lambda: next(memory))
    with fleet(make_checkpoint(tmp_path), 2, 1, kv_slots=0) as workers:
        first, last = (worker.report for worker in workers.workers)
    # 1 and 2 layers of 3: a block of the last stage is twice as large, its memory half
    block = 2 * 4 * 2 * 8 * 4
    assert (first.bytes_per_block, last.bytes_per_block) == (2 * block, block)
    assert first.num_blocks == last.num_blocks < 2048


def test_the_data_plane_leaves_no_socket_behind(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with fleet(tmp_path, 2, 2):
        pass  # libraries open descriptors of their own once
    gc.collect()  # what other tests left
    before = psutil.Process().num_fds()
    for _ in range(2):
        with fleet(tmp_path, 2, 2) as workers:
            assert psutil.Process().num_fds() > before
        del workers
    gc.collect()
    assert psutil.Process().num_fds() == before


def test_each_layer_head_and_id_is_on_one_stage_and_rank() -> None:
    for stages in (1, 2, 3, 5, 12):
        spans = layer_spans(SHAPE, stages)
        assert [layer for span in spans for layer in span] == list(range(12))
        assert all(spans)
    shards = [Shard.of(SHAPE, Placement(rank=rank, num_ranks=8), None) for rank in range(8)]
    for name, size in (("heads", 8), ("inner", 256), ("vocabulary", 1000)):
        assert [at for shard in shards for at in getattr(shard, name).run] == list(range(size))
    assert [shard.kv_heads.run.start for shard in shards] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_stage_with_a_large_head_has_fewer_layers() -> None:
    assert layer_spans(replace(SHAPE, vocab_size=1), 2) == [range(6), range(6, 12)]
    head_of_four_layers = replace(SHAPE, vocab_size=4000)
    assert layer_spans(head_of_four_layers, 2) == [range(8), range(8, 12)]
    assert layer_spans(replace(SHAPE, vocab_size=10**6), 3) == [
        range(5),
        range(5, 11),
        range(11, 12),
    ]


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        (Placement(num_stages=13), r"12 layers .* among 13 stages \(--pipeline-stages\)"),
        (Placement(num_ranks=3), r"8 attention heads .* among 3 ranks \(--tensor-ranks\)"),
        (Placement(num_ranks=16), "8 attention heads cannot be divided evenly among 16 ranks"),
    ],
)
def test_more_stages_than_layers_are_rejected(placement: Placement, line: str) -> None:
    with pytest.raises(StartupError, match=line):
        Shard.of(SHAPE, placement, None)


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (replace(SHAPE, inner_size=255), "255 MLP columns cannot be divided evenly among 2 ranks"),
        (
            replace(SHAPE, num_heads=6, num_kv_heads=3),
            "3 key-value heads cannot be divided evenly among 2 ranks",
        ),
    ],
)
def test_a_layer_that_ranks_cannot_divide_is_rejected(shape: ModelShape, line: str) -> None:
    with pytest.raises(StartupError, match=line):
        Shard.of(shape, Placement(num_ranks=2), None)


@pytest.mark.parametrize("variant", IN_FOUR, indirect=True)
def test_log_probabilities_of_a_prompt_come_from_all_ranks(alone: Worker, together: Fleet) -> None:
    prompt, targets = (1, 2, 3, 4, 5), PromptTargets(3, 0, (2, 3, 4, 5))
    scores = []
    for runs in (alone, together):
        entry = Driver(runs).entry(0, prompt, SampleSpec(GREEDY, logprobs=2))
        result = runs.run(Step(StepId(0), (entry._replace(prompt_logprobs=targets),)))
        scores.append([*result.prompt_logprobs[0], *result.logprobs])
    for one, many in zip(*scores, strict=True):
        assert one is not None
        assert many is not None
        assert many.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [token for token, _ in many.top] == [token for token, _ in one.top]
