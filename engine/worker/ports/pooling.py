"""Pooling: how the hidden states of a prompt become one vector, an embedding or scores."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from engine.worker.ports.shapes import ModelShape
from engine.worker.ports.weights import WeightSource


class PoolingMethod(StrEnum):
    """The final hidden states of a prompt that are pooled."""

    LAST = "last"  # the vector of its last token
    CLS = "cls"  # the vector of its first token
    MEAN = "mean"  # the mean over all its tokens


class PoolingHead(Protocol):
    """The layers behind the pooling of one checkpoint."""

    @property
    def size(self) -> int:
        """Numbers of a result."""

    def build(self, weights: WeightSource, shape: ModelShape) -> Callable[[Tensor], Tensor]:
        """The head that maps a pooled hidden state `[1, hidden]` to `[1, size]`. Raises
        `StartupError`."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a checkpoint pools. `task` is "embed" or "score".

    A normalized vector has length 1. `max_tokens` bounds a prompt, None: only the model's positions
    do. `dimensions` and `pair_template` are described in `PoolingReport`.
    """

    task: str
    method: PoolingMethod
    is_normalized: bool = False
    head: PoolingHead | None = None
    max_tokens: int | None = None
    dimensions: tuple[int, ...] | None = None
    pair_template: str = ""
