"""Pooler: from hidden states to the vectors of a step's result, one row after the other, so that a
vector has the same bits whatever else is in the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.pooling import PoolingReport
from engine.step import Fault, Step
from engine.worker.ports import ModelShape, PoolingConfig, PoolingMethod, RaggedLayout
from engine.worker.sampling.logits_output import LogitsOutput

TINY = 1e-12  # the least length that a vector is divided by, as in torch's `normalize`


@dataclass(frozen=True, slots=True)
class Pooler:
    """`features` are the model's final hidden states; `head` is None for embeddings without one."""

    config: PoolingConfig
    features: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(
        cls,
        config: PoolingConfig | None,
        features: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor] | None,
    ) -> Self | None:
        """None if the model generates text."""
        return None if config is None else cls(config, features, head)

    def read(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> LogitsOutput:
        """The vectors of the step's pooling entries; `hidden` has the layout's pooled rows.

        An entry whose vector is not finite gets a fault.
        """
        vectors: list[bytes] = []
        faults: list[Fault] = []
        entries = [at for at, entry in enumerate(step.entries) if entry.pooling is not None]
        if not entries:
            return LogitsOutput()
        parts = torch.split(self.features(hidden), layout.pooled.counts.tolist())
        for at, part in zip(entries, parts, strict=True):
            pooling = step.entries[at].pooling
            assert pooling is not None, "a pooling entry"
            vector = self._vector(part)[: pooling.dimensions]
            if self.config.is_normalized:
                vector = vector / max(float(np.linalg.norm(vector)), TINY)
            if not np.isfinite(vector).all():
                faults.append(Fault(at, "the model computed NaN or infinity for its prompt"))
            vectors.append(vector.astype("<f4").tobytes())
        return LogitsOutput(vectors=tuple(vectors), faults=tuple(faults))

    def _vector(self, states: Tensor) -> NDArray[np.float32]:
        """The vector of the states `[rows, hidden]` that the method pools."""
        pooled = states.mean(dim=0, keepdim=True) if len(states) > 1 else states
        if self.head is not None:
            pooled = self.head(pooled)
        numbers: NDArray[np.float32] = pooled[0].float().numpy(force=True)
        return numbers


def computes_whole_prompts(config: PoolingConfig | None, shape: ModelShape) -> bool:
    """Whether a prompt is computed in one iteration: an encoder's, and all whose pooling reads more
    than the last hidden state."""
    if config is None:
        return False
    return not shape.is_causal or config.method is not PoolingMethod.LAST


def report_of(config: PoolingConfig | None, shape: ModelShape) -> PoolingReport | None:
    """What the worker reports; None if the model generates text."""
    if config is None:
        return None
    return PoolingReport(
        task=config.task,
        method=config.method.value,
        size=shape.hidden_size if config.head is None else config.head.size,
        is_whole=computes_whole_prompts(config, shape),
        is_normalized=config.is_normalized,
        dimensions=config.dimensions,
        pair_template=config.pair_template,
    )
