from collections.abc import Iterator

import pytest

from engine.worker.cpu import limits


@pytest.fixture(scope="session")
def reads() -> Iterator[limits.PlainReads]:
    """Of one thread in little memory: of as much as a server reads, measuring takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "READ_BYTES", 1 << 24)
        patch.setattr(limits, "WINDOW_BYTES", 1 << 22)
        yield limits.PlainReads(1)
