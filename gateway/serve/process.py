"""The process of a server: garbage collection, the heap and open files."""

import contextlib
import ctypes
import gc
import resource

from engine.transport.process_memory import trim_heap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
LARGE_BLOCK_BYTES = 1 << 20  # a larger block is a mapping of its own, which free() removes
FREE_BYTES = 4 << 20  # at the end of a heap; more are returned
RESERVED_FILES = 128  # reserved for weights, pipes to workers, the store


def tune_collector() -> None:
    """Exclude from garbage collection what lives as long as the process.

    Requests are freed by reference counting. Full collections over all modules, several times a
    second, took 8 % of the loop's time. A full collection now scans live requests only, and runs
    after ten million container objects that were allocated and not freed. What a start leaves is
    frozen too: collecting it would delay the first request.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def return_large_blocks() -> None:
    """Return the memory of large objects to the system when they are freed (glibc only).

    By default glibc keeps up to 64 MiB for each of its heaps once blocks of up to 32 MiB have been
    freed: token ids of long texts, and bodies. What the start has freed is returned now, 10 MiB
    after a large tokenizer was loaded.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, FREE_BYTES)
    trim_heap()


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard limit. Returns the connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(
            ValueError, OSError
        ):  # macOS reports a higher limit than it allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(1, most - RESERVED_FILES)
