import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "gateway" / "README.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = (text for text in blocks if word in text)
    return str(found)


def test_the_batch_example_runs(server_url: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(block("json", "custom_id"))
    program = block("python", "batches").replace("http://127.0.0.1:8000", server_url)
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    (answer,) = (json.loads(line) for line in shown.stdout.splitlines() if line)
    assert answer["custom_id"] == "1"
    assert answer["response"]["body"]["choices"][0]["message"]["content"]
