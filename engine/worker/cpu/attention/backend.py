"""Attention on the CPU, which reads the paged KV cache in place, in native kernels."""

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.attention import paged_kernels as paged
from engine.worker.cpu.attention import rope_and_cache_write as rope_write
from engine.worker.cpu.attention.kv_pages import LayerPages
from engine.worker.cpu.attention.softmax import SPAN, partial_floats
from engine.worker.cpu.build import compile_all
from engine.worker.cpu.kernel_call import KernelCall, share_out
from engine.worker.cpu.kernels.dtypes import dtype_code
from engine.worker.cpu.kernels.linears.tile_formats import AMX_ROWS
from engine.worker.ports import (
    AttentionSpec,
    Int64s,
    KVTensors,
    RaggedLayout,
    RecordableAttention,
    RopeAngles,
    ThreadPool,
)

# Rows per task: tokens x query heads of one KV head. Each task reads its context. Milliseconds of a
# layer for 512 tokens after 15,872, 32 heads over 8 of 128, on two cores of Zen 5:
#     rows              24   48
#     AVX-512 BF16     442  412
#     float16          676  649
#     AVX2, float16   1367 1370
ROWS = 48
AMX_TILES = 4  # tiles per task
CHUNKS_PER_THREAD = 4  # enough for all threads to end at about the same time
MIN_ROWS = 4  # the fewest rows of a task when threads share its query heads
FEW_DECODES = 8
MIN_SPANS = 4  # a context is divided among threads from so many on
TASK, INT64 = np.dtype(paged.Task), np.dtype(np.int64)
PLAN_KEY = Struct("8q")

Tasks = NDArray[np.void]  # arrays of dtype TASK


class Addresses(NamedTuple):
    """The addresses of the arrays that a plan has filled."""

    tasks: int
    tables: int
    divided: int
    partials: int
    slots: int


class _Runs(NamedTuple):
    """Runs of rows that are cut into tasks: each is of one request, and of one image or none."""

    start: Int64s
    stop: Int64s
    request: Int64s
    image_end: Int64s  # position behind the image; 0 of text

    @classmethod
    def of_requests(cls, layout: RaggedLayout) -> "_Runs":
        """All rows of each request."""
        ends, count = layout.qo_indptr.astype(np.int64), layout.num_requests
        return cls(ends[:-1], ends[1:], np.arange(count), np.zeros(count, np.int64))

    @classmethod
    def of_images(cls, layout: RaggedLayout) -> "_Runs":
        """The rows of each image, and those of the text between them."""
        if not layout.encoded:
            return cls.of_requests(layout)
        starts = np.array([each.start for each in layout.encoded])
        stops = starts + [each.num_rows for each in layout.encoded]
        ends = np.unique(np.concatenate((layout.qo_indptr, starts, stops)))
        image_end = np.zeros(len(ends) - 1, np.int64)
        image_end[np.searchsorted(ends, starts)] = layout.positions[stops - 1] + 1
        request = np.searchsorted(layout.qo_indptr, ends[:-1], side="right") - 1
        return cls(ends[:-1], ends[1:], request, image_end)


