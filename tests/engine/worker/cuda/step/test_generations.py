"""Steps launched ahead on stand-ins for a GPU produce the same tokens as the CPU's worker.

Prompts in pieces beside decodes, clients that leave, preemption with and without a host tier,
penalties, grammars' bans, log-probabilities and requests that fail, all with two steps in flight.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine.errors import NoAllowedToken
from engine.loop import Engine
from engine.policy.priority import LowestPriorityFirst
from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from tests.engine.worker.cuda.launching import LaunchesSteps, LaunchingExecutor, on_stand_ins
from tests.engine.worker.process.driving import load_worker
from tests.inline import RequestOutcome, engine_over, play, read_all, serve
from tests.models.checkpoints import make_checkpoint

VOCAB = 97
COUNT = 14
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
WAYS = (
    GREEDY,
    SEEDED,
    replace(SEEDED, presence_penalty=1.5),
    replace(GREEDY, frequency_penalty=0.7, logit_bias=((5, 2.0), (6, -3.0))),
    replace(GREEDY, repetition_penalty=1.3),
    replace(SEEDED, repetition_penalty=0.8, min_p=0.02, top_k=20),
    replace(GREEDY, logit_bias=((VOCAB + 5, 1.0),)),  # is refused by the worker
)


def an_ask(number: int) -> RequestSpec:
    random = Random(number)
    return RequestSpec(
        tuple(random.choices(range(VOCAB), k=2 + 5 * number % 23)),
        max_tokens=10 + 3 * number % 13,
        sampling=WAYS[number % len(WAYS)],
        end_ids=frozenset(range(0, VOCAB, 20)),
        min_tokens=4 * (number % 3),
        logprobs=number % 4 if number % 2 else None,
        prompt_logprobs=1 if number % 5 == 0 else None,
        priority=COUNT - number,
    )


async def outcomes_of(
    on_gpu: LaunchesSteps, lookahead: int, num_blocks: int, seed: int
) -> list[RequestOutcome]:
    """Serve all requests, more urgent ones later; every fourth is cancelled in the middle."""
    engine = engine_over(
        on_gpu.worker.report,
        LaunchingExecutor(on_gpu, 1 + lookahead, Random(seed)),
        num_blocks=num_blocks,
        lookahead=lookahead,
        policy=LowestPriorityFirst(),
        max_batch_size=6,
        max_batch_tokens=13,
    )

    async def client(engine: Engine, spec: RequestSpec) -> RequestOutcome:
        return await read_all(engine, spec, 3 if (COUNT - spec.priority) % 4 == 3 else None)

    return await serve(engine, [an_ask(number) for number in range(COUNT)], client)


def setbacks(outcomes: list[RequestOutcome], name: str) -> int:
    """How often all requests together were swapped or computed again."""
    return sum(getattr(one.request.setbacks, name) for one in outcomes)


def values(logprobs: list[TokenLogprobs]) -> list[float]:
    return [one.logprob for one in logprobs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutcome]:
    """The outputs of the CPU's worker, without lookahead and with KV blocks for all."""
    return play(load_worker(model), [an_ask(number) for number in range(COUNT)])


@pytest.mark.parametrize(
    ("lookahead", "num_blocks", "host_kv_memory", "cuda_graphs"),
    [
        (0, 128, 0, True),
        (1, 128, 0, False),
        (1, 20, 0, True),
        (1, 20, 1 << 16, True),
    ],
)
async def test_what_is_launched_ahead_says_what_the_cpu_says(
    model: Path,
    expected: list[RequestOutcome],
    lookahead: int,
    num_blocks: int,
    host_kv_memory: int,
    cuda_graphs: bool,
) -> None:
    on_gpu = on_stand_ins(
        model,
        lookahead=lookahead,
        host_kv_memory=host_kv_memory,
        cuda_graphs=cuda_graphs,
        max_batch_size=6,
        max_batch_tokens=13,
    )
    outcomes = await outcomes_of(on_gpu, lookahead, num_blocks, seed=num_blocks)
    for number, (one, whole) in enumerate(zip(outcomes, expected, strict=True)):
        assert type(one.error) is type(whole.error)
        assert one.tokens == whole.tokens[: len(one.tokens)]
        assert len(one.tokens) == len(whole.tokens) or number % 4 == 3
        found, wanted = values(one.logprobs), values(whole.logprobs)
        assert found == pytest.approx(wanted[: len(found)], abs=1e-4)
        assert len(found) == (len(one.tokens) if number % 2 else 0)
        found, wanted = values(one.prompt_logprobs), values(whole.prompt_logprobs)
        assert found == pytest.approx(wanted, abs=1e-4)
    assert {type(one.error) for one in outcomes} == {type(None), NoAllowedToken}
    if num_blocks < 128:
        assert setbacks(outcomes, "num_swaps" if host_kv_memory else "num_preemptions")
    replays = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
    assert (replays > 5) == cuda_graphs
