"""Log-probabilities of tokens: of the model's own distribution, in float32."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.step import TokenLogprobs


class Likelihoods(NamedTuple):
    """How likely one id of each row is, and the likeliest ones; where the logits are."""

    logprobs: Tensor  # [rows]
    ranks: Tensor  # [rows]
    ids: Tensor  # [rows, most]
    likeliest: Tensor  # [rows, most]
    are_finite: Tensor  # [rows], whether the row has neither NaN nor infinity


def likelihoods(logits: Tensor, ids: Tensor, most: int) -> Likelihoods:
    """Of `ids[i]` in row i of `[rows, vocab]`, and of the `most` likeliest ids.

    Of equally likely ids any may be the likeliest.
    """
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, ids[:, None])
    best = logits.topk(min(most, logits.shape[1]), dim=-1)
    return Likelihoods(
        chosen[:, 0] - total,
        (logits > chosen).sum(dim=-1) + 1,
        best.indices,
        best.values - total[:, None],
        total.isfinite(),
    )


def tell(found: Likelihoods, tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """In plain numbers, with the `tops[i]` likeliest of row i; None for a row with NaN."""
    return [
        TokenLogprobs(logprob, rank, tuple(zip(top_ids, top, strict=True))[:count])
        if is_fine
        else None
        for logprob, rank, top_ids, top, is_fine, count in zip(
            *(tensor.tolist() for tensor in found), tops, strict=True
        )
    ]


def log_probabilities(
    logits: Tensor, ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs | None]:
    """How likely `ids[i]` is in row i of `[rows, vocab]`, and the `tops[i]` likeliest ids.

    None for a row that has NaN or infinity. Of equally likely ids any may be the likeliest.
    """
    asked = torch.tensor(ids, device=logits.device)
    return tell(likelihoods(logits, asked, max(tops)), tops)
