"""What of a file is in the memory of this process."""

from pathlib import Path

from engine.transport.process_memory import SMAPS


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
