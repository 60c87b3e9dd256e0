"""A decoder whose layers are recorded once, and replayed for steps of any number of rows.

There are two recordings: of steps in which each row decodes, and of others, such as those with
prompts. With rows that use LoRA adapters, or in a mixture of experts, the calls of a step depend on
more than its number of rows: decode steps are recorded for each shape, and the recording of another
step is replayed once, which spares it fresh memory for each output.

For few decodes the logits and the most likely tokens are recorded too, so that memory is read
without a pause from the first layer to the head. Of other steps the last layer is not recorded,
because torch selects its rows; with recurrent layers they are not recorded at all: they have few
runs of many rows. What torch computes is not in a recording, so steps of a decoder
with layers that run anything but kernels of the thread pool are not replayed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.step import NO_STATE
from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.recurrent_states import NO_RUN
from engine.worker.model.layers import ComputesAngles, Decoder
from engine.worker.ports import (
    Argmax,
    LoraSegment,
    RecordableAttention,
    RopeAngles,
    StateRuns,
    StepContext,
    StepStates,
)

# What neither computes nor allocates: it reads what is known of a tensor, or makes a view of it.
VIEWS = frozenset(
    {
        *("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel"),
        *("size", "storage_offset", "stride"),
        *("as_strided", "chunk", "detach", "expand", "narrow", "permute", "select", "split"),
        *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
    }
)
SOMETIMES_VIEWS = frozenset({"__getitem__", "contiguous", "flatten", "float", "reshape"})


class TorchWatch(TorchFunctionMode):
    """While it is entered, `operations` gets the names of all functions of torch that are called,
    but for views. (A `TorchDispatchMode` would make torch import a third of its modules.)"""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        is_view = name in VIEWS or (name in SOMETIMES_VIEWS and _shares_memory(args[0], result))
        if not is_view:
            self.operations.append(name)
        return result


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


logger = logging.getLogger(__name__)

MAX_ROWS = 512
MAX_DECODES = 64  # up to so many decodes' logits are recorded: their memory stays allocated
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


class StepInputs(NamedTuple):
    """The tensors from which a recording reads what differs from step to step."""

    hidden: Tensor  # also the output
    ropes: tuple[RopeAngles, ...]
    layer_inputs: Tensor | None
    runs: StateRuns | None

    def fill(self, hidden: Tensor, context: StepContext) -> None:
        """Write a step's hidden states and RoPE angles to where the graph reads them."""
        self.hidden.copy_(hidden)
        if self.layer_inputs is not None and context.layer_inputs is not None:
            self.layer_inputs.copy_(context.layer_inputs)
        for own, rope in zip(self.ropes, context.ropes, strict=True):
            own.cos.copy_(rope.cos)
            own.sin.copy_(rope.sin)
        if self.runs is not None and context.states is not None:
            runs, count = context.states.runs, len(context.states.runs.runs)
            self.runs.writes[:] = runs.writes
            self.runs.runs[:count], self.runs.runs[count:] = runs.runs, NO_RUN


class Recording:
    """A graph with its inputs and outputs, which are rows of what was recorded."""

    def __init__(
        self, graph: KernelGraph, inputs: StepInputs, read_out: RecordedLogits | None, plan: bytes
    ) -> None:
        """Recorded with attention whose plan has this key."""
        self.graph, self.inputs, self.read_out = graph, inputs, read_out
        self._recorded = inputs, read_out
        self._plan = plan

    def fit(self, rows: int, plan: bytes) -> None:
        """Fit the recording to a step of so many rows whose attention is planned, with this key."""
        if (rows, plan) == (len(self.inputs.hidden), self._plan):
            return
        self.graph.resize(rows)
        self._plan = plan
        (hidden, ropes, layer_inputs, runs), read_out = self._recorded
        self.inputs = StepInputs(
            hidden[:rows],
            tuple([RopeAngles(rope.cos[:rows], rope.sin[:rows]) for rope in ropes]),
            None if layer_inputs is None else layer_inputs[:rows],
            None if runs is None else StateRuns(runs.runs[:rows], runs.writes[:rows]),
        )
        if read_out is not None:
            logits, (values, ids) = read_out
            self.read_out = RecordedLogits(logits[:rows], Argmax(values[:rows], ids[:rows]))


class RecordingKey(NamedTuple):
    """The shape of a step whose recording cannot be resized."""

    rows: int
    plan: bytes
    loras: tuple[LoraSegment, ...]
    is_whole: bool


class RopeTable:
    """The angles of one kind of RoPE at the first positions, computed once."""

    def __init__(self, rope: ComputesAngles) -> None:
        self._rope = rope
        self._known = RopeAngles(torch.empty(0), torch.empty(0))

    def angles(self, positions: Tensor) -> RopeAngles:
        """The angles of `Rope.angles`, with the same bits."""
        is_table = positions.dim() == 1 and len(positions) <= MAX_ROWS
        stop = 1 + max(positions.tolist(), default=0) if is_table else 0
        if not 0 < stop <= MAX_TABLE_POSITIONS:
            return self._rope.angles(positions)
        if len(self._known.cos) < stop:
            count = max(MIN_TABLE_POSITIONS, 1 << (stop - 1).bit_length())
            self._known = self._rope.angles(torch.arange(count))
        known = self._known
        return RopeAngles(
            known.cos.index_select(0, positions), known.sin.index_select(0, positions)
        )


