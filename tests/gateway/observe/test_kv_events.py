import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StartupError
from engine.kv.ledger import KVLedger
from engine.kv.prefix import name_in_group
from engine.kv.prefix_search import PrefixSearch
from engine.kv_shape import KVShape
from engine.lora import LoraAdapter
from engine.media import EncoderReport, Media
from engine.policy import build
from engine.request import Request, RequestSpec
from engine.step import Tier
from gateway.observe.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    KVEvents,
    KVEventsConfig,
    ZmqPublisher,
    check_config,
    topic_of,
)
from gateway.observe.metrics import Metrics
from tests.blank import blank
from tests.scheduling import GREEDY, HAND_COST, run_iteration

BLOCK = 4
GOLDEN = Path(__file__).parent / "kv_events.golden.json"


class Rig:
    """A scheduler whose prefix cache reports to `events`."""

    def __init__(
        self, num_blocks: int = 8, windows: tuple[int | None, ...] = (None,), num_states: int = 0
    ) -> None:
        self.batches: list[Batch] = []
        self.events = KVEvents(BLOCK, self.batches.append, windows)
        settings = SchedulerSettings(max_model_len=64, max_batch_size=4, max_batch_tokens=64)
        ledger = KVLedger(
            KVShape(num_blocks, BLOCK, windows=windows, chunk=64, num_states=num_states)
        )
        policy = build("fcfs", HAND_COST)
        encoder = EncoderReport(num_layers=1, row_bytes=1, row_flops=1, pair_flops=1, tile=1)
        self.scheduler = IterationScheduler(settings, ledger, policy, self.events, encoder=encoder)
        self.scheduler.kv.search.listen(self.events)

    def serve(
        self, *prompts: tuple[int, ...], salt: str = "", lora: LoraAdapter | None = None
    ) -> list[Request]:
        """Serve these prompts with two output tokens each, all at once."""
        specs = [RequestSpec(prompt, 2, GREEDY, salt=salt, lora=lora) for prompt in prompts]
        requests = [self.scheduler.add(spec, 0.0) for spec in specs]
        while len(self.scheduler.pool):
            run_iteration(self.scheduler, 0.0)
        return requests

    def all_events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch.events]


def prompt(first: int, length: int = 9) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_a_computed_prompt_is_stored_as_one_run_of_blocks() -> None:
    rig = Rig()
    (request,) = rig.serve(prompt(100))
    (stored,) = rig.all_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(100, 108))
    assert stored.block_hashes == [int.from_bytes(one[:8], "big") for one in request.block_hashes]
    assert (stored.parent_block_hash, stored.block_size, stored.medium) == (None, BLOCK, "GPU")
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")


def test_each_layer_group_reports_its_blocks_under_the_same_hashes() -> None:
    rig = Rig(num_blocks=40, windows=(None, 6))
    (request,) = rig.serve(prompt(100, 17))
    events = rig.all_events()
    hashes = [int.from_bytes(one[:8], "big") for one in request.block_hashes]
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [(one.group_idx, one.kv_cache_spec_kind) for one in stored] == [
        (0, "full_attention"),
        (1, "sliding_window"),
    ]
    assert [one.kv_cache_spec_sliding_window for one in stored] == [None, 6]
    assert [one.block_hashes for one in stored] == [hashes, hashes]


def test_a_snapshot_is_reported_as_the_block_that_it_is_behind() -> None:
    rig = Rig(num_blocks=40, num_states=8)
    (request,) = rig.serve(prompt(100, 17))
    *_, stored = rig.all_events()
    assert isinstance(stored, BlockStored)
    before, behind = (int.from_bytes(one[:8], "big") for one in request.block_hashes[2:4])
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (1, "mamba")
    assert (stored.parent_block_hash, stored.block_hashes) == (before, [behind])
    assert stored.token_ids == list(range(112, 116))


