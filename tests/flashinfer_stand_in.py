"""FlashInfer's wrappers and a GPU's stream as they are documented, on tensors of the CPU.

Copies out of pinned memory wait in a queue until the stream is made to go on: by an event that the
host waits for, by a launch, or by `catch_up` ahead of what torch computes at once. So what is
overwritten too early gives wrong results here, as on a GPU. Wrong dtypes, wrong places, runs
before plans and plans over cuts not yet fetched raise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.ports import (
    CapturedBuffers,
    RopeAndCacheWrite,
    RunsPaged,
)
from engine.worker.cuda.kernels.reference import rope_and_cache_write
from engine.worker.ports import AttentionSpec

TILE = 16
POISON = -77


class StandIn:
    """See `Library`. `calls` are the arguments of all plans and runs, in order."""

    num_processors = 4
    names = ("Standing GPU", "flashinfer", "0")

    def __init__(self, *, is_fused: bool = False, capability: tuple[int, int] = (8, 0)) -> None:
        """XQA needs capability (9, 0); `slowness` are seconds of a run of each kernel."""
        self.is_fused = is_fused  # whether there is a kernel for RoPE and cache write
        self.capability = capability
        self.slowness = {"captured": 2.0, "xqa": 1.0}
        self.packed_error = ""  # that XQA raises
        self.packed_faults = False  # whether XQA leaves a device that computes nothing more
        self.has_faulted = False
        self.packed_factor = 1.0  # of its results
        self.now = 0.0
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.compiled: list[tuple[int, bool]] = []  # tokens of a block, and whether for XQA too
        self.log: list[str] = []  # what the host waited for, with how many copies were pending
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._pinned: set[int] = set()
        self._device: set[int] = set()

    @property
    def given(self) -> int:
        return len(self._queue)

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        fill = POISON % 256 if dtype == torch.uint8 else POISON
        tensor = torch.full((size,), fill, dtype=dtype)
        self._device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def pinned(self, num_bytes: int) -> Tensor:
        tensor = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.check_device("target", target, target.dtype)
        self.check_pinned("source", source, target.dtype)
        assert target.shape == source.shape
        self.later(lambda: target.copy_(source))

    def fill(self, target: Tensor, value: int) -> None:
        self.later(lambda: target.fill_(value))

    def scatter(self, target: Tensor, places: Tensor, values: Tensor) -> None:
        self.check_device("places", places, torch.int64)
        self.check_device("values", values, target.dtype)
        assert places.shape == values.shape
        self.later(lambda: target.index_copy_(0, places, values))

    def seconds(self, work: Callable[[], object]) -> float:
        self.catch_up()
        began = self.now
        work()
        return self.now - began

    def compile(
        self, spec: AttentionSpec, kv_dtype: torch.dtype, page_size: int, *, with_xqa: bool
    ) -> None:
        self.compiled.append((page_size, with_xqa))

    def packed_decode(self, workspace: Tensor) -> "StandInPacked":
        self.check_device("workspace", workspace, torch.uint8)
        return StandInPacked(self, workspace)

    def synchronize(self) -> None:
        if self.has_faulted:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.catch_up()

    def event(self) -> "StandInEvent":
        return StandInEvent(self)

    def mixed(self, workspace: Tensor, buffers: CapturedBuffers | None = None) -> "StandInMixed":
        self.check_device("workspace", workspace, torch.uint8)
        return StandInMixed(self, workspace, buffers)

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> "StandInCaptured":
        self.check_device("workspace", workspace, torch.uint8)
        return StandInCaptured(self, workspace, buffers)

    def baked(self, wrapper: RunsPaged) -> tuple[int, ...]:
        assert isinstance(wrapper, StandInWrapper)
        assert wrapper.size, "a wrapper that is not for graphs"
        return wrapper.parts_rows, wrapper.size

    def rope_and_cache_write(self, kept: torch.dtype) -> RopeAndCacheWrite | None:
        """The kernel's reference where it stands in for the kernel."""
        if not self.is_fused:
            return None

        def write(*given: Any) -> None:
            self.calls.append(("rope_and_cache_write", {}))
            self.catch_up()
            rope_and_cache_write(*given)

        return write

    def apply_rope(self, q: Tensor, k: Tensor, cos_sin: Tensor, rows: Tensor) -> None:
        self.check_device("rows", rows, torch.int32)
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
        assert rows.tolist() == list(range(len(q)))
        cos, sin = (half[:, None].double() for half in cos_sin.chunk(2, dim=-1))
        for heads in (q, k):
            heads.view(len(heads), -1)  # as FlashInfer demands
            rotated = heads[..., : cos_sin.shape[-1]]
            first, second = (half.double() for half in rotated.chunk(2, dim=-1))
            turned = (first * cos - second * sin, second * cos + first * sin)
            rotated.copy_(torch.cat(turned, dim=-1))

    def later(self, work: Callable[[], object]) -> None:
        """Give work to the stream."""
        self._queue.append(work)

    def go_on(self, until: int) -> None:
        """Let the device do the first `until` pieces of work ever given."""
        while self._done < until:
            self._queue[self._done]()
            self._done += 1

    def catch_up(self) -> None:
        """Let the device do all it was given."""
        self.go_on(len(self._queue))

    def is_done(self, until: int) -> bool:
        return self._done >= until

    def check_pinned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.untyped_storage().data_ptr() not in self._pinned:
            raise ValueError(f"{name} is not in pinned memory of the host")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")

    def check_device(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.untyped_storage().data_ptr() not in self._device:
            raise ValueError(f"{name} is not on the device")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")


class StandInEvent:
    """See `Event`."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._at = 0

    def record(self) -> None:
        self._at = self._stand_in.given

    def synchronize(self) -> None:
        if not self._stand_in.is_done(self._at):
            self._stand_in.log.append("waited")
        self._stand_in.go_on(self._at)


class StandInWrapper(ABC):
    """What both wrappers have in common: cuts in pinned staging, and attention by the tables.

    With `buffers` it is for graphs, of steps of `size` requests: what they read are the buffers.
    """

    def __init__(
        self, stand_in: StandIn, workspace: Tensor, buffers: CapturedBuffers | None
    ) -> None:
        self._stand_in = stand_in
        self._workspace = workspace
        self._buffers = {} if buffers is None else buffers._asdict()
        self._buffers = {name: each for name, each in self._buffers.items() if each is not None}
        for name, buffer in self._buffers.items():
            stand_in.check_device(name, buffer, torch.int32)
        self.size = 0 if buffers is None else len(buffers.last_page_len)
        assert buffers is None or len(buffers.indptr) == self.size + 1
        self._cuts = stand_in.on_device(8, torch.uint8)
        self.parts_rows = 0
        self._staged_until = 0
        self._planned: dict[str, Any] = {}
        self._tables: dict[str, Tensor] = {}  # on the device

    def _plan(self, name: str, planned: dict[str, Any], tables: dict[str, Tensor]) -> None:
        """`tables` are on the host but for the indices; those reach the device later."""
        self._stand_in.calls.append((name, planned))
        if not self._stand_in.is_done(self._staged_until):
            raise RuntimeError("plan overwrites cuts that the device has not fetched")
        for each, tensor in tables.items():
            if each == "indices":
                self._stand_in.check_device(each, tensor, torch.int32)
            else:
                self._stand_in.check_pinned(each, tensor, torch.int32)
        assert planned["non_blocking"], "plan would wait for the device"
        indptr, page = tables["indptr"].numpy(), planned["page_size"]
        assert len(tables["indices"]) == indptr[-1]
        lengths = (np.diff(indptr) - 1) * page + tables["last_page_len"].numpy()
        is_empty = np.diff(indptr) == 0
        assert ((lengths > 0) | is_empty).all()
        lengths[is_empty] = 0
        if self.size:
            self._plan_graph(planned, tables)
        assert tables["seq_lens"].tolist() == lengths.tolist()
        assert ((tables["last_page_len"] > 0) & (tables["last_page_len"] <= page)).all()
        self._planned = planned
        self._stand_in.later(lambda: self._upload(tables))
        self._staged_until = self._stand_in.given

    def _plan_graph(self, planned: dict[str, Any], tables: dict[str, Tensor]) -> None:
        """The shapes of a graph are fixed, and its workspaces are large enough."""
        if len(tables["last_page_len"]) != self.size:
            raise ValueError(f"{len(tables['last_page_len'])} requests in a graph of {self.size}")
        if len(tables["indices"]) > len(self._buffers["indices"]):
            raise ValueError("more indices than their buffer holds")
        width = planned.get("head_dim") or planned["head_dim_qk"]
        parts, cuts = self._sizes(planned["num_qo_heads"], planned["num_kv_heads"], width)
        if len(self._workspace) < parts:
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        assert len(self._cuts) >= cuts
        self.parts_rows = parts

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._workspace, self._cuts = float_workspace_buffer, int_workspace_buffer

    def _sizes(self, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
        group = heads // kv_heads
        tiles = max(2 * 4 // kv_heads, -(-self.size * group // TILE) + self.size - 1)
        rows = kv_heads * tiles * TILE
        return rows * (head_dim + 1) * 4, 16 * tiles + 8 * self.size + 100

    def _fill(self, tables: dict[str, Tensor]) -> None:
        """Copy the tables to the buffers of a graph."""
        for name, buffer in self._buffers.items():
            buffer[: len(tables[name])].copy_(tables[name].clone())

    @abstractmethod
    def _upload(self, tables: dict[str, Tensor]) -> None:
        """The device takes what was planned, when it comes to it."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor,
    ) -> Tensor:
        if not self._planned:
            raise RuntimeError("run before plan")
        self._stand_in.now += self._stand_in.slowness.get("captured", 0.0)
        arguments = {"q": q, "k_scale": k_scale, "v_scale": v_scale, "out": out}
        self._stand_in.calls.append(("run", arguments | {"paged_kv_cache": paged_kv_cache}))
        self._stand_in.catch_up()
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride()
        for name, tensor in (("q", q), ("kv", keys), ("kv", values), ("o", out)):
            if tensor.dtype != self._planned[f"{name}_data_type"]:
                raise ValueError(f"{name} is {tensor.dtype}, not as planned")
        assert out.shape == q.shape
        assert q.stride(-1) == 1
        qo_indptr = self._tables["qo_indptr"].tolist()
        if qo_indptr[-1] != len(q):
            raise ValueError(f"q has {len(q)} rows, planned are {qo_indptr[-1]}")
        scale = self._planned["sm_scale"] * (1.0 if k_scale is None else k_scale)
        for i in range(len(qo_indptr) - 1):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            if rows.start == rows.stop:
                continue
            found = self._attend(i, q[rows].double(), keys, values, scale)
            out[rows] = (found * (1.0 if v_scale is None else v_scale)).to(out.dtype)
        return out

    def _attend(self, i: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        first, end = self._tables["indptr"][i : i + 2].tolist()
        pages = self._tables["indices"][first:end].long()
        length = (end - first - 1) * keys.shape[1] + int(self._tables["last_page_len"][i])
        group = q.shape[1] // keys.shape[2]
        k, v = (
            whole[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            for whole in (keys, values)
        )
        back = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
        hidden = back < 0
        if self._planned["window_left"] >= 0:
            hidden |= back > self._planned["window_left"]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if cap := self._planned["logits_soft_cap"]:
            scores = (scores / cap).tanh() * cap
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class StandInMixed(StandInWrapper):
    """See `MixedWrapper`."""

    num_rows = 0  # of the first plan, in a graph

    def plan(self, **planned: Any) -> None:
        rows = int(planned["qo_indptr"][-1])
        self.num_rows = self.num_rows or rows
        if self.size and rows > self.num_rows:
            raise ValueError(f"{rows} rows in a graph of {self.num_rows}")
        tables = {
            "qo_indptr": planned["qo_indptr"],
            "indptr": planned["paged_kv_indptr"],
            "indices": planned["paged_kv_indices"],
            "last_page_len": planned["paged_kv_last_page_len"],
            "seq_lens": planned["seq_lens"],
        }
        assert planned["causal"], "rows of a prompt would see those behind them"
        assert planned["max_token_per_sequence"] == int(planned["qo_indptr"].diff().max())
        assert planned["max_sequence_kv"] == int(planned["seq_lens"].max())
        self._plan("mixed", planned, tables)

    def _upload(self, tables: dict[str, Tensor]) -> None:
        """All but the indices are copied; those are read where they lie."""
        if self.size:
            self._fill(tables)
            self._tables = self._buffers
            return
        self._tables = {name: tensor.clone() for name, tensor in tables.items()}
        self._tables["indices"] = tables["indices"]


class StandInCaptured(StandInWrapper):
    """See `CapturedWrapper`."""

    def plan(self, **planned: Any) -> None:
        names = ("indptr", "indices", "last_page_len", "seq_lens")
        self._plan("captured", planned, {name: planned[name] for name in names})

    def workspace_size(self, **planned: Any) -> tuple[int, int]:
        self._stand_in.calls.append(("workspace_size", planned))
        return self._sizes(planned["num_qo_heads"], planned["num_kv_heads"], planned["head_dim"])

    def _upload(self, tables: dict[str, Tensor]) -> None:
        self._fill(tables)
        self._tables = {"qo_indptr": torch.arange(self.size + 1), **self._buffers}


class StandInPacked:
    """See `PackedDecode`: attention by the dense page table, with q as it lies in memory."""

    def __init__(self, stand_in: StandIn, workspace: Tensor) -> None:
        self._stand_in = stand_in
        self._workspace = workspace

    def __call__(self, **given: Any) -> None:
        stand_in, q, out = self._stand_in, given["query"], given["out"]
        stand_in.calls.append(("xqa", given))
        stand_in.now += stand_in.slowness["xqa"]
        stand_in.catch_up()
        stand_in.has_faulted |= stand_in.packed_faults
        stand_in.synchronize()
        if stand_in.packed_error:
            raise RuntimeError(stand_in.packed_error)
        tables, lengths = given["block_tables"], given["seq_lens"]
        stand_in.check_device("block_tables", tables, torch.int32)
        stand_in.check_device("seq_lens", lengths, torch.uint32)
        assert len(self._workspace) > 8 << 20, "the semaphores alone take 8 MiB"
        keys, values = given["kv_cache"]
        assert q.is_contiguous(), "the kernel knows no strides of q"
        assert out.is_contiguous()
        assert keys.dtype == values.dtype == q.dtype == out.dtype
        assert given["kv_layout"] == "NHD"
        assert tables.shape == (len(q), given["max_seq_len"] // keys.shape[1])
        assert 0 <= int(tables.min()) <= int(tables.max()) < len(keys), "pages outside of the cache"
        scale, group = given["bmm1_scale"], q.shape[1] // keys.shape[2]
        for row, length in enumerate(lengths.view(torch.int32).tolist()):
            pages = tables[row, : -(-length // keys.shape[1])].long()
            k, v = (
                each[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for each in (keys, values)
            )
            if (window := given["window_left"]) >= 0:
                k, v = k[-window - 1 :], v[-window - 1 :]
            weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * scale).softmax(-1)
            found = torch.einsum("hk,khd->hd", weights, v) * given["bmm2_scale"]
            out[row] = (found * stand_in.packed_factor).to(out.dtype)
