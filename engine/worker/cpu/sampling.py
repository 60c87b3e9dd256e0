"""`SamplingOperators` over native kernels and NumPy."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import sampling
from engine.worker.cpu.recorded_decoder import LargestLogits
from engine.worker.ports import Argmax, Draw, ThreadPool

# Upper bounds of the logits of eight ids for each byte of a mask: infinity, or minus infinity.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)


class NativeSampling:
    """Takes the largest logits from a replay if it has computed them: `largest`."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self.largest = LargestLogits()
        operands = sampling.ArgmaxOperands()
        self._argmax = KernelCall(pool, sampling.argmax, operands, fit=lambda _, rows: rows)
        self._sample = KernelCall(pool, sampling.sample, sampling.SampleOperands())

    def argmax(self, logits: Tensor) -> Argmax:
        values, ids = self.largest.take(logits) or self.run_argmax(logits)
        return Argmax(values.clone(), ids.clone())  # later steps use their memory again

    def run_argmax(self, logits: Tensor) -> Argmax:
        """The largest of each row, which a recording computes again for other logits."""
        rows, vocab = logits.shape
        values = self._pool.empty("largest logits", (rows,))
        ids = self._pool.empty("most likely ids", (rows,), torch.int64)
        operands = self._argmax.operands
        operands.logits, operands.stride = logits.data_ptr(), logits.stride(0)
        operands.vocab = vocab
        operands.values, operands.ids = values.data_ptr(), ids.data_ptr()
        self._argmax.over_rows(rows)
        return Argmax(values, ids)

    def argmax_of(self, logits: Tensor, rows: Tensor) -> Argmax:
        values = logits.numpy()
        ids = torch.tensor([int(values[row].argmax()) for row in rows.tolist()])
        return Argmax(logits[rows, ids], ids)

    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        values = logits.numpy()
        for row, bits in zip(rows.tolist(), allowed.numpy(), strict=True):
            bounds = _BOUNDS.take(bits, axis=0).reshape(-1)[: values.shape[1]]
            np.minimum(values[row], bounds, out=values[row])

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        params = (sampling.SampleParams * len(draws))(
            *(
                sampling.SampleParams(row, one.top_k, one.temperature, one.min_p, one.top_p, point)
                for row, one, point in draws
            )
        )
        ids = np.empty(len(draws), dtype=np.int64)
        scratch_bytes = sampling.scratch_bytes(logits.shape[1])
        scratch = np.empty(self._pool.threads * scratch_bytes, dtype=np.int8)
        operands = self._sample.operands
        operands.logits, operands.stride = logits.data_ptr(), logits.stride(0)
        operands.vocab = logits.shape[1]
        operands.params, operands.ids = ctypes.addressof(params), ids.ctypes.data
        operands.scratch, operands.scratch_bytes = scratch.ctypes.data, scratch_bytes
        self._sample(len(draws))
        return torch.from_numpy(ids)
