"""Attention on the CPU over the paged cache as it lies, in native kernels on the worker's team."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adapters.attention import paged
from engine.worker.kv_tensors import KVTensors
from engine.worker.layout import Int64s, RaggedLayout
from engine.worker.native.operators import Call
from engine.worker.native.recorded import RecordableAttention
from engine.worker.ports import AttentionSpec, Team, Turn

ROWS = 24  # of a task: tokens x query heads of one KV head
ROUND = 16  # floats; a row of scores is written in fours and may run over its end
GROWTH = 256  # floats by which rows of scores grow, so that few steps differ in it


class CpuAttention(RecordableAttention):
    """Float32 only. Work is cut into tasks once a step; layers differ in addresses alone."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, team: Team) -> None:
        group = spec.num_heads // spec.num_kv_heads
        self._team = team
        self._cache = cache
        self._dim = spec.head_dim
        self._kv_heads = spec.num_kv_heads
        self._tokens_per_task = max(1, ROWS // group)
        self._most_rows = self._tokens_per_task * group
        self._tasks = self._tables = self._slots = np.empty(0, dtype=np.int64)
        self._num_tasks = 0
        self._is_of_decodes = False
        self._scratch: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._attend = Call(
            team,
            paged.attend,
            (
                spec.num_kv_heads,
                group,
                spec.head_dim,
                cache.block_size,
                spec.window or 0,
                *(0,) * 6,
                self._most_rows,
                *(0,) * 6,
            ),
        )
        self._attend.words.view(np.float32)[2 * 5] = spec.scale
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._enter = Call(team, paged.enter, (0, 0, *heads, *(0,) * 7))

    def plan(self, layout: RaggedLayout) -> None:
        """See `AttentionBackend`."""
        tasks = self._cut(layout)
        self._num_tasks = len(tasks)
        self._is_of_decodes = layout.num_decodes == layout.num_requests
        self._tasks = _put(self._tasks, tasks.ravel())
        self._tables = _put(self._tables, layout.kv_indices)
        self._slots = _put(self._slots, layout.slots)
        score_stride = (int(layout.kv_len.max()) // GROWTH + 1) * GROWTH + ROUND
        stride = self._most_rows * (2 * self._dim + score_stride)
        if len(self._scratch) < stride * self._team.threads:
            self._scratch = np.empty(stride * self._team.threads, dtype=np.float32)
        self._attend.words[6:11] = (
            self._tasks.ctypes.data,
            self._tables.ctypes.data,
            self._scratch.ctypes.data,
            stride,
            score_stride,
        )
        self._enter.words[:2] = self._slots.ctypes.data, len(layout.slots)

    @property
    def tape_key(self) -> bytes:
        """See `RecordableAttention`."""
        if not self._is_of_decodes:
            return b""
        words = *self._attend.words[6:11], *self._enter.words[:2], self._num_tasks
        return np.array(words).tobytes()

    def _cut(self, layout: RaggedLayout) -> Int64s:
        """Tasks `[tasks, TASK_WORDS]`."""
        per = self._tokens_per_task
        first_row, last_row = layout.qo_indptr[:-1], layout.qo_indptr[1:]
        if layout.num_decodes == layout.num_requests:
            ones = np.ones_like(layout.positions)
            return np.stack((first_row, ones, layout.positions, layout.kv_indptr[:-1]), axis=1)
        pieces = -(-(last_row - first_row) // per)
        owner = np.repeat(np.arange(layout.num_requests), pieces)
        piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        tasks = np.empty((len(owner), paged.TASK_WORDS), dtype=np.int64)
        tasks[:, 0] = first_row[owner] + piece * per
        tasks[:, 1] = np.minimum(per, last_row[owner] - tasks[:, 0])
        tasks[:, 2] = layout.positions[tasks[:, 0]]
        tasks[:, 3] = layout.kv_indptr[owner]
        return tasks

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
        """See `AttentionBackend`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        rows, stride = len(q), q.stride(0)
        ends = q.data_ptr() + q[0].nbytes, k.data_ptr() + k[0].nbytes
        assert ends == (k.data_ptr(), v.data_ptr()), "q, k and v lie side by side"
        assert k.stride(0) == v.stride(0) == stride, "in the rows of one tensor"
        self._enter.words[5:11] = (
            q.data_ptr(),
            stride,
            0 if turn is None else turn.cos.data_ptr(),
            0 if turn is None else turn.sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )
        self._enter.over_rows(rows, 11)
        out = self._team.room("attention", tuple(q.shape))
        self._attend.words[12:] = (
            keys.data_ptr(),
            values.data_ptr(),
            q.data_ptr(),
            stride,
            out.data_ptr(),
            out.stride(0),
        )
        self._attend(self._num_tasks * self._kv_heads)
        return out


def _put(place: Int64s, values: NDArray[np.integer]) -> Int64s:
    """Write values to the front of a place that lasts, larger if need be; the place."""
    if len(place) < len(values):
        place = np.empty(1 << len(values).bit_length(), dtype=np.int64)
    place[: len(values)] = values
    return place
