"""A channel over a socket pair; the test plays the worker on the other end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from engine.errors import StepFailed, WorkerLost
from engine.media import ImagePixels
from engine.step import RequestId, Step, StepEntry, StepId, StepResult
from engine.transport.channel import StepChannel
from engine.transport.wire import (
    HEADER,
    FrameReader,
    FromWorker,
    Goodbye,
    RunStep,
    SendPixels,
    StepFailure,
    StepRan,
    ToWorker,
    WorkerLoaded,
    frame,
    read_to_worker,
)
from engine.worker_settings import Placement
from tests.engine.transport.workers import REPORT
from tests.fakes import a_step


@dataclass
class Peer:
    """The worker end of the channel, and the reasons that `on_lost` received."""

    connection: socket.socket  # non-blocking
    reasons: list[str] = field(default_factory=list)
    frames: FrameReader = field(default_factory=FrameReader)

    async def send(self, *messages: FromWorker) -> None:
        data = b"".join(frame(message) for message in messages)
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def receive(self) -> list[ToWorker]:
        """Receive until at least one message is complete."""
        loop = asyncio.get_running_loop()
        while True:
            piece = await loop.sock_recv(self.connection, 1 << 16)
            assert piece, "the channel closed the connection"
            if payloads := self.frames.feed(piece):
                return [read_to_worker(payload) for payload in payloads]


@dataclass
class Line:
    channel: StepChannel
    peer: Peer


@dataclass
class FakeClock:
    """The time of the event loop, which only `advance` changes."""

    now: float = 0.0

    async def advance(self, seconds: float) -> None:
        """Advance the time and run the timers that are due."""
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)


def ran(step_id: int) -> StepRan:
    return StepRan(StepResult(StepId(step_id), (1,), 0.0))


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now)
    return clock


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    """A channel that gives each step 60 seconds."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        peer = Peer(theirs)
        channel = StepChannel({Placement(): ours}, 60.0, peer.reasons.append)
        yield Line(channel, peer)
        channel.close("the test is over")


async def test_submit_sends_the_step_before_it_returns(line: Line) -> None:
    step = a_step(1, 10)
    line.channel.submit(step)
    (payload,) = FrameReader().feed(line.peer.connection.recv(1 << 16))
    assert read_to_worker(payload) == RunStep(step)


async def test_a_step_larger_than_the_socket_buffer_is_sent_as_the_worker_reads(line: Line) -> None:
    entry = StepEntry(RequestId(1), start=0, tokens=(1,), blocks=bytes(4 << 20), sample=None)
    steps = [Step(StepId(1), (entry,)), Step(StepId(2), (entry,)), a_step(3, 10)]
    answers = [line.channel.submit(step) for step in steps]
    received: list[ToWorker] = []
    while len(received) < len(steps):
        received += await line.peer.receive()
    assert received == [RunStep(step) for step in steps]
    await line.peer.send(ran(1), ran(2), ran(3))
    assert [(await answer).step_id for answer in answers] == [1, 2, 3]
    line.channel.submit(a_step(4, 10))
    assert await line.peer.receive() == [RunStep(a_step(4, 10))]


async def test_a_step_waits_behind_one_piece_of_an_image_at_most(line: Line) -> None:
    piece = ImagePixels(1, 0, bytes(4 << 20), (3, 1 << 20), (1, 1, 1))

    async def send() -> None:
        for _ in range(3):
            await line.channel.send_pixels(piece)

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)
    line.channel.submit(a_step(1, 10))
    received: list[ToWorker] = []
    while len(received) < 4:
        received += await line.peer.receive()
    await sending
    pixels = SendPixels(piece)
    assert received == [pixels, RunStep(a_step(1, 10)), pixels, pixels]


async def test_pixels_for_a_worker_that_is_lost_keep_nobody_waiting(line: Line) -> None:
    piece = ImagePixels(1, 0, bytes(4 << 20), (1 << 20,), (1, 1, 1))
    sending = asyncio.create_task(line.channel.send_pixels(piece))
    await asyncio.sleep(0)
    assert not sending.done()
    line.peer.connection.close()
    await sending
    await line.channel.send_pixels(piece)


async def test_a_result_that_arrives_in_two_pieces_resolves_one_future(line: Line) -> None:
    answer = line.channel.submit(a_step(1, 10))
    loop = asyncio.get_running_loop()
    data = frame(ran(1))
    await loop.sock_sendall(line.peer.connection, data[:3])
    other = line.channel.submit(a_step(2, 10))
    await line.peer.receive()
    assert not answer.done()
    await loop.sock_sendall(line.peer.connection, data[3:] + frame(ran(2)))
    assert [(await answer).step_id, (await other).step_id] == [1, 2]


