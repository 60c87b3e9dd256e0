"""Which kernels may be tried on this GPU: those that failed are noted in a JSON file.

Kernels are tried at the start of a worker, and torch or another kernel takes the place of one that
does not compile, raises, or computes something else. A kernel that makes the GPU fault is
different: CUDA fails every later call of the process, so nothing can take its place there. It is
noted in a file, loading fails with `KernelFaulted`, and workers that start later leave it out.

A kernel may also end its process. So each trial is noted before it begins, and the note is removed
when it has ended. A kernel with the notes of two trials is left out; after one it is tried again,
since the process may have been killed for another reason.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import KernelFaulted

logger = logging.getLogger(__name__)


class ChoiceFile:
    """Names by key. A `path` of None, or one that cannot be written, keeps them in memory only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._choices = _read(path)

    def get(self, key: str) -> str:
        """The choice; empty if there is none."""
        return str(self._choices.get(key, ""))

    def put(self, key: str, choice: str) -> None:
        """Keep a choice and write the file as a whole, with what other workers have written."""
        self._choices = {**self._choices, **_read(self.path), key: choice}
        if self.path is None:
            return
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._choices, indent=1, sort_keys=True) + "\n")
            part.replace(self.path)
        except OSError as error:
            logger.warning("choices of kernels are not kept for later starts: %s", error)
            with contextlib.suppress(OSError):
                part.unlink()
            self.path = None  # one warning is enough


def _read(path: Path | None) -> dict[str, str]:
    """The choices in the file; none if there is no such file or it is damaged."""
    try:
        choices = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}


def file_of(directory: str, *words: str) -> Path | None:
    """The file named by these words, such as the GPU and versions; None without a directory."""
    if not directory:
        return None
    name = "".join(each if each.isalnum() else "-" for each in " ".join(words))
    return Path(directory) / f"{name.lower()}.json"


FAULTED = "faulted"
MAX_UNFINISHED = 2  # trials that did not end, after which a kernel is left out


class KernelTrials:
    """Keeps the trials of a worker in a file of its kind of GPU and of the kernels' versions."""

    def __init__(self, file: ChoiceFile, synchronize: Callable[[], None]) -> None:
        """`synchronize` waits for all work on the GPU, and raises if the GPU has faulted."""
        self._file = file
        self._synchronize = synchronize

    def excluded(self, kernel: str) -> str:
        """Why the kernel must not be tried, in one line; empty if it may be."""
        note = self._file.get(kernel)
        if note == FAULTED:
            return f"it made the GPU fault at an earlier start{self._forget}"
        if note.isdecimal() and int(note) >= MAX_UNFINISHED:
            return f"{note} worker processes ended while they tried it{self._forget}"
        return ""

    @contextmanager
    def trial(self, kernel: str, alternative: str) -> Iterator[None]:
        """The block compiles and runs the kernel for the first time; its errors pass through.

        Raises `KernelFaulted`, which names the kernel and the flag `alternative`, if the GPU can
        compute nothing more after the block.
        """
        note = self._file.get(kernel)
        num_unfinished = int(note) if note.isdecimal() else 0
        self._file.put(kernel, str(num_unfinished + 1))
        try:
            try:
                yield
            finally:
                self._check(kernel, alternative)
        except KernelFaulted:
            self._file.put(kernel, FAULTED)
            raise
        except Exception:
            self._file.put(kernel, "")
            raise
        self._file.put(kernel, "")

    def _check(self, kernel: str, alternative: str) -> None:
        try:
            self._synchronize()
        except Exception as error:  # torch raises several types
            line = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise KernelFaulted(
                f"the kernel {kernel!r} made the GPU fault: {line}; {alternative} avoids it"
            ) from error

    @property
    def _forget(self) -> str:
        path = self._file.path
        return "" if path is None else f"; remove {path} to try it again"
