"""A decoder whose steps of decodes are recorded once for each shape, and then only played.

For so many rows the calls of all layers are the same from step to step, except where attention
planned otherwise. Prompts, whose shapes seldom come twice, take the plain way.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layers import Decoder
from engine.worker.ports import RopeAngles, StepContext

MOST_ROWS = 512
MOST_TAPES = 128  # the oldest makes room


class RecordableAttention(ABC):
    """An `AttentionBackend` that runs kernels of the team and keeps its plan in one place."""

    @property
    @abstractmethod
    def tape_key(self) -> bytes:
        """What the last plan decided that stands in the operands of kernels, not behind addresses
        there: after plans of equal keys `run` makes the same calls.

        Empty if the step is not of decodes alone: its like will hardly come again.
        """


class DecodeRecording(NamedTuple):
    """A tape, and where it reads and leaves what differs from step to step."""

    tape: KernelGraph
    hidden: Tensor
    rope: RopeAngles | None

    def fill(self, hidden: Tensor, rope: RopeAngles | None) -> None:
        """Write a step's hidden states and RoPE angles to where the tape reads them."""
        self.hidden.copy_(hidden)
        if self.rope is not None and rope is not None:
            self.rope.cos.copy_(rope.cos)
            self.rope.sin.copy_(rope.sin)


class RecordedDecoder:
    """See `StageModel`. All that the decoder computes in its blocks must be kernels of `team`."""

    def __init__(self, decoder: Decoder, team: NativeThreadPool) -> None:
        self._decoder = decoder
        self._team = team
        self._recordings: dict[tuple[int, bytes], DecodeRecording] = {}
        self.embed = decoder.embed
        self.logits = decoder.logits

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        attention = context.attention
        planned = attention.tape_key if isinstance(attention, RecordableAttention) else b""
        if not planned or context.rows is not None or len(hidden) > MOST_ROWS:
            return self._decoder.layers(hidden, context)
        rope = self._decoder.rope(context.positions)
        key = (len(hidden), planned)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(hidden, replace(context, rope=rope))
            if len(self._recordings) > MOST_TAPES:
                del self._recordings[next(iter(self._recordings))]
        else:
            recording.fill(hidden, rope)
            self._team.play(recording.tape)
        return hidden.copy_(recording.hidden)

    def _record(self, hidden: Tensor, context: StepContext) -> DecodeRecording:
        """Run the step while recording it, on memory that the recording keeps."""
        rope = context.rope
        with self._team.recording() as tape:
            place = tape.take("hidden", tuple(hidden.shape), hidden.dtype)
            angles = rope and RopeAngles(
                tape.take("cos", tuple(rope.cos.shape), rope.cos.dtype),
                tape.take("sin", tuple(rope.sin.shape), rope.sin.dtype),
            )
            recording = DecodeRecording(tape, place, angles)
            recording.fill(hidden, rope)
            left = self._decoder.run_blocks(place, replace(context, rope=angles))
        assert left is place, "the residual stream stays where it is"
        return recording
