"""A decoder whose decode steps are recorded once for each shape, and replayed afterwards.

For a number of rows the kernel calls of all layers are the same from step to step, unless attention
plans them differently. Prompts, whose shapes seldom repeat, are computed without a recording.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layers import Decoder
from engine.worker.ports import RopeAngles, StepContext

MAX_ROWS = 512
MAX_RECORDINGS = 128  # the oldest is dropped for a new one


class RecordableAttention(ABC):
    """An `AttentionBackend` that runs kernels of the thread pool only."""

    @property
    @abstractmethod
    def plan_key(self) -> bytes:
        """What the last plan put into the operands of kernels, not behind addresses in them.

        After plans of equal keys `run` makes the same calls. Empty if the step has prompts: a
        step like it seldom comes again.
        """


class DecodeRecording(NamedTuple):
    """A graph, and the tensors from which it reads what differs from step to step."""

    graph: KernelGraph
    hidden: Tensor  # also the output
    rope: RopeAngles | None

    def fill(self, hidden: Tensor, rope: RopeAngles | None) -> None:
        """Write a step's hidden states and RoPE angles to where the graph reads them."""
        self.hidden.copy_(hidden)
        if self.rope is not None and rope is not None:
            self.rope.cos.copy_(rope.cos)
            self.rope.sin.copy_(rope.sin)


class RecordedDecoder:
    """A `StageModel` around a decoder whose blocks run kernels of the thread pool only."""

    def __init__(self, decoder: Decoder, pool: NativeThreadPool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._recordings: dict[tuple[int, bytes], DecodeRecording] = {}
        self.embed = decoder.embed
        self.logits = decoder.logits

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        attention = context.attention
        plan = attention.plan_key if isinstance(attention, RecordableAttention) else b""
        if not plan or context.rows is not None or len(hidden) > MAX_ROWS:
            return self._decoder.layers(hidden, context)
        rope = self._decoder.rope(context.positions)
        key = (len(hidden), plan)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(hidden, replace(context, rope=rope))
            if len(self._recordings) > MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
        else:
            recording.fill(hidden, rope)
            self._pool.replay(recording.graph)
        return hidden.copy_(recording.hidden)

    def _record(self, hidden: Tensor, context: StepContext) -> DecodeRecording:
        """Run the step while recording it, on memory that the recording keeps."""
        rope = context.rope
        with self._pool.recording() as graph:
            own = graph.take("hidden", tuple(hidden.shape), hidden.dtype)
            angles = rope and RopeAngles(
                graph.take("cos", tuple(rope.cos.shape), rope.cos.dtype),
                graph.take("sin", tuple(rope.sin.shape), rope.sin.dtype),
            )
            recording = DecodeRecording(graph, own, angles)
            recording.fill(hidden, rope)
            output = self._decoder.run_blocks(own, replace(context, rope=angles))
        assert output is own, "the blocks update the hidden states in place"
        return recording
