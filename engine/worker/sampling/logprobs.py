"""Log-probabilities of tokens under the model's own distribution, in float32."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.step import TokenLogprobs


class RowLogprobs(NamedTuple):
    """Log-probabilities of one id per row and of the most likely ids, on the logits' device."""

    logprobs: Tensor  # [rows]
    ranks: Tensor  # [rows]
    top_ids: Tensor  # [rows, most]
    top_logprobs: Tensor  # [rows, most]
    are_finite: Tensor  # [rows], whether the row has neither NaN nor infinity


def row_logprobs(logits: Tensor, ids: Tensor, most: int) -> RowLogprobs:
    """Log-probabilities of `ids[i]` in row i of `[rows, vocab]`, and of the `most` most likely ids.

    The order of equally likely ids is not defined.
    """
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, ids[:, None])
    best = logits.topk(min(most, logits.shape[1]), dim=-1)
    return RowLogprobs(
        chosen[:, 0] - total,
        (logits > chosen).sum(dim=-1) + 1,
        best.indices,
        best.values - total[:, None],
        total.isfinite(),
    )


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the ids `[rows, most]` in each row of `[rows, vocab]`; NaN or infinity
    in a row whose logits are not finite."""
    return logits.gather(1, ids) - logits.logsumexp(dim=-1, keepdim=True)


def to_token_logprobs(found: RowLogprobs, tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """The rows as Python numbers, with the `tops[i]` most likely ids of row i; None for a row with
    NaN."""
    return [
        TokenLogprobs(logprob, rank, tuple(zip(top_ids, top, strict=True))[:count])
        if is_fine
        else None
        for logprob, rank, top_ids, top, is_fine, count in zip(
            *(tensor.tolist() for tensor in found), tops, strict=True
        )
    ]
