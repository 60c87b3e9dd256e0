"""How far a prompt was known, and why the rest of it was computed.

In the rig a token is a byte, a block has one token, and a message is rendered as `role:content\\n`.
"""

import asyncio
from typing import Any

import pytest

from gateway.observe.prefixes import PrefixHistory
from tests.gateway.rig import CHAT, STEP, Rig, Setting, chat, played

SYSTEM = {"role": "system", "content": "Be brief and friendly."}
KEYS = Setting(keys=("k1", "k2"), isolates_prefixes=False)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


class Explained:
    """Sends chats and reads what their timelines say of the prompt."""

    def __init__(self, rig: Rig, key: str = "") -> None:
        self._rig = rig
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._number = 0

    async def __call__(self, *messages: dict[str, str], **fields: Any) -> tuple[Any, str]:
        self._number += 1
        headers = self._headers | {"x-request-id": f"r{self._number}"}
        body = chat(messages=list(messages), **fields)
        await self._rig.client.post(CHAT, body, headers)
        path = f"/v1/requests/r{self._number}/timeline"
        timeline = (await self._rig.client.get(path, self._headers)).json
        return timeline["choices"][0]["prefix"], timeline["explanation"]


@played()
async def test_the_first_message_that_differs_is_named(rig: Rig) -> None:
    explained = Explained(rig)
    prefix, sentence = await explained(SYSTEM, user("one"), user("two"))
    assert prefix["reason"] == "new"
    assert "No recent prompt begins like it." in sentence
    prefix, sentence = await explained(SYSTEM, user("one"), user("Two"))
    known = len("system:Be brief and friendly.\nuser:one\nuser:")
    assert prefix == {
        "reason": "diverged",
        "known_tokens": known,
        "cached_tokens": known,
        "relative": "r1",
        "message": 2,
    }
    assert f"Its first {known} tokens are those of request r1" in sentence
    assert "message 2 (from 0) differs" in sentence
    prefix, _ = await explained({**SYSTEM, "content": "Be long."}, user("one"))
    assert (prefix["reason"], prefix["message"]) == ("diverged", 0)


@played()
async def test_a_prompt_that_is_known_to_its_end_is_cached(rig: Rig) -> None:
    explained = Explained(rig)
    await explained(SYSTEM, user("one"))
    prefix, sentence = await explained(SYSTEM, user("one"))
    assert (prefix["reason"], prefix["relative"], prefix["message"]) == ("cached", "r1", None)
    assert f"{prefix['cached_tokens']} tokens of it were in the prefix cache" in sentence


@played(Setting(num_blocks=75))
async def test_what_was_evicted_is_told_from_what_was_never_there(rig: Rig) -> None:
    explained = Explained(rig)
    await explained(user("a" * 40))
    await explained(user("b" * 60))
    prefix, sentence = await explained(user("a" * 40))
    assert prefix["reason"] == "evicted"
    assert prefix["known_tokens"] == len("user:") + 41
    assert prefix["cached_tokens"] < prefix["known_tokens"]
    assert "were evicted" in sentence


@played()
async def test_another_salt_is_named(rig: Rig) -> None:
    explained = Explained(rig)
    await explained(SYSTEM, user("one"), cache_salt="x")
    prefix, sentence = await explained(SYSTEM, user("one"), cache_salt="y")
    assert prefix["reason"] == "other_salt"
    assert "another salt or API key" in sentence


@played()
async def test_log_probabilities_of_a_prompt_need_all_of_it(rig: Rig) -> None:
    explained = Explained(rig)
    await explained(SYSTEM, user("one"))
    prefix, _ = await explained(SYSTEM, user("one"), prompt_logprobs=1)
    assert (prefix["reason"], prefix["cached_tokens"]) == ("logprobs", 0)


@played(KEYS)
async def test_a_request_of_another_key_is_not_named(rig: Rig) -> None:
    await Explained(rig, "k1")(SYSTEM, user("one"))
    prefix, sentence = await Explained(rig, "k2")(SYSTEM, user("two"))
    assert (prefix["reason"], prefix["relative"]) == ("diverged", None)
    assert "those of another request" in sentence


@played(Setting(prefix_cache=False))
async def test_without_a_prefix_cache_nothing_is_said(rig: Rig) -> None:
    prefix, sentence = await Explained(rig)(SYSTEM)
    assert prefix is None
    assert "prompt begins" not in sentence


@played()
async def test_only_so_much_is_remembered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.observe.prefixes.MAX_BLOCKS", 50)
    monkeypatch.setattr("gateway.observe.prefixes.MAX_ORIGINS", 2)
    histories: list[PrefixHistory] = []
    explained = Explained(rig)
    for number in range(5):
        await explained(user(f"{number}" * 30))
    histories.append(rig.service.timelines.prefixes)
    prefix, _ = await explained(user("0" * 30))
    assert prefix["reason"] in ("new", "diverged")
    (history,) = histories
    assert len(history._seen) <= 50
    assert len(history._origins) <= 2


@played()
async def test_choices_of_a_response_have_one_report(rig: Rig) -> None:
    explained = Explained(rig)
    await explained(SYSTEM, user("one"))
    await explained(SYSTEM, user("two"), n=3)
    reports = [each.prefix for each in rig.service.timelines.find("r2", "")]
    assert len(reports) == 3
    assert {report.relative for report in reports if report is not None} == {"r1"}


@played(Setting(context=20_000, num_blocks=40_000))
async def test_a_request_that_ends_before_its_prompt_is_computed_is_remembered_as_far_as_it_got(
    rig: Rig,
) -> None:
    async with rig.client.post(CHAT, chat(messages=[SYSTEM, user("one" * 3000)])):
        await asyncio.sleep(1.5 * STEP)  # some of its chunks are computed
    await asyncio.sleep(2 * STEP)
    prefix, _ = await Explained(rig)(SYSTEM, user("one" * 3000))
    assert prefix["reason"] in ("diverged", "evicted")
    assert 0 < prefix["known_tokens"] < 9000
