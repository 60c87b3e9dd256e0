"""A worker without a model whose output reveals any error in the KV cache.

Its KV cache holds the token of each slot, and each sampled token is a digest of all cached tokens
up to its position, so a lost, duplicated or overwritten slot changes the output. It dies or hangs
when it computes a `Poison` token, and while loading if the model's directory contains `die`. It
imports no torch, which takes longer than a test.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from engine.errors import StartupError, WorkerLost
from engine.step import LAST_TOKEN, RequestId, SampleSpec, Step, StepEntry, StepResult
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

    def __init__(self) -> None:
        self.report = REPORT
        self._slots: dict[int, int] = {}
        self._last: dict[RequestId, int] = {}  # tokens
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
        return cls()

    def run(self, step: Step) -> StepResult:
        entries = tuple(
            entry._replace(tokens=(self._last[entry.request_id],))
            if entry.tokens == (LAST_TOKEN,)
            else entry
            for entry in step.entries
        )
        for token in chain.from_iterable(entry.tokens for entry in entries):
            _die_of(token)
        drawn = []
        for entry in self._outputs.complete(replace(step, entries=entries)).entries:
            slots = self._slots_of(entry)
            self._slots.update(zip(slots[entry.start :], entry.tokens, strict=True))
            if entry.sample is not None:
                self._last[entry.request_id] = self._draw(entry.sample, slots)
                drawn.append(self._last[entry.request_id])
        return StepResult(step.step_id, tuple(drawn), seconds=1e-4)

    def _slots_of(self, entry: StepEntry) -> list[int]:
        """The slots of all tokens of the entry's request, up to the last one of the entry."""
        blocks = np.frombuffer(entry.blocks, dtype="<i4").tolist()
        return [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(entry.start + len(entry.tokens))
        ]

    def _draw(self, sample: SampleSpec, slots: list[int]) -> int:
        context = [self._slots[slot] for slot in slots]
        text = f"{sample.sampling.seed} {context} {sample.output}"
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
