"""Pooling, in the messages of `engine.step`: a prompt becomes one vector instead of output.

A model that pools makes the vector of hidden states. For a model that generates text, the vector
has the log-probabilities of given tokens after the prompt.
"""

from typing import NamedTuple


class PoolSpec(NamedTuple):
    """How to pool the hidden states of a whole prompt into one vector.

    `dimensions` keeps the vector's first so many numbers, before it is normalized; None keeps all.
    `first_len` is the number of tokens of the first text of a pair, which have token type 0; those
    after them have token type 1. None: one text.

    For a model that generates text there is nothing to pool: the vector has the log-probability of
    each of `token_ids` after the prompt, and is empty if there are none.
    """

    dimensions: int | None = None
    first_len: int | None = None
    token_ids: tuple[int, ...] = ()


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