@pytest.mark.parametrize(
    ("windows", "num_states"), [((None,), 0), ((None, 6), 0), ((None,), 5), ((6, None), 5)]
)
def test_a_router_that_follows_the_events_knows_the_blocks_of_every_group(
    windows: tuple[int | None, ...], num_states: int
) -> None:
    rig = Rig(num_blocks=24, windows=windows, num_states=num_states)
    known: set[tuple[int | None, int]] = set()
    for first in (100, 200, 300, 100, 400, 200, 500):
        rig.serve(prompt(first, 13), prompt(first, 17))
        for event in rig.all_events():
            assert not isinstance(event, AllBlocksCleared)
            blocks = {(event.group_idx, one) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                assert known.isdisjoint(blocks), "stored twice"
                assert event.parent_block_hash in (None, *(one for _, one in known))
                known |= blocks
            else:
                assert blocks <= known, "removed and not stored"
                known -= blocks
        rig.batches.clear()
        ledger, states = rig.scheduler.ledger, rig.scheduler.ledger.states
        groups = [len(ledger.prefixes.pages), len(states.snapshots.pages)]
        counts = Counter(group == len(windows) for group, _ in known)
        assert [counts[False], counts[True]] == groups
        named = {int.from_bytes(name[1:8], "big") for name in ledger.prefixes._pages}
        assert {one & (1 << 56) - 1 for group, one in known if group != len(windows)} == named
    rig.scheduler.ledger.reset()
    rig.events.worker_lost(0.0)
    assert rig.all_events() == [AllBlocksCleared()]


def test_the_first_block_of_a_salted_prompt_has_the_salt() -> None:
    rig = Rig()
    rig.serve(prompt(100), salt="mine")
    rig.serve(prompt(100))
    salted, plain = rig.all_events()
    assert isinstance(salted, BlockStored)
    assert isinstance(plain, BlockStored)
    assert salted.extra_keys == [("mine",), None]
    assert plain.extra_keys is None
    assert set(salted.block_hashes).isdisjoint(plain.block_hashes)


def test_blocks_of_a_lora_adapter_have_its_name_and_digest() -> None:
    rig = Rig()
    rig.serve(prompt(100), salt="mine", lora=LoraAdapter(3, "sql", "ab"))
    (stored,) = rig.all_events()
    assert isinstance(stored, BlockStored)
    assert (stored.lora_id, stored.lora_name) == (3, "sql")
    assert stored.extra_keys == [("ab", "mine"), ("ab",)]


def test_blocks_with_an_image_have_its_digest() -> None:
    rig = Rig(num_blocks=20)
    image = Media(6, 4, bytes(range(32)), blank(), (1, 0, 0))
    rig.scheduler.add(RequestSpec(tuple(range(16)), 1, GREEDY, salt="mine", media=(image,)), 0.0)
    run_iteration(rig.scheduler, 0.0)
    rig.events.worker_lost(0.0)
    (stored,) = rig.all_events()
    assert isinstance(stored, BlockStored)
    digest = image.digest.hex()
    assert stored.extra_keys == [("mine",), (digest,), (digest,), None]


def test_evictions_in_a_row_are_one_event() -> None:
    rig = Rig(num_blocks=4)
    rig.serve(prompt(100, 13))
    rig.batches.clear()
    rig.serve(prompt(200, 13))
    removed = [one for one in rig.all_events() if isinstance(one, BlockRemoved)]
    assert [len(one.block_hashes) for one in removed] == [3]


def test_copies_in_lower_tiers_are_events_with_the_tiers_medium() -> None:
    rig = Rig()
    name = bytes(range(16))
    rig.events.copied(Tier.HOST, name, True)
    rig.events.copied(Tier.DISK, name, True)
    rig.events.copied(Tier.HOST, name, False)
    rig.events.removed(name)
    rig.events.planned(None, 0.0)  # type: ignore[arg-type] # not read
    names = [int.from_bytes(name[:8], "big")]
    group = (None, 0, "full_attention")
    assert rig.all_events() == [
        BlockStored(names, None, [], BLOCK, None, "CPU", None, *group),
        BlockStored(names, None, [], BLOCK, None, "STORAGE", None, *group),
        BlockRemoved(names, "CPU", 0),
        BlockRemoved(names, "GPU", 0),
    ]


def test_a_copy_in_a_lower_tier_is_reported_with_its_layer_group() -> None:
    rig = Rig(num_blocks=40, windows=(None, 6))
    (request,) = rig.serve(prompt(100, 5))
    rig.batches.clear()
    name = name_in_group(request.block_hashes[0], 1)
    rig.events.copied(Tier.DISK, name, True)
    rig.events.removed(name)
    rig.events.copied(Tier.DISK, name, False)
    rig.events.planned(None, 0.0)  # type: ignore[arg-type] # not read
    hashes = [int.from_bytes(request.block_hashes[0][:8], "big")]
    stored, *removed = rig.all_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.group_idx, stored.medium) == (hashes, 1, "STORAGE")
    assert stored.kv_cache_spec_sliding_window == 6
    assert removed == [BlockRemoved(hashes, "GPU", 1), BlockRemoved(hashes, "STORAGE", 1)]


def test_what_a_shared_store_has_is_not_reported() -> None:
    rig = Rig()
    ledger = KVLedger(KVShape(8, BLOCK, num_store_names=4))
    PrefixSearch(ledger, is_on=True).listen(rig.events)
    ledger.blocks.lower[Tier.STORE].learn([bytes(range(16))])
    rig.events.planned(None, 0.0)  # type: ignore[arg-type] # not read
    assert not rig.all_events()


def test_the_payload_is_that_of_vllm() -> None:
    """The golden frame was decoded by vLLM 0.32's own `KVEventBatch` when it was written."""
    stored = BlockStored([1, 2**64 - 1], None, [5, 6, 7, 8], 2, None, "GPU", None, [("s",), None])
    events: list[Event] = [stored, BlockRemoved([3], "GPU"), AllBlocksCleared()]
    payload = msgspec.msgpack.encode(Batch(1.5, events))
    assert payload.hex() == json.loads(GOLDEN.read_text())["payload"]


