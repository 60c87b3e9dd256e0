import runpy
from collections.abc import Sequence

import numpy as np
import pytest
from numba import types

from engine.worker.cpu import all_kernels, build
from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.intrinsics import add_release, int64s
from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.device import Progress


def count(operands, chunk, thread):  # type: ignore[no-untyped-def]
    """Add 1 to the chunk's counter, and the chunk's number to a sum that all threads share."""
    counts = int64s(operands, chunk + 2)
    counts[chunk + 1] += 1
    add_release(operands, chunk)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("is_awake", [True, False])
def test_every_chunk_runs_once(threads: int, is_awake: bool) -> None:
    pool, address = NativeThreadPool(threads), build.kernel(count).address

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


def test_all_kernels_can_be_compiled_before_a_first_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `make` does, which ends if one of them does not compile."""
    compiled: set[object] = set()

    def compile_all(kernels: Sequence[object], progress: Progress) -> None:
        compiled.update(kernels)
        progress("kernels", 0, 2)
        progress("kernels", 2, 2)

    monkeypatch.setattr(all_kernels, "compile_all", compile_all)
    runpy.run_module("engine.worker.cpu", run_name="__main__")
    assert capsys.readouterr().out == "\rCompiling kernels for this CPU: 2 of 2\n"
    for weights in FORMATS:
        operators = NativeOperators(NativeThreadPool(1), PackedStore(linears_of(weights)))
        assert {*operators.usual_kernels} <= compiled
    attention = *paged_kernels.BY_DTYPE, paged_kernels.merge_partials
    assert {*attention, *rope_and_cache_write.BY_DTYPE} <= compiled
