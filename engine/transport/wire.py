"""Messages between the server process and a worker: MessagePack in length-prefixed frames.

A frame is the payload's length as four big-endian bytes, then the payload: one message encoded by
msgspec. Nothing is pickled. Invalid frames and messages raise `WireError`.
"""

import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct

from engine.lora import LoraReport, LoraSpec
from engine.media import ImagePixels
from engine.step import Step, StepId, StepResult, StepTimes
from engine.worker_settings import WorkerReport, WorkerSettings

MAX_FRAME_BYTES = 64 << 20  # a step of 256 requests with 128k tokens of context is about 8 MiB
HEADER = struct.Struct(">I")  # big-endian, so that ASCII text reads as a length above the limit


class WireError(Exception):
    """The bytes are not a valid message, or the message cannot be encoded."""


class LoadWorker(Struct, frozen=True, tag="load", array_like=True):
    """The first message to a worker: what it must load."""

    settings: WorkerSettings


class RunStep(Struct, frozen=True, tag="run", array_like=True):
    """Run one step."""

    step: Step


class LoadLora(Struct, frozen=True, tag="load_lora", array_like=True):
    """Load a LoRA adapter beside the steps; answered by a `LoraLoaded`."""

    spec: LoraSpec


class UnloadLora(Struct, frozen=True, tag="unload_lora", array_like=True):
    """Free a LoRA adapter, which no later step uses."""

    lora_id: int


class SendPixels(Struct, frozen=True, tag="pixels", array_like=True):
    """A piece of an image's pixels, before the step that begins to encode it."""

    piece: ImagePixels


class Goodbye(Struct, frozen=True, tag="goodbye", array_like=True):
    """The last message to a worker: it exits after the steps sent before."""


class LoadProgress(Struct, frozen=True, tag="progress", array_like=True):
    """Progress of loading: `done` of `total` units of `what`."""

    what: str
    done: int
    total: int


class WorkerLoaded(Struct, frozen=True, tag="loaded", array_like=True):
    """The worker is ready for steps."""

    report: WorkerReport


class LoadFailed(Struct, frozen=True, tag="refused", array_like=True):
    """The worker could not load; `message` is the reason, one line for the operator.

    `may_retry`: the reason is a GPU kernel that new workers leave out.
    """

    message: str
    may_retry: bool = False


class StepRan(Struct, frozen=True, tag="ran", array_like=True):
    """The result of a `RunStep`."""

    result: StepResult


class LoraLoaded(Struct, frozen=True, tag="lora", array_like=True):
    """The answer to a `LoadLora`, also if the adapter could not be loaded."""

    report: LoraReport


class StepFailure(Struct, frozen=True, tag="failed", array_like=True):
    """The step of a `RunStep` raised; the worker can run further steps."""

    step_id: StepId
    message: str


class TraceEvents(Struct, frozen=True, tag="traced", array_like=True):
    """Sent after a result by a worker that traces: when it received the step and ran it."""

    step_id: StepId
    learned_at: float
    times: StepTimes


ToWorker: TypeAlias = LoadWorker | RunStep | LoadLora | UnloadLora | SendPixels | Goodbye
FromWorker: TypeAlias = (
    LoadProgress | WorkerLoaded | LoadFailed | StepRan | StepFailure | LoraLoaded | TraceEvents
)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytearray:
    """Encode a message as one frame. Raises `WireError` if a value or the size is too large."""
    buffer = bytearray(HEADER.size)
    try:
        _encoder.encode_into(message, buffer, HEADER.size)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise WireError(f"cannot be sent to another process: {error}") from error
    num_bytes = len(buffer) - HEADER.size
    if num_bytes > MAX_FRAME_BYTES:
        raise WireError(f"is a message of {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
    HEADER.pack_into(buffer, 0, num_bytes)
    return buffer


def read_to_worker(payload: bytearray) -> ToWorker:
    """Decode a payload that the worker received. Raises `WireError`."""
    try:
        message: ToWorker = _to_worker.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message to a worker: {error}") from error
    return message


def read_from_worker(payload: bytearray) -> FromWorker:
    """Decode a payload that the server received. Raises `WireError`."""
    try:
        message: FromWorker = _from_worker.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message from a worker: {error}") from error
    return message


class FrameReader:
    """Splits a byte stream, which arrives in pieces of any length, into frame payloads."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes | bytearray | memoryview) -> list[bytearray]:
        """The payloads that this piece completes. Raises `WireError` for an invalid length."""
        self._buffer += piece
        payloads = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (num_bytes,) = HEADER.unpack_from(self._buffer, start)
            if not 0 < num_bytes <= self._max_frame_bytes:
                raise WireError(
                    f"a frame of {num_bytes} bytes; 1 to {self._max_frame_bytes} are allowed"
                )
            end = start + HEADER.size + num_bytes
            if end > len(self._buffer):
                break
            payloads.append(self._buffer[start + HEADER.size : end])
            start = end
        del self._buffer[:start]
        return payloads
