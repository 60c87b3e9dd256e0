"""Rows and columns that llama.cpp stores in another order than Hugging Face.

Its converter puts the two halves of a head's RoPE pairs next to each other (Llama's q and k), and
the value heads of Gated DeltaNet layers into the order in which key heads repeat (Qwen 3.5):

    Hugging Face    value heads 0 1 of key head 0, 2 3 of key head 1
    llama.cpp       0 of key head 0, 2 of key head 1, 1 of key head 0, 3 of key head 1
"""

from typing import NamedTuple

import torch
from torch import Tensor


def interleaved_rows(num_rows: int, num_heads: int) -> Tensor:
    """The file's row of each row in Hugging Face's order; int64 `[num_rows]`."""
    heads = torch.arange(num_rows).view(num_heads, -1, 2)
    return heads.transpose(1, 2).flatten()


class ValueHeads(NamedTuple):
    """The heads of Gated DeltaNet layers."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    def order(self, part: str) -> Tensor | None:
        """The order of `interleaved_rows` for a tensor of a block; the columns of `ssm_out`.

        None if the order is Hugging Face's.
        """
        if self.num_values == self.num_keys:
            return None
        if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
            return self._tiled(1)
        if part in ("attn_gate", "ssm_out"):
            return self._tiled(self.value_dim)
        if part in ("attn_qkv", "ssm_conv1d"):
            before = 2 * self.num_keys * self.key_dim
            return torch.cat((torch.arange(before), before + self._tiled(self.value_dim)))
        return None

    def _tiled(self, width: int) -> Tensor:
        """The rows of all value heads, `width` of each."""
        rows = torch.arange(self.num_values * width).view(-1, self.num_keys, width)
        return rows.transpose(0, 1).flatten()
