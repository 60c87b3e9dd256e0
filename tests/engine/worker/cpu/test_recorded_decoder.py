from pathlib import Path
from random import Random

import pytest
import torch

from engine.step import RequestId, SampleSpec, Step, StepEntry, StepId
from engine.worker.cpu import operators
from engine.worker.cpu import recorded_decoder as recorded
from engine.worker.cpu.attention import backend
from engine.worker.cpu.recorded_decoder import RecordedDecoder
from engine.worker.lora.model import LoraModel
from engine.worker.model.rope import Rope, inverse_frequencies
from engine.worker.ports import StageModel
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint

VOCAB = 97


def recordings(worker: Worker) -> int:
    model = base_of(worker)
    if not isinstance(model, RecordedDecoder):
        return 0
    return len(model._for_all) + len(model._for_shapes)


def base_of(worker: Worker) -> StageModel:
    """The model that computes rows without LoRA adapters."""
    model = worker.parts.stage.model
    assert isinstance(model, LoraModel)
    return model.base


def logits_of_a_mixed_load(
    directory: Path, weights: str, threads: int = 1
) -> tuple[list[torch.Tensor], int]:
    """Prompts in pieces and decodes of up to 12 requests, together and apart."""
    worker = load_worker(
        directory, attention="cpu", weights=weights, kv_slots=2048, threads=threads
    )
    rng, driver, found = Random(3), Driver(worker), []
    for step in range(60):
        some = rng.sample(range(12), rng.choice([1, 2, 3, 12]))
        sizes = {request: rng.choice([1] * 12 + [9]) if step > 2 else 1 for request in some}
        pieces = [(r, [rng.randrange(VOCAB) for _ in range(size)]) for r, size in sizes.items()]
        found.append(driver.logits(*sorted(pieces, key=lambda piece: len(piece[1]))).clone())
    return found, recordings(worker)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize(
    "variant",
    [
        "llama_gelu",
        "qwen3",
        "gpt2",
        "olmo2",
        "gemma4",
        "mixtral",
        "deepseek_v3",
        "minicpm3",
        "qwen3_5_attention",
        "qwen3_5",
        "lfm2",
        "granite_hybrid",
    ],
)
def test_logits_have_the_same_bits_replayed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, weights: str
) -> None:
    make_checkpoint(tmp_path, variant)
    replayed, count = logits_of_a_mixed_load(tmp_path, weights)
    monkeypatch.setattr(recorded, "MAX_ROWS", 0)
    plain, none = logits_of_a_mixed_load(tmp_path, weights)
    if variant in ("mixtral", "deepseek_v3"):
        assert count > 3, "of each number of decodes, whose experts differ"
    elif variant in ("qwen3_5", "granite_hybrid", "lfm2"):
        assert count == 1, "of decodes: with prompts the recurrent layers have other runs than rows"
    else:
        assert count == 2, "of decodes, and of steps with prompts"
    assert none == 0
    for one, other in zip(replayed, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", ["deepseek_v3", "minicpm3"])
def test_decodes_whose_query_heads_threads_share_have_the_same_bits_replayed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    make_checkpoint(tmp_path, variant)
    whole, _ = logits_of_a_mixed_load(tmp_path, "float32")
    monkeypatch.setattr(backend, "MIN_ROWS", 1)
    shared, count = logits_of_a_mixed_load(tmp_path, "float32", threads=3)
    assert count > 1
    monkeypatch.setattr(recorded, "MAX_ROWS", 0)
    plain, _ = logits_of_a_mixed_load(tmp_path, "float32", threads=3)
    for each in zip(whole, shared, plain, strict=True):
        assert torch.equal(each[0], each[1])
        assert torch.equal(each[0], each[2])


@pytest.mark.parametrize("dim", [6, 20, 64, 128])
def test_angles_from_a_table_have_the_bits_of_those_that_are_computed(dim: int) -> None:
    rope = Rope(inverse_frequencies(dim, 10000.0), magnitude=1.25)
    table = recorded.RopeTable(rope)
    for each in ([5], [255, 0], [256], [1, 2, 3, 4000], [8191], [8192, 1], [*range(600)]):
        positions = torch.tensor(each)
        expected, found = rope.angles(positions), table.angles(positions)
        assert torch.equal(found.cos, expected.cos)
        assert torch.equal(found.sin, expected.sin)


def test_helpers_stay_awake_between_steps_if_the_next_one_is_known(tmp_path: Path) -> None:
    worker = load_worker(make_checkpoint(tmp_path), attention="cpu")
    base = base_of(worker)
    assert isinstance(base, RecordedDecoder)
    steps = [step_of(0), step_of(1), step_of(2, token=VOCAB)]
    for step in steps:
        worker.learn(step)
    is_awake = []
    for step in steps[:2]:
        worker.run(step)
        is_awake.append(base._pool.is_awake)
    with pytest.raises(ValueError, match="token ids"):
        worker.run(steps[2])
    assert [*is_awake, base._pool.is_awake] == [True, True, False]


def step_of(number: int, token: int = 1) -> Step:
    entry = StepEntry(RequestId(0), number, (token,), bytes(4), SampleSpec(GREEDY))
    return Step(StepId(number), (entry,))


def test_the_oldest_recording_is_dropped_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 2)
    make_checkpoint(tmp_path, "mixtral")
    worker = load_worker(tmp_path, attention="cpu")
    driver = Driver(worker)
    for together in (1, 2, 3, 4, 3, 2, 1):
        driver.logits(*((request, [5]) for request in range(together)))
        assert recordings(worker) <= 2


def test_a_decoder_with_operators_of_torch_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    monkeypatch.delitem(operators.ACTIVATIONS, "silu")  # as if there were no kernel for it
    driver, expected = (
        Driver(load_worker(tmp_path, attention=attention)) for attention in ("cpu", "reference")
    )
    for pieces in ([(0, [5, 6, 7]), (1, [8])], [(0, [1]), (1, [2])], [(1, [3])]):
        torch.testing.assert_close(driver.logits(*pieces), expected.logits(*pieces))
    assert isinstance(driver.worker, Worker)
    assert recordings(driver.worker) == 0


def test_logits_of_gated_attention_have_the_same_bits_whatever_else_is_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3_5_attention")
    monkeypatch.setattr(recorded, "MAX_ROWS", 0)
    rows = [(request, [request, 50 + request, 7]) for request in range(5)]
    worker = load_worker(tmp_path, attention="cpu")
    together = Driver(worker).logits(*rows)
    for row, expected in zip(rows, together, strict=True):
        assert torch.equal(Driver(worker).logits(row)[0], expected)


def test_logits_of_few_rows_are_recorded_with_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    worker = load_worker(tmp_path, attention="cpu")
    driver, base = Driver(worker), base_of(worker)
    assert isinstance(base, RecordedDecoder)
    few = 3
    driver.logits(*((request, [5]) for request in range(few)))
    assert base._computed is not None
    computed = base._computed.hidden
    assert base.logits(computed) is base._computed.logits
    assert base.logits(computed.clone()) is not base._computed.logits
    monkeypatch.setattr(recorded, "MAX_DECODES", few)
    driver.logits(*((request, [5]) for request in range(few + 1)))
    assert base._computed is None
