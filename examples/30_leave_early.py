"""Disconnect in the middle of a long answer; /metrics shows that its KV cache is free.

The blocks are freed at most one iteration after the server notices that the client has left.

    python examples/30_leave_early.py [URL]
"""

import sys
import urllib.request

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
ENOUGH = 5  # chunks of text
WATCHED = (
    "podway_requests_running",
    "podway_kv_slots",
    "podway_orphan_blocks",
    "podway_aborts_total",
    "podway_cancel_to_free_iterations_bucket",
)


def metrics() -> list[str]:
    """The lines of /metrics about running requests and KV blocks."""
    with urllib.request.urlopen(f"{URL}/metrics") as page:
        lines = page.read().decode().splitlines()
    return [line for line in lines if line.startswith(WATCHED)]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="any")
    model = client.models.list().data[0].id
    long_answer = client.completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True},  # so that it does not end by itself
    )
    for count, chunk in enumerate(long_answer, start=1):
        print(chunk.choices[0].text, end="", flush=True)
        if count == ENOUGH:
            print(" …\n\nDuring the answer:")
            print(*metrics(), sep="\n")
            break
    long_answer.close()
    client.completions.create(model=model, prompt="Next", max_tokens=4)
    print("\nAfter the client has left, and another request:")
    print(*metrics(), sep="\n")


if __name__ == "__main__":
    main()
