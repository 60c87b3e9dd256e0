"""Go on reading an answer after the connection was lost: nothing is generated twice.

A stream with a name is generated whether somebody listens or not, and its events are numbered.

    python examples/gallery/lost_connection.py [URL]
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from uuid import uuid4

import httpx

BODY = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 80,
}
LOST_AFTER = 5  # events


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """The ids and the texts of a stream's events."""
    event_id = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "id":
            event_id = value
        elif field == "data" and value != "[DONE]":
            choices = json.loads(value)["choices"]
            yield event_id, (choices[0]["delta"].get("content") or "") if choices else ""


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    last = ""
    with httpx.Client(base_url=url, timeout=600) as client:
        body = {**BODY, "model": client.get("/v1/models").json()["data"][0]["id"]}
        name = {"x-conversation-id": f"story-{uuid4()}"}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=name) as answer:
            for event, text in islice(events(answer), LOST_AFTER):
                print(text, end="", flush=True)
                last = event
        print(f"\n-- lost after event {last} --")
        resume = {**name, "last-event-id": last}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=resume) as answer:
            for _, text in events(answer):
                print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
