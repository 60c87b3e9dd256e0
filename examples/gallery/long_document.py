"""Ask several questions about a long document: it is computed once, then it is cached.

python examples/gallery/long_document.py [URL] [FILE]
"""

import sys
import time
from pathlib import Path

from openai import OpenAI

QUESTIONS = ("What is this text about?", "Whom is it for?", "Name one limit.", "Sum it up.")
README = Path(__file__).parents[2] / "README.md"


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    document = Path(sys.argv[2] if len(sys.argv) > 2 else README).read_text()
    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    model = client.models.list().data[0].id
    for question in QUESTIONS:
        began, first = time.monotonic(), None
        chunks = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": document},  # what all have in common comes first
                {"role": "user", "content": question},
            ],
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            if first is None and chunk.choices and chunk.choices[0].delta.content:
                first = time.monotonic() - began
            if chunk.usage:
                details = chunk.usage.prompt_tokens_details
                cached = details.cached_tokens if details else 0
                wait = "no text" if first is None else f"first token after {first * 1000:.0f} ms"
                print(f"{question} {wait}, {cached} of {chunk.usage.prompt_tokens} tokens cached")


if __name__ == "__main__":
    main()
