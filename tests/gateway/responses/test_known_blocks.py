from typing import Any
from unittest.mock import patch

import pytest

from engine.kv import prefix
from engine.kv.prefix import hash_blocks
from engine.request import RequestSpec
from tests.gateway.responses.sockets import CountsCharacters, EndsMessages, connected
from tests.gateway.rig import Rig, Setting, play

SETTING = Setting(texts=("Hello!", "Yes.", "No."), context=1000, tokenizer=CountsCharacters())
FIRST = {"input": "first" * 20, "store": False}


def turns(*messages: dict[str, Any]) -> list[RequestSpec]:
    """The engine requests of a conversation."""

    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            fields: dict[str, Any] = {}
            for message in messages:
                response = await client.response(**message, **fields)
                fields = {"previous_response_id": response["id"]}
        specs.extend(request.spec for request in rig.ended)
        sizes.append(rig.engine.scheduler.kv.block_size)

    specs: list[RequestSpec] = []
    sizes: list[int] = []
    with patch("tests.gateway.rig.PlainTemplate", EndsMessages):
        play(scene, SETTING)
    for spec in specs:
        known = list(spec.caching.known_hashes)
        assert known == hash_blocks(spec.salt, spec.prompt, sizes[0])[: len(known)]
    return specs


def test_a_turn_knows_the_digests_of_the_text_before_it() -> None:
    first, second, third = turns(FIRST, {"input": "and", "store": False}, {"input": "then"})
    assert not first.caching.known_hashes
    assert len(second.caching.known_hashes) * 4 >= len(first.prompt)
    assert len(third.caching.known_hashes) * 4 >= len(second.prompt)


def test_only_blocks_that_are_new_are_hashed() -> None:
    starts: list[int] = []

    def counted(before: bytes, tokens: Any, start: int, spans: Any = ()) -> bytes:
        starts.append(start)
        return real(before, tokens, start, spans)

    real = prefix._next
    with patch.object(prefix, "_next", counted):
        specs = turns(FIRST, {"input": "and", "store": False})
    hashed = starts[: starts.index(0, 1)]  # before the digests are computed for comparison
    assert len(hashed) == len(set(hashed))
    assert max(hashed) >= len(specs[1].prompt) - 8


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "other"},
        {"instructions": "Be brief."},  # another beginning
        {"truncation": "auto", "max_output_tokens": 800},  # of which the beginning is cut
    ],
)
def test_digests_of_another_text_or_salt_are_not_used(other: dict[str, Any]) -> None:
    _, second = turns(FIRST, {"input": "and" * 20, **other})
    assert not second.caching.known_hashes