def test_the_payload_with_layer_groups_is_that_of_vllm() -> None:
    """The golden frame was decoded as the structs of vLLM's `kv_events` when it was written."""
    events: list[Event] = [
        BlockStored([1], 7, [5, 6], 2, None, "GPU", None, None, 1, "sliding_window", 512),
        BlockStored([2], 1, [8, 9], 2, None, "GPU", None, None, 2, "mamba"),
        BlockRemoved([1], "GPU", 1),
    ]
    payload = msgspec.msgpack.encode(Batch(1.5, events))
    assert payload.hex() == json.loads(GOLDEN.read_text())["groups"]


@pytest.fixture
def sockets(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def receive(socket: Any) -> list[bytes]:
    assert socket.poll(10_000), "nothing arrived"
    frames: list[bytes] = socket.recv_multipart()
    return frames


def decoded(payload: bytes) -> list[dict[str, Any]]:
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    found: list[dict[str, Any]] = events
    return found


def test_a_subscriber_gets_topic_sequence_and_batch_and_can_ask_for_what_it_missed(
    sockets: tuple[str, str],
) -> None:
    endpoint, replay = sockets
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replay, buffer_steps=2)
    publisher = ZmqPublisher(config, "kv@pod@m", Metrics())
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.REQ) as req:
        sub.connect(endpoint)
        sub.subscribe(b"kv@")
        while not sub.poll(50):  # until the subscription has arrived
            publisher.publish(Batch(1.0, [BlockRemoved([0], "GPU")]))
        first = int.from_bytes(receive(sub)[1], "big")
        for number in (7, 8):
            publisher.publish(Batch(2.0, [BlockRemoved([number], "GPU")]))
        frames = receive(sub)
        while decoded(frames[2])[0]["block_hashes"] == [0]:
            first = int.from_bytes(frames[1], "big")
            frames = receive(sub)
        topic, sequence, payload = frames
        assert (topic, int.from_bytes(sequence, "big")) == (b"kv@pod@m", first + 1)
        assert decoded(payload) == [{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}]
        assert decoded(receive(sub)[2])[0]["block_hashes"] == [8]
        req.connect(replay)
        req.send((0).to_bytes(8, "big"))
        assert receive(req)[0] == sequence  # the last two batches are kept
    publisher.close()


def test_a_replay_ends_with_the_sequence_number_minus_one(sockets: tuple[str, str]) -> None:
    endpoint, replay = sockets
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replay)
    publisher = ZmqPublisher(config, "t", Metrics())
    publisher.publish(Batch(1.0, [AllBlocksCleared()]))
    publisher.publish(Batch(1.0, [AllBlocksCleared()]))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(replay)
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        frames = [receive(dealer)]
        while frames[-1][2]:
            frames.append(receive(dealer))
    assert [int.from_bytes(one[1], "big", signed=True) for one in frames] == [1, -1]
    publisher.close()


def test_a_full_queue_drops_batches_counts_them_and_skips_their_numbers() -> None:
    metrics = Metrics()
    config = KVEventsConfig(True, endpoint="inproc://full", max_queue_size=1)
    publisher = ZmqPublisher(config, "t", metrics)
    publisher.close()  # nothing takes batches from the queue any more
    publisher.publish(Batch(1.0, []))
    publisher.publish(Batch(1.0, []))
    assert metrics.num_dropped_kv_events == 1
    assert publisher._next == 2


def test_an_address_that_cannot_be_bound_fails_the_start() -> None:
    config = KVEventsConfig(True, endpoint="ipc:///no/such/folder/events")
    with pytest.raises(StartupError, match="cannot publish at ipc:///no/such/folder"):
        ZmqPublisher(config, "t", Metrics())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "^: Input data was truncated"),
        ('{"enabled": true}', "unknown field `enabled`"),
        ('{"publisher": "kafka"}', "publisher must be zmq or null, not 'kafka'"),
        ('{"hwm": 0}', "must be at least 1"),
        ({"topic": 3}, r"Expected `str`, got `int` - at `\$.topic`"),
    ],
)
def test_a_wrong_configuration_is_rejected_with_the_reason(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(value)


def test_events_are_published_only_if_enabled_and_the_topic_names_host_and_model() -> None:
    assert not KVEventsConfig().is_published
    assert not KVEventsConfig(True, publisher="null").is_published
    assert KVEventsConfig(True).is_published
    assert topic_of(KVEventsConfig(True, topic="mine"), "m") == "mine"
    assert topic_of(KVEventsConfig(True), "m").startswith("kv@")
    assert topic_of(KVEventsConfig(True), "m").endswith("@m")