class RecordedDecoder:
    """A `StageModel` around a decoder, most of whose steps are replayed.

    None is if a recording shows that torch computes anything in it.
    """

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
        self._is_recordable = True  # as far as is known
        self._watched = set[tuple[bool, bool]]()  # kinds of recordings: whole, and with LoRA rows
        self._is_resizable = True  # as far as is known
        self._for_all: dict[bool, Recording] = {}  # by whether they have the last layer
        self._for_shapes: dict[RecordingKey, Recording] = {}
        self.embed = decoder.embed
        self.features = decoder.features

    def logits(self, hidden: Tensor) -> Tensor:
        computed = self._computed
        if computed is None or not _is_same(computed.hidden, hidden):
            return self._decoder.logits(hidden)
        return computed.logits

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        self._computed = None
        attention, decoder = context.attention, self._decoder
        is_other = len(hidden) > MAX_ROWS or context.added
        if is_other or not isinstance(attention, RecordableAttention) or not self._is_recordable:
            return decoder.layers(hidden, context)
        is_whole = (
            attention.has_decodes_only and context.rows is None and len(hidden) <= MAX_DECODES
        )
        if context.states is not None and not is_whole:
            return decoder.layers(hidden, context)
        hidden, context = decoder.prepared(hidden, context)
        recording = self._recording(hidden, context, attention, is_whole=is_whole)
        if recording is None:
            return decoder.sent(decoder.run_blocks(hidden, context), context)
        recording.fit(len(hidden), attention.plan_key)
        recording.inputs.fill(hidden, context)
        self._pool.replay(recording.graph)
        hidden.copy_(recording.inputs.hidden)
        if not is_whole:
            hidden = decoder.blocks[-1](hidden, context)
        elif recording.read_out is not None:
            self._computed = ComputedLogits(hidden, recording.read_out.logits)
            self._largest.keep(recording.read_out)
        return decoder.sent(hidden, context)

    def _recording(
        self,
        hidden: Tensor,
        context: StepContext,
        attention: RecordableAttention,
        *,
        is_whole: bool,
    ) -> Recording | None:
        """The recording of all such steps, or of those of this shape; `is_whole` with the last
        layer. None if steps cannot be recorded."""
        plan = attention.plan_key
        if self._is_resizable and not context.loras:
            most = MAX_DECODES if is_whole else MAX_ROWS
            for_all = self._for_all.get(is_whole)
            for_all = for_all or self._record(most, hidden, context, plan, is_whole=is_whole)
            if for_all is None:
                return None
            self._is_resizable = for_all.graph.is_resizable
            if self._is_resizable:
                self._for_all[is_whole] = for_all
                return for_all
        key = RecordingKey(len(hidden), plan, context.loras, is_whole)
        recording = self._for_shapes.get(key)
        if recording is None:
            recording = self._record(len(hidden), hidden, context, plan, is_whole=is_whole)
            if recording is not None and attention.has_decodes_only:
                self._for_shapes[key] = recording
            if len(self._for_shapes) > MAX_RECORDINGS:
                del self._for_shapes[next(iter(self._for_shapes))]
        return recording

    def _record(
        self, rows: int, hidden: Tensor, context: StepContext, plan: bytes, *, is_whole: bool
    ) -> Recording | None:
        """A recording of so many rows like those of a step; None if torch computes in it, which
        writes no states meanwhile."""
        blocks = self._decoder.blocks if is_whole else self._decoder.blocks[:-1]
        kind, watch = (is_whole, bool(context.loras)), TorchWatch()
        states, runs = context.states, None
        if states is not None:
            runs = StateRuns(np.full((rows, 3), NO_STATE), np.full((rows, 2), NO_STATE))
            states = StepStates(states.layers, runs)
        with (
            self._pool.recording(rows) as graph,
            nullcontext() if kind in self._watched else watch,
        ):

            def taken(kind: str, like: Tensor) -> Tensor:
                return graph.take(kind, (rows, *like.shape[1:]), like.dtype)

            inputs = StepInputs(
                taken("hidden", hidden),
                tuple(
                    RopeAngles(taken(f"cos {at}", rope.cos), taken(f"sin {at}", rope.sin))
                    for at, rope in enumerate(context.ropes)
                ),
                None
                if context.layer_inputs is None
                else taken("layer inputs", context.layer_inputs),
                runs,
            )
            own = replace(
                context,
                rows=None,
                ropes=inputs.ropes,
                layer_inputs=inputs.layer_inputs,
                states=states,
            )
            for block in blocks:
                output = block(inputs.hidden, own)
                assert output is inputs.hidden, "blocks update the hidden states in place"
            read_out = self._record_logits(inputs.hidden) if is_whole else None
        self._watched.add(kind)
        if watch.operations:
            logger.info("steps are not recorded: torch runs %s", watch.operations[0])
            self._is_recordable = False
            self._for_all.clear()
            self._for_shapes.clear()
            return None
        return Recording(graph, inputs, read_out, plan)

    def _record_logits(self, hidden: Tensor) -> RecordedLogits | None:
        """None for an earlier stage, and for logits that torch changes."""
        decoder = self._decoder
        if decoder.head is None or decoder.logit_cap is not None:
            return None
        logits = decoder.logits(hidden)
        return RecordedLogits(logits, self._argmax(logits))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors `[rows, width]` are the same rows in memory."""
    return one.data_ptr() == other.data_ptr() and len(one) == len(other)