class CpuAttention(RecordableAttention):
    """An `AttentionBackend`. A step is cut into tasks once; layers differ in addresses only."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, pool: ThreadPool) -> None:
        group = spec.num_heads // spec.num_kv_heads
        self._pool = pool
        self._cache = cache  # kernels keep addresses only
        self._kv_heads, self._group = spec.num_kv_heads, group
        self._splits, self._parts = _splits_of(spec), 1
        self._window = spec.window or 0
        self._ahead, self._sees_images = spec.tokens_ahead, spec.sees_images
        self._has_sinks, self._has_own_kv = spec.has_sinks, spec.has_own_kv
        dtype = dtype_code(cache.keys[0].dtype)
        self._out_sizes = spec.num_heads, spec.value_dim
        if spec.values_from is None:
            attend = paged.attend_kernel(dtype, group, spec.head_dim, cache.block_size)
        else:
            attend = paged.attend_rows_kernel(
                dtype, spec.head_dim, spec.value_dim, cache.block_size
            )
            compile_all((attend,))  # none of the usual kernels
        self._tokens_per_task = max(1, ROWS // group)
        if attend in paged.BY_DTYPE_AND_AMX.values():  # all tiles have as many rows
            self._tokens_per_task = max(1, AMX_TILES * (AMX_ROWS // group))
        max_rows = self._tokens_per_task * group
        self._partial_floats = partial_floats(max_rows, spec.value_dim)
        self._no_tasks: Tasks = np.empty(0, dtype=TASK)
        self._tasks, self._divided = _StoredValues(TASK), _StoredValues(TASK)
        self._tables, self._slots = _StoredValues(INT64), _StoredValues(INT64)
        self._addresses = Addresses(0, 0, 0, 0, 0)
        self._num_tasks = self._num_divided = 0
        self._has_decodes_only = False
        stride = paged.scratch_floats(max_rows, spec.head_dim)
        self._scratch: NDArray[np.float32] = np.empty(stride * pool.threads, dtype=np.float32)
        self._partials: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._partials_at = 0  # its address, once it is needed
        self._has_values = spec.values_from is None
        self._pages = _pages_of_layers(cache, spec.values_from)
        attend_operands, merge_operands = (
            paged.AttentionOperands(
                kv_heads=spec.num_kv_heads,
                group=group,
                dim=spec.head_dim,
                value_dim=spec.value_dim,
                window=self._window,
                ahead=spec.tokens_ahead,
                scale=spec.scale,
                soft_cap=spec.soft_cap or 0.0,
                scratch=self._scratch.ctypes.data,
                scratch_stride=stride,
                max_rows=max_rows,
            )
            for _ in range(2)
        )
        write_operands = rope_write.RopeWriteOperands(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads if spec.has_own_kv else 0,
            dim=spec.head_dim,
        )
        self._attend = KernelCall(pool, attend, attend_operands, fit=self._fit_attend)
        self._merge = KernelCall(pool, paged.merge_partials, merge_operands, fit=self._fit_merge)
        write = rope_write.BY_DTYPE[dtype]
        self._write = KernelCall(pool, write, write_operands, fit=self._fit_write)

    def plan(self, layout: RaggedLayout) -> None:
        divided, tasks = self._no_tasks, self._cut(layout)
        if self._pool.threads > 1 and layout.kv_len.max() > (MIN_SPANS - 1) * SPAN:
            divided, tasks = self._divide(tasks)
        self._num_tasks, self._num_divided = len(tasks), len(divided)
        threads, parts = self._pool.threads, self._splits
        self._parts = next((n for n in parts if n * len(tasks) >= threads), parts[-1])
        if len(divided):
            self._reserve_partials(divided)
        self._has_decodes_only = layout.num_decodes == layout.num_requests
        self._addresses = Addresses(
            self._tasks(tasks),
            self._tables(layout.kv_indices),
            self._divided(divided),
            self._partials_at,
            self._slots(layout.slots),
        )

    @property
    def plan_key(self) -> bytes:
        return PLAN_KEY.pack(*self._addresses, self._num_tasks, self._num_divided, self._parts)

    @property
    def has_decodes_only(self) -> bool:
        return self._has_decodes_only

    def _fit_attend(self, operands: paged.AttentionOperands, rows: int) -> int:
        """Fit the kernel's operands to the last plan, of so many rows."""
        operands.tasks, operands.tables, _, operands.partials, _ = self._addresses
        self._share_heads(operands)
        return self._num_tasks * operands.kv_heads

    def _fit_merge(self, operands: paged.AttentionOperands, rows: int) -> int:
        """Fit the kernel's operands to the last plan, of so many rows."""
        operands.tasks, operands.partials = self._addresses.divided, self._addresses.partials
        self._share_heads(operands)
        return self._num_divided * operands.kv_heads

    def _share_heads(self, operands: paged.AttentionOperands) -> None:
        operands.kv_heads = self._kv_heads * self._parts
        operands.group = self._group // self._parts

    def _fit_write(self, operands: rope_write.RopeWriteOperands, rows: int) -> int:
        """Fit the kernel's operands to the slots of the last plan, of so many rows."""
        operands.slots = self._addresses.slots
        return share_out(operands, rows, self._pool.threads)

    def _cut(self, layout: RaggedLayout) -> Tasks:
        """Tasks over whole contexts."""
        if layout.is_decode_only and layout.num_requests <= FEW_DECODES:
            return self._cut_few(layout)
        per_task = self._tokens_per_task
        runs = _Runs.of_images(layout) if self._sees_images else _Runs.of_requests(layout)
        run, piece = _pieces(-(-(runs.stop - runs.start) // per_task))
        request = runs.request[run]
        tasks = np.empty(len(run), dtype=TASK)
        tasks["first"] = runs.start[run] + piece * per_task
        tasks["tokens"] = np.minimum(per_task, runs.stop[run] - tasks["first"])
        tasks["position"] = layout.positions[tasks["first"]]
        tasks["image_end"] = runs.image_end[run]
        tasks["table"] = layout.kv_indptr[request]
        seen = tasks["position"] + 1 - self._window if self._window else 0
        tasks["low"] = np.maximum(seen, 0) // SPAN * SPAN
        stop = tasks["position"] + tasks["tokens"] + self._ahead
        stop = np.maximum(stop, tasks["image_end"])
        tasks["high"] = np.minimum(stop, layout.kv_len[request])
        tasks["partial"] = -1
        return tasks

    def _cut_few(self, layout: RaggedLayout) -> Tasks:
        """The same of few decodes, for which arrays would take longer than the numbers one by
        one."""
        tasks = []
        starts = layout.kv_indptr.tolist()  # one more than there are requests
        rows = zip(layout.positions.tolist(), layout.kv_len.tolist(), starts, strict=False)
        for row, (position, kv_len, start) in enumerate(rows):
            low = max(position + 1 - self._window, 0) // SPAN * SPAN if self._window else 0
            high = min(position + 1 + self._ahead, kv_len)
            tasks.append((row, 1, position, 0, start, low, high, -1))
        return np.array(tasks, dtype=TASK)

    def _divide(self, tasks: Tasks) -> tuple[Tasks, Tasks]:
        """Cut tasks that would delay the end of the step into runs of spans.

        Returns the tasks that were cut, and all tasks to run. The results do not change, because a
        partial result is always of one span.
        """
        spans = -(-(tasks["high"] - tasks["low"]) // SPAN)
        if spans.max() < MIN_SPANS:
            return self._no_tasks, tasks
        chunks = CHUNKS_PER_THREAD * self._pool.threads
        most = max(MIN_SPANS // 2, int(spans.sum()) * self._kv_heads // chunks)
        is_long = spans > 2 * most
        divided, spans = tasks[is_long], spans[is_long]
        divided["partial"] = np.cumsum(spans) - spans
        task, piece = _pieces(-(-spans // most))
        runs = divided[task]
        runs["low"] += piece * most * SPAN
        runs["high"] = np.minimum(runs["high"], runs["low"] + most * SPAN)
        runs["partial"] += piece * most
        return divided, np.concatenate((runs, tasks[~is_long]))

    def _reserve_partials(self, divided: Tasks) -> None:
        """Allocate memory for the partial results of these tasks."""
        spans = -(-(divided["high"] - divided["low"]) // SPAN)
        needed = int(spans.sum()) * self._kv_heads * self._parts * self._partial_floats
        if len(self._partials) < needed:
            self._partials = np.empty(needed, dtype=np.float32)
            self._partials_at = self._partials.ctypes.data

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        stride = q.stride(0)
        assert self._has_own_kv == (k is not None), "as the spec says"
        if k is not None:
            assert self._has_values == (v is not None), "as the spec says"
            for one, then in ((q, k), (k, v)):
                if then is not None:
                    end = one.data_ptr() + one[0].nbytes
                    assert end == then.data_ptr(), "q, k and v are adjacent"
                    assert then.stride(0) == stride, "in the rows of one tensor"
        assert self._has_sinks == (sinks is not None), "as the spec says"
        out = self._pool.empty("attention", (len(q), *self._out_sizes))
        attend, merge, write = self._attend.operands, self._merge.operands, self._write.operands
        attend.sinks = merge.sinks = 0 if sinks is None else sinks.data_ptr()
        attend.pages = write.pages = ctypes.addressof(self._pages[layer])
        write.qkv, write.stride = q.data_ptr(), stride
        write.half, write.cos, write.sin = (
            (0, 0, 0)
            if rope is None
            else (rope.cos.shape[1], rope.cos.data_ptr(), rope.sin.data_ptr())
        )
        self._write.over_rows(len(q))
        attend.q, attend.q_stride = q.data_ptr(), stride
        attend.out, attend.out_stride = out.data_ptr(), out.stride(0)
        self._attend.over_rows(len(q))
        merge.out, merge.out_stride = out.data_ptr(), out.stride(0)
        self._merge.over_rows(len(q))
        return out


def _splits_of(spec: AttentionSpec) -> list[int]:
    """Into how many parts the query heads of a KV head may be divided, each computed as if it had
    a KV head of its own. Several are for the one key of latent vectors only."""
    most = 1
    if spec.values_from is not None and spec.num_kv_heads == 1:
        most = max(1, spec.num_heads // MIN_ROWS)
    return [parts for parts in range(1, most + 1) if spec.num_heads % parts == 0]


def _pages_of_layers(cache: KVTensors, values_from: int | None) -> Any:
    """An array with the `LayerPages` of each layer."""
    keys = cache.keys[0]
    page_stride, key_slot_stride, head_stride, key_stride = keys.stride()
    scale_stride = cache.key_scales[0].stride(0) if cache.key_scales else 0
    shift = keys.itemsize * (values_from or 0)
    return (LayerPages * len(cache.keys))(
        *(
            LayerPages(
                block_size=cache.block_size,
                page_stride=page_stride,
                head_stride=head_stride if keys.shape[2] > 1 else 0,
                scale_head_stride=cache.block_size if keys.shape[2] > 1 else 0,
                slot_stride=(cache.values or cache.keys)[layer].stride(1),
                key_slot_stride=key_slot_stride,
                key_stride=key_stride,
                has_values=values_from is None,
                scale_stride=scale_stride,
                keys=keys.data_ptr(),
                values=(cache.values or cache.keys)[layer].data_ptr() + shift,
                key_scales=_address(cache.key_scales, layer),
                value_scales=_address(cache.value_scales or cache.key_scales, layer),
            )
            for layer, keys in enumerate(cache.keys)
        )
    )


def _address(parts: Sequence[Tensor], layer: int) -> int:
    """The address of a layer's tensor; 0 if there are none."""
    return parts[layer].data_ptr() if parts else 0


def _pieces(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Number the pieces of things of which thing i has `counts[i]`: for each, thing and piece."""
    thing = np.repeat(np.arange(len(counts)), counts)
    return thing, np.arange(len(thing)) - np.repeat(np.cumsum(counts) - counts, counts)


class _StoredValues:
    """Values that stay at one address from step to step, as long as they are not more."""

    def __init__(self, dtype: "np.dtype[Any]") -> None:
        self._buffer: NDArray[Any] = np.empty(0, dtype=dtype)
        self._address = 0

    def __call__(self, values: NDArray[Any]) -> int:
        """Replace the values; returns their address."""
        count = len(values)
        if count > len(self._buffer):
            self._buffer = np.empty(1 << count.bit_length(), dtype=self._buffer.dtype)
            self._address = self._buffer.ctypes.data
        self._buffer[:count] = values
        return self._address
