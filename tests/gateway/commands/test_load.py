import pytest

from gateway.commands.bench.load import RequestResult, Target, closed_loop, open_loop, send
from gateway.commands.bench.workload import (
    LengthRange,
    PlannedRequest,
    RandomPrompts,
    closed_loop_requests,
)
from gateway.commands.http_client import open_session
from tests.gateway.commands.conftest import Peer

REQUEST = PlannedRequest(0, 0.0, prompt_tokens=5, output_tokens=6)


def target(peer: Peer, session: object, *, is_chat: bool = False) -> Target:
    prompts = RandomPrompts(0, None if is_chat else LengthRange(1, 9))
    return Target(peer.url, session, prompts, {"model": "peer"}, is_chat)  # type: ignore[arg-type]


async def send_one(
    peer: Peer, *, is_chat: bool = False, seconds: float | None = None
) -> RequestResult:
    async with open_session(None, timeout=seconds) as session:
        aim = target(peer, session, is_chat=is_chat)
        return await send(aim, REQUEST, aim.body(REQUEST))


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_answer_has_its_times_and_the_servers_count(peer: Peer, is_chat: bool) -> None:
    outcome = await send_one(peer, is_chat=is_chat)
    assert outcome.error is None
    assert outcome.num_events == 3
    assert len(outcome.gaps) == 2
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 6)
    assert outcome.first_at is not None
    assert outcome.last_at is not None
    assert outcome.ended_at is not None
    assert outcome.sent_at < outcome.first_at <= outcome.last_at <= outcome.ended_at
    assert peer.bodies[0]["max_tokens"] == 6
    assert peer.bodies[0]["stream_options"] == {"include_usage": True}


async def test_without_usage_every_event_counts_as_a_token(peer: Peer) -> None:
    peer.usage = False
    outcome = await send_one(peer)
    assert (outcome.prompt_tokens, outcome.output_tokens) == (5, 3)


async def test_an_http_error_is_recorded_with_its_status(peer: Peer) -> None:
    peer.reject = (503, "full")
    outcome = await send_one(peer)
    assert (outcome.error, outcome.ended_at is not None) == ("HTTP 503: full", True)


async def test_an_error_event_and_a_stream_cut_short_are_failures(peer: Peer) -> None:
    peer.error_event = "lost"
    assert (await send_one(peer)).error == "lost"
    peer.error_event, peer.break_off = None, True
    assert (await send_one(peer)).error == "the stream ended early"


async def test_an_answer_whose_tokens_have_no_text_counts_and_starts_with_its_end(
    peer: Peer,
) -> None:
    peer.words = []
    peer.usage_tokens = 8
    outcome = await send_one(peer)
    assert (outcome.error, outcome.output_tokens) == (None, 8)
    assert outcome.first_at == outcome.finished_at is not None
    peer.usage_tokens = 0
    assert (await send_one(peer)).error == "the stream ended early"


async def test_an_answer_that_takes_too_long_is_a_failure(peer: Peer) -> None:
    peer.hold = True
    assert (await send_one(peer, seconds=0.2)).error == f"{peer.url} did not answer in time"


async def test_a_closed_loop_sends_every_request_once(peer: Peer) -> None:
    outcomes: list[RequestResult] = []
    requests = closed_loop_requests(9, LengthRange(5, 5), LengthRange(6, 6), seed=0)
    async with open_session(None) as session:
        await closed_loop(target(peer, session), requests, 4, outcomes.append)
    assert sorted(outcome.request.index for outcome in outcomes) == list(range(9))
    assert all(outcome.is_ok for outcome in outcomes)


async def test_an_open_loop_sends_no_request_before_its_time(peer: Peer) -> None:
    outcomes: list[RequestResult] = []
    requests = [PlannedRequest(index, 0.05 * index, 5, 6) for index in range(4)]
    async with open_session(None) as session:
        late = await open_loop(target(peer, session), requests, outcomes.append)
    by_index = sorted(outcomes, key=lambda outcome: outcome.request.index)
    first = by_index[0].sent_at
    assert all(s.sent_at - first >= s.request.at - 0.02 for s in by_index)
    assert late >= 0
