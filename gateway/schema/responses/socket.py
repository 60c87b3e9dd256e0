"""The messages of a WebSocket for responses, and the requests that they become.

`response.create` has the fields of `POST /v1/responses`; its text is passed on as the body of a
request. `response.steer` has input for a response in progress.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.schema.decoding import decode, invalid
from gateway.schema.responses.client_tools import CALLS
from gateway.schema.responses.items import InputItem

CREATE, STEER = "response.create", "response.steer"
MAX_STREAM_ID = 64
Fields = dict[str, msgspec.Raw]


class Message(msgspec.Struct):
    """The fields that say what becomes of a message; those of its request are not read."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None
    previous_response_id: str | None = None


class SteerMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Input for the response in progress with this id."""

    type: str
    previous_response_id: str
    input: msgspec.Raw


class Steer(NamedTuple):
    """Accepted steering input, which the next response of the conversation will have."""

    steer_id: str
    input: bytes  # JSON: a string or items

    def as_json(self, response_id: str) -> dict[str, Any]:
        """What events say of it."""
        return {"id": self.steer_id, "previous_response_id": response_id}


_FIELDS = msgspec.json.Decoder(Fields)
_ITEMS: Any = str | list[InputItem]
_RAW_ITEMS = msgspec.json.Decoder(str | list[msgspec.Raw])


def read_message(text: bytes) -> Message:
    """Raises `InvalidRequest` for a message that is not one of the two types."""
    message = decode(Message, text)
    if message.type not in (CREATE, STEER):
        raise invalid("type", f"{message.type[:100]!r} is not one of '{CREATE}' and '{STEER}'.")
    if message.stream_id is not None and not 0 < len(message.stream_id) <= MAX_STREAM_ID:
        raise invalid("stream_id", f"expected 1 to {MAX_STREAM_ID} characters.")
    return message


def read_steer(text: bytes) -> SteerMessage:
    """Raises `InvalidRequest` unless its input is text or messages of the user."""
    message = decode(SteerMessage, text)
    items = decode(_ITEMS, bytes(message.input))
    if not items:
        raise invalid("input", "expected text or at least one message.")
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if item.type != "message" or item.role != "user":
            raise invalid(f"input[{i}]", "steering accepts messages of the user only.")
        item.as_stored(f"input[{i}]", lambda prefix: prefix)
    return message


def unaccepted(text: bytes) -> bytes:
    """The part of a steering message that its error repeats."""
    fields = _FIELDS.decode(text)
    given = {name: fields[name] for name in ("previous_response_id", "input") if name in fields}
    return msgspec.json.encode(given)


def continued(text: bytes, response_id: str, steers: Sequence[Steer]) -> bytes:
    """The message of a response that continues this one with the steering input: its settings
    stay."""
    fields = _FIELDS.decode(text)
    fields["input"] = msgspec.Raw(_joined([steer.input for steer in steers]))
    fields["previous_response_id"] = msgspec.Raw(msgspec.json.encode(response_id))
    return msgspec.json.encode(fields)


def with_steers(text: bytes, steers: Sequence[Steer]) -> bytes:
    """The message with the steering input before its own."""
    fields = _FIELDS.decode(text)
    own = [bytes(fields["input"])] if "input" in fields else []
    fields["input"] = msgspec.Raw(_joined([*(steer.input for steer in steers), *own]))
    return msgspec.json.encode(fields)


def _joined(inputs: Sequence[bytes]) -> bytes:
    """Inputs as one list of items."""
    items: list[msgspec.Raw] = []
    for each in inputs:
        decoded = _RAW_ITEMS.decode(each)
        if isinstance(decoded, str):
            message = {"type": "message", "role": "user", "content": decoded}
            items.append(msgspec.Raw(msgspec.json.encode(message)))
        else:
            items += decoded
    return msgspec.json.encode(items)


def required_input(output: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs that the calls of a response wait for, without their results."""
    outputs: list[dict[str, Any]] = []
    for item in output:
        kind = {"type": f"{item['type']}_output", "call_id": item.get("call_id")}
        if item["type"] == "function_call":
            outputs.append({**kind, "name": item["name"]})
        elif item["type"] == "custom_tool_call" or item["type"] in CALLS:
            outputs.append(kind)
    return outputs
