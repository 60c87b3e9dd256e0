"""Messages between the loop process and a worker, as bytes: MessagePack in length-prefixed frames.

A frame is the payload's length as four big-endian bytes, then the payload: one message as msgspec
writes it. Nothing is pickled. Whatever is not a frame, or not a message, is a `WireError`.
"""

import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct

from engine.step import Step, StepId, StepResult, StepTimes, WorkerReport, WorkerSettings

MAX_FRAME_BYTES = 64 << 20  # a step of 256 requests with 128k tokens of context is about 8 MiB
HEADER = struct.Struct(">I")  # big-endian, so that text on the wire reads as an absurd length


class WireError(Exception):
    """The bytes are no message, or the message does not go into bytes."""


class LoadWorker(Struct, frozen=True, tag="load", array_like=True):
    """Opens the conversation: what the worker is to load."""

    settings: WorkerSettings


class RunStep(Struct, frozen=True, tag="run", array_like=True):
    """Orders one iteration."""

    step: Step


class Goodbye(Struct, frozen=True, tag="goodbye", array_like=True):
    """Ends the conversation; the worker leaves after the steps sent before."""


class Progress(Struct, frozen=True, tag="progress", array_like=True):
    """Loading goes on: `done` of `total` units of `what`."""

    what: str
    done: int
    total: int


class WorkerLoaded(Struct, frozen=True, tag="loaded", array_like=True):
    """The worker is ready for steps."""

    report: WorkerReport


class LoadRefused(Struct, frozen=True, tag="refused", array_like=True):
    """The worker cannot load; `line` says why to a person."""

    line: str


class StepRan(Struct, frozen=True, tag="ran", array_like=True):
    """The answer to a `RunStep`."""

    result: StepResult


class StepFailure(Struct, frozen=True, tag="failed", array_like=True):
    """The other answer to a `RunStep`: the step raised, the worker lives on."""

    step_id: StepId
    line: str


class TraceEvents(Struct, frozen=True, tag="traced", array_like=True):
    """After the answer, from a worker that traces: when it learned of the step, and ran it."""

    step_id: StepId
    learned_at: float
    times: StepTimes


ToWorker: TypeAlias = LoadWorker | RunStep | Goodbye
FromWorker: TypeAlias = Progress | WorkerLoaded | LoadRefused | StepRan | StepFailure | TraceEvents

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytearray:
    """The message as one frame. Raises `WireError` where a value or the size does not fit."""
    buffer = bytearray(HEADER.size)
    try:
        _encoder.encode_into(message, buffer, HEADER.size)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise WireError(f"cannot be sent to another process: {error}") from error
    num_bytes = len(buffer) - HEADER.size
    if num_bytes > MAX_FRAME_BYTES:
        raise WireError(f"a message of {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
    HEADER.pack_into(buffer, 0, num_bytes)
    return buffer


def read_to_worker(payload: bytearray) -> ToWorker:
    """A message as the worker receives it. Raises `WireError`."""
    try:
        message: ToWorker = _to_worker.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message to a worker: {error}") from error
    return message


def read_from_worker(payload: bytearray) -> FromWorker:
    """A message as the loop process receives it. Raises `WireError`."""
    try:
        message: FromWorker = _from_worker.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message from a worker: {error}") from error
    return message


class FrameReader:
    """Cuts a stream of bytes, in pieces of any length, into the payloads of its frames."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here without cutting a frame in two."""
        return not self._buffer

    def feed(self, piece: bytes | bytearray | memoryview) -> list[bytearray]:
        """The payloads that this piece completes. Raises `WireError` for an absurd length."""
        self._buffer += piece
        payloads = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (num_bytes,) = HEADER.unpack_from(self._buffer, start)
            if not 0 < num_bytes <= self._max_frame_bytes:
                raise WireError(f"a frame of {num_bytes} bytes; 1 to {self._max_frame_bytes} fit")
            end = start + HEADER.size + num_bytes
            if end > len(self._buffer):
                break
            payloads.append(self._buffer[start + HEADER.size : end])
            start = end
        del self._buffer[:start]
        return payloads
