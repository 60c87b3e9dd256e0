"""A decoder whose decode steps are recorded once for each shape, and replayed afterwards.

For a number of rows the kernel calls of all layers are the same from step to step, unless attention
plans them differently or other rows use LoRA adapters. The shapes of prompts seldom repeat: their
recordings are replayed once, which spares them fresh memory for each output, and waits of one
kernel for another.

For few rows the logits and the most likely tokens are recorded too, so that memory is read without
a pause from the first layer to the head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layers import ComputesAngles, Decoder
from engine.worker.ports import (
    Argmax,
    LoraSegment,
    RecordableAttention,
    RopeAngles,
    StepContext,
)

MAX_ROWS = 512
MAX_ROWS_WITH_HEAD = 64  # whose logits are recorded: their memory stays allocated
MIN_TABLE_POSITIONS = 256
MAX_TABLE_POSITIONS = 8192  # 4 MiB of angles for heads of 128
MAX_RECORDINGS = 128  # the oldest is dropped for a new one


class RecordedLogits(NamedTuple):
    """Logits `[rows, vocab]` in float32, and the largest of each row."""

    logits: Tensor
    largest: Argmax


class ComputedLogits(NamedTuple):
    """The logits that the last replay computed from `hidden`.

    `hidden` is kept, so no other tensor can have its address.
    """

    hidden: Tensor
    logits: Tensor


class LargestLogits:
    """The largest logits that a replay computed, until they are read."""

    def __init__(self) -> None:
        self._known: RecordedLogits | None = None

    def keep(self, known: RecordedLogits) -> None:
        self._known = known

    def take(self, logits: Tensor) -> Argmax | None:
        """The largest of exactly these logits, once, before they are changed."""
        known, self._known = self._known, None
        return known.largest if known is not None and known.logits is logits else None


class DecodeRecording(NamedTuple):
    """A graph, and the tensors from which it reads what differs from step to step."""

    graph: KernelGraph
    hidden: Tensor  # also the output
    ropes: tuple[RopeAngles, ...]
    layer_inputs: Tensor | None
    read_out: RecordedLogits | None = None

    def fill(self, hidden: Tensor, context: StepContext) -> None:
        """Write a step's hidden states and RoPE angles to where the graph reads them."""
        self.hidden.copy_(hidden)
        if self.layer_inputs is not None and context.layer_inputs is not None:
            self.layer_inputs.copy_(context.layer_inputs)
        for own, rope in zip(self.ropes, context.ropes, strict=True):
            own.cos.copy_(rope.cos)
            own.sin.copy_(rope.sin)


class RopeTable:
    """The angles of one kind of RoPE at the first positions, computed once."""

    def __init__(self, rope: ComputesAngles) -> None:
        self._rope = rope
        self._known = RopeAngles(torch.empty(0), torch.empty(0))

    def angles(self, positions: Tensor) -> RopeAngles:
        """As `Rope.angles`, with the same bits."""
        stop = 1 + max(positions.tolist(), default=0) if len(positions) <= MAX_ROWS else 0
        if not 0 < stop <= MAX_TABLE_POSITIONS:
            return self._rope.angles(positions)
        if len(self._known.cos) < stop:
            count = max(MIN_TABLE_POSITIONS, 1 << (stop - 1).bit_length())
            self._known = self._rope.angles(torch.arange(count))
        return RopeAngles(self._known.cos[positions], self._known.sin[positions])


class RecordedDecoder:
    """A `StageModel` around a decoder whose blocks run kernels of the thread pool only."""

    def __init__(
        self,
        decoder: Decoder,
        pool: NativeThreadPool,
        argmax: Callable[[Tensor], Argmax],
        largest: LargestLogits,
    ) -> None:
        """`argmax` finds the largest logits by kernels; those of a replay are kept in `largest`."""
        tables = tuple([RopeTable(rope) for rope in decoder.ropes])
        self._decoder = decoder = replace(decoder, ropes=tables)
        self._pool = pool
        self._argmax = argmax
        self._largest = largest
        self._computed: ComputedLogits | None = None
        self._recordings: dict[tuple[int, bytes, tuple[LoraSegment, ...]], DecodeRecording] = {}
        self.embed = decoder.embed
        self.features = decoder.features

    def logits(self, hidden: Tensor) -> Tensor:
        computed = self._computed
        if computed is None or not _is_same(computed.hidden, hidden):
            return self._decoder.logits(hidden)
        return computed.logits

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        self._computed = None
        attention = context.attention
        plan = attention.plan_key if isinstance(attention, RecordableAttention) else b""
        is_other = context.rows is not None or context.states is not None
        if not plan or is_other or len(hidden) > MAX_ROWS:
            return self._layers_once(hidden, context)
        hidden, context = self._decoder.prepared(hidden, context)
        key = (len(hidden), plan, context.loras)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(hidden, context)
            if len(self._recordings) > MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
        else:
            recording.fill(hidden, context)
            self._pool.replay(recording.graph)
        hidden.copy_(recording.hidden)
        if recording.read_out is not None:
            self._computed = ComputedLogits(hidden, recording.read_out.logits)
            self._largest.keep(recording.read_out)
        return self._decoder.sent(hidden, context)

    def _layers_once(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Layers that run after they were recorded; the recording is not kept.

        The last layer is not recorded, because torch selects its rows.
        """
        decoder = self._decoder
        is_native = isinstance(context.attention, RecordableAttention)
        if not is_native or context.states is not None or len(hidden) > MAX_ROWS:
            return decoder.layers(hidden, context)
        hidden, context = decoder.prepared(hidden, context)
        all_rows = replace(context, rows=None)
        with self._pool.recording():
            for block in decoder.blocks[:-1]:
                block(hidden, all_rows)
        return decoder.sent(decoder.blocks[-1](hidden, context), context)

    def _record(self, hidden: Tensor, context: StepContext) -> DecodeRecording:
        """Run the step while recording it, on memory that the recording keeps."""
        with self._pool.recording() as graph:
            own = graph.take("hidden", tuple(hidden.shape), hidden.dtype)
            ropes = tuple(
                RopeAngles(
                    graph.take(f"cos {at}", tuple(rope.cos.shape), rope.cos.dtype),
                    graph.take(f"sin {at}", tuple(rope.sin.shape), rope.sin.dtype),
                )
                for at, rope in enumerate(context.ropes)
            )
            inputs = context.layer_inputs
            if inputs is not None:
                inputs = graph.take("layer inputs", tuple(inputs.shape), inputs.dtype)
            recording = DecodeRecording(graph, own, ropes, inputs)
            recording.fill(hidden, context)
            recorded = replace(context, ropes=ropes, layer_inputs=inputs)
            output = self._decoder.run_blocks(own, recorded)
            assert output is own, "the blocks update the hidden states in place"
            return recording._replace(read_out=self._record_logits(own))

    def _record_logits(self, hidden: Tensor) -> RecordedLogits | None:
        """None for many rows, for an earlier stage, and for logits that torch changes."""
        decoder = self._decoder
        if decoder.head is None or decoder.logit_cap is not None:
            return None
        if len(hidden) > MAX_ROWS_WITH_HEAD:
            return None
        logits = decoder.logits(hidden)
        return RecordedLogits(logits, self._argmax(logits))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors `[rows, width]` are the same rows in memory."""
    return one.data_ptr() == other.data_ptr() and len(one) == len(other)
