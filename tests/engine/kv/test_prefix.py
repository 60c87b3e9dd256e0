from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv.prefix import Part, extend_hashes, hash_blocks
from engine.kv_shape import KVShape
from engine.media import EncoderReport, Media, Span
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Request, RequestSpec, Times
from engine.step import HASH_BYTES, RequestId
from tests.blank import blank
from tests.scheduling import GREEDY, planned

BLOCK = 2
IMAGE, OTHER = b"i" * 32, b"o" * 32
ENCODER = EncoderReport(num_layers=1, row_bytes=1, row_flops=1, pair_flops=1, tile=1)


def image(span: Span) -> Media:
    """An image without patches, which counts as encoded."""
    return Media(*span, blank(), (1, 0, 0))


def names(
    prompt: tuple[int, ...], salt: str = "", spans: tuple[Span, ...] = (), block: int = BLOCK
) -> list[bytes]:
    """The hashes of the prompt's full blocks."""
    spec = RequestSpec(prompt, 1, GREEDY, salt=salt, media=tuple(map(image, spans)))
    request = Request(RequestId(0), spec, Times(0.0))
    extend_hashes(request, block, len(prompt) // block)
    assert request.block_hashes == hash_blocks(salt, prompt, block, spans=spans)
    return request.block_hashes


def test_only_full_blocks_are_hashed_and_each_hash_depends_on_all_blocks_before() -> None:
    assert len(names((1, 2, 3))) == 1
    assert names((1, 2, 3, 4))[:1] == names((1, 2, 3))
    assert names((9, 2, 3, 4))[1] != names((1, 2, 3, 4))[1]


def test_hashes_with_different_salts_differ() -> None:
    by_salt = [names((1, 2, 3, 4), salt) for salt in ("", "a", "b")]
    assert len({name for each in by_salt for name in each}) == 6


def test_no_salt_can_imitate_the_parts_of_another_callers_block() -> None:
    """Otherwise its owner could publish KV of position 0 under the hash of a later block."""
    parent, tokens = b"p" * HASH_BYTES, array("i", (7, 7)).tobytes()
    block = Part.PARENT.of(parent) + Part.TOKENS.of(tokens)
    salt = block.decode()  # these bytes are text, so a caller can choose them
    as_block = blake2b(block, digest_size=HASH_BYTES).digest()
    plain = blake2b(Part.SALT.of(b"") + Part.ADAPTER.of(b""), digest_size=HASH_BYTES).digest()
    root = Part.PARENT.of(plain)
    known = blake2b(root + Part.TOKENS.of(tokens), digest_size=HASH_BYTES).digest()
    assert names((7, 7)) == [known], "the layout of the parts above is the one in use"
    assert as_block not in names((7, 7, 7, 7), salt)


def test_a_salt_and_an_adapter_with_the_same_bytes_have_different_hashes() -> None:
    as_salt = hash_blocks("abcd", (1, 2), BLOCK)
    as_adapter = hash_blocks("", (1, 2), BLOCK, b"abcd".hex())
    split = hash_blocks("ab", (1, 2), BLOCK, b"cd".hex())
    assert len({*as_salt, *as_adapter, *split}) == 3


def test_tokens_that_stand_for_different_images_have_different_hashes_from_there_on() -> None:
    prompt = (1, 2, 9, 9, 9, 9, 3, 4)
    plain = names(prompt)
    one, other = (names(prompt, spans=(Span(3, 3, digest),)) for digest in (IMAGE, OTHER))
    assert plain[0] == one[0] == other[0]
    for place in (1, 2, 3):
        assert len({plain[place], one[place], other[place]}) == 3


@pytest.mark.parametrize("span", [Span(2, 3, IMAGE), Span(3, 2, IMAGE)])
def test_the_same_image_at_another_place_or_of_another_length_has_another_hash(span: Span) -> None:
    prompt = (9,) * 8
    assert names(prompt, spans=(Span(2, 2, IMAGE),))[1] != names(prompt, spans=(span,))[1]


def test_tokens_with_the_bytes_of_an_image_do_not_share_its_hash() -> None:
    place = array("i", (0, 1)).tobytes()
    forged = tuple(array("i", Part.SPAN.of(place + IMAGE[:31])))
    with_image = names((5,), spans=(Span(0, 1, IMAGE[:31]),), block=1)
    assert names((5, *forged), block=1 + len(forged)) != with_image


CONTENTS = st.lists(st.tuples(st.sampled_from(Part), st.binary(max_size=6)), max_size=5)


@given(CONTENTS, CONTENTS)
def test_different_sequences_of_parts_are_different_bytes(
    one: list[tuple[Part, bytes]], other: list[tuple[Part, bytes]]
) -> None:
    first, second = (b"".join(part.of(data) for part, data in each) for each in (one, other))
    assert (first == second) == (one == other)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_request_waits_for_a_prefix_that_is_being_computed_only_if_its_images_are_the_same(
    is_same: bool,
) -> None:
    settings = SchedulerSettings(max_model_len=4000, max_batch_size=4, max_batch_tokens=400)
    ledger = KVLedger(KVShape(400, 16))
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed(), encoder=ENCODER)
    digests = (IMAGE, IMAGE if is_same else OTHER)
    prompt = tuple(range(300))
    for digest in digests:
        spec = RequestSpec(prompt, 4, GREEDY, media=(image(Span(20, 30, digest)),))
        scheduler.add(spec, 0.0)
    iteration = planned(scheduler)
    assert len(iteration.requests) == (1 if is_same else 2)
