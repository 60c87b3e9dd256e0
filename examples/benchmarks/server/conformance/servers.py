"""What the conformance suites have in common: the server's models, and where results go."""

import subprocess
from pathlib import Path

OUT = Path(__file__).parents[2] / "results" / "conformance"
SERVED = """\
[models.builtin]
model = "builtin"
served_model_name = [
  "gpt-6-astra", "gpt-5.6-sol", "gpt-5.4", "gpt-5.1", "gpt-4o-mini", "gpt-3.5-turbo-instruct",
  "model",
]
pinned = true

[models.minilm]
model = "{embedder}"
served_model_name = ["text-embedding-3-small"]
pinned = true
"""


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, ten digits."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
