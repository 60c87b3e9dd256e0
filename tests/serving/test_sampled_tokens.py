"""The whole engine samples what the definition of sampling gives for transformers' logits."""

from dataclasses import replace
from pathlib import Path

from engine.request import RequestSpec
from engine.step import SampleSpec
from tests.contracts.test_sampling import SPECS, accepted
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.loras import logits_of

VOCAB = 97
PROMPT = (5, 17, 17, 60, 3, 44, 5, 5)


def test_each_token_is_that_of_its_request_seed_and_position(tmp_path: Path) -> None:
    model, worker = make_model("llama"), load_worker(make_checkpoint(tmp_path), attention="cpu")
    requests = [
        RequestSpec(PROMPT, 4, replace(spec.sampling, seed=seed))
        for spec in SPECS.values()
        for seed in range(8)
    ]
    outcomes = play(worker, requests, max_batch_size=64)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.tokens) == 4
        for at, token in enumerate(outcome.tokens):
            output = tuple(outcome.tokens[:at])
            logits = logits_of(model, [*PROMPT, *output]).double().numpy()
            row = SampleSpec(request.sampling, prompt=PROMPT, output=output)
            assert token in accepted(logits, row, len(PROMPT) + at)
    assert len({tuple(one.tokens) for one in outcomes}) > 3 * len(SPECS), "seeds decide"
