import os
import platform
import sys
from types import SimpleNamespace

import pytest
from numba import cfunc

from engine.worker.cpu import features
from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.intrinsics import float32s


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="Linux on x86-64 is asked"
)
@pytest.mark.parametrize(
    ("lacks", "answer", "expected"),
    [("", 0, True), ("", -1, False), ("amx-int8", 0, False), ("avx512f", 0, False)],
)
def test_amx_needs_the_cpu_and_linux(
    lacks: str, answer: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def syscall(*arguments: int) -> int:
        asked.append(arguments)
        return answer

    monkeypatch.setattr(features, "has", lambda feature: feature != lacks)
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(syscall=syscall))
    assert features.has_amx.__wrapped__() is expected
    assert asked == ([] if lacks else [(158, 0x1023, 18)])


@pytest.mark.skipif(
    not features.has("avx512f") or "NUMBA_CPU_FEATURES" in os.environ, reason="no such vectors"
)
def test_loops_use_vectors_of_512_bits() -> None:
    def double(address: int, count: int, thread: int) -> None:
        numbers = float32s(address, count)
        for i in range(count):
            numbers[i] += numbers[i]

    kernel = cfunc(KERNEL, nogil=True, error_model="numpy")(double)
    assert "%zmm" in kernel._library.get_asm_str()
