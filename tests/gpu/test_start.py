import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_start_says_what_is_missing() -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--port", "0", "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 1
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("podway: --device 'cuda' cannot be used: ")
    assert "Traceback" not in refused.stderr
