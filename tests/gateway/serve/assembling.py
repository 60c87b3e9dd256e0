"""Chat events put together as clients do it, to be compared with the reply that is not streamed."""

import json
from collections.abc import Iterable
from typing import Any

from tests.wire.response_check import data_of


def payloads(stream: bytes) -> list[Any]:
    """The JSON of every event, without the end mark."""
    events = [data_of(event) for event in stream.split(b"\n\n")]
    return [json.loads(event) for event in events if event not in (b"", b"[DONE]")]


def assembled(chunks: Iterable[Any], index: int = 0) -> dict[str, Any]:
    """Message, finish reason and log-probabilities of one choice, from its deltas."""
    message: dict[str, Any] = {}
    reasons: list[str] = []
    logprobs: list[Any] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                _add(message, choice["delta"])
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                logprobs += (choice["logprobs"] or {}).get("content") or []
    (reason,) = reasons
    return {"message": message, "finish_reason": reason, "logprobs": logprobs}


def _add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Append texts, merge tool calls by index, set everything else once."""
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value:
                _add_call(whole.setdefault("tool_calls", []), part)
        elif name == "function_call" and name in whole:
            whole[name]["arguments"] += value["arguments"]
        elif isinstance(value, str) and isinstance(whole.get(name), str):
            whole[name] += value
        elif whole.get(name) is None:
            whole[name] = value


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    rest = {name: value for name, value in part.items() if name != "index"}
    if part["index"] == len(calls):
        calls.append(rest)
    else:
        calls[part["index"]]["function"]["arguments"] += rest["function"]["arguments"]
