import asyncio

import pytest

from engine.simulated.virtual_loop import run_virtual
from gateway.observe.backpressure import (
    BUSY,
    CALM,
    FIRST_GAP,
    MAX_GAP,
    LoopWatch,
    ThreadTimes,
    thread_times,
)
from gateway.observe.metrics import Histogram
from tests.gateway.rig import CHAT, Rig, Setting, chat, play


def a_watch() -> LoopWatch:
    return LoopWatch(lambda: 0.0, Histogram((1,)))


def test_an_idle_loop_merges_no_tokens() -> None:
    watch = a_watch()
    watch.update(0.5)
    assert watch.gap == 0.0


def test_the_gap_grows_while_the_loop_is_busy_and_is_bounded() -> None:
    watch = a_watch()
    watch.update(0.95)
    assert watch.is_busy
    assert watch.gap == FIRST_GAP
    for _ in range(50):
        watch.update(1.0)
    assert watch.gap == MAX_GAP


def test_the_gap_stays_between_the_thresholds_and_shrinks_below_them() -> None:
    watch = a_watch()
    for _ in range(5):
        watch.update(1.0)
    kept = watch.gap
    watch.update(0.8)
    assert not watch.is_busy
    assert watch.gap == kept
    for _ in range(20):
        watch.update(0.1)
    assert watch.gap == 0.0


def test_a_late_probe_is_counted_as_lag() -> None:
    lag = Histogram((0.1, 1))
    now = 0.0

    def late_clock() -> float:
        nonlocal now
        now += 0.55
        return now

    async def main() -> None:
        watching = asyncio.create_task(
            LoopWatch(late_clock, lag, lambda: ThreadTimes(0.0, 0.0)).run()
        )
        await asyncio.sleep(0.06)
        watching.cancel()

    run_virtual(main())
    assert lag.buckets() == [("0.1", 0), ("1.0", 1), ("+Inf", 1)]


def test_a_running_thread_accumulates_seconds() -> None:
    before = thread_times()
    sum(range(2_000_000))
    assert thread_times().running > before.running


def test_time_in_which_other_threads_have_the_cores_does_not_count_as_work() -> None:
    """Of 100 ms the thread runs for 10, waits 82 for a core, and sleeps for 8."""
    before = ThreadTimes(1.0, 2.0)
    share = ThreadTimes(1.010, 2.082).share_since(before, 0.100)
    assert share < CALM
    assert ThreadTimes(1.030, 2.069).share_since(before, 0.100) > BUSY, "it sleeps for 1 ms only"
    assert ThreadTimes(1.1, 2.0).share_since(before, 0.1) == 1.0
    assert ThreadTimes(1.0, 2.1).share_since(before, 0.1) == 0.0


def test_streams_of_a_busy_loop_carry_several_tokens_an_event() -> None:
    text = "many words " * 5

    async def scene(rig: Rig) -> None:
        rig.service.watch.gap = 1.0
        events = (await rig.client.post(CHAT, chat(stream=True))).events
        pieces = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) == 4

    play(scene, Setting(texts=(text,)))


@pytest.mark.parametrize(("share", "num_probes"), [(0.1, 6), (1.0, 21)])
def test_a_calm_loop_is_probed_a_quarter_as_often(share: float, num_probes: int) -> None:
    """The histogram of the lag counts each 50 ms either way."""
    lag, read_at = Histogram((1,)), []

    async def main() -> None:
        clock = asyncio.get_running_loop().time

        def times() -> ThreadTimes:
            read_at.append(clock())
            return ThreadTimes(share * clock(), 0.0)

        watching = asyncio.create_task(LoopWatch(clock, lag, times).run())
        await asyncio.sleep(1.06)
        watching.cancel()

    run_virtual(main())
    assert len(read_at) == 1 + num_probes
    assert lag.buckets()[-1] == ("+Inf", 21)
