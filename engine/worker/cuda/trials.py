"""Which kernels may be tried on this GPU.

Kernels are tried at the start of a worker, and torch or another kernel takes the place of one that
does not compile, raises, or computes something else. A kernel that makes the GPU fault is
different: CUDA fails every later call of the process, so nothing can take its place there. It is
noted in a file, loading fails with `KernelFaulted`, and workers that start later leave it out.

A kernel may also end its process. So each trial is noted before it begins, and the note is removed
when it has ended. A kernel with the notes of two trials is left out; after one it is tried again,
since the process may have been killed for another reason.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.errors import KernelFaulted
from engine.worker.cuda.choice_file import ChoiceFile

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
