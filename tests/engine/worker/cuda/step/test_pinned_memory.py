"""Page-locked memory, with CUDA's registration replaced: sizes are exact, failures name the
flag."""

from types import SimpleNamespace

import pytest
import torch

from engine.errors import StartupError
from engine.worker.cuda import streams
from engine.worker.cuda.streams import pinned


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(address, bytes) of each registration."""
    calls: list[tuple[int, int]] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        calls.append((address, num_bytes))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(streams, "EXACT_BYTES", 1000)
    return calls


def test_a_large_allocation_locks_exactly_its_own_bytes(registered: list[tuple[int, int]]) -> None:
    tensor = pinned((3, 5, 100), torch.bfloat16)
    assert tensor.shape == (3, 5, 100)
    assert registered == [(tensor.data_ptr(), 3000)]


def test_memory_that_cannot_be_locked_is_an_error_that_names_the_flag(
    registered: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = SimpleNamespace(cudaHostRegister=lambda address, num_bytes, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuse)
    with pytest.raises(StartupError, match=r"page-locked .*--host-kv-memory"):
        pinned((2000,), torch.uint8)
