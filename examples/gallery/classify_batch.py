"""Classify thousands of texts overnight: one batch, whose lines use what other requests leave.

    python examples/gallery/classify_batch.py [URL] [--texts FILE] [--count 10000]

FILE has a text per line. The label is one of an enum, so that every line has a valid one.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from openai import OpenAI

LABELS = ("billing", "delivery", "fault", "praise", "other")
MADE_UP = ("My parcel is late.", "I was charged twice.", "It does not turn on.", "Great service!")
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": LABELS}},
    "required": ["label"],
    "additionalProperties": False,
}


def line(number: int, text: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Which topic has this message? {text}"}],
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "topic", "schema": SCHEMA, "strict": True},
        },
    }
    request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="any")
    model = client.models.list().data[0].id
    texts = args.texts.read_text().splitlines() if args.texts else MADE_UP * args.count
    lines = "\n".join(line(number, text, model) for number, text in enumerate(texts[: args.count]))
    file = client.files.create(file=("texts.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    began = time.monotonic()
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    seconds = time.monotonic() - began
    if batch.output_file_id is None:
        raise SystemExit(f"the batch is {batch.status}: {batch.errors}")
    counts: Counter[str] = Counter()
    for result in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(result)["response"]["body"]["choices"][0]["message"]["content"]
        counts[json.loads(answer)["label"]] += 1
    print(f"{counts.total()} texts in {seconds:.1f} s:", dict(counts.most_common()))


if __name__ == "__main__":
    main()
