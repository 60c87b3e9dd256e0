"""A worker without a model whose output reveals any error in the KV cache.

Its KV cache holds the token of each slot, and each sampled token is a digest of all cached tokens
up to its position, so a lost, duplicated or overwritten slot changes the output. It dies or hangs
when it computes a `Poison` token, and while loading if the model's directory contains `die`.
"""

import os
import signal
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np

from engine.errors import StartupError, WorkerLost
from engine.step import Step, StepEntry, StepResult
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.sampling.last_tokens import KnownTokens, LastTokens
from engine.worker.sampling.outputs import OutputMemory
from engine.worker_settings import WorkerSettings
from tests.engine.transport.workers import UnconnectedWorker
from tests.worker_settings import worker_report

VOCAB = 1000
NUM_BLOCKS = 96
BLOCK_SIZE = 4
MAX_MODEL_LEN = 200

REPORT = worker_report(
    attention="none",
    vocab_size=VOCAB,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=(),
    num_blocks=NUM_BLOCKS,
    block_size=BLOCK_SIZE,
)


class Poison(IntEnum):
    """Prompt tokens that end the worker which computes them; they are never sampled."""

    KILLS = 990  # like the kernel's out-of-memory killer
    EXITS = 991  # like a crash in native code
    LOSES = 992  # like an unusable device
    HANGS = 993


class DigestWorker(UnconnectedWorker):
    """Samples digests of its KV cache, as the module's docstring describes."""

    def __init__(self, num_stages: int) -> None:
        self.report = REPORT
        self._slots: dict[int, int] = {}
        self._held = LastTokens(num_stages)
        self._outputs = OutputMemory()

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Callable[[str, int, int], None]) -> Self:
        """`model` names a directory. If it contains a file `die`, the file is removed and this
        process kills itself. If it contains a file `refuse`, loading fails every time."""
        directory = Path(settings.model)
        if (directory / "refuse").exists():
            raise StartupError("there is no memory for the weights")
        if (directory / "die").exists():
            (directory / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return cls(settings.placement.num_stages)

    def run(self, step: Step) -> StepResult:
        self._held.open(step)
        step = self._held.continued(step).complete(step)
        layout = build_layout(step, LayoutLimits(VOCAB, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE))
        step = self._outputs.complete(step)
        for token in layout.token_ids.tolist():
            _die_of(token)
        self._slots.update(zip(layout.slots.tolist(), layout.token_ids.tolist(), strict=True))
        tokens = tuple([self._draw(entry) for entry in step.entries if entry.sample is not None])
        self._held.keep(KnownTokens(tokens))
        return StepResult(step.step_id, tokens, seconds=1e-4)

    def _draw(self, entry: StepEntry) -> int:
        assert entry.sample is not None, "only sampling entries"
        blocks = np.frombuffer(entry.blocks, dtype="<i4").tolist()
        context = [
            self._slots[blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
            for position in range(entry.start + len(entry.tokens))
        ]
        text = f"{entry.sample.sampling.seed} {context} {entry.sample.output}"
        return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") % 900


def _die_of(token: int) -> None:
    match token:
        case Poison.KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        case Poison.EXITS:
            os._exit(1)
        case Poison.LOSES:
            raise WorkerLost("the device is unusable")
        case Poison.HANGS:
            signal.pause()
