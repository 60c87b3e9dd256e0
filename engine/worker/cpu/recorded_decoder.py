"""A decoder whose steps of decodes are recorded once for each shape, and then only played.

For so many rows the calls of all layers are the same from step to step, except where attention
planned otherwise. Prompts, whose shapes seldom come twice, take the plain way.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layers import Decoder
from engine.worker.ports import AttentionBackend, RotaryAngles

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
    turn: RotaryAngles | None

    def fill(self, hidden: Tensor, turn: RotaryAngles | None) -> None:
        """Write a step's hidden states and turn to where the tape reads them."""
        self.hidden.copy_(hidden)
        if self.turn is not None and turn is not None:
            self.turn.cos.copy_(turn.cos)
            self.turn.sin.copy_(turn.sin)


class RecordedDecoder:
    """See `StageModel`. All that the decoder computes in its blocks must be kernels of `team`."""

    def __init__(self, decoder: Decoder, team: NativeThreadPool) -> None:
        self._decoder = decoder
        self._team = team
        self._recordings: dict[tuple[int, bytes], DecodeRecording] = {}
        self.embed = decoder.embed
        self.logits = decoder.logits

    def layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `StageModel`."""
        planned = attention.tape_key if isinstance(attention, RecordableAttention) else b""
        if not planned or rows is not None or len(hidden) > MOST_ROWS:
            return self._decoder.layers(hidden, positions, attention, rows)
        key, turn = (len(hidden), planned), self._decoder.turn(positions)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(hidden, turn, attention)
            if len(self._recordings) > MOST_TAPES:
                del self._recordings[next(iter(self._recordings))]
        else:
            recording.fill(hidden, turn)
            self._team.play(recording.tape)
        return hidden.copy_(recording.hidden)

    def _record(
        self, hidden: Tensor, turn: RotaryAngles | None, attention: AttentionBackend
    ) -> DecodeRecording:
        """Run the step as ever, on memory that stays."""
        with self._team.recording() as tape:
            place = tape.take("hidden", tuple(hidden.shape), hidden.dtype)
            angles = turn and RotaryAngles(
                tape.take("cos", tuple(turn.cos.shape), turn.cos.dtype),
                tape.take("sin", tuple(turn.sin.shape), turn.sin.dtype),
            )
            recording = DecodeRecording(tape, place, angles)
            recording.fill(hidden, turn)
            left = self._decoder.through(place, angles, attention)
        assert left is place, "the residual stream stays where it is"
        return recording
