from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from starlette.requests import Request as HttpRequest

from gateway.access.bodies import BodyLimits, read_body
from gateway.errors import BodyTooLarge, TooManyValues

LIMITS = BodyLimits(max_bytes=40, max_commas=5, max_objects=2, max_escapes=3)


class Sent:
    """A request whose body arrives in these pieces; counts those that were read."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.headers: dict[str, str] = {}
        self.num_read = 0
        self._pieces = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            self.num_read += 1
            yield piece


async def read(sent: Sent, media_type: str | None = "application/json") -> bytes:
    return await read_body(cast("HttpRequest", sent), LIMITS, media_type)


async def test_a_body_with_more_commas_than_allowed_is_rejected_before_it_is_decoded() -> None:
    sent = Sent([b"[1,2,3", b",4,5,6,7", b",8]"])
    with pytest.raises(TooManyValues, match="more than 5 commas"):
        await read(sent)
    assert sent.num_read == 2


async def test_as_many_commas_as_allowed_are_accepted_and_other_media_are_not_counted() -> None:
    assert await read(Sent([b"[1,2,3", b",4,5,6]"])) == b"[1,2,3,4,5,6]"
    assert await read(Sent([b",,,,,,", b",,"]), media_type=None) == b",,,,,,,,"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'[{"a":1},{ "a":1},{\n"a":1}]', "more than 2 objects"),
        (rb'["\n\n\u00e4\n"]', "more than 3 backslashes.* UTF-8"),
    ],
)
async def test_objects_and_escapes_are_counted_before_they_are_decoded(
    body: bytes, says: str
) -> None:
    with pytest.raises(TooManyValues, match=says):
        await read(Sent([body]))
    assert await read(Sent([body]), media_type=None) == body


async def test_braces_in_texts_are_no_objects() -> None:
    body = rb'[{"a":"{{{{ {} {\"}"}]'
    assert await read(Sent([body])) == body


async def test_a_body_that_becomes_too_large_is_rejected_with_its_first_byte_too_many() -> None:
    sent = Sent([b"x" * 40, b"x", b"x"])
    with pytest.raises(BodyTooLarge):
        await read(sent)
    assert sent.num_read == 2
