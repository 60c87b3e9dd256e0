"""Pooler: from hidden states to the vectors of a step's result, one row after the other, so that a
vector has the same bits whatever else is in the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.pooling import PoolingReport, PoolSpec
from engine.step import Fault, Step
from engine.worker.ports import ModelShape, PoolingConfig, PoolingMethod, RaggedLayout
from engine.worker.sampling.constraints import MaskRequest
from engine.worker.sampling.logits_output import LogitsOutput, PendingOutput
from engine.worker.transfers import Fetched, Transfers

TINY = 1e-12  # the least length that a vector is divided by, as in torch's `normalize`


@dataclass(frozen=True, slots=True, eq=False)
class PendingVectors:
    """The vectors of a step's pooling entries on their way to the host, one tensor each."""

    entries: tuple[tuple[int, PoolSpec], ...]  # with their numbers
    fetched: Fetched
    is_normalized: bool
    ids = None
    is_known = True

    def known(self) -> Sequence[int]:
        return ()

    def read(self) -> LogitsOutput:
        """The vectors; an entry whose vector is not finite gets a fault."""
        vectors: list[bytes] = []
        faults: list[Fault] = []
        for (at, pooling), state in zip(self.entries, self.fetched.wait(), strict=True):
            vector: NDArray[np.float32] = state.numpy()[: pooling.dimensions]
            if self.is_normalized:
                vector = vector / max(float(np.linalg.norm(vector)), TINY)
            if not np.isfinite(vector).all():
                faults.append(Fault(at, "the model computed NaN or infinity for its prompt"))
            vectors.append(vector.astype("<f4").tobytes())
        return LogitsOutput(vectors=tuple(vectors), faults=tuple(faults))


@dataclass(frozen=True, slots=True)
class Pooler:
    """A `ReadsOutput`. `features` are the model's final hidden states; `head` is None for
    embeddings without one."""

    config: PoolingConfig
    features: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor] | None
    transfers: Transfers
    reads_tokens = False

    def prepare(self, step: Step) -> MaskRequest:
        """None: nothing is sampled."""
        return MaskRequest()

    def has_collectives(self, layout: RaggedLayout) -> bool:
        return False

    def begin(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, masks: MaskRequest
    ) -> PendingOutput:
        """Submit the pooling of the step's entries."""
        entries = tuple(
            (at, entry.pooling)
            for at, entry in enumerate(step.entries)
            if entry.pooling is not None
        )
        states: tuple[Tensor, ...] = ()
        if entries:
            parts = torch.split(self.features(hidden), layout.pooled.counts.tolist())
            states = tuple(map(self._state, parts))
        return PendingVectors(entries, self.transfers.fetch(*states), self.config.is_normalized)

    def _state(self, states: Tensor) -> Tensor:
        """The pooled state of `[rows, hidden]` by the method."""
        pooled = states.mean(dim=0, keepdim=True) if len(states) > 1 else states
        if self.head is not None:
            pooled = self.head(pooled)
        return pooled[0].to(torch.float32, copy=True)  # operators may use its memory again


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
