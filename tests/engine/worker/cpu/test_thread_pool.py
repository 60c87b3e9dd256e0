"""Every chunk of a job runs once, on any thread; kernels compile without a cache directory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types

from engine.worker.cpu import build
from engine.worker.cpu.intrinsics import add_release, int64s
from engine.worker.cpu.thread_pool import NativeThreadPool


def count(operands, chunk, thread):  # type: ignore[no-untyped-def]
    """Add 1 to the chunk's counter, and the chunk's number to a sum that all threads share."""
    counts = int64s(operands, chunk + 2)
    counts[chunk + 1] += 1
    add_release(operands, chunk)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("is_awake", [True, False])
@pytest.mark.parametrize("wait", ["spin", "sleep"])
def test_every_chunk_runs_once(threads: int, is_awake: bool, wait: str) -> None:
    pool, address = NativeThreadPool(threads, wait), build.kernel(count).address

    def run_all() -> None:
        for chunks in (1, 2, 3, 17, 1000, 0, 5):
            counters = np.zeros(chunks + 1, dtype=np.int64)
            for repeat in range(1, 200):
                pool.run(address, counters.ctypes.data, chunks)
                assert counters[1:].tolist() == [repeat] * chunks
                assert counters[0] == repeat * chunks * (chunks - 1) // 2

    if is_awake:
        for _ in range(2):
            with pool.awake():
                run_all()
    else:
        run_all()


def test_an_error_in_the_step_lets_the_team_sleep() -> None:
    pool, address = NativeThreadPool(3), build.kernel(count).address
    counters = np.zeros(9, dtype=np.int64)
    with pytest.raises(KeyError), pool.awake():
        raise KeyError
    with pool.awake():
        pool.run(address, counters.ctypes.data, 8)
    assert counters[1:].tolist() == [1] * 8


def test_kernels_compile_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cache(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.Dispatcher.enable_caching", no_cache)

    def double(value):  # type: ignore[no-untyped-def]
        return 2 * value

    assert build.compiled(double, types.int64(types.int64))(21) == 42


def test_kernels_can_be_compiled_before_a_first_start() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "engine.worker.cpu"],
        cwd=Path(__file__).parents[4],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
