"""KV events: which prefixes this server has cached, published for routers over ZeroMQ.

Wire format of vLLM 0.32 (`vllm.distributed.kv_events`), so that llm-d's and Dynamo's routers index
this server as they index vLLM: multipart messages of topic, sequence number (8 bytes, big-endian)
and a msgpack batch `[Unix seconds, events, data-parallel rank]`. An event is a map with the key
`type`. A second socket replays batches from a sequence number.

The event loop collects the changes of an iteration and queues them as one batch; a thread encodes
and sends it.
"""

import contextlib
import importlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from engine.errors import StartupError
from engine.iteration import Iteration, Observer
from engine.kv.prefix import name_in_group, spans_in
from engine.request import Request, RequestSpec
from engine.step import Tier
from gateway.observe.metrics import Metrics

logger = logging.getLogger(__name__)

FLAG = "--kv-events-config"
INSTALL = "pip install 'podway[kv-events]'"
HASH_BYTES = 8  # vLLM's integer hashes have 64 bits
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_POLL_SECONDS = 0.05
CLOSE_SECONDS = 1.0
DEVICE = "GPU"  # vLLM's names of the media; this one is where attention reads KV
MEDIA = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
FULL, WINDOW, RECURRENT = "full_attention", "sliding_window", "mamba"  # vLLM's `KVCacheSpecKind`


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The fields of vLLM's `--kv-events-config`."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # "zmq" or "null"; None: zmq if events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_published(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of one prefix are cached in a layer group. `extra_keys` has, for each
    block, the digest of the LoRA adapter that computed it, those of its spans of other content, and
    the salt of a first block."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks of a layer group are no longer cached."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(NamedTuple):
    """The changes of one iteration; a message's payload."""

    unix_seconds: float
    events: list[Event]
    rank: int = 0


def check_config(value: object) -> KVEventsConfig:
    """The config that JSON text, or a table of a settings file, describes.

    Raises `ValueError` with the rest of a line that begins with the flag.
    """
    try:
        given = msgspec.json.decode(value) if isinstance(value, str) else value
        config = msgspec.convert(given, KVEventsConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f": {error}") from None
    if config.publisher not in (None, "zmq", "null"):
        raise ValueError(f": publisher must be zmq or null, not {config.publisher!r}")
    if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
        raise ValueError(": buffer_steps, hwm and max_queue_size must be at least 1")
    return config


class GroupSpec(NamedTuple):
    """What a layer group keeps, in vLLM's words."""

    number: int
    kind: str
    window: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an event."""
        return {
            "group_idx": self.number,
            "kv_cache_spec_kind": self.kind,
            "kv_cache_spec_sliding_window": self.window,
        }

    @classmethod
    def all_of(cls, windows: Sequence[int | None]) -> "list[GroupSpec]":
        """The layer groups with these windows, and behind them the recurrent layers as one group,
        of which each snapshot is reported as the block that it is behind."""
        attention = [
            cls(n, FULL if window is None else WINDOW, window) for n, window in enumerate(windows)
        ]
        return [*attention, cls(len(windows), RECURRENT)]


class KVEvents(Observer):
    """A `PrefixListener` and an observer: batches the changes of each iteration.

    A block has the same hash in all layer groups; a group is named by its number, as in vLLM. A
    router that does not know groups takes the first one, which keeps the most tokens.
    """

    def __init__(
        self,
        block_size: int,
        publish: Callable[[Batch], None],
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """`windows` has the sliding window of each layer group, None for all tokens."""
        self._block_size = block_size
        self._publish = publish
        self._specs = GroupSpec.all_of(windows)
        self._groups: dict[bytes, int] = {}  # the groups of the names that are stored on any medium
        self._stored_on: dict[str, set[bytes]] = {
            medium: set() for medium in (DEVICE, *MEDIA.values())
        }
        self._events: list[Event] = []

    def stored(self, request: Request, places: Sequence[int], group: int) -> None:
        """One event for each run of consecutive blocks."""
        for place in places:
            name = name_in_group(request.block_hashes[place], group)
            self._groups[name] = group
            self._stored_on[DEVICE].add(name)
        for first, last in _runs(places):
            self._events.append(self._stored(request, first, last + 1, self._specs[group]))

    def _stored(self, request: Request, first: int, stop: int, group: GroupSpec) -> BlockStored:
        hashes, size, spec = request.block_hashes, self._block_size, request.spec
        lora = spec.lora
        return BlockStored(
            [_integer(one) for one in hashes[first:stop]],
            parent_block_hash=_integer(hashes[first - 1]) if first else None,
            token_ids=list(request.tokens(first * size, stop * size)),
            block_size=size,
            lora_id=None if lora is None else lora.lora_id,
            medium=DEVICE,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(spec, range(first, stop), size),
            **group.fields,
        )

    def removed(self, block_hash: bytes) -> None:
        self._remove(block_hash, DEVICE)

    def _remove(self, name: bytes, medium: str) -> None:
        group = self._groups.get(name, 0)
        self._stored_on[medium].discard(name)
        if not any(name in names for names in self._stored_on.values()):
            self._groups.pop(name, None)
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved) or (last.medium, last.group_idx) != (medium, group):
            last = BlockRemoved([], medium, group)
            self._events.append(last)
        last.block_hashes.append(_integer(name_in_group(name, group)))

    def cleared(self) -> None:
        """The device and the host tier are empty; vLLM has one event for all media."""
        for medium in (DEVICE, MEDIA[Tier.HOST]):
            self._stored_on[medium].clear()
        kept = set().union(*self._stored_on.values())
        self._groups = {name: group for name, group in self._groups.items() if name in kept}
        if not self._events or not isinstance(self._events[-1], AllBlocksCleared):
            self._events.append(AllBlocksCleared())

    def copied(self, tier: Tier, block_hash: bytes, is_saved: bool) -> None:
        """A copy in a lower tier: an event without tokens, as vLLM's offloading sends them."""
        medium = MEDIA[tier]
        if not is_saved:
            self._remove(block_hash, medium)
            return
        group = self._specs[self._groups.setdefault(block_hash, 0)]
        self._stored_on[medium].add(block_hash)
        name = _integer(name_in_group(block_hash, group.number))
        self._events.append(
            BlockStored([name], None, [], self._block_size, None, medium, None, **group.fields)
        )

    def planned(self, iteration: Iteration, now: float) -> None:
        self._flush()

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        self._flush()

    def worker_lost(self, now: float) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._events:
            self._publish(Batch(datetime.now(UTC).timestamp(), self._events))
            self._events = []


