import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
NUM_CASES = 6
PROCESSES = (("0", 0), ("7", 1009))  # PYTHONHASHSEED, and objects allocated


def plans(hash_seed: str, num_junk: int) -> list[str]:
    """The lines of `tests.fuzz.engine.plans`, from a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz.engine.plans", str(NUM_CASES), str(num_junk)]
    environ = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_plans_are_the_same_in_every_process() -> None:
    first, second = [plans(hash_seed, num_junk) for hash_seed, num_junk in PROCESSES]
    assert len(first) == NUM_CASES
    assert second == first
