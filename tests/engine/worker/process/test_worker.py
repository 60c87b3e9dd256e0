import struct
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError, StartupError
from engine.step import (
    Grammar,
    GrammarKind,
    RequestId,
    SampleSpec,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.cpu.linears.int8 import FASTEST
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import worker_settings

VOCAB = 97


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "mistral_window"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, str(request.param))
    return load_worker(directory, attention="cpu", kv_slots=4096)


def text(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_the_first_row_with_a_grammar_opens_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening takes a second and 120 MiB with a large vocabulary, so a start does not do it."""
    opened: list[Checkpoint] = []

    def fail_to_open(checkpoint: Checkpoint) -> None:
        opened.append(checkpoint)
        raise EngineError("there is no vocabulary")

    monkeypatch.setattr(Checkpoint, "open_grammars", fail_to_open)
    worker = load_worker(make_checkpoint(tmp_path), attention="cpu")
    driver = Driver(worker)
    driver.tokens((0, text(3, 1), GREEDY))
    assert not opened
    spec = SampleSpec(GREEDY, grammar=Grammar(GrammarKind.REGEX, "a"))
    result = worker.run(Step(StepId(1), (driver.entry(1, text(3, 2), spec),)))
    assert len(opened) == 1
    assert [fault.message for fault in result.faults] == ["grammar: there is no vocabulary"]


def test_logits_are_bit_identical_however_the_tokens_are_split_into_steps(worker: Worker) -> None:
    tokens, mates = text(60, 1), [text(40, seed) for seed in (2, 3, 4)]
    (whole,) = Driver(worker).logits((0, tokens))
    cut = Driver(worker, seed=1)
    for start, end in ((0, 13), (13, 14), (14, 47), (47, 59)):
        cut.logits(
            (0, tokens[start:end]),
            *[(i, mate[start // 2 :][:5]) for i, mate in enumerate(mates, start + 1)],
        )
    beside = cut.logits((90, mates[0]), (0, tokens[59:]), (91, mates[1]))
    if worker.report.architecture == "GPT2LMHeadModel":  # its norms and gelu are torch's
        torch.testing.assert_close(beside[1], whole, rtol=0, atol=1e-5)
    else:
        assert torch.equal(beside[1], whole)


def test_the_report_states_the_facts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", eos_token_id=[2, 5])
    progress: list[tuple[str, int, int]] = []
    settings = worker_settings(
        model=str(tmp_path), block_size=8, kv_slots=84, max_model_len=100, threads=2
    )
    report = Worker.load(settings, lambda *news: progress.append(news)).report
    assert report.architecture == "LlamaForCausalLM"
    assert (report.dtype, report.device, report.attention) == ("float32", "cpu", "cpu")
    assert (report.vocab_size, report.max_model_len) == (97, 100)
    assert report.eos_token_ids == (2, 5)
    assert (report.num_blocks, report.block_size, report.threads) == (11, 8, 2)
    assert report.kv_dtype == "float16"
    assert report.bytes_per_block == 2 * 3 * 8 * 2 * 8 * 2
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    assert report.num_parameters == 2 * 97 * 32 + 32 + 3 * layer
    assert progress[-1] == ("weights", 30, 30)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_int8_weights_keep_the_most_likely_tokens(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    exact, rounded = (
        load_worker(tmp_path, attention="cpu", weights=weights) for weights in ("float32", "int8")
    )
    assert exact.report.weights == "float32"
    assert rounded.report.weights == f"int8 ({FASTEST.name})"
    logits, found = (Driver(each, seed=1).logits((0, text(40, 1))) for each in (exact, rounded))
    assert not torch.equal(logits, found)
    spread = logits.std()
    torch.testing.assert_close(found, logits, rtol=0, atol=float(spread) / 10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_a_small_kv_dtype_keeps_the_most_likely_tokens_and_is_deterministic(
    tmp_path: Path, dtype: str
) -> None:
    model = make_checkpoint(tmp_path, "llama")
    exact = load_worker(model, attention="cpu")
    small = load_worker(model, attention="cpu", kv_dtype=dtype)
    plain = load_worker(model, kv_dtype=dtype)
    assert small.report.kv_dtype == dtype
    assert small.report.bytes_per_block * 2 <= exact.report.bytes_per_block
    test_logits_are_bit_identical_however_the_tokens_are_split_into_steps(small)
    logits, found, oracle = (
        Driver(each, seed=1).logits((0, text(60, 1))) for each in (exact, small, plain)
    )
    spread = float(logits.std())
    torch.testing.assert_close(found, logits, rtol=0, atol=spread / 10)
    torch.testing.assert_close(found, oracle, rtol=0, atol=spread / 20)
    assert not torch.equal(found, logits)


def test_a_wrong_step_fails_and_the_next_one_runs(worker: Worker) -> None:
    expected = Driver(worker).generate(0, [1, 2, 3], 4)
    outside = StepEntry(RequestId(0), 0, (1,), struct.pack("<i", 1 << 20), SampleSpec(GREEDY))
    for entry in (outside, StepEntry(RequestId(0), 0, (VOCAB,), bytes(4), SampleSpec(GREEDY))):
        with pytest.raises(ValueError, match="out of range"):
            worker.run(Step(StepId(0), (entry,)))
    assert Driver(worker).generate(0, [1, 2, 3], 4) == expected


def test_nan_weights_are_rejected_at_start(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path)
    with pytest.raises(StartupError, match="NaN or infinite logits"):
        load_worker(tmp_path, attention="cpu")


def test_threads_do_not_change_the_bits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    logits = []
    for threads in (1, 3):
        settings = worker_settings(model=str(tmp_path), kv_slots=256, threads=threads)
        worker = Worker.load(settings, lambda *_: None)
        logits.append(Driver(worker).logits((0, text(50, 1)), (1, text(7, 2))))
    assert torch.equal(*logits)


def test_max_model_len_limits_the_context(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    settings = worker_settings(model=str(tmp_path), max_model_len=20, kv_slots=64)
    worker = Worker.load(settings, lambda *_: None)
    Driver(worker).logits((0, text(20, 0)))
    with pytest.raises(ValueError, match="positions"):
        Driver(worker).logits((0, text(21, 0)))
