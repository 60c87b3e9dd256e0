"""Ranks other than 0 of a stage: they compute their part of the logits, and get the sampled tokens
on the device, so that they launch the next step without waiting for the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.step import Step
from engine.worker.ports import AllReduce, RaggedLayout
from engine.worker.sampling.logits_output import LogitsOutput, slices


@dataclass(frozen=True, slots=True)
class FollowedOutput:
    """Tokens that rank 0 sampled; the result of a step is rank 0's."""

    ids: Tensor | None  # int64, one per sampled row

    def known(self) -> list[int]:
        raise AssertionError("only rank 0 samples rows that read their own output")

    def read(self) -> LogitsOutput:
        return LogitsOutput()


@dataclass(frozen=True, slots=True)
class FollowingReader:
    """Takes part in each computation of logits and in each exchange of tokens that rank 0's
    `DeviceOutputReader` submits."""

    head: Callable[[Tensor], Tensor | None]
    vocab_size: int
    all_reduce: AllReduce
    place: torch.device
    samples = False

    def begin(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> FollowedOutput:
        """`hidden` `[sampled rows, then scored rows, hidden]`."""
        num_samples, ids = len(layout.sampled_rows), None
        if num_samples:
            self.head(hidden[:num_samples])
            ids = torch.zeros(num_samples, dtype=torch.int64, device=self.place)
            self.all_reduce(ids)
        for part in slices(len(layout.scored_rows), self.vocab_size):
            self.head(hidden[num_samples:][part])
        return FollowedOutput(ids)
