"""Log-probabilities of tokens: of the model's own distribution, in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.step import TokenLogprobs


def log_probabilities(
    logits: Tensor, ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs | None]:
    """How likely `ids[i]` is in row i of `[rows, vocab]`, and the `tops[i]` likeliest ids.

    None for a row that has NaN or infinity. Of equally likely ids any may be the likeliest.
    """
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, torch.tensor(ids)[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    best = logits.topk(min(max(tops), logits.shape[1]), dim=-1)
    likeliest = (best.values - total[:, None]).tolist()
    return [
        TokenLogprobs(logprob, rank, tuple(zip(top_ids, top, strict=True))[:count])
        if is_fine
        else None
        for logprob, rank, top_ids, top, count, is_fine in zip(
            (chosen[:, 0] - total).tolist(),
            ranks.tolist(),
            best.indices.tolist(),
            likeliest,
            tops,
            total.isfinite().tolist(),
            strict=True,
        )
    ]
