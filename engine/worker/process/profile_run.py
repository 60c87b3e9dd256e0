"""The profile run: the largest possible step on a small cache of its own, to measure its memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.device import Device
from engine.worker.model.kv.recurrent_states import RecurrentStates
from engine.worker.model.layout import build_layout
from engine.worker.model.stage import Stage
from engine.worker.ports import KVTensors, Shard
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.sampler import Sampler
from engine.worker_settings import WorkerSettings

ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """Runs the step when called. All ranks of a stage must call it together; stages need not."""

    settings: WorkerSettings
    shard: Shard
    max_model_len: int
    device: Device
    kv: StageKV
    make_stage: Callable[[KVTensors, RecurrentStates | None], Stage]
    sampler: Sampler

    def __call__(self) -> None:
        """Run as many requests and tokens as a step may have; every request samples a token."""
        shape, step = self.shard.shape, self._step()
        num_blocks = -(-self._tokens_each // self.settings.kv.block_size)
        if not self.kv.groups.windows:  # then the blocks of requests are different ones
            num_blocks *= self._num_requests
        num_states = 1 if shape.recurrent_layers else 0
        layout = build_layout(step, self.kv.limits(self.max_model_len, num_blocks, num_states))
        stage = self.make_stage(self.kv.allocate(num_blocks), self.kv.states(num_states))
        hidden = None
        with torch.inference_mode(), self.device.pool.awake():
            if not self.shard.is_first:
                hidden = self.device.memory.zeros(layout.num_tokens, self.shard.received_width)
            if not self.shard.is_last:
                stage.run(layout, hidden)
                return
            found = stage.read(layout, hidden)
            logits = stage.head(found) if self.shard.has_logits else None
            if logits is not None:
                specs = [entry.sample for entry in step.entries if entry.sample is not None]
                self.sampler.sample(logits, specs, range(len(specs)))

    @property
    def _num_requests(self) -> int:
        return min(self.settings.max_batch_size, self.settings.max_batch_tokens)

    @property
    def _tokens_each(self) -> int:
        """The step's tokens, shared evenly."""
        each = -(-self.settings.max_batch_tokens // self._num_requests)
        return min(each, self.max_model_len)

    def _step(self) -> Step:
        """All requests share the same blocks, since their KV is not used."""
        count = self._tokens_each
        blocks = np.arange(-(-count // self.settings.kv.block_size), dtype="<i4").tobytes()
        entries = (
            StepEntry(RequestId(request), 0, (0,) * count, blocks, SampleSpec(ALL_FILTERS))
            for request in range(self._num_requests)
        )
        return Step(StepId(-3), tuple(entries))
