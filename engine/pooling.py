"""Pooling, in the messages of `engine.step`: a prompt becomes one vector instead of output."""

from typing import NamedTuple


class PoolSpec(NamedTuple):
    """How to pool the hidden states of a whole prompt into one vector.

    `dimensions` keeps the vector's first so many numbers, before it is normalized; None keeps all.
    `first_len` is the number of tokens of the first text of a pair, which have token type 0; those
    after them have token type 1. None: one text.
    """

    dimensions: int | None = None
    first_len: int | None = None


class PoolingReport(NamedTuple):
    """What a model that pools returns for a prompt: a vector of `size` numbers.

    `task` is "embed" (an embedding) or "score" (one score per label). `method` is "last", "cls" or
    "mean". If it `is_whole`, a prompt is computed in one iteration, never in chunks. An embedding
    may be cut to one of `dimensions`; None: it may not, empty: to any length. `pair_template` is
    the prompt of a scored pair with `{query}` and `{document}`, "" if a pair is tokenized as two
    segments.
    """

    task: str
    method: str
    size: int
    is_normalized: bool = False
    is_whole: bool = False
    dimensions: tuple[int, ...] | None = None
    pair_template: str = ""
