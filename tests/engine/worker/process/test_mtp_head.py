from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models import qwen3_5

from engine.errors import StartupError
from engine.request import RequestSpec
from engine.step import ProposalSpec, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.process.worker import Worker
from engine.worker_settings import Placement
from tests.engine.worker.process.driving import GREEDY, Driver, settings_for
from tests.inline import play
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.drafts import a_model_drafter
from tests.models.mtp import VARIANT, make_exact_mtp_checkpoint, make_mtp_checkpoint, mtp_layer

PROMPT = tuple(range(3, 15))


def load(directory: Path) -> Worker:
    settings = replace(settings_for(directory, "cpu"), has_mtp=True, lookahead=1)
    return Worker.load(settings, lambda *_: None)


class Reference:
    """Greedy proposals as `transformers` computes the model and the layer."""

    def __init__(self) -> None:
        self._model = make_model(VARIANT)
        self._layer, self._around = mtp_layer()
        self._rope = qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(self._model.config)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._model.config.rms_norm_eps)
        return x * (1 + self._around[f"mtp.{name}.weight"])

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens behind `tokens`, of which the last one was sampled."""
        inner: Any = self._model.model
        features = inner(torch.tensor([tokens[:-1]])).last_hidden_state
        following, proposals = list(tokens[1:]), []
        for _ in range(count):
            embedded = self._norm("pre_fc_norm_embedding", inner.embed_tokens(_ids(following)))
            joined = torch.cat((embedded, self._norm("pre_fc_norm_hidden", features)), dim=-1)
            x, length = F.linear(joined, self._around["mtp.fc.weight"]), len(following)
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            out = self._layer(x, position_embeddings=self._rope(x, positions), attention_mask=mask)
            out = self._norm("norm", out if isinstance(out, Tensor) else out[0])
            proposals.append(int(self._model.lm_head(out[0, -1]).argmax()))
            following.append(proposals[-1])
            features = torch.cat((features, out[:, -1:]), dim=1)
        return tuple(proposals)


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)])


class Stepper:
    """Runs entries of one request, with proposals; blocks are there for some tokens more."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._driver = Driver(worker)

    def run(self, tokens: Sequence[int], *, samples: bool, proposes: int = 0) -> Any:
        entry: StepEntry = self._driver.entry(0, tokens, SampleSpec(GREEDY) if samples else None)
        if proposes:
            length = self._driver.lengths[0]
            self._driver.lengths[0] = length + proposes
            entry = entry._replace(
                blocks=self._driver.table(0, 0), proposal=ProposalSpec(proposes, entry.start)
            )
            self._driver.lengths[0] = length
        return self._worker.run(Step(StepId(0), (entry,)))


def test_a_whole_prompt_proposes_what_the_layer_predicts(tmp_path: Path) -> None:
    result = Stepper(load(make_mtp_checkpoint(tmp_path))).run(PROMPT, samples=True, proposes=3)
    assert result.proposals == (Reference().propose((*PROMPT, *result.tokens), 3),)


def test_rows_are_kept_until_proposals_are_wanted(tmp_path: Path) -> None:
    stepper = Stepper(load(make_mtp_checkpoint(tmp_path)))
    stepper.run(PROMPT[:5], samples=False)
    tokens = [*PROMPT, *stepper.run(PROMPT[5:], samples=True).tokens]
    for _ in range(2):
        tokens += stepper.run(tokens[-1:], samples=True).tokens
    result = stepper.run(tokens[-1:], samples=True, proposes=2)
    assert result.proposals == (Reference().propose((*tokens, *result.tokens), 2),)
    tokens += result.tokens
    result = stepper.run(tokens[-1:], samples=True, proposes=1)
    assert result.proposals == (Reference().propose((*tokens, *result.tokens), 1),)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_proposals_are_all_accepted(tmp_path: Path, temperature: float) -> None:
    worker = load(make_exact_mtp_checkpoint(tmp_path))
    specs = [
        RequestSpec((5, 7, 11 + seed), 30, SamplingParams(temperature=temperature, seed=seed))
        for seed in range(3)
    ]
    drafter = a_model_drafter(3)
    drafted, plain = play(worker, specs, drafter=drafter), play(worker, specs)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert drafter.counts.num_accepted == drafter.counts.num_drafts >= 40


def test_of_a_long_prompt_the_last_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.process.drafts.mtp_head.MAX_ROWS", 16)
    stepper = Stepper(load(make_exact_mtp_checkpoint(tmp_path)))
    prompt = [number % 90 for number in range(100)]
    for at in range(0, 90, 10):
        stepper.run(prompt[at : at + 10], samples=False)
    result = stepper.run(prompt[90:], samples=True, proposes=2)
    following = stepper.run(result.tokens, samples=True).tokens
    assert result.proposals == ((*following, *stepper.run(following, samples=True).tokens),)


def test_models_without_the_layer_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no layer for multi-token prediction \(tensors"):
        load(make_checkpoint(tmp_path / "hybrid", VARIANT))
    with pytest.raises(StartupError, match="LlamaForCausalLM has no layer for multi-token"):
        load(make_checkpoint(tmp_path / "llama", "llama"))


def test_stages_and_ranks_are_rejected(tmp_path: Path) -> None:
    settings = replace(
        settings_for(make_mtp_checkpoint(tmp_path), "cpu"),
        has_mtp=True,
        placement=Placement(num_ranks=2),
    )
    with pytest.raises(StartupError, match='"mtp" of --speculative-config needs a single worker'):
        Worker.load(settings, lambda *_: None)
