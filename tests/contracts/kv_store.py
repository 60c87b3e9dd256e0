"""What every store of KV does (`engine.kv_store.KVStore`)."""

from collections.abc import Callable, Sequence

import numpy as np

from engine.kv_store import Bytes, KVStore

Open = Callable[[], KVStore]
SIZE = 96
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def content(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def _equal(found: Sequence[Bytes | None], expected: Sequence[Bytes | None]) -> bool:
    as_bytes = [
        [None if content is None else content.tobytes() for content in side]
        for side in (found, expected)
    ]
    return as_bytes[0] == as_bytes[1]


def check_store(opened: Open) -> None:
    """Contents come back by name, also to another client, and what is not there is None."""
    store = opened()
    assert store.num_slots >= 4
    store.write(0, A, content(1))
    store.write(3, B, content(2))
    store.wait()
    assert _equal(store.read([3, 0, 1], [B, A, C]), [content(2), content(1), None])
    assert store.read([], []) == []
    store.write(0, A, content(1))  # again
    store.wait()
    assert _equal(store.read([0], [A]), [content(1)])
    store.close()
    again = opened()
    assert _equal(again.read([0, 3], [A, B]), [content(1), content(2)])
    again.close()