async def test_a_step_that_cannot_be_encoded_fails_and_the_channel_stays_open(line: Line) -> None:
    with pytest.raises(StepFailed, match="step 1 cannot be sent"):
        await line.channel.submit(a_step(1, 2**64))
    answer = line.channel.submit(a_step(2, 10))
    await line.peer.send(ran(2))
    assert (await answer).step_id == 2


async def test_results_sent_before_the_worker_exited_are_delivered(line: Line) -> None:
    answered = line.channel.submit(a_step(1, 10))
    await line.peer.receive()
    await line.peer.send(ran(1))
    line.peer.connection.close()
    lost = line.channel.submit(a_step(2, 20))
    assert (await answered).step_id == 1
    with pytest.raises(WorkerLost, match="closed the connection"):
        await lost
    assert line.peer.reasons == ["the worker closed the connection"]


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"Traceback (most recent call last):", "a frame of"),
        (HEADER.pack(0), "a frame of 0 bytes"),
        (HEADER.pack(2**31), "a frame of 2147483648 bytes"),
        (HEADER.pack(3) + b"\xc1\xc1\xc1", "not a message from a worker"),
        (frame(Goodbye()), "not a message from a worker"),
        (frame(WorkerLoaded(REPORT)), "Loaded is not a result"),
        (frame(ran(2)), "a result of step 2, which is not the oldest"),
        (frame(StepFailure(StepId(2), "no")), "a result of step 2"),
        (frame(ran(1)) * 3, "a result of step 1, which is not the oldest"),
    ],
)
async def test_invalid_data_loses_the_channel(line: Line, garbage: bytes, reason: str) -> None:
    line.channel.submit(a_step(1, 10))
    answer = line.channel.submit(a_step(3, 10))
    await asyncio.get_running_loop().sock_sendall(line.peer.connection, garbage)
    with pytest.raises(WorkerLost, match=reason):
        await answer
    assert len(line.peer.reasons) == 1


async def test_a_result_without_a_step_loses_the_channel() -> None:
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        channel = StepChannel({Placement(): ours}, 60.0, lost.set_result)
        theirs.sendall(frame(ran(1)))
        assert "not the oldest step in flight" in await lost
        assert channel.ended == await lost


async def test_a_step_that_takes_too_long_loses_the_channel(line: Line, clock: FakeClock) -> None:
    oldest, next_one = line.channel.submit(a_step(1, 10)), line.channel.submit(a_step(2, 20))
    await clock.advance(59.0)
    assert not oldest.done()
    await clock.advance(1.0)
    with pytest.raises(WorkerLost, match="hangs: step 1 took longer than 60 s"):
        await oldest
    assert isinstance(next_one.exception(), WorkerLost)
    assert len(line.peer.reasons) == 1


async def test_a_step_is_timed_from_the_result_before_it(line: Line, clock: FakeClock) -> None:
    first, second = line.channel.submit(a_step(1, 10)), line.channel.submit(a_step(2, 20))
    await clock.advance(50.0)
    await line.peer.send(ran(1))
    await first
    await clock.advance(59.0)
    assert not second.done()
    await clock.advance(1.0)
    with pytest.raises(WorkerLost, match="step 2"):
        await second


async def test_an_idle_channel_is_never_overdue(line: Line, clock: FakeClock) -> None:
    answer = line.channel.submit(a_step(1, 10))
    await line.peer.send(ran(1))
    await answer
    await clock.advance(61.0)
    await clock.advance(61.0)
    assert line.channel.ended is None
    late = line.channel.submit(a_step(2, 20))
    await clock.advance(59.0)
    assert not late.done()
    await clock.advance(1.0)
    assert isinstance(late.exception(), WorkerLost)


async def test_a_result_in_the_socket_buffer_is_not_overdue(line: Line, clock: FakeClock) -> None:
    """After this process was suspended, the timer may run before the socket is read."""
    answer = line.channel.submit(a_step(1, 10))
    line.peer.connection.send(frame(ran(1)))
    clock.now += 61.0
    line.channel._check_overdue()
    assert (await answer).step_id == 1


async def test_close_sends_a_goodbye_and_fails_the_steps_in_flight(line: Line) -> None:
    answer = line.channel.submit(a_step(1, 10))
    line.channel.close("enough")
    line.channel.close("once more")
    assert await line.peer.receive() == [RunStep(a_step(1, 10)), Goodbye()]
    with pytest.raises(WorkerLost, match="enough"):
        await answer
    assert line.peer.reasons == []
