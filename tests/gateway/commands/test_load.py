"""What the client notes of each request, and how many it keeps in flight."""

import pytest

from gateway.commands.bench.load import Outcome, Target, closed_loop, open_loop, send
from gateway.commands.bench.workload import RandomPrompts, Shot, Span, at_once
from gateway.commands.http_client import open_session
from tests.gateway.commands.conftest import Peer

SHOT = Shot(0, 0.0, prompt_tokens=5, output_tokens=6)


def target(peer: Peer, session: object, *, is_chat: bool = False) -> Target:
    prompts = RandomPrompts(0, None if is_chat else Span(1, 9))
    return Target(peer.url, session, prompts, {"model": "peer"}, is_chat)  # type: ignore[arg-type]


async def one(peer: Peer, *, is_chat: bool = False, seconds: float | None = None) -> Outcome:
    async with open_session(None, timeout=seconds) as session:
        aim = target(peer, session, is_chat=is_chat)
        return await send(aim, SHOT, aim.body(SHOT))


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_answer_has_its_times_and_the_servers_count(peer: Peer, is_chat: bool) -> None:
    seen = await one(peer, is_chat=is_chat)
    assert seen.error is None
    assert seen.num_events == 3
    assert len(seen.gaps) == 2
    assert (seen.prompt_tokens, seen.output_tokens) == (7, 6)
    assert seen.first_at is not None
    assert seen.last_at is not None
    assert seen.ended_at is not None
    assert seen.sent_at < seen.first_at <= seen.last_at <= seen.ended_at
    assert peer.bodies[0]["max_tokens"] == 6
    assert peer.bodies[0]["stream_options"] == {"include_usage": True}


async def test_without_usage_every_event_counts_as_a_token(peer: Peer) -> None:
    peer.usage = False
    seen = await one(peer)
    assert (seen.prompt_tokens, seen.output_tokens) == (5, 3)


async def test_a_refusal_is_noted_with_its_status(peer: Peer) -> None:
    peer.refuse = (503, "full")
    seen = await one(peer)
    assert (seen.error, seen.ended_at is not None) == ("HTTP 503: full", True)


async def test_an_error_event_and_a_stream_cut_short_are_failures(peer: Peer) -> None:
    peer.error_event = "lost"
    assert (await one(peer)).error == "lost"
    peer.error_event, peer.break_off = None, True
    assert (await one(peer)).error == "the stream ended early"


async def test_an_answer_that_takes_too_long_is_a_failure(peer: Peer) -> None:
    peer.hold = True
    assert (await one(peer, seconds=0.2)).error == f"{peer.url} did not answer in time"


async def test_a_closed_loop_sends_every_shot_once(peer: Peer) -> None:
    seen: list[Outcome] = []
    shots = at_once(9, Span(5, 5), Span(6, 6), seed=0)
    async with open_session(None) as session:
        await closed_loop(target(peer, session), shots, 4, seen.append)
    assert sorted(outcome.shot.index for outcome in seen) == list(range(9))
    assert all(outcome.is_ok for outcome in seen)


async def test_an_open_loop_sends_no_shot_before_its_time(peer: Peer) -> None:
    seen: list[Outcome] = []
    shots = [Shot(index, 0.05 * index, 5, 6) for index in range(4)]
    async with open_session(None) as session:
        late = await open_loop(target(peer, session), shots, seen.append)
    by_index = sorted(seen, key=lambda outcome: outcome.shot.index)
    first = by_index[0].sent_at
    assert all(s.sent_at - first >= s.shot.at - 0.02 for s in by_index)
    assert late >= 0
