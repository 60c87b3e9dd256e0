"""What of a file is in the memory of this process, and how often its buffers cause faults."""

import resource
import sys
from pathlib import Path

from engine.transport.process_memory import SMAPS, keep_heap

SIZE = 1 << 20


def resident(path: Path) -> int:
    """Bytes of the file in this process's memory."""
    total, is_ours = 0, False
    for line in SMAPS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if "-" in words[0] and not words[0].endswith(":"):
            is_ours = len(words) > 5 and words[5] == str(path)
        elif words[0] == "Rss:" and is_ours:
            total += 1024 * int(words[1])
    return total


def page_faults() -> int:
    """Page faults of this process for which nothing was read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_buffers(keeps: bool) -> None:
    """Write the page faults of four buffers of 12 MiB that are allocated and freed 10 times, after
    the first time."""
    if keeps:
        keep_heap()
    before = 0
    for round_number in range(11):
        buffers = [bytearray(12 * SIZE) for _ in range(4)]
        del buffers
        if round_number == 0:
            before = page_faults()
    sys.stdout.write(f"{page_faults() - before}\n")
