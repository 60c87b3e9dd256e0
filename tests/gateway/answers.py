"""One request to an app over the engine in virtual time, and the whole answer to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.gateway.rig import Rig, Setting, play


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, parsed, and the rig after its end."""

    status: int
    headers: Mapping[str, str]
    json: Any
    rig: Rig


def answer_to(
    path: str,
    body: object,
    setting: Setting | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Post a body, the only request of an app with that setting."""
    answers: list[Answer] = []

    async def scene(rig: Rig) -> None:
        exchange = await rig.client.post(path, body, headers)
        answers.append(Answer(exchange.status, exchange.headers, exchange.json, rig))

    play(scene, setting)
    return answers[0]
