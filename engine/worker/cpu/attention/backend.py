"""Attention on the CPU over the paged cache as it lies, in native kernels on the worker's team."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.attention import paged_kernels as paged
from engine.worker.cpu.attention import rope_and_cache_write as entering
from engine.worker.cpu.attention.softmax import SPAN, part_floats
from engine.worker.cpu.kernels.dtypes import kind_of
from engine.worker.cpu.operators import KernelCall
from engine.worker.cpu.recorded_decoder import RecordableAttention
from engine.worker.ports import (
    AttentionSpec,
    Int64s,
    KVTensors,
    RaggedLayout,
    RopeAngles,
    ThreadPool,
)

ROWS = 24  # of a task: tokens x query heads of one KV head
CHUNKS_PER_THREAD = 4  # enough for threads to end together
FEWEST_SPANS = 4  # of a context that is worth being shared out
FIRST, TOKENS, POSITION, PLACE, LOW, HIGH, PARTS = range(paged.TASK_WORDS)


class CpuAttention(RecordableAttention):
    """Work is cut into tasks once a step; layers differ in addresses alone."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, team: ThreadPool) -> None:
        group = spec.num_heads // spec.num_kv_heads
        self._team = team
        self._cache = cache
        self._kv_heads = spec.num_kv_heads
        self._window = spec.window or 0
        self._tokens_per_task = max(1, ROWS // group)
        most_rows = self._tokens_per_task * group
        self._part_floats = part_floats(most_rows, spec.head_dim)
        self._tasks = self._whole = self._tables = self._slots = np.empty(0, dtype=np.int64)
        self._num_tasks = self._num_whole = 0
        self._is_of_decodes = False
        stride = paged.scratch_floats(most_rows, spec.head_dim)
        self._scratch: NDArray[np.float32] = np.empty(stride * team.threads, dtype=np.float32)
        self._parts: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        kind = kind_of(cache.keys[0].dtype)
        shape = (spec.num_kv_heads, group, spec.head_dim, cache.block_size)
        blank = paged.AttendOperands(
            *shape,
            window=self._window,
            scale=0,
            tasks=0,
            tables=0,
            scratch=self._scratch.ctypes.data,
            scratch_stride=stride,
            most_rows=most_rows,
            parts=0,
            keys=0,
            values=0,
            key_scales=0,
            value_scales=0,
            q=0,
            q_stride=0,
            out=0,
            out_stride=0,
        )
        self._attend = KernelCall(team, paged.OF_KINDS[kind], blank)
        self._attend.words.view(np.float32)[2 * 5] = spec.scale
        self._join = KernelCall(team, paged.join_parts, blank)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.block_size)
        self._enter = KernelCall(team, entering.OF_KINDS[kind], (0, 0, *heads, *(0,) * 9))

    def plan(self, layout: RaggedLayout) -> None:
        """See `AttentionBackend`."""
        whole = self._cut(layout)
        whole, tasks = self._share_out(whole)
        self._num_tasks, self._num_whole = len(tasks), len(whole)
        self._is_of_decodes = layout.num_decodes == layout.num_requests
        self._tasks = _put(self._tasks, tasks.ravel())
        self._whole = _put(self._whole, whole.ravel())
        self._tables = _put(self._tables, layout.kv_indices)
        self._slots = _put(self._slots, layout.slots)
        self._attend.words[6:8] = self._tasks.ctypes.data, self._tables.ctypes.data
        self._join.words[6] = self._whole.ctypes.data
        self._attend.words[11] = self._join.words[11] = self._parts.ctypes.data
        self._enter.words[:2] = self._slots.ctypes.data, len(layout.slots)

    @property
    def tape_key(self) -> bytes:
        """See `RecordableAttention`."""
        if not self._is_of_decodes:
            return b""
        words = *self._attend.words[6:8], self._join.words[6], self._join.words[11]
        return np.array(
            (*words, *self._enter.words[:2], self._num_tasks, self._num_whole)
        ).tobytes()

    def _cut(self, layout: RaggedLayout) -> Int64s:
        """Tasks over whole contexts, `[tasks, TASK_WORDS]`."""
        per = self._tokens_per_task
        first_row, last_row = layout.qo_indptr[:-1], layout.qo_indptr[1:]
        owner, piece = _pieces(-(-(last_row - first_row) // per))
        tasks = np.empty((len(owner), paged.TASK_WORDS), dtype=np.int64)
        tasks[:, FIRST] = first_row[owner] + piece * per
        tasks[:, TOKENS] = np.minimum(per, last_row[owner] - tasks[:, FIRST])
        tasks[:, POSITION] = layout.positions[tasks[:, FIRST]]
        tasks[:, PLACE] = layout.kv_indptr[owner]
        seen = tasks[:, POSITION] + 1 - self._window if self._window else 0
        tasks[:, LOW] = np.maximum(seen, 0) // SPAN * SPAN
        tasks[:, HIGH] = tasks[:, POSITION] + tasks[:, TOKENS]
        tasks[:, PARTS] = -1
        return tasks

    def _share_out(self, tasks: Int64s) -> tuple[Int64s, Int64s]:
        """Cut tasks that would keep others waiting into runs of spans: these tasks, and all runs.

        That changes nothing of what they compute, since a part is always of one span.
        """
        spans = -(-(tasks[:, HIGH] - tasks[:, LOW]) // SPAN)
        if self._team.threads == 1 or spans.max() < FEWEST_SPANS:
            return tasks[:0], tasks
        chunks = CHUNKS_PER_THREAD * self._team.threads
        most = max(FEWEST_SPANS // 2, int(spans.sum()) * self._kv_heads // chunks)
        is_long = spans > 2 * most
        whole, spans = tasks[is_long], spans[is_long]
        whole[:, PARTS] = np.cumsum(spans) - spans
        owner, piece = _pieces(-(-spans // most))
        runs = whole[owner]
        runs[:, LOW] += piece * most * SPAN
        runs[:, HIGH] = np.minimum(runs[:, HIGH], runs[:, LOW] + most * SPAN)
        runs[:, PARTS] += piece * most
        needed = int(spans.sum()) * self._kv_heads * self._part_floats
        if len(self._parts) < needed:
            self._parts = np.empty(needed, dtype=np.float32)
        return whole, np.concatenate((runs, tasks[~is_long]))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: RopeAngles | None) -> Tensor:
        """See `AttentionBackend`."""
        rows, stride = len(q), q.stride(0)
        ends = q.data_ptr() + q[0].nbytes, k.data_ptr() + k[0].nbytes
        assert ends == (k.data_ptr(), v.data_ptr()), "q, k and v lie side by side"
        assert k.stride(0) == v.stride(0) == stride, "in the rows of one tensor"
        cache = self._cache
        pages = [cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), 0, 0]
        if cache.key_scales:
            pages[2:] = cache.key_scales[layer].data_ptr(), cache.value_scales[layer].data_ptr()
        angles = (0, 0) if turn is None else (turn.cos.data_ptr(), turn.sin.data_ptr())
        self._enter.words[6:14] = (q.data_ptr(), stride, *angles, *pages)
        self._enter.over_rows(rows, 14)
        out = self._team.room("attention", tuple(q.shape))
        self._attend.words[12:] = (*pages, q.data_ptr(), stride, out.data_ptr(), out.stride(0))
        self._attend(self._num_tasks * self._kv_heads)
        if self._num_whole:
            self._join.words[18:] = out.data_ptr(), out.stride(0)
            self._join(self._num_whole * self._kv_heads)
        return out


def _pieces(counts: Int64s) -> tuple[Int64s, Int64s]:
    """For each piece, when thing i has `counts[i]` of them: the thing, and which of its pieces."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _put(place: Int64s, values: NDArray[np.integer]) -> Int64s:
    """Write values to the front of a place that lasts, larger if need be; the place."""
    if len(place) < len(values):
        place = np.empty(1 << len(values).bit_length(), dtype=np.int64)
    place[: len(values)] = values
    return place