def _extra_keys(
    spec: RequestSpec, blocks: range, block_size: int
) -> list[tuple[str, ...] | None] | None:
    """What the hash of each block depends on besides its tokens; None if on nothing."""
    lora = (spec.lora_digest,) if spec.lora_digest else ()
    keys: list[tuple[str, ...] | None] = []
    for place in blocks:
        spans = spans_in(spec.spans, place * block_size, (place + 1) * block_size)
        salt = (spec.salt,) if spec.salt and not place else ()
        keys.append((*lora, *[span.digest.hex() for span in spans], *salt) or None)
    return keys if any(keys) else None


def _integer(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:HASH_BYTES], "big")


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers in an ascending sequence."""
    breaks = [i for i, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1]
    for start, stop in pairwise((0, *breaks, len(numbers))):
        yield numbers[start], numbers[stop - 1]


class ZmqPublisher:
    """Sends batches in a thread of its own, and replays the last `buffer_steps` on request.

    A batch that finds the queue full is dropped and counted; its sequence number is skipped, so
    that subscribers notice.
    """

    def __init__(self, config: KVEventsConfig, topic: str, metrics: Metrics) -> None:
        """Bind or connect the sockets. Raises `StartupError`."""
        self._metrics = metrics
        self._topic = topic.encode()
        self._queue: queue.Queue[tuple[int, Batch] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        try:
            zmq = importlib.import_module("zmq")
        except ImportError as error:
            raise StartupError(f"{FLAG} needs ZeroMQ ({INSTALL}): {error}") from None
        context = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: Any = None
        try:
            _attach(self._pub, config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise StartupError(f"{FLAG}: cannot publish at {config.endpoint}: {error}") from None
        logger.info("KV events, which contain prompts as token ids, go to %s", config.endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Batch) -> None:
        """Queue a batch; called on the event loop."""
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, batch))
        except queue.Full:
            self._metrics.num_dropped_kv_events += 1

    def close(self) -> None:
        """Send what is queued, for at most `CLOSE_SECONDS`."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        self._close_sockets()

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            # After the queue, so that a replay has every batch that was published before it.
            if self._replay is not None and self._queue.empty() and self._replay.poll(0):
                self._serve_replay()
            try:
                queued = self._queue.get(timeout=REPLAY_POLL_SECONDS)
            except queue.Empty:
                continue
            if queued is None:
                return
            number, batch = queued
            sequence, payload = number.to_bytes(8, "big"), encode(batch)
            self._pub.send_multipart((self._topic, sequence, payload))
            self._sent.append((sequence, payload))

    def _serve_replay(self) -> None:
        """Answer a request of a REQ or DEALER socket: an empty frame and a sequence number."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3:
            logger.warning("a replay request for KV events has %d frames, not 3", len(frames))
            return
        client, empty, start = frames
        for sequence, payload in self._sent:
            if sequence >= start:
                self._replay.send_multipart((client, empty, sequence, payload))
        self._replay.send_multipart((client, empty, END_OF_REPLAY, b""))

    def _close_sockets(self) -> None:
        for one in (self._pub, self._replay):
            if one is not None:
                one.close(linger=0)


def _attach(pub: Any, endpoint: str) -> None:
    """Bind to an address of this machine, connect to any other, as vLLM does."""
    is_local = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    (pub.bind if is_local else pub.connect)(endpoint)


def topic_of(config: KVEventsConfig, model: str) -> str:
    """The configured topic; by default `kv@HOST@MODEL`, which llm-d expects."""
    return config.topic or f"kv@{socket.gethostname()}@{model}"
