"""Relays of token streams, in virtual time."""

import asyncio

import pytest

from engine.errors import StepFailed
from engine.loop import Engine
from engine.request import FinishReason, RequestSpec
from engine.stream import Write
from tests.engine.control.served_loop import GREEDY, Mortal, now, serve


def test_a_relay_takes_tokens_in_place_of_the_reader_unless_it_refuses_them() -> None:
    async def client(engine: Engine) -> None:
        offered = []

        def relay(tokens: list[int], writes: list[Write]) -> bool:
            offered.append((now(), len(tokens)))
            return now() != 3.0

        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            chunk = await stream.next(relay)
            assert (now(), len(chunk.tokens), chunk.finish) == (3.0, 1, None)
            chunk = await stream.next(relay)
            assert (now(), len(chunk.tokens), chunk.finish) == (5.0, 1, FinishReason.LENGTH)
        assert offered == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]

    serve(client)


def test_what_relays_write_follows_in_a_row() -> None:
    async def client(engine: Engine) -> None:
        seen: list[bytes] = []

        def relay(tokens: list[int], writes: list[Write]) -> bool:
            seen.append(b"relay")
            writes.append((seen.append, b"write"))
            return True

        spec = RequestSpec((1,), 3, GREEDY)
        with engine.stream(spec) as one, engine.stream(spec) as other:
            await asyncio.gather(one.next(relay), other.next(relay))
        assert seen == 2 * [b"relay", b"relay", b"write", b"write"]

    serve(client)


def test_the_reader_gets_the_error_of_its_relay_and_of_its_request() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 9, GREEDY)) as stream:
            with pytest.raises(ZeroDivisionError):
                await stream.next(lambda tokens, writes: bool(1 // 0))
            chunk = await stream.next(lambda tokens, writes: True)
            assert (now(), len(chunk.tokens)) == (1.0, 1)
            chunk = await stream.next(lambda tokens, writes: True)
            assert (now(), len(chunk.tokens)) == (2.0, 1)
            with pytest.raises(StepFailed):
                await stream.next(lambda tokens, writes: True)

    serve(client, Mortal(fails=(2,)))
