"""The two wrappers of FlashInfer over pages, on a stand-in's stream."""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.ports import CapturedBuffers
from tests.flashinfer_stream import StandInStream

TILE = 16


class StandInWrapper(ABC):
    """What both wrappers have in common: cuts in pinned staging, and attention by the tables.

    With `buffers` it is for graphs, of steps of `size` requests: what they read are the buffers.
    """

    def __init__(
        self, stand_in: StandInStream, workspace: Tensor, buffers: CapturedBuffers | None
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
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor:
        if not self._planned:
            raise RuntimeError("run before plan")
        arguments = {"q": q, "k_scale": k_scale, "v_scale": v_scale, "out": out}
        self._stand_in.calls.append(("run", arguments | {"paged_kv_cache": paged_kv_cache}))
        self._stand_in.catch_up()
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride()
        for name, tensor in (("q", q), ("kv", keys), ("kv", values), ("o", out)):
            if tensor.dtype != self._planned[f"{name}_data_type"]:
                raise ValueError(f"{name} is {tensor.dtype}, not as planned")
        width = self._planned.get("head_dim") or self._planned["head_dim_qk"]
        assert {q.shape[2], out.shape[2], keys.shape[3]} == {width}
        assert width in (64, 128, 256, 512)
        assert out.shape == q.shape
        assert return_lse == (lse is not None)
        assert lse is None or (lse.dtype, lse.shape) == (torch.float32, q.shape[:2])
        assert q.stride(-1) == 1
        qo_indptr = self._tables["qo_indptr"].tolist()
        if qo_indptr[-1] != len(q):
            raise ValueError(f"q has {len(q)} rows, planned are {qo_indptr[-1]}")
        scale = self._planned["sm_scale"] * (1.0 if k_scale is None else k_scale)
        for i in range(len(qo_indptr) - 1):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            if rows.start == rows.stop:
                continue
            found, sums = self._attend(i, q[rows].double(), keys, values, scale)
            if lse is not None:
                lse[rows] = sums.float()
            out[rows] = (found * (1.0 if v_scale is None else v_scale)).to(out.dtype)
        return out

    def _attend(
        self, i: int, q: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The outputs of a request, and the sums of its scores as logarithms to base 2."""
        first, end = self._tables["indptr"][i : i + 2].tolist()
        if first == end:  # no keys
            return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
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
        scores = scores.masked_fill(hidden, -torch.inf)
        sums = scores.logsumexp(-1).t() / math.log(2)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), sums


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
