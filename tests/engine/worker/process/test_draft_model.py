import json
from dataclasses import replace
from pathlib import Path

import pytest

import adapters
from engine.errors import StartupError
from engine.step import ProposalSpec, RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.device import open_device
from engine.worker.process.drafts.draft_model import load_draft
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement, WorkerSettings
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import first_layers
from tests.worker_settings import changed as with_settings
from tests.worker_settings import worker_settings

BUILTIN = Path(adapters.__file__).parent / "builtin"
SETTINGS = worker_settings(str(BUILTIN), block_size=4, kv_slots=256, threads=1, max_model_len=512)


def load(settings: WorkerSettings) -> Worker:
    return Worker.load(settings, lambda *_: None)


def changed(directory: Path, **config: object) -> Path:
    """A draft model of one layer with other values in its config."""
    draft = first_layers(BUILTIN, directory / "draft", 1)
    known = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(known | config))
    return draft


def test_a_draft_model_with_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    draft = changed(tmp_path)
    table = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(StartupError, match=r"has another vocabulary than .* the same tokenizer"):
        load(replace(SETTINGS, draft_model=str(draft)))


def test_a_draft_model_with_a_shorter_context_is_rejected(tmp_path: Path) -> None:
    draft = changed(tmp_path, max_position_embeddings=256)
    with pytest.raises(StartupError, match="256 positions, fewer than the 512 that are served"):
        load(replace(SETTINGS, draft_model=str(draft)))


def test_a_draft_model_beside_stages_or_ranks_is_rejected() -> None:
    settings = replace(SETTINGS, draft_model=str(BUILTIN), max_model_len=0)
    with pytest.raises(StartupError, match="needs a single worker: no stages and no ranks"):
        load_draft_of(replace(settings, placement=Placement(num_stages=2)))


def load_draft_of(settings: WorkerSettings) -> None:
    device = open_device(settings)
    load_draft(settings, Checkpoint.open(settings.model), device, 128, lambda *_: None)


def test_a_draft_model_with_sliding_windows_is_rejected(tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "windows", "mistral_window")
    with pytest.raises(StartupError, match="the draft model: it has sliding-window layers"):
        load_draft_of(replace(SETTINGS, draft_model=str(draft)))


def test_the_memory_of_its_kv_is_counted() -> None:
    half = with_settings(SETTINGS, kv_slots=0, kv_memory=1 << 20)
    alone, beside_itself = load(half), load(replace(half, draft_model=str(BUILTIN)))
    assert beside_itself.report.num_blocks == alone.report.num_blocks // 2
    assert beside_itself.report.num_draft_parameters == alone.report.num_parameters


def test_it_proposes_what_the_model_samples_next() -> None:
    worker = load(replace(SETTINGS, draft_model=str(BUILTIN)))
    blocks = b"".join(number.to_bytes(4, "little") for number in range(8))
    greedy = SampleSpec(SamplingParams(temperature=0.0))
    prompt = tuple(range(40, 50))
    entry = StepEntry(RequestId(0), 0, prompt, blocks, greedy, proposal=ProposalSpec(3, 0))
    result = worker.run(Step(StepId(0), (entry,)))
    (proposal,) = result.proposals
    assert 0.0 < result.proposal_seconds < result.seconds
    token, found = result.tokens[0], []
    for place in range(3):
        one = StepEntry(RequestId(0), len(prompt) + place, (token,), blocks, greedy)
        (token,) = worker.run(Step(StepId(1 + place), (one,))).tokens
        found.append(token)
    assert list(proposal) == found
