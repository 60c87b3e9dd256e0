"""FlashInfer's module for latent vectors, on a stand-in's stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.flashinfer_stream import StandInStream

TILE = 64  # rows of a thread block: heads times tokens
ALIGN = 16  # bytes that a thread loads at once
CAUSAL = 1


class StandInLatents:
    """See `LatentKernels`. When the stream comes to the copy of a plan, that is on the device which
    is then in `staging`."""

    def __init__(self, stand_in: StandInStream, num_processors: int) -> None:
        self._stand_in = stand_in
        self._num_processors = num_processors
        self._plans: list[list[Tensor]] = []
        self._on_device: dict[int, list[Tensor]] = {}  # the last plan in each workspace

    def plan(
        self,
        parts: Tensor,
        cuts: Tensor,
        staging: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len: Tensor,
        num_heads: int,
        latent: int,
        is_causal: bool,
        /,
    ) -> Sequence[int]:
        self._stand_in.check_device("parts", parts, torch.uint8)
        self._stand_in.check_device("cuts", cuts, torch.uint8)
        self._stand_in.check_pinned("staging", staging, torch.uint8)
        tables = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len": kv_len}
        for name, table in tables.items():
            self._stand_in.check_pinned(name, table, torch.int32)
        assert is_causal, "rows of a prompt would see those behind them"
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len) + 1
        rows = qo_indptr.diff()
        assert (rows >= 0).all()
        size = 2 if int(rows.sum()) * num_heads // len(rows) > TILE else 1
        tile, clusters = size * TILE, self._num_processors // size
        if tile % num_heads and (rows * num_heads > tile).any():
            raise ValueError("a token in two tiles may lose a key")
        assert len(parts) >= 2 * clusters * tile * (2 * latent + 4)
        number = staging[:8].view(torch.int64)
        number[0] = len(self._plans)
        self._plans.append([table.clone() for table in tables.values()])
        self._stand_in.later(lambda: self._copy(cuts, int(number)))
        self._stand_in.calls.append(("latents", tables | {"num_heads": num_heads}))
        return [size, clusters, num_heads]

    def _copy(self, cuts: Tensor, number: int) -> None:
        found = self._on_device[cuts.data_ptr()] = self._plans[number]
        self._stand_in.calls.append(("copied", {"kv_len": found[-1]}))

    def run(
        self,
        parts: Tensor,
        cuts: Tensor,
        planned: Sequence[int],
        q: Tensor,
        q_turned: Tensor,
        keys: Tensor,
        keys_turned: Tensor,
        indices: Tensor,
        out: Tensor,
        sums: Tensor | None,
        mask: int,
        num_heads: int,
        page_size: int,
        scale: float,
        has_natural_sums: bool,
        key_scale: float,
        turned_scale: float,
        scales: Tensor | None,
        /,
    ) -> None:
        self._stand_in.check_device("indices", indices, torch.int32)
        given = {"planned": planned, "indices": indices, "q": q, "keys": keys}
        self._stand_in.calls.append(("run", given))
        self._stand_in.catch_up()
        assert mask == CAUSAL
        assert sums is scales is None
        assert key_scale == turned_scale == 1.0
        assert q.shape[1] == q_turned.shape[1] == num_heads == planned[2]
        assert out.shape == q.shape
        assert keys.shape[1] == keys_turned.shape[1] == page_size
        for each in (q, q_turned, keys, keys_turned, out):
            assert (each.dtype, each.stride(-1)) == (q.dtype, 1)
            steps = each.storage_offset(), *each.stride()[:2]
            assert not any(step * each.itemsize % ALIGN for step in steps)
        qo_indptr, kv_indptr, kv_len = (each.tolist() for each in self._on_device[cuts.data_ptr()])
        assert qo_indptr[-1] == len(q)
        whole = torch.cat((keys_turned, keys), dim=-1)
        for i, length in enumerate(kv_len):
            assert kv_indptr[i + 1] - kv_indptr[i] == -(-length // page_size)
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            count = rows.stop - rows.start
            found = whole[indices[kv_indptr[i] : kv_indptr[i + 1]].long()].flatten(0, 1)[:length]
            ours = torch.cat((q_turned[rows], q[rows]), dim=-1).double()
            scores = torch.einsum("qhd,kd->hqk", ours, found.double()) * scale
            hidden = torch.arange(length - count, length)[:, None] < torch.arange(length)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            values = found[:, q_turned.shape[2] :].double()
            out[rows] = torch.einsum("hqk,kd->qhd", shares, values).to(out.dtype)
