from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import pytest

from engine.control.admission import SwapMode
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import Driver, settings_for
from tests.inline import RequestOutcome, play
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter
from tests.worker_settings import changed

VARIANTS = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "smollm3", "granite"),
    *("phi3_long", "stablelm", "olmo2", "olmo3", "gemma2", "gemma3", "gemma4"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "qwen3_5", "qwen3_5_moe"),
    *("granite_hybrid_groups", "bamba", "falcon_h1", "nemotron_h"),
    *("qwen3_next", "lfm2", "lfm2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("glm4_moe", "glm", "glm4", "cohere", "cohere2", "exaone4_window", "ernie4_5", "hunyuan"),
    *("seed_oss", "ernie4_5_moe", "hunyuan_moe", "nemotron", "arcee", "minicpm3", "minicpm"),
    "starcoder2_full",  # with windows only, 4 requests never need more KV
)
# Of each kind of KV, state and position one: what the engine does with them is the same.
KINDS = (
    *("llama", "gpt2", "mistral", "phi3_long", "gemma3", "gemma4", "gpt_oss", "mixtral"),
    *("qwen3_5", "granite_hybrid_groups", "falcon_h1", "lfm2", "deepseek_v3", "minicpm3"),
)
EACH_KIND = pytest.mark.parametrize("served", KINDS, indirect=True)
# And of each other kind of layer, whose bits may not depend on the step that computes it.
LAYERS = (
    *("opt", "qwen3", "stablelm", "olmo2", "cohere2", "nemotron", "qwen2_moe", "glm4_moe"),
    *("deepseek_v2", "nemotron_h", "qwen3_next"),
)
COUNT, NEW_TOKENS, SHARED = 4, 20, 16


@dataclass(frozen=True)
class Served:
    """A worker with host memory, and requests to it."""

    worker: Worker
    specs: tuple[RequestSpec, ...]

    @cached_property
    def expected(self) -> list[list[int]]:
        """The greedy outputs of each request alone."""
        return self.alone(self.specs)

    def alone(self, specs: Sequence[RequestSpec]) -> list[list[int]]:
        driver = Driver(self.worker)
        return [driver.generate(at, spec.prompt, spec.max_tokens) for at, spec in enumerate(specs)]


def prompts() -> list[tuple[int, ...]]:
    """Four prompts with the same beginning, of which the first has a snapshot behind it."""
    shared = Random(0).choices(range(97), k=SHARED)
    return [(*shared, *Random(at + 1).choices(range(97), k=4 + at)) for at in range(COUNT)]


@pytest.fixture(scope="module", params=VARIANTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), str(request.param))
    settings = changed(settings_for(directory, "cpu"), host_kv_memory=1 << 18)
    return Served(
        Worker.load(settings, lambda *_: None),
        tuple(RequestSpec(each, NEW_TOKENS, SamplingParams(temperature=0.0)) for each in prompts()),
    )


def tokens(outcomes: Sequence[RequestOutcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes]


def test_a_shared_prefix_is_computed_once(served: Served) -> None:
    specs = [replace(spec, max_tokens=5) for spec in served.specs[:3]]
    outcomes = play(served.worker, specs, max_batch_size=1, max_batch_tokens=8)
    assert tokens(outcomes) == served.alone(specs)
    cached = [outcome.request.num_cached for outcome in outcomes]
    assert cached == [0, SHARED, SHARED]


@EACH_KIND
def test_preempted_requests_are_computed_again_or_swapped_and_continue_as_they_were(
    served: Served,
) -> None:
    for swap, reuses in ((SwapMode.OFF, True), (SwapMode.PROACTIVE, False)):
        outcomes = play(
            served.worker,
            served.specs,
            num_blocks={1: 14, 2: 24, 3: 28}[len(served.worker.report.windows)],
            max_batch_size=4,
            max_batch_tokens=4,
            swap=swap,
            reuses_prefixes=reuses,
        )
        assert tokens(outcomes) == served.expected
        setbacks = [outcome.request.setbacks for outcome in outcomes]
        assert any(each.num_preemptions for each in setbacks) == (swap is SwapMode.OFF)
        assert any(each.num_swaps for each in setbacks) == (swap is not SwapMode.OFF)


@EACH_KIND
def test_right_and_wrong_drafts_change_no_output(served: Served) -> None:
    drafter = a_drafter(served.expected)
    outcomes = play(
        served.worker, served.specs, max_batch_size=4, max_batch_tokens=32, drafter=drafter
    )
    assert tokens(outcomes) == served.expected
    assert drafter.counts.num_drafts > drafter.counts.num_accepted > 0


@pytest.mark.parametrize("served", [*KINDS, *LAYERS], indirect=True)
def test_requests_continue_with_the_same_bits_after_a_worker_has_died(served: Served) -> None:
    """Their tokens are computed again as parts of prompts, and the log-probabilities are equal."""
    specs = [replace(spec, logprobs=2) for spec in served.specs]
    undisturbed = play(served.worker, specs, max_batch_size=4)
    outcomes = play(served.worker, specs, max_batch_size=4, max_batch_tokens=12, dies_in=(9, 20))
    assert tokens(outcomes) == served.expected
    assert [one.logprobs for one in outcomes] == [one.logprobs for one in undisturbed]
